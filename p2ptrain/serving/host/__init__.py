"""A host's side of serving: memory and computation of the sessions on its stage."""
