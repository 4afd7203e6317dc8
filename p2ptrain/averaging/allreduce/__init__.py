"""All-reduce of one roster: its streams, its attempts, and the bandwidth that shapes both."""
