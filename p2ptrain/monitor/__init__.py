"""The status page: what peers publish, as a snapshot of the swarm, its history, and a web page over both.

`snapshot` and what it calls are pure: records and certificates in, plain values out. `watch` reads the swarm like any
light peer, `store` keeps the past in SQLite, and `web` shows both. Nothing here can change the swarm.
"""
