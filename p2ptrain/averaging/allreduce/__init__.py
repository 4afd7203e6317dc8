"""All-reduce of one roster: streams, attempts, and the measured bandwidth that shapes both."""
