"""p2ptrain's process in the averaging benchmarks: an `Averager` on a real daemon, with one fp32 vector.

The directory is left out: the parent tells the peers of each other. `benchmarks.swarms.P2PTrainSwarm` is the other end.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

import torch
import uvloop

from benchmarks.answers import hear, say
from benchmarks.peers import SWARM, LoopbackPeer, loopback_peer
from benchmarks.vectors import initial_vector, quality
from p2ptrain.averaging.averager import Averager, RoundOutcome
from p2ptrain.averaging.commit.attempt import decode_means
from p2ptrain.averaging.commit.round_log import RoundLog
from p2ptrain.averaging.context import PeerContext
from p2ptrain.averaging.grouping.membership import Membership
from p2ptrain.averaging.protocol.certificate import Head, genesis
from p2ptrain.codecs import get_codec, warm_up
from p2ptrain.errors import P2PTrainError
from p2ptrain.manifest import AveragingSpec, SecureAggregationSpec
from p2ptrain.network.records.record import PeerRecord

Command = Callable[..., Awaitable[dict[str, Any]]]
ROUND_SECONDS = 120.0
LAYOUT = b"benchmark layout".ljust(32, b".")


class Peer:
    """One peer; `go`, `anew`, `check` and `threads` are commands, and return their answers.

    Args:
        here: The peer up to its `Rpc`.
        options: ``index``, ``peers``, ``values``, ``codec``, ``grace_seconds``, ``spot_checks`` and ``is_masked``.
    """

    def __init__(self, here: LoopbackPeer, options: dict[str, Any]) -> None:
        rpc, self._runtime, self._traffic = here.rpc, here.runtime, here.rpc.traffic
        self._num_peers = options["peers"]
        self._codec = get_codec(options["codec"])
        warm_up()
        self._vector = initial_vector(options["index"], options["values"])
        self._membership = Membership(rpc.peer_id, self._runtime)
        self._spec = spec = AveragingSpec(
            codec=options["codec"], grace_seconds=options["grace_seconds"], round_seconds=ROUND_SECONDS,
            spot_checks=options["spot_checks"],
        )  # fmt: skip
        secure = SecureAggregationSpec() if options["is_masked"] else None
        context = PeerContext(
            rpc, self._runtime, here.identity, SWARM, spec, self._membership, secure_aggregation=secure
        )
        self.averager = Averager(context, _head(0), RoundLog(context, [(self._codec, len(self._vector))]), LAYOUT)
        self.averager.matchmaker.participate(True)
        self.averager.phase_listeners = [self._on_phase]
        self._stood = 0.0
        self._freeze = ""

    def meet(self, peers: list[str]) -> None:
        """Wait for these peers in each round."""
        for peer in peers:
            self._membership.update(_record(peer), sequence=1, expires_at=self._runtime.now() + 1e6)

    def _on_phase(self, phase: str, round_: int) -> None:
        if phase == "scatter" and not self._stood:
            self._stood = time.monotonic()
            say(stood=self._stood)
        if phase == self._freeze:
            say(frozen=time.monotonic())
            os.kill(os.getpid(), signal.SIGSTOP)

    async def go(self, delay: float, freeze: str = "") -> dict[str, Any]:
        """After a delay: average, replace the vector by the mean, and move on. Says so once the group stands.

        Args:
            delay: Seconds.
            freeze: A phase on whose beginning this process stops itself (SIGSTOP).
        """
        await asyncio.sleep(delay)
        self._freeze = freeze
        self._stood, ready = 0.0, time.monotonic()
        try:
            outcome = await self.averager.average(self._vector, tokens=1000, samples=1)
        except P2PTrainError as error:
            return {"failed": f"{type(error).__name__}: {error}", "ready": ready}
        certificate = outcome.result.certificate
        await self._runtime.compute(self._decode, outcome)
        finished = time.monotonic()
        self.averager.round_log.add(outcome.result, self.averager.head)
        self.averager.matchmaker.set_head(self.averager.head.after(certificate, self.averager.head.digest))
        return {
            "ready": ready,
            "stood": self._stood,
            "finished": finished,
            "members": len(certificate.body.members),
            "contributors": len(certificate.body.contributors),
            "attempts": outcome.attempts,
            "sent": self._traffic.sent,
        }

    def _decode(self, outcome: RoundOutcome) -> None:
        result = outcome.result
        decode_means(self._spec, self._codec, result.certificate.body, result.means, self._vector)

    async def anew(self, number: int) -> dict[str, Any]:
        """Begin lineage ``number`` and forget how earlier rounds went, so that no round depends on those before it."""
        self.averager.matchmaker.set_head(_head(number))
        for record in self._membership.records():
            self._membership.heard_from(record.peer)
            self._membership.finished_with(record.peer)
        return {}

    async def check(self) -> dict[str, Any]:
        """See `quality`."""
        return await self._runtime.compute(quality, self._vector, self._num_peers)

    async def threads(self) -> dict[str, Any]:
        """The names of this process's Python threads, by the kernel's id; the first is the event loop's."""
        return {str(thread.native_id): thread.name for thread in threading.enumerate()}


def _head(lineage: int) -> Head:
    return genesis(SWARM, lineage.to_bytes(32, "big"))


def _record(peer: str) -> PeerRecord:
    head = _head(0)
    return PeerRecord(
        peer=peer, name="benchmark", version="0", protocol=1, role="trainer", state="training", device="cpu", round=0,
        lineage=head.lineage, digest=head.digest, lineage_tokens=0, lineage_full=0, round_tokens=0, loss=None,
        tokens_per_second=0.0, bytes_sent=0, bytes_received=0, reachability="direct", addresses=(),
        started_at=0.0, last_rounds=(),
    )  # fmt: skip


async def serve(options: dict[str, Any]) -> None:
    """Answer commands on stdin until it closes."""
    async with loopback_peer(options["listen"]) as here:
        peer = Peer(here, options)
        commands: dict[str, Command] = {
            "go": peer.go,
            "anew": peer.anew,
            "check": peer.check,
            "threads": peer.threads,
        }
        await here.rpc.start()
        try:
            peer.meet(await here.meet())
            while line := await hear():
                arguments = json.loads(line)
                say(**await commands[arguments.pop("do")](**arguments))
        finally:
            await peer.averager.close()


if __name__ == "__main__":
    torch.set_num_threads(1)
    uvloop.run(serve(json.loads(sys.argv[1])))
