"""Attackers in a swarm: a stranger has a key of its own and the swarm's link, and a member trains with the others, too.

An attack is a file in ``tests/lab/attacks`` with one coroutine, ``attack(stranger, **options)``, which runs until it is
cancelled. It may import anything. Records, certificates and states that several attacks forge are made here.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch

from p2ptrain.averaging.commit.round_log import Result, RoundLog
from p2ptrain.averaging.context import PeerContext
from p2ptrain.averaging.grouping.cells import Cells, Key
from p2ptrain.averaging.grouping.membership import Membership
from p2ptrain.averaging.grouping.messages import JOIN, PROBE, STEPS, Join, Probe, ProbeReply, StepsAdvice, StepsReport
from p2ptrain.averaging.protocol.certificate import Body, Certificate, Head, Roster, Ticket, vote
from p2ptrain.averaging.protocol.table import Census
from p2ptrain.averaging.vector.chunks import chunk_values, mean_root
from p2ptrain.errors import DeadlineError, IntegrityError, P2PTrainError, PeerError
from p2ptrain.hashing import EMPTY_HASH
from p2ptrain.manifest import Manifest
from p2ptrain.network.directory import Directory, Entry
from p2ptrain.network.records.record import (
    NUM_SHARDS,
    PeerRecord,
    open_record,
    peers_key,
    seal_record,
    shard_of,
)
from p2ptrain.network.rpc.channel import Channel
from p2ptrain.network.rpc.endpoint import Rpc
from p2ptrain.network.transport import Transport
from p2ptrain.signing import Signer
from p2ptrain.training.state.layout import vector_codec
from p2ptrain.training.state.shared_state import SharedState
from p2ptrain.training.sync.state_server import StateServer, fetch_head
from p2ptrain.training.sync.synchronizer import Synchronizer
from tests.lab.scenario import ATTACKS, HOSTILE

PUBLISH_SECONDS = 3.0
CALL_SECONDS = 5.0

Attack = Callable[..., Awaitable[None]]


@cache
def load_attack(name: str) -> Attack:
    """Return the attack of this name."""
    spec = importlib.util.spec_from_file_location(f"tests.lab.attacks.{name}", ATTACKS / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    found: Attack = module.attack
    return found


@dataclass
class Stranger:
    """One attacker.

    Attributes:
        new_signer: Makes the key of a peer that does not exist.
        new_state: Makes the initial shared state, which anybody with the manifest can.
    """

    name: str
    rpc: Rpc
    transport: Transport
    directory: Directory
    signer: Signer
    manifest: Manifest
    new_signer: Callable[[], Signer]
    new_state: Callable[[], SharedState]

    def __post_init__(self) -> None:
        self.swarm = self.manifest.digest
        self.runtime = self.rpc.runtime
        self.random = self.runtime.random
        self._sequence = 0

    @property
    def peer_id(self) -> str:
        return self.signer.peer_id

    async def run(self, attack: str, options: dict[str, Any]) -> None:
        """Run an attack until it is cancelled; what victims refuse is tried again."""
        while True:
            with contextlib.suppress(P2PTrainError, TimeoutError):
                await load_attack(attack)(self, **options)
            await asyncio.sleep(1.0)

    # --- what a stranger learns

    async def records(self) -> list[PeerRecord]:
        """Return the records of honest trainers, ordered by peer id; wait until there are some."""
        while True:
            entries: dict[str, Entry] = {}
            for shard in range(NUM_SHARDS):
                entries |= await self.directory.look_up(peers_key(self.swarm, shard), CALL_SECONDS) or {}
            found = []
            for peer in sorted(entries):
                with contextlib.suppress(IntegrityError):
                    opened = open_record(entries[peer].value, self.swarm, self.signer)
                    record = PeerRecord.from_payload(peer, opened.payload)
                    if record.state == "training" and not record.name.startswith(HOSTILE):
                        found.append(record)
            if found:
                return found
            await asyncio.sleep(1.0)

    async def victims(self) -> list[str]:
        return [record.peer for record in await self.records()]

    async def head(self) -> Head:
        """Return the newest head that an honest trainer tells."""
        for record in sorted(await self.records(), key=lambda each: -each.lineage_tokens):
            with contextlib.suppress(PeerError, DeadlineError):
                return await fetch_head(self.rpc, record.peer)
        raise DeadlineError("no trainer tells its head")

    def key_of(self, head: Head, peer: str = "") -> Key:
        """Return the group in which a peer averages after a head; this peer's by default."""
        return Cells(self.manifest.averaging.group_size).key_of(head, peer or self.peer_id)

    # --- what a stranger says

    async def publish(self, signer: Signer | None = None, **changes: Any) -> None:
        """Publish a record that looks like an honest trainer's, but for these fields."""
        model = max(await self.records(), key=lambda record: record.lineage_tokens)
        signer = signer or self.signer
        usual = {"peer": signer.peer_id, "name": f"{HOSTILE} {self.name}", "addresses": (), "last_rounds": ()}
        record = replace(model, **{**usual, **changes})
        self._sequence = max(self._sequence + 1, int(self.runtime.now() * 1000))
        expires_at = self.runtime.now() + 30.0
        sealed = seal_record(self.swarm, record.to_payload(), self._sequence, expires_at, signer)
        key = peers_key(self.swarm, shard_of(signer.peer_id))
        await self.directory.publish(key, signer.peer_id, sealed, expires_at, CALL_SECONDS)

    async def pretend(self, head: Head, signer: Signer | None = None) -> None:
        """Publish once a record of a trainer with this head."""
        position = {"round": head.round, "lineage": head.lineage, "digest": head.digest, "lineage_tokens": head.tokens}
        await self.publish(signer, **position)

    async def probe(self, victim: str, head: Head, closing: bool = False) -> None:
        """Tell a trainer that this peer is in its round after a head, and whether that closes."""
        with contextlib.suppress(PeerError, DeadlineError):
            await self.rpc.call(victim, PROBE, Probe(self.key_of(head, victim), closing), ProbeReply, CALL_SECONDS)

    def name_leader(self, leader: Callable[[Key], str] = lambda key: "") -> None:
        """Answer probes as a trainer does, but for the leader that it names, and for a turn that never comes."""

        async def on_probe(peer: str, request: Probe) -> ProbeReply:
            return ProbeReply((await self.head()).without_proof(), leader(request.key), 1 << 40)

        self.rpc.serve(PROBE, Probe, on_probe)

    def act_alive(self) -> None:
        """Answer probes and reports as a trainer does."""

        async def on_steps(peer: str, request: StepsReport) -> StepsAdvice:
            return StepsAdvice(closing=False)

        self.name_leader()
        self.rpc.serve(STEPS, StepsReport, on_steps)

    async def pose(self, **changes: Any) -> None:
        """Look like an honest trainer in the directory, until cancelled."""
        while True:
            await self.publish(**changes)
            await asyncio.sleep(PUBLISH_SECONDS)

    # --- what a stranger forges

    def forge(
        self, parent: Head, state: SharedState, tokens: int, tokens_before: int | None, signers: Sequence[Signer] = ()
    ) -> Result:
        """Return a result of the round after ``parent``, whose mean is all ones, certified by the signers alone.

        Each signer contributes ``tokens``; ``tokens_before`` are the lineage's own if None.
        """
        codec, size = vector_codec(self.manifest.averaging, state.layout), state.layout.num_values
        mean, everybody = codec.encode(torch.ones(size)), tuple(signers) or (self.signer,)
        body = Body(
            self.swarm, parent.round, parent.lineage, parent.digest,
            parent.tokens if tokens_before is None else tokens_before, parent.samples, self.random.randbytes(32),
            tuple(each.peer_id for each in everybody), tuple((i, tokens, 1) for i in range(len(everybody))),
            f"{codec.name}/{codec.version}", (0, *(size for _ in everybody)),
            (mean_root(codec, mean, size, chunk_values(codec)), *(EMPTY_HASH for _ in everybody[1:])),
            peers=(1,) * len(everybody),
            census=Census(joining=tuple(sorted({each.peer_id for each in everybody}))),
        )  # fmt: skip
        body = parent.table.completed(body)
        votes = tuple((each.peer_id, each.sign(vote(body.body_hash))) for each in everybody)
        return Result(Certificate(body, votes), [mean, *(b"" for _ in everybody[1:])])

    async def promise(self, tokens_before: int = 1 << 60) -> SharedState:
        """Serve the head of a state far ahead of the swarm's, which this peer alone certifies; return the state."""
        state = self.new_state()
        parent = await self.head()
        self.go_on(state, parent, self.forge(parent, state, 1, tokens_before))
        self.offer(state)
        return state

    def go_on(self, state: SharedState, parent: Head, result: Result) -> None:
        """Give a state the head after a result, whoever certified it."""
        certificate = result.certificate
        state.head = certificate.next_head(state.tree().root, parent.table.after(certificate.body))

    def offer(self, state: SharedState, *results: tuple[Result, Head]) -> RoundLog:
        """Serve a state for download, and results for replay, each with the head before it."""
        membership = Membership(self.peer_id, self.runtime)
        spec, layout = self.manifest.averaging, state.layout
        context = PeerContext(self.rpc, self.runtime, self.signer, self.swarm, spec, membership)
        log = RoundLog(context, [(vector_codec(spec, layout), layout.num_values)])
        for result, parent in results:
            log.add(result, parent)
        StateServer(self.rpc, state)
        return log


