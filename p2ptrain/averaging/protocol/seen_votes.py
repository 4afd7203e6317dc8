"""Other voters' votes that this peer has seen, so that a second vote in one view shows.

A liar may vote for one body before half of the voters, and for another before the rest. Both votes come to an honest
peer without any further message. A member that is asked for its vote sees those of another roster; and two certificates
of one round meet where a peer chooses between lineages.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from threading import Lock
from typing import NamedTuple

from p2ptrain.averaging.protocol.certificate import Body, Head
from p2ptrain.buffers import Bounded

MAX_ROUNDS = 64
MAX_RESULTS = 8
"""Limit of the results of one round that are kept, the latest."""
MAX_FOUND = 256


class Votes(NamedTuple):
    """Votes for one result: valid signatures, by voter."""

    body: Body
    proofs: dict[str, bytes]


class SeenVotes:
    """The votes for full results of this peer's last rounds; safe from any thread."""

    def __init__(self) -> None:
        self._rounds = Bounded[bytes, tuple[frozenset[str], deque[Votes]]](MAX_ROUNDS)  # By the lineage before it.
        self._found: dict[str, tuple[Votes, Votes]] = {}
        self._lock = Lock()

    def follow(self, head: Head) -> None:
        """Keep the votes in the round after a head of this peer, and in the last `MAX_ROUNDS` rounds."""
        with self._lock:
            _, seen = self._rounds.get(head.lineage, (None, deque[Votes](maxlen=MAX_RESULTS)))
            self._rounds[head.lineage] = head.table.electorate, seen

    def add(self, body: Body, proofs: Iterable[tuple[str, bytes]], *, is_own: bool = False) -> None:
        """Keep votes, whose signatures the caller has verified, and compare them with those that are known.

        A third of the electorate must have voted for the body, unless it ``is_own``, of an attempt of this peer. So one
        of them is honest, and no liar displaces other votes.
        """
        with self._lock:
            if (known := self._rounds.get(body.lineage)) is None:
                return
            electorate, seen = known
            votes = Votes(body, {peer: proof for peer, proof in proofs if peer in electorate})
            counts = is_own or 3 * len(votes.proofs) >= len(electorate)
            if not (body.is_full and votes.proofs and counts):
                return
            for each in seen:
                if each.body.excludes(body) and len(self._found) < MAX_FOUND:
                    self._found |= dict.fromkeys(each.proofs.keys() & votes.proofs.keys(), (each, votes))
            same = next((each for each in seen if each.body.body_hash == body.body_hash), None)
            if same is None:
                seen.append(votes)
            else:
                same.proofs.update(votes.proofs)

    def take(self) -> list[tuple[str, Votes, Votes]]:
        """Return the voters that voted twice, with both votes, and forget that they were found."""
        with self._lock:
            found, self._found = self._found, {}
        return [(peer, *both) for peer, both in sorted(found.items())]
