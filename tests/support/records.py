"""Records that peers publish, for tests."""

from typing import Any

from p2ptrain.network.records.record import PeerRecord

USUAL: dict[str, Any] = {
    "version": "0", "protocol": 1, "role": "trainer", "state": "training", "device": "cpu", "round": 0,
    "lineage": bytes(32), "digest": bytes(32), "lineage_tokens": 0, "round_tokens": 0, "loss": None,
    "tokens_per_second": 0.0, "bytes_sent": 0, "bytes_received": 0, "reachability": "direct", "addresses": (),
    "started_at": 0.0, "last_rounds": (),
}  # fmt: skip


def record_of(peer: str, **changes: Any) -> PeerRecord:
    """Return what a trainer publishes that has done nothing yet, with these fields changed."""
    return PeerRecord(**{**USUAL, "peer": peer, "name": peer, **changes})
