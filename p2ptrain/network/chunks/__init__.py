"""Transfer of verified chunks from several sources in parallel: resumable, and rate-limited by the servers."""
