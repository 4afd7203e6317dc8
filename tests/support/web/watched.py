"""A made-up swarm to watch: records, reports, results, and a source that tells of them."""

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from p2ptrain.averaging.protocol.certificate import Body, Certificate
from p2ptrain.network.records.record import Look, PeerRecord, RoundReport, Sighting, StageReport
from p2ptrain.status.observation import Observation
from p2ptrain.status.progress import RoundGoal
from p2ptrain.status.rounds import SwarmRounds
from p2ptrain.status.snapshot import build_snapshot
from p2ptrain.status.stages import WHOLE
from p2ptrain.status.tracker import SwarmTracker
from p2ptrain.status.views import PeerView, RoundView, Snapshot, SwarmView
from tests.support.records import record_of

START = 1_700_000_000.0
SWARM = SwarmView(
    name="tiny", digest="ab" * 32, link="p2ptrain://swarm", command="p2ptrain join p2ptrain://swarm",
    signer="organizer", manifest={"model": {"layers": 4}}, protocol=1, num_blocks=4, group_size=4,
    max_weight=1e6, spans=((0, 4),), goal=RoundGoal(0, False),
)  # fmt: skip
CUT = replace(SWARM, num_blocks=8, spans=((0, 2), (2, 4), (4, 6), (6, 8)))
"""The same, of a model that is cut into four stages."""
STRANGE = replace(
    CUT, num_blocks=0, spans=((0, 0),) * 4, missing="stages are shown without their blocks: unknown model family 'x'"
)
"""The same, of a family that is not installed here."""
LINEAGE, DIGEST = b"l" * 32, b"d" * 32


def report(round_: int, **changes: Any) -> RoundReport:
    """A round that went well: 3 s of training, then 2 s of averaging."""
    usual = RoundReport(
        round=round_, committed=True, reason="", seconds=2.0, members=3, contributors=3, contributed=True,
        digest=digest_after(round_), compute_seconds=3.0, matchmaking_seconds=0.5, transfer_seconds=1.25,
    )  # fmt: skip
    return replace(usual, **changes)


def aborted(round_: int, reason: str = "too few peers", **changes: Any) -> RoundReport:
    broken = replace(report(round_), committed=False, contributed=False, digest=bytes(32), members=0, contributors=0)
    return replace(broken, reason=reason, **changes)


def digest_after(round_: int) -> bytes:
    return hashlib.sha256(b"digest %d" % round_).digest()


def trainer(peer: str, **changes: Any) -> PeerRecord:
    """A healthy trainer that works towards round 8."""
    usual = record_of(
        peer, name=f"{peer}'s laptop", version="0.1.0", round=8, lineage=LINEAGE, digest=DIGEST, lineage_tokens=8000,
        round_tokens=10, loss=2.5, tokens_per_second=100.0, bytes_sent=1000, bytes_received=2000,
        started_at=START - 3600.0, trained_tokens=500, trained_rounds=8,
    )  # fmt: skip
    return replace(usual, **changes)


def host(peer: str, stage: int, *tied: int, **changes: Any) -> PeerRecord:
    """A healthy host of a stage, in round 8 of it; ``tied`` names what it averages beside it."""
    stages = tuple(
        StageReport(
            unit, 8, hashlib.sha256(b"lineage %d" % unit).digest(), hashlib.sha256(b"state %d" % unit).digest(), 8000,
            tokens_per_second=100.0 if unit == stage else 0.0, waiting=3 if unit == stage else 0,
        )
        for unit in (stage, *tied)
    )  # fmt: skip
    usual = trainer(peer, role="stage", lineage=stages[0].lineage, digest=stages[0].digest, stages=stages)
    return replace(usual, **changes)


def feeder(peer: str, **changes: Any) -> PeerRecord:
    """Who only sends microbatches through a pipeline: no stage, no round, no state."""
    return replace(trainer(peer, round=0, lineage=bytes(32), digest=bytes(32), lineage_tokens=0), **changes)


def pipeline() -> list[PeerRecord]:
    """Two hosts for each of four stages, of which the first and the last share embeddings, and one who feeds them."""
    tied = {0: (4,), 3: (4,)}
    hosts = [host(f"{name}{stage}", stage, *tied.get(stage, ())) for stage in range(4) for name in "ab"]
    return [*hosts, feeder("f")]


