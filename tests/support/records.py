"""Records of peers that tests only care for a part of."""

from __future__ import annotations

from typing import Any

from p2ptrain.network.records.record import PeerRecord


def peer_record(peer: str, **fields: Any) -> PeerRecord:
    """Return the record of a trainer at its start, with these fields."""
    usual: dict[str, Any] = {
        "name": peer, "version": "0", "protocol": 1, "role": "trainer", "state": "training", "device": "cpu",
        "round": 0, "lineage": b"l" * 32, "digest": b"d" * 32, "lineage_tokens": 0, "round_tokens": 0, "loss": None,
        "tokens_per_second": 0.0, "bytes_sent": 0, "bytes_received": 0, "reachability": "direct", "addresses": (),
        "started_at": 0.0, "last_rounds": (),
    }  # fmt: skip
    return PeerRecord(peer=peer, **{**usual, **fields})
