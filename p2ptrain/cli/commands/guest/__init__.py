"""Commands for the owner of a machine on which a peer runs."""
