"""Bytes between peers: transports, the directory, identities, records and links.

=================  =====================================================================================
`transport`        the seam: streams between peers; `directory`: the seam: records that expire
`identity`         this peer's RSA key: its file, its lock, signing and verifying
`records`          typed, signed, bounded records, as every peer publishes them
`link`             the text that invites somebody into a swarm
`libp2p`           `Transport` on a p2pd daemon; `daemon` starts and watches it, `control` speaks to it
`libp2p_directory` `Directory` on hivemind's ``DHTNode``
`lazy_hivemind`    so that what is not used of hivemind is not imported
=================  =====================================================================================

hivemind is imported here alone, and only by what needs the real network: `libp2p`, `control`, `libp2p_directory`.
"""

from p2ptrain.network.libp2p.lazy_hivemind import PACKAGES, put_in_place

for package in PACKAGES:
    put_in_place(package)
