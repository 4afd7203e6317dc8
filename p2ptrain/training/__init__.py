"""Training: data, inner steps, the outer step, synchronisation, state download and checkpoints.

`trainer` is the loop of a peer that trains the manifest's own model; it uses `optimizer` like any other script. `sync`
is what happens between two rounds; `state` is what it changes, `transfer` how a newcomer gets it, `checkpoint` how it
is kept.
"""
