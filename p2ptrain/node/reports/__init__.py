"""What a peer tells of itself: jobs, metrics, and the summary of its run."""
