"""The contenders of the averaging benchmarks as the parent sees them: processes that average when told to.

Both do a round in the same steps, so that every benchmark can be written once: `AveragingSwarm.prepare`, which for
hivemind is the matchmaking; `AveragingSwarm.go`; and one `AveragingSwarm.outcome` of each peer.
"""

from __future__ import annotations

import abc
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.harness import cpu_seconds
from benchmarks.workers import Workers

START_SECONDS = 120.0
ROUND_SECONDS = 150.0
"""Longer than the peers' own deadlines."""
PATIENT_SECONDS = 60.0
"""The grace period where no peer is meant to be left out, however busy the machine is."""


@dataclass(frozen=True)
class Place:
    """Where a peer runs.

    Attributes:
        listen: The multiaddr that it listens on.
        prefix: What stands before its command line.
    """

    listen: str = "/ip4/127.0.0.1/tcp/0"
    prefix: tuple[str, ...] = ()


@dataclass(frozen=True)
class Setup:
    """The settings that all peers of a swarm have in common.

    Attributes:
        peers: How many.
        num_values: In each one's fp32 vector.
        codec: ``fp32`` or ``int8``; for hivemind, its codec of that precision.
        grace_seconds: How long a late peer is waited for; for hivemind, how long a silent one is.
        min_group: Fewer peers do not form a group; for hivemind alone.
        places: One for each peer.
        spot_checks: Chunks of each share that are computed again; for p2ptrain alone, and none where it is compared.
        is_masked: Whether contributions are masked (secure aggregation); for p2ptrain alone.
        log: Where the error output of all processes goes.
        hivemind_python: The interpreter for hivemind.
    """

    peers: int
    num_values: int
    codec: str
    grace_seconds: float = PATIENT_SECONDS
    min_group: int = 0
    places: tuple[Place, ...] = ()
    spot_checks: int = 0
    is_masked: bool = False
    log: str | None = None
    hivemind_python: str = sys.executable

    def options(self, index: int) -> dict[str, Any]:
        """Return the options of one process."""
        return {
            "index": index,
            "peers": self.peers,
            "values": self.num_values,
            "codec": self.codec,
            "listen": self.place(index).listen,
        }

    def place(self, index: int) -> Place:
        """Where a peer runs; on loopback unless said otherwise."""
        return self.places[index] if self.places else Place()


@dataclass(frozen=True)
class Round:
    """One round: until the last peer has its result; CPU seconds of all processes, and bytes that p2ptrain's sent."""

    seconds: float
    cpu_seconds: float
    sent_bytes: int = 0


@dataclass(frozen=True)
class Match:
    """One time of looking for a group: seconds from the first ready peer to the last member, members in each group."""

    seconds: float
    members: tuple[int, ...]


@dataclass(frozen=True)
class Check:
    """The relative L2 error of the worst replica, and whether all have the same bits."""

    relative_error: float
    replicas_equal: bool


class AveragingSwarm(Workers, abc.ABC):
    """Peers that average one vector each, ready for rounds within this context.

    Attributes:
        setup: What it was made with.
        versions: Of what the yardstick runs on; empty for p2ptrain.
    """

    name: str

    def __init__(self, module: str, setup: Setup) -> None:
        super().__init__(module, setup.log)
        self.setup = setup
        self.versions: dict[str, str] = {}
        self._sent = 0

    @abc.abstractmethod
    def prepare(self) -> None:
        """Do what comes before a round and is not part of its time."""

    @abc.abstractmethod
    def go(self) -> float:
        """Start a round; returns the time of the monotonic clock."""

    @abc.abstractmethod
    def match(self, delays: Sequence[float]) -> Match:
        """Find a group, with peers that are ready after these seconds, and average once."""

    @abc.abstractmethod
    def seconds_of(self, started: float, answers: Sequence[dict[str, Any]]) -> float:
        """How long a round took without matchmaking, from when it was started and what all peers said."""

    def wait_until_standing(self, index: int) -> None:
        """Wait until a peer has found the group of the round that was started."""

    def outcome(self, index: int) -> dict[str, Any]:
        """One peer's last word on a round: ``finished`` and more, or ``failed``."""
        while "stood" in (answer := self.all[index].hear(ROUND_SECONDS)) and len(answer) == 1:
            pass
        return answer

    def outcomes(self) -> list[dict[str, Any]]:
        """`outcome` of all.

        Raises:
            RuntimeError: A round failed, or went on without a peer.
        """
        answers = [self.outcome(index) for index in range(len(self.all))]
        for answer in answers:
            if "failed" in answer:
                raise RuntimeError(f"{self.name}: a round failed: {answer['failed']}")
            if answer.get("contributors", answer["members"]) != self.setup.peers:
                raise RuntimeError(f"{self.name}: a round went on without a peer; run with --log FILE to see why")
        return answers

    def round(self) -> Round:
        """One round of all peers.

        Raises:
            RuntimeError: A peer failed or took too long.
        """
        self.prepare()
        processes = self.processes()
        cpu_before, started = cpu_seconds(processes), self.go()
        answers = self.outcomes()
        sent_before, self._sent = self._sent, sum(answer.get("sent", 0) for answer in answers)
        return Round(self.seconds_of(started, answers), cpu_seconds(processes) - cpu_before, self._sent - sent_before)

    def check(self) -> Check:
        """How good the mean is; meaningful after the first round."""
        self.order("check")
        answers = self.hear_all(ROUND_SECONDS)
        worst = max(answer["relative_error"] for answer in answers)
        return Check(worst, len({answer["sha256"] for answer in answers}) == 1)

    def order(self, what: str, **arguments: object) -> None:
        """Send one command to all peers."""
        self.tell_all(json.dumps({"do": what, **arguments}))


