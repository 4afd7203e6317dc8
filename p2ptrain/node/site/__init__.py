"""A site's policy, and the log of what left it."""