@dataclass
class Member(Stranger):
    """An attacker that trains, votes and may lead; what an attack does not change, it goes on doing in good order.

    Attributes:
        sync: Of its training.
    """

    sync: Synchronizer

    async def head(self) -> Head:
        return self.sync.head

    async def publish(self, signer: Signer | None = None, **changes: Any) -> None:
        if signer is not None:  # Its training publishes its own record.
            await super().publish(signer, **changes)

    def lead(self, answer: Callable[[Channel, Ticket], Awaitable[None]]) -> None:
        """Answer the tickets of others with a coroutine of its own."""

        async def serve(channel: Channel, request: Join) -> None:
            await answer(channel, request.ticket)

        self.rpc.serve_channel(JOIN, Join, serve)

    def vote_for(self, may_vote: Callable[[Body], bool]) -> None:
        """Sign results that a function accepts, whatever this peer signed before, and no others."""
        ballots = self.sync.replica.context.ballots
        ballots.vote = lambda body, *_, **__: may_vote(body)  # type: ignore[method-assign]

    def ticket(self) -> Ticket:
        averager = self.sync.averager
        return averager._signed(averager._ticket(self.sync.head, 10, 1, 0))

    async def average(self, roster: Roster) -> None:
        """Take part in an attempt with a roster of any leader's choice."""
        runner, vector = self.sync.averager._runner, self.sync.state.vector.clone()
        await runner.run(runner.prepare(roster, self.sync.head, vector, None))


def roster_of(tickets: Iterable[Ticket]) -> Roster:
    return Roster(tuple(sorted(tickets, key=lambda ticket: ticket.peer)))


async def forever() -> None:
    await asyncio.sleep(86_400)
