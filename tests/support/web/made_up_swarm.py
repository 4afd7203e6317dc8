"""A swarm that is not there: records and certificates as a real one would publish, for the status page and its tests.

Everything is a function of a seed and the clock: peers join and leave, rounds go on, some peers are late or dropped.
``python -m tests.support.web.made_up_swarm --peers 200 --port 8090`` serves the page over one, so that anyone can look.
"""

import argparse
import asyncio
import hashlib
import math
import signal
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import base58

from p2ptrain.averaging.grouping.cells import Cells
from p2ptrain.averaging.protocol.certificate import Body, Certificate, Head
from p2ptrain.manifest import AveragingSpec, Manifest, ModelSpec, PipelineSpec, SignedManifest, TrainingSpec
from p2ptrain.monitor.serve import answer_first
from p2ptrain.monitor.store import Store
from p2ptrain.monitor.watch import Watch, watching
from p2ptrain.monitor.web import make_app
from p2ptrain.network.http_server import listen, serving, url_of
from p2ptrain.network.link import SwarmLink
from p2ptrain.network.records.evaluation import Evaluation
from p2ptrain.network.records.record import MAX_REPORTS, Look, PeerRecord, RoundReport, Sighting, StageReport
from p2ptrain.status.agreed import bootstraps, swarm_view
from p2ptrain.status.tracker import SwarmTracker
from p2ptrain.status.views import Event, SwarmView
from tests.support.signers import NamedSigner
from tests.support.web.served import served, spread

MAX_PEERS = 2000
PUBLISH_SECONDS = 5.0
ROUND_SECONDS = 20.0
GROUP_SIZE = 16
FIRST_ROUND = 40_000
ROUND_BYTES = 4_000_000
ABSENT = bytes(32)
LATE, DROPPED, MISSES = 0.02, 0.023, 0.028
"""Of the draws from 0 to 1: below which a peer is late, dropped, or in a group that breaks."""
NAMES = (
    "amber", "birch", "cedar", "delta", "ember", "fjord", "grove", "heron", "islet", "juniper", "kestrel", "lagoon",
    "maple", "north", "otter", "pine", "quartz", "river", "spruce", "tundra", "umber", "violet", "willow", "yarrow",
)  # fmt: skip


