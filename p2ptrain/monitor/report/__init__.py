"""The HTML report of a finished run."""
