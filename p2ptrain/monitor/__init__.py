"""The status page: snapshots of a swarm, its history, and a web page; read-only.

`watch` reads records and certificates as any light peer does, and builds snapshots with `p2ptrain.status`. `store`
keeps the history in SQLite. `web` serves both.
"""
