"""Chooses between the two ways to the swarm's state: the rounds that a peer missed, or the state as a whole.

Decisions alone; `p2ptrain.training.sync.catch_up` carries them out. Both ways lead to the same bits, and treat local
work alike where the certificates between are known.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from p2ptrain.averaging.protocol.certificate import Certificate

DOWNLOAD_BELOW = 0.9
"""The most bytes of a download, as a part of a replay's. A replay fills the history, from which others can replay in
turn, and needs no copy of the state at its source; so it is preferred where the two are nearly equal."""


@dataclass(frozen=True)
class Way:
    """The way to catch up, and why."""

    is_download: bool
    reason: str


def choose_way(num_rounds: int, replay_bytes: int, download_bytes: int) -> Way:
    """The way that moves fewer bytes.

    Args:
        num_rounds: How many were missed.
        replay_bytes: Size of their encoded means.
        download_bytes: Size of the state: parameters, buffers and shared optimizer state; 0 if that cannot be known.
    """
    rounds = f"{replay_bytes} bytes of {num_rounds} rounds"
    if not download_bytes:
        return Way(False, f"{rounds} against a state of unknown size")
    is_download = download_bytes < DOWNLOAD_BELOW * replay_bytes
    state = f"{download_bytes} bytes of state"
    return Way(is_download, f"{state} instead of {rounds}" if is_download else f"{rounds} instead of {state}")


def between(chain: Sequence[Certificate], start: bytes, end: bytes) -> list[Certificate] | None:
    """The certificates that lead from one lineage to another; None when ``chain`` does not have them all."""
    found: list[Certificate] = []
    for certificate in chain:
        if certificate.body.lineage == start:
            found.append(certificate)
            start = certificate.body.next_lineage
        if start == end:
            break
    return found if found and start == end else None
