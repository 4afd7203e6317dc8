"""The choice between replay of missed rounds and download of the state; `p2ptrain.training.sync.catch_up` acts on it.

Both lead to the same bits, and treat local work alike if the certificates between are known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from p2ptrain.averaging.protocol.certificate import Certificate

DOWNLOAD_BELOW = 0.9
"""A download needs fewer bytes than this part of a replay's. A replay also fills the history, from which other peers
can replay, so it wins near equality."""


@dataclass(frozen=True)
class Way:
    """The choice, and its reason."""

    is_download: bool
    reason: str


def choose_way(num_rounds: int, replay_bytes: int, download_bytes: int) -> Way:
    """Choose the way that moves fewer bytes; ``download_bytes`` is 0 if it is not known."""
    rounds = f"{replay_bytes} bytes of {num_rounds} rounds"
    if not download_bytes:
        return Way(False, f"{rounds} against a state of unknown size")
    is_download = download_bytes < DOWNLOAD_BELOW * replay_bytes
    state = f"{download_bytes} bytes of state"
    return Way(is_download, f"{state} instead of {rounds}" if is_download else f"{rounds} instead of {state}")


def between(chain: Sequence[Certificate], start: bytes, end: bytes) -> list[Certificate] | None:
    """Return the certificates that lead from one lineage to another; None if ``chain`` lacks some."""
    found: list[Certificate] = []
    for certificate in chain:
        if certificate.body.lineage == start:
            found.append(certificate)
            start = certificate.body.next_lineage
        if start == end:
            break
    return found if found and start == end else None
