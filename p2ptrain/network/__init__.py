"""Networking: transports, RPC, chunk transfers, the directory, identities, records and swarm links.

Only modules of `libp2p` import hivemind. Importing this package makes hivemind's imports lazy (`lazy_hivemind`).
"""

from p2ptrain.network.libp2p.lazy_hivemind import PACKAGES, put_in_place

for package in PACKAGES:
    put_in_place(package)
