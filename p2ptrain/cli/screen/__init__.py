"""Terminal output of commands."""
