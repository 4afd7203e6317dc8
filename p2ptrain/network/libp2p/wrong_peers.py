"""Detects from the daemon's refusals that another peer answers at a dialled peer's addresses.

The daemon names the other peer only in the first refusal; later ones report "dial backoff".
"""

from __future__ import annotations

import re

from p2ptrain.buffers import Bounded

MAX_REMEMBERED_PEERS = 64
MAX_REMEMBERED_ADDRESSES = 64
_ATTEMPT = re.compile(r"\* \[(/[^\]\s]+)\] ([^\n]*)")
_MISMATCH = re.compile(r"peer id mismatch: expected (\w+), but remote key matches (\w+)")
_BACKOFF = "dial backoff"


class WrongPeers:
    """Remembers which other peers answered at the addresses of dialled peers."""

    def __init__(self) -> None:
        self._seen = Bounded[str, dict[str, str]](MAX_REMEMBERED_PEERS)

    def holder(self, peer: str, refusal: str) -> str | None:
        """Return the peer that answered in place of ``peer``; None unless all tried addresses belong to other peers.

        ``refusal`` is the daemon's error message, with one line per tried address.
        """
        seen = self._seen.pop(peer, {})
        holders: list[str | None] = []
        for address, reason in _ATTEMPT.findall(refusal):
            mismatch = _MISMATCH.search(reason)
            if mismatch is not None and len(seen) < MAX_REMEMBERED_ADDRESSES:
                seen[address] = mismatch[2]
            elif _BACKOFF not in reason:
                seen.pop(address, None)
            holders.append(seen.get(address))
        if seen:
            self._seen[peer] = seen
        return holders[0] if holders and all(holders) else None
