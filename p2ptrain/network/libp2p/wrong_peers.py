"""Finds out from the daemon's refusals that other peers answer at the addresses of the one that was dialled.

The daemon names the other peer only in the first refusal. Later ones say "dial backoff", so the first is remembered.
"""

from __future__ import annotations

import re
from collections import OrderedDict

MAX_REMEMBERED_PEERS = 64
MAX_REMEMBERED_ADDRESSES = 64
_ATTEMPT = re.compile(r"\* \[(/[^\]\s]+)\] ([^\n]*)")
_MISMATCH = re.compile(r"peer id mismatch: expected (\w+), but remote key matches (\w+)")
_BACKOFF = "dial backoff"


class WrongPeers:
    """By dialled peer: its addresses, and the peers that answered there."""

    def __init__(self) -> None:
        self._seen: OrderedDict[str, dict[str, str]] = OrderedDict()

    def holder(self, peer: str, refusal: str) -> str | None:
        """Return the id of the peer that answered in place of ``peer``.

        Args:
            peer: The dialled peer's id.
            refusal: The daemon's words, with one line for each address that it tried.

        Returns:
            None unless another peer answers at every address that was tried: ``peer`` may answer at the others.
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
            if len(self._seen) > MAX_REMEMBERED_PEERS:
                self._seen.popitem(last=False)
        return holders[0] if holders and all(holders) else None