class P2PTrainSwarm(AveragingSwarm):
    """Peers of `benchmarks.averaging_peer`. A round is everything from the roster to the decoded mean."""

    name = "p2ptrain"

    def __init__(self, setup: Setup) -> None:
        super().__init__("benchmarks.averaging_peer", setup)
        self._lineages = 0

    def begin(self) -> None:
        for index in range(self.setup.peers):
            options = {
                **self.setup.options(index),
                "grace_seconds": self.setup.grace_seconds,
                "spot_checks": self.setup.spot_checks,
                "is_masked": self.setup.is_masked,
            }
            self.start(json.dumps(options), command=(*self.setup.place(index).prefix, sys.executable))
        self.tell_all(json.dumps(self.hear_all(START_SECONDS)))
        self.hear_all(START_SECONDS)

    def prepare(self) -> None:
        pass

    def anew(self) -> None:
        """Tell all peers to begin another lineage, whatever became of the last round."""
        self._lineages += 1
        self.order("anew", number=self._lineages)
        self.hear_all(ROUND_SECONDS)

    def go(self) -> float:
        started = time.monotonic()
        self.order("go", delay=0.0)
        return started

    def wait_until_standing(self, index: int) -> None:
        answer = self.all[index].hear(ROUND_SECONDS)
        if "stood" not in answer:
            raise RuntimeError(f"p2ptrain: found no group: {answer.get('failed')}")

    def seconds_of(self, started: float, answers: Sequence[dict[str, Any]]) -> float:
        return float(max(answer["finished"] for answer in answers) - min(answer["stood"] for answer in answers))

    def match(self, delays: Sequence[float]) -> Match:
        self.anew()
        for worker, delay in zip(self.all, delays, strict=True):
            worker.tell(json.dumps({"do": "go", "delay": delay}))
        answers = [self.outcome(index) for index in range(len(self.all))]
        stood = [answer.get("stood", answer["ready"] + ROUND_SECONDS) for answer in answers]
        return Match(
            max(stood) - min(answer["ready"] for answer in answers),
            tuple(answer["members"] if answer.get("attempts") == 1 else 0 for answer in answers),
        )

    def threads(self) -> list[dict[int, str]]:
        """By peer: the names of its process's threads."""
        self.order("threads")
        return [{int(key): name for key, name in answer.items()} for answer in self.hear_all(ROUND_SECONDS)]


class HivemindSwarm(AveragingSwarm):
    """Peers of `benchmarks.hivemind_peer`."""

    name = "hivemind"
    SEARCH_SECONDS = 30.0

    def __init__(self, setup: Setup) -> None:
        super().__init__("benchmarks.hivemind_peer", replace(setup, min_group=setup.min_group or setup.peers))

    def begin(self) -> None:
        hello = self._start(0, []).hear(START_SECONDS)
        self.versions = hello["versions"]
        for index in range(1, self.setup.peers):
            self._start(index, hello["addresses"])
        for worker in self.all[1:]:
            worker.hear(START_SECONDS)

    def _start(self, index: int, initial: list[str]) -> Any:
        patient = self.setup.grace_seconds >= PATIENT_SECONDS
        options = {
            **self.setup.options(index),
            "initial": initial,
            "min_group": self.setup.min_group,
            "chunk_seconds": None if patient else self.setup.grace_seconds,
        }
        return self.start(json.dumps(options), command=(*self.setup.place(index).prefix, self.setup.hivemind_python))

    def prepare(self) -> None:
        self.order("form", delay=0.0, seconds=2 * self.SEARCH_SECONDS)
        if not all(answer["formed"] for answer in self.hear_all(ROUND_SECONDS)):
            raise RuntimeError("hivemind formed no group; run with --log FILE to see why")

    def go(self) -> float:
        started = time.monotonic()
        self.order("go")
        return started

    def seconds_of(self, started: float, answers: Sequence[dict[str, Any]]) -> float:
        return float(max(answer["finished"] for answer in answers) - started)

    def match(self, delays: Sequence[float]) -> Match:
        for worker, delay in zip(self.all, delays, strict=True):
            worker.tell(json.dumps({"do": "form", "delay": delay, "seconds": self.SEARCH_SECONDS}))
        found = self.hear_all(ROUND_SECONDS)
        formed = [index for index, answer in enumerate(found) if answer["formed"]]
        for index in formed:
            self.all[index].tell(json.dumps({"do": "go"}))
        sizes = {index: self.outcome(index).get("members", 0) for index in formed}
        seconds = max(answer["stood"] for answer in found) - min(answer["ready"] for answer in found)
        return Match(seconds, tuple(sizes.get(index, 0) for index in range(len(found))))
