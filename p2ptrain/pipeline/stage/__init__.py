"""A stage host: compute, microbatch accounting, and rounds."""
