"""A peer's own reports: jobs, record, metrics page, and the summary of its run."""
