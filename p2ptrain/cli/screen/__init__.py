"""The terminal drawings of commands."""
