"""A peer as its role file describes it."""

from typing import Any

from p2ptrain.config import PeerConfig
from p2ptrain.node.options import peer_options

SEED = "/ip4/192.0.2.1/tcp/31337/p2p/QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"


def test_a_peer_listens_as_its_role_file_says_but_a_seed_moves_nothing_in_bulk() -> None:
    network: dict[str, Any] = {"listen": ["/ip4/0.0.0.0/tcp/4001"], "bootstrap": [SEED], "direct_port": 4002}
    trainer, seed = (
        PeerConfig.model_validate({"role": role, "link": "p2ptrain://x", "network": network})
        for role in ("trainer", "bootstrap")
    )
    assert dict(trainer.network).items() <= dict(peer_options(trainer, "Qm").network).items()
    assert peer_options(seed, "Qm").network.direct == "off"
