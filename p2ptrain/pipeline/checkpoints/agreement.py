"""Which checkpoints of stages belong together: decided from what hosts say in their records that they saved.

Rounds are numbered alike in all stages, so checkpoints of one round are one model's, unless the swarm was split when
they were made. What tells is the digests of their states: a checkpoint is *complete* once more than half of the hosts
of every stage that save anything have said that they saved its round, with the same digest.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from p2ptrain.network.records.record import StageReport

MAX_ROUNDS = 8
"""As many saves of a host are remembered for each stage."""


@dataclass(frozen=True)
class Agreement:
    """What the hosts of all stages say of one round.

    Attributes:
        round: Which one.
        digests: Of each stage's state, as far as its hosts agree; by unit, see `p2ptrain.pipeline.plan.Unit`.
        missing: Why there is none, for people, of the others.
    """

    round: int
    digests: Mapping[int, bytes]
    missing: Mapping[int, str]

    @property
    def is_complete(self) -> bool:
        """Whether every stage has its digest."""
        return not self.missing


class Saves:
    """What hosts say that they saved. A host's last record says which stages it has; older ones add earlier rounds."""

    def __init__(self) -> None:
        self._told: dict[int, dict[str, dict[int, bytes]]] = {}

    def tell(self, peer: str, reports: Iterable[StageReport]) -> None:
        """Take in what a host says of all that it hosts."""
        saved = {report.unit: report for report in reports if report.saved_round > 0}
        for unit in self._told:
            if unit not in saved:
                self.forget(peer, unit)
        for unit, report in saved.items():
            self.note(peer, unit, report.saved_round, report.saved_digest)

    def note(self, peer: str, unit: int, round: int, digest: bytes) -> None:
        """A host saved a round of a stage."""
        rounds = self._told.setdefault(unit, {}).setdefault(peer, {})
        rounds.pop(round, None)
        rounds[round] = digest
        while len(rounds) > MAX_ROUNDS:
            del rounds[next(iter(rounds))]

    def forget(self, peer: str, unit: int) -> None:
        """A host has nothing saved of a stage any more."""
        self._told.get(unit, {}).pop(peer, None)

    def keep_only(self, peers: Iterable[str]) -> None:
        """Forget those who are gone, so that the others decide."""
        kept = set(peers)
        for unit, hosts in self._told.items():
            self._told[unit] = {peer: rounds for peer, rounds in hosts.items() if peer in kept}

    def agreement(self, units: Iterable[int], round: int) -> Agreement:
        """What is known of a round."""
        digests: dict[int, bytes] = {}
        missing: dict[int, str] = {}
        for unit in units:
            hosts = self._told.get(unit, {})
            votes = Counter(rounds[round] for rounds in hosts.values() if round in rounds)
            digest, count = votes.most_common(1)[0] if votes else (b"", 0)
            if 2 * count > len(hosts):
                digests[unit] = digest
            else:
                missing[unit] = f"{count} of {len(hosts)} hosts that save agree" if hosts else "no host has saved any"
        return Agreement(round, digests, missing)
