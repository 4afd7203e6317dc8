"""What peers publish about themselves: signed, bounded, checked."""
