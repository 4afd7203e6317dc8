"""Transport and directory on a p2pd daemon, and direct connections that bypass it."""
