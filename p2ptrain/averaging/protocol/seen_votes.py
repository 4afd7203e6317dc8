"""Other voters' votes that this peer has seen, so that a second vote in one view shows.

A liar may vote for one body before half of the voters, and for another before the rest. Both votes come to an honest
peer without any further message. A member that is asked for its vote sees those of another roster; and two certificates
of one round meet where a peer chooses between lineages.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable
from threading import Lock
from typing import NamedTuple

from p2ptrain.averaging.protocol.certificate import Body, Head

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
        self._electorates: OrderedDict[bytes, frozenset[str]] = OrderedDict()
        self._seen: dict[bytes, deque[Votes]] = {}
        self._found: dict[str, tuple[Votes, Votes]] = {}
        self._lock = Lock()

    def follow(self, head: Head) -> None:
        """Keep the votes in the round after a head of this peer, and in the last `MAX_ROUNDS` rounds."""
        with self._lock:
            self._electorates[head.lineage] = head.table.electorate
            while len(self._electorates) > MAX_ROUNDS:
                self._seen.pop(self._electorates.popitem(last=False)[0], None)

    def add(self, body: Body, proofs: Iterable[tuple[str, bytes]], *, is_own: bool = False) -> None:
        """Keep votes, whose signatures the caller has verified, and compare them with those that are known.

        A third of the electorate must have voted for the body, unless it ``is_own``, of an attempt of this peer. So one
        of them is honest, and no liar displaces other votes.
        """
        with self._lock:
            if (electorate := self._electorates.get(body.lineage)) is None:
                return
            votes = Votes(body, {peer: proof for peer, proof in proofs if peer in electorate})
            counts = is_own or 3 * len(votes.proofs) >= len(electorate)
            if not (body.is_full and votes.proofs and counts):
                return
            seen = self._seen.setdefault(body.lineage, deque(maxlen=MAX_RESULTS))
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
