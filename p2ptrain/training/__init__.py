"""Training: data, inner steps, the outer step, synchronisation, state download and checkpoints.

`loop` trains the manifest's own model; it uses `optimizer` as any other script would. `sync` runs between two local
phases, and changes `state`. `checkpoints` saves it.
"""