class MadeUpSwarm:
    """A `p2ptrain.monitor.watch.Source` without a network.

    Set ``answers`` to False to make the directory fall silent.
    """

    def __init__(
        self,
        num_peers: int = 24,
        seed: int = 1,
        clock: Callable[[], float] = time.time,
        *,
        num_astray: int = 0,
        num_stages: int = 1,
        bare_stages: Sequence[int] = (),
        serves: bool = False,
        measures: bool = False,
    ) -> None:
        """
        Args:
            num_peers: That it has when all of them are there, at most 2000.
            clock: Wall-clock seconds; the swarm's tenth round is under way at its first value.
            num_astray: Peers whose state is not that of the others.
            bare_stages: Those that nobody hosts.
            serves: Whether every third peer serves the model, too.
            measures: Whether each trainer is a site that reports its accuracy on held-out samples.
        """
        if not 0 <= num_peers <= MAX_PEERS:
            raise ValueError(f"num_peers = {num_peers}: give a number from 0 to {MAX_PEERS}")
        self.answers = True
        self._seed = seed
        self._clock = clock
        self._num_astray = num_astray
        self._num_stages = num_stages
        self.serves = serves
        self._measures = measures
        self._hosted = [number for number in range(num_stages) if number not in bare_stages]
        self._genesis = clock() - 10.5 * ROUND_SECONDS
        self._ids = [base58.b58encode(b"\x12\x20" + self._hash("peer", i)).decode() for i in range(num_peers)]
        self._num_bootstraps = min(3, max(1, num_peers // 20))
        self._cells = Cells(GROUP_SIZE)
        signed = SignedManifest.create(Manifest(
            name="made-up-swarm", model=ModelSpec(layers=12), averaging=AveragingSpec(group_size=GROUP_SIZE),
            training=TrainingSpec(every=1 if num_stages > 1 else 32), pipeline=PipelineSpec(stages=num_stages),
        ), NamedSigner("organizer"))  # fmt: skip
        self._digest = signed.manifest.digest
        self.link = SwarmLink(self._digest, tuple(
            f"/ip4/203.0.113.{5 + i}/tcp/31337/p2p/{peer}"
            for i, peer in enumerate(self._ids[: self._num_bootstraps] or [self._id_of_nobody()])
        ))  # fmt: skip
        self.swarm: SwarmView = swarm_view(signed, self.link)
        self._chain: list[Body] = []
        self._reports: dict[tuple[int, int], RoundReport] = {}

    # --- what a Source has ----------------------------------------------------------------------------------------

    def now(self) -> float:
        return self._clock()

    async def look(self) -> Look:
        """Return what each peer that is there published last."""
        now = self.now()
        # It takes longer than to watch a real swarm does.
        seen = await asyncio.to_thread(self._look, now) if self.answers else None
        return Look(now, seen)

    def _look(self, now: float) -> list[Sighting]:
        self._extend_chain(self._round_at(now))
        seen = []
        for index in range(len(self._ids)):
            offset = PUBLISH_SECONDS * self._chance("offset", index)
            at = now - (now + offset) % PUBLISH_SECONDS
            if self._is_present(index, now):
                seen.append(Sighting(self._record(index, max(at, self._started_at(index, now))), at))
        self._reports = {key: report for key, report in self._reports.items() if key[1] >= self._round_at(now) - 10}
        return seen

    async def certificates_after(self, peer: str, lineage: bytes) -> Sequence[Certificate]:
        """Results that follow on a lineage; their signatures are left out, as whoever looks has checked them."""
        lineages = [body.lineage for body in self._chain]
        return [Certificate(body, ()) for body in self._chain[lineages.index(lineage) :]] if lineage in lineages else []

    # --- peers ----------------------------------------------------------------------------------------------------

    def _record(self, index: int, at: float) -> PeerRecord:
        round_ = self._round_at(at)
        started_at = self._started_at(index, at)
        role = self._role(index)
        is_new = at - started_at < 1.5 * ROUND_SECONDS
        joins = role in ("trainer", "stage")
        trains = joins and not is_new
        feeds = trains and self._num_stages > 1 and role == "trainer"
        first = max(FIRST_ROUND, self._round_at(started_at) + 2)
        done = range(max(first, round_ - MAX_REPORTS), round_) if trains else range(0)
        num_rounds = max(0, round_ - first) if trains else 0
        speed = self._speed(index) if trains else 0.0
        in_round = (at - self._genesis) % ROUND_SECONDS
        traffic = int(ROUND_BYTES * (num_rounds + in_round / ROUND_SECONDS)) if trains else 0
        return PeerRecord(
            peer=self._ids[index],
            name=self._name(index),
            version="0.4.0" if self._chance("version", index) < 0.9 else "0.3.2",
            protocol=1,
            role=role,
            state="serving" if role == "bootstrap" else "syncing" if is_new else "training",
            device=("cuda: NVIDIA RTX 4090", "cuda: NVIDIA A100", "cpu", "mps")[self._hash("device", index)[0] % 4],
            round=round_ if joins and not feeds else 0,
            lineage=self._lineage(round_) if trains and not feeds else ABSENT,
            digest=ABSENT if not trains or feeds else self._state(index, self._stage(index), round_),
            lineage_tokens=self._chain[round_ - 1 - FIRST_ROUND].tokens_before if round_ > FIRST_ROUND else 0,
            round_tokens=int(speed * in_round),
            loss=made_up_loss(round_) * (0.98 + 0.04 * self._chance("loss", index, round_)) if trains else None,
            tokens_per_second=speed * (0.97 + 0.06 * self._chance("speed now", index, int(at))),
            bytes_sent=int(traffic * (0.9 + 0.2 * self._chance("traffic", index))),
            bytes_received=traffic,
            reachability="direct" if self._chance("reach", index) < 0.7 else "relay",
            addresses=(f"/ip4/198.51.100.{index % 256}/tcp/31337",),
            started_at=started_at,
            last_rounds=tuple(self._report(index, number) for number in (() if feeds else done)),
            trained_tokens=int(num_rounds * speed * ROUND_SECONDS * 0.9),
            trained_rounds=num_rounds,
            stages=self._stages(index, round_, int(speed * in_round)) if role == "stage" and trains else (),
            serving=served(at - started_at, 0.3 + self._chance("requests", index))
            if self.serves and joins and index % 3 == 1
            else None,
            evaluation=self._evaluation(index, round_) if self._measures and trains else None,
        )

    def _evaluation(self, index: int, round_: int) -> Evaluation | None:
        mean = 0.95 - 0.4 / (1 + 0.15 * (round_ - FIRST_ROUND)) + 0.04 * (self._chance("accuracy", index, round_) - 0.5)
        samples = 32 << index % 5
        return Evaluation.of("accuracy", round_, mean, math.sqrt(mean * (1 - mean) / samples), samples)

    def _stages(self, index: int, round_: int, tokens: int) -> tuple[StageReport, ...]:
        """What a host of a pipeline reports: its stage, and embeddings that the first and the last one share."""
        stage = self._stage(index)
        tied = [self._num_stages] if stage in (0, self._num_stages - 1) else []
        return tuple(
            StageReport(
                unit, round_, self._hash("lineage", unit, round_), self._state(index, unit, round_),
                self._chain[round_ - 1 - FIRST_ROUND].tokens_before if round_ > FIRST_ROUND else 0,
                self._speed(index) if unit == stage else 0.0,
                self._hash("waiting", index, round_)[0] % 7 if unit == stage else 0,
                tokens // 256 if unit == stage else 0,
            )
            for unit in (stage, *tied)
        )  # fmt: skip

    def _stage(self, index: int) -> int:
        if self._num_stages == 1:
            return 0
        return self._hosted[(index - self._num_bootstraps) % len(self._hosted)]

    def _state(self, index: int, unit: int, round_: int) -> bytes:
        astray = self._num_bootstraps <= index < self._num_bootstraps + self._num_astray
        cut = (unit,) if self._num_stages > 1 else ()
        return self._hash("state", round_, int(astray and index), *cut)

    def _name(self, index: int) -> str:
        return f"{NAMES[index % len(NAMES)]}-{index // len(NAMES) + 1}"

    def _role(self, index: int) -> str:
        if index < self._num_bootstraps:
            return "bootstrap"
        # In a pipeline every sixth peer only sends microbatches through.
        return "stage" if self._num_stages > 1 and index % 6 != 5 else "trainer"

    def _speed(self, index: int) -> float:
        return 2000.0 * math.exp(2 * self._chance("speed", index) - 1)

    def _stay(self, index: int, at: float) -> tuple[bool, float]:
        """Whether a peer is there, and since when: most stay, every eighth comes and goes."""
        if index % 8 != 7:
            return True, self._genesis - 3600 * (1 + 48 * self._chance("start", index))
        cycle = 240 + 600 * self._chance("cycle", index)
        phase = (at + cycle * self._chance("phase", index)) % cycle
        return phase < 0.7 * cycle, at - phase

    def _is_present(self, index: int, at: float) -> bool:
        return self._stay(index, at)[0]

    def _started_at(self, index: int, at: float) -> float:
        return self._stay(index, at)[1]

    # --- rounds ---------------------------------------------------------------------------------------------------

    def _round_at(self, at: float) -> int:
        return FIRST_ROUND + int((at - self._genesis) / ROUND_SECONDS)

    def _report(self, index: int, round_: int) -> RoundReport:
        known = self._reports.get((index, round_))
        if known is not None:
            return known
        draw = self._chance("luck", index, round_)
        reason = (
            "late: this peer's work waits for the next round" if draw < LATE
            else "this peer sent values out of range: it was dropped" if draw < DROPPED
            else "the group broke: 2 of 5 members did not answer within 20 s" if draw < MISSES
            else ""
        )  # fmt: skip
        committed = not DROPPED <= draw < MISSES
        matchmaking = ROUND_SECONDS * (0.05 + 0.05 * self._chance("matchmaking", round_))
        transfer = ROUND_SECONDS * (0.08 + 0.12 * self._chance("transfer", round_))
        body = self._chain[round_ - FIRST_ROUND]
        report = self._reports[index, round_] = RoundReport(
            round=round_,
            committed=committed,
            reason=reason,
            seconds=matchmaking + transfer,
            members=self._num_members(body, index),
            contributors=self._num_members(body, index),
            contributed=not reason,
            digest=self._state(index, self._stage(index), round_ + 1) if committed else ABSENT,
            compute_seconds=ROUND_SECONDS - matchmaking - transfer,
            matchmaking_seconds=matchmaking,
            transfer_seconds=transfer,
        )
        return report

    def _num_members(self, body: Body, index: int) -> int:
        if self._num_stages == 1:
            return sum(body.peers)
        return sum(
            self._role(other) == "stage" and self._stage(other) == self._stage(index) for other in range(len(self._ids))
        )

    def _lineage(self, round_: int) -> bytes:
        return self._chain[round_ - 1 - FIRST_ROUND].next_lineage if round_ > FIRST_ROUND else self._hash("lineage")

    def _extend_chain(self, upto: int) -> None:
        while len(self._chain) < upto - FIRST_ROUND:
            self._chain.append(self._result(FIRST_ROUND + len(self._chain)))

    def _result(self, round_: int) -> Body:
        at = self._genesis + (round_ - FIRST_ROUND) * ROUND_SECONDS
        present = [
            index for index in range(len(self._ids))
            if self._role(index) in ("trainer", "stage") and self._is_present(index, at)
        ]  # fmt: skip
        before = self._chain[-1] if self._chain else None
        lineage = before.next_lineage if before else self._hash("lineage")
        size = before.present if before else len(present)
        head = Head(round_, lineage, 0, 0, ABSENT, present=size)
        groups: dict[int, list[int]] = {}
        for index in present:
            cell = self._cells.key_of(head, self._ids[index]).cell
            groups.setdefault(cell, []).append(index)
        levels = self._cells.num_levels(size)
        delegates = [group[0] for group in groups.values()] if levels > 1 else present
        parts = list(groups.values()) if levels > 1 else [[index] for index in present]
        tokens = [int(sum(map(self._speed, part)) * ROUND_SECONDS * 0.9) for part in parts]
        peers = tuple(map(len, parts))
        return Body(
            swarm=self._digest,
            round=round_,
            lineage=lineage,
            digest=self._hash("state", round_),
            tokens_before=before.tokens_before + before.tokens if before else 10**9,
            samples_before=0,
            group_id=self._hash("group", round_),
            members=tuple(self._ids[index] for index in delegates),
            contributors=tuple(
                (i, tokens[i], 64)
                for i, index in enumerate(delegates)
                if levels > 1 or self._chance("luck", index, round_) >= MISSES
            ),
            codec="int8/1",
            bounds=(0,),
            hashes=(),
            present=len(present),
            level=levels - 1,
            levels=levels,
            peers=peers,
        )

    # --- chance ---------------------------------------------------------------------------------------------------

    def _hash(self, purpose: str, *numbers: int) -> bytes:
        return hashlib.sha256(f"{self._seed} {purpose} {numbers}".encode()).digest()

    def _chance(self, purpose: str, *numbers: int) -> float:
        """The same number from 0 to 1 whenever it is asked for."""
        return int.from_bytes(self._hash(purpose, *numbers)[:4], "big") / 2**32

    def _id_of_nobody(self) -> str:
        return base58.b58encode(b"\x12\x20" + self._hash("nobody")).decode()


def made_up_loss(round_: float) -> float:
    """A loss that falls as losses do, in nats."""
    return 2.2 + 6 / math.sqrt(1 + max(0.0, round_ - FIRST_ROUND + 400) / 40)


async def fill(store: Store, swarm: MadeUpSwarm) -> None:
    """Give a store the past week that such a swarm would have left in it."""
    now, peers = swarm.now(), len((await swarm.look()).sightings or ())
    moments: Iterable[float] = (
        *_every(900, now - 7 * 86400, now - 86400), *_every(120, now - 86400, now - 3600),
        *_every(10, now - 3600, now),
    )  # fmt: skip
    for at in moments:
        wave = math.sin(at / 5000) + 0.3 * math.sin(at / 37)
        there = round(peers * (0.9 + 0.08 * wave))
        if swarm.serves:
            number = int(20 + 4 * wave)
            await store.add_points(at, {
                "first_token_seconds": spread(number, 0.4 * (1.2 + 0.2 * wave)),
                "token_seconds": spread(63 * number, 0.04 * (1.2 + 0.1 * wave)),
            })  # fmt: skip
        await store.add_points(at, {
            "loss": made_up_loss(FIRST_ROUND - (now - at) / ROUND_SECONDS) * (1 + 0.001 * math.sin(at)),
            "tokens_per_second": there * 2100 * (1 + 0.03 * math.sin(at / 11)),
            "peers": there, "training": 0.95 * there,
            "compute_seconds": ROUND_SECONDS * (0.75 + 0.03 * wave),
            "matchmaking_seconds": ROUND_SECONDS * (0.07 + 0.01 * math.sin(at / 900)),
            "transfer_seconds": ROUND_SECONDS * (0.14 - 0.02 * wave),
            "aborted": float(math.sin(at / 71) > 0.995),
            "sent_per_second": there * ROUND_BYTES / ROUND_SECONDS,
            "received_per_second": there * ROUND_BYTES / ROUND_SECONDS * (0.97 + 0.02 * wave),
            **({
                "served_tokens_per_second": 130 + 25 * wave, "served_prompt_tokens_per_second": 400 + 80 * wave,
                "sessions": 9 + 2 * wave,
            } if swarm.serves else {}),
        })  # fmt: skip
    await store.add_events([
        Event(now - 3000 + 400 * i, kind, "", text)
        for i, (kind, text) in enumerate((
            ("joined", "maple-1 joined"), ("left", "otter-1 left"), ("alert", "cedar-1's clock is 7 s behind"),
            ("cleared", "over: cedar-1's clock is 7 s behind"), ("joined", "otter-1 joined"),
        ))
    ])  # fmt: skip


def _every(step: float, start: float, end: float) -> Iterator[float]:
    while start < end:
        yield start
        start += step


async def _serve(swarm: MadeUpSwarm, port: int, db: Path | None) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    listener = listen("127.0.0.1", port, "--port")
    store = await Store.open(db, swarm.swarm.digest, swarm.now())
    if len((await swarm.look()).sightings or ()):
        await fill(store, swarm)
    watch = Watch(swarm, SwarmTracker(swarm.swarm, swarm.now(), bootstraps(swarm.link)), store)
    async with watching(watch), serving(make_app(watch, store, swarm.now), listener):
        sys.stdout.write(f"status page: {url_of(listener)}\n")
        sys.stdout.flush()
        await stop.wait()
    await store.close()


def main() -> None:
    """Serve the page over a made-up swarm until interrupted."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--peers", type=int, default=24, help="how many, at most 2000 (default 24)")
    parser.add_argument("--port", type=int, default=8090, help="port on 127.0.0.1, 0 for a free one (default 8090)")
    parser.add_argument("--astray", type=int, default=0, help="peers with another state than the rest (default none)")
    parser.add_argument("--stages", type=int, default=1, help="into which the model is cut (default 1)")
    parser.add_argument("--bare", type=int, action="append", default=[], help="a stage that nobody hosts")
    parser.add_argument("--serving", action="store_true", help="let every third peer serve the model, too")
    parser.add_argument("--db", type=Path, help="where history is kept (default: in memory)")
    parser.add_argument("--sites", action="store_true", help="let each trainer report what it measured")
    asked = parser.parse_args()
    swarm = MadeUpSwarm(
        asked.peers, num_astray=asked.astray, num_stages=asked.stages, bare_stages=asked.bare,
        serves=asked.serving, measures=asked.sites,
    )  # fmt: skip
    answer_first()
    asyncio.run(_serve(swarm, asked.port, asked.db))


if __name__ == "__main__":
    main()