def result(round_: int, lineage: bytes, members: Sequence[str] = ("a", "b", "c"), **changes: Any) -> Body:
    """What a group agreed on: all contribute 100 tokens each but the last member."""
    size = len(members)
    usual = Body(
        b"s" * 32, round_, lineage, b"d" * 32, 100 * round_, 8 * round_, b"g" * 32, tuple(members),
        tuple((index, 100, 8) for index in range(size - 1)), "int8/1", tuple(range(size + 1)), (b"h" * 32,) * size,
        present=size, peers=(1,) * size,
    )  # fmt: skip
    return replace(usual, **changes)


def chain(first: int, number: int, lineage: bytes = LINEAGE, **changes: Any) -> list[Certificate]:
    """Results of consecutive rounds that follow on a lineage; their signatures were checked by who tells of them."""
    certificates = []
    for round_ in range(first, first + number):
        body = result(round_, lineage, **changes)
        certificates.append(Certificate(body, ()))
        lineage = body.next_lineage
    return certificates


def rounds_of(*records: PeerRecord, usual: int = 8, certified: Body | None = None) -> list[RoundView]:
    """What these peers report of rounds, while the swarm works towards round ``usual``."""
    rounds = SwarmRounds(4, 1)
    for record in records:
        rounds.learn(record, START, {WHOLE: usual})
    if certified is not None:
        rounds.certify(certified, START)
    return rounds.views()


def snapshot_of(
    records: Sequence[PeerRecord], rounds: Sequence[RoundView] = (), now: float = START, **changes: Any
) -> Snapshot:
    """A snapshot of these peers, seen just now."""
    usual = Observation(
        swarm=SWARM, sightings=[Sighting(record, now) for record in records], rates={}, rounds=rounds, groups=(),
        tokens_per_second=300.0, committed=5, aborted=1, rejected=0,
        since=now - 60.0, stall_seconds=600.0,
    )  # fmt: skip
    return build_snapshot(replace(usual, **changes), now)


def views_of(*records: PeerRecord) -> tuple[PeerView, ...]:
    return snapshot_of(records).peers


def after_looks(*looks: Sequence[PeerRecord], swarm: SwarmView = SWARM, seconds: float = 2.0) -> Snapshot:
    """A snapshot after these looks, so many seconds apart."""
    tracker, now = SwarmTracker(swarm, START), START
    for records in looks:
        tracker.take_in(Look(now, [Sighting(record, now) for record in records]))
        now += seconds
    return build_snapshot(tracker.observation(), now - seconds)


class FakeSource:
    """A directory and peers that say what the test wants, at times that it sets.

    Attributes:
        records: Of all peers, published when they are looked at; None when nobody can be asked.
        published_at: By peer id, where that is not so.
        history: By peer id: what it tells of the past; who is not here raises ``error``.
        asked: Who was asked for what followed on which lineage.
        error: Raised instead of an answer, once; None for none.
    """

    def __init__(self, *records: PeerRecord) -> None:
        self.time = START
        self.records: list[PeerRecord] | None = list(records)
        self.published_at: dict[str, float] = {}
        self.history: dict[str, list[Certificate]] = {}
        self.asked: list[tuple[str, bytes]] = []
        self.error: Exception | None = None
        self.num_looks = 0

    def now(self) -> float:
        return self.time

    async def look(self) -> Look:
        self.num_looks += 1
        self._fail()
        if self.records is None:
            return Look(self.time, None)
        seen = [Sighting(record, self.published_at.get(record.peer, self.time)) for record in self.records]
        return Look(self.time, seen)

    async def certificates_after(self, peer: str, lineage: bytes) -> Sequence[Certificate]:
        self.asked.append((peer, lineage))
        self._fail()
        known = self.history.get(peer, [])
        starts = [certificate.body.lineage for certificate in known]
        return known[starts.index(lineage) :] if lineage in starts else []

    def _fail(self) -> None:
        error, self.error = self.error, None
        if error is not None:
            raise error
