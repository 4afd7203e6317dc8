"""Commands of the organizer that decide who is in, and the one that shows it."""
