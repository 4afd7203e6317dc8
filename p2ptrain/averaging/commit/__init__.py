"""From an attempt to a committed round, and from there to everyone who needs its result."""
