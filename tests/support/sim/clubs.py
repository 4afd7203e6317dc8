"""Trainers that average when a test tells them to, and what they do about a head that a hostile peer announces."""

import asyncio
import math
from collections.abc import Sequence
from pathlib import Path

import torch

from p2ptrain.averaging.commit.votes import VOTE, AskVote, Vote
from p2ptrain.averaging.protocol.certificate import Certificate, Head, vote
from p2ptrain.averaging.protocol.table import ESTABLISHED
from p2ptrain.errors import PeerRefusedError
from p2ptrain.network.simulated import SimulatedNetwork, SimulatedPeer
from tests.support.coroutines import at_end
from tests.support.sim.seed import SimulatedSeed
from tests.support.sim.trainers import Ledger, SimulatedTrainer, make_manifest

WAIT_SECONDS = 20.0
Saved = tuple[Head, list[tuple[str, torch.Tensor]]]


def save(trainer: SimulatedTrainer) -> Saved:
    """A checkpoint of a trainer's state."""
    return trainer.sync.head, [(name, tensor.clone()) for name, tensor in trainer.state.tensors()]


async def train(trainer: SimulatedTrainer) -> None:
    """Synchronise after each step until the trainer stops."""
    while not trainer.stop:
        await trainer._compute()
        await trainer.synchronize()


class Club:
    """Trainers that average when they are told to, and the seed that founded their swarm.

    With ``anchor_rounds``, the seed signs anchors.
    """

    def __init__(self, network: SimulatedNetwork, mode: str = "invite", **averaging: object) -> None:
        self.network = network
        seed = SimulatedSeed(network, is_open=mode == "open")
        if "anchor_rounds" in averaging:
            averaging = {"anchors": (seed.peer.peer_id,), **averaging}
        manifest = make_manifest(**{"history_rounds": 4, "matchmaking_seconds": WAIT_SECONDS, **averaging})
        admission = manifest.admission.model_copy(update={"mode": mode})
        self.manifest = manifest.model_copy(update={"founders": (seed.peer.peer_id,), "admission": admission})
        seed.peer.spawn(seed.serve(self.manifest.digest, manifest.averaging))
        self.seed, self.ledger = seed, Ledger()
        self.trainers: list[SimulatedTrainer] = []
        at_end(self.close)

    async def start(self, name: str, *, joins: bool = True, scratch: Path | None = None) -> SimulatedTrainer:
        peer = self.network.add_peer(name)
        peer.runtime.scratch = scratch
        return await self._begin(peer, joins)

    async def restart(self, trainer: SimulatedTrainer, saved: Saved | None = None) -> SimulatedTrainer:
        """Begin again after a crash, with the files, and with the state of a checkpoint if there is one."""
        peer = self.network.restart(trainer.peer)
        peer.runtime.scratch = trainer.peer.runtime.scratch
        return await self._begin(peer, joins=saved is not None, saved=saved)

    async def restart_all(self, trainers: Sequence[SimulatedTrainer], saved: Sequence[Saved]) -> list[SimulatedTrainer]:
        """Crash all of these trainers at once, and begin again with them after two minutes."""
        for each in trainers:
            self.network.crash(each.peer)
        await asyncio.sleep(120.0)
        return list(await asyncio.gather(*(self.restart(each, s) for each, s in zip(trainers, saved, strict=True))))

    async def _begin(self, peer: SimulatedPeer, joins: bool, saved: Saved | None = None) -> SimulatedTrainer:
        trainer = SimulatedTrainer(peer, self.manifest, self.ledger)
        self.trainers.append(trainer)
        if saved is not None:
            head, tensors = saved
            trainer.state.replace(tensors, head)
            trainer.sync.averager.begin_at(head)

        async def begin() -> None:
            await trainer.rpc.start()
            await trainer.presence.start()
            if joins:
                await trainer._join()

        await peer.spawn(begin())
        return trainer

    async def average(self, *members: SimulatedTrainer, rounds: int = 1) -> None:
        for _ in range(rounds):
            before = min(each.sync.head.round for each in members)
            for _ in range(5):
                for each in members:
                    each._step()
                await asyncio.gather(*(each.synchronize() for each in members))
                if min(each.sync.head.round for each in members) > before:
                    break
            assert min(each.sync.head.round for each in members) > before

    async def close(self) -> None:
        for each in self.trainers:
            if each.peer.alive:
                await each.peer.spawn(each.close())
        self.ledger.check_convictions(self.trainers)


def tell_seed(club: Club, *trainers: SimulatedTrainer) -> None:
    """Let the seed have records of trainers."""
    for each in trainers:
        club.seed.membership.update(each.describe(), 1, expires_at=math.inf)


async def established(
    network: SimulatedNetwork, names: str = "abc", **averaging: object
) -> tuple[Club, list[SimulatedTrainer]]:
    """A club whose trainers and seed vote."""
    club = Club(network, "invite", **averaging)
    trainers = list(await asyncio.gather(*(club.start(name) for name in names)))
    await club.average(*trainers, rounds=1 + ESTABLISHED)
    assert trainers[0].sync.head.table.electorate == {club.seed.peer.peer_id, *(t.peer.peer_id for t in trainers)}
    return club, trainers


async def announce(trainer: SimulatedTrainer, *others: SimulatedTrainer) -> None:
    """Publish a trainer's head, and let others read it."""
    trainer.status = "training"
    await trainer.presence.publish()
    await asyncio.sleep(1.0)
    for each in others:
        await each.presence.refresh()


async def refuses(victim: SimulatedTrainer, evil: SimulatedTrainer) -> None:
    """A trainer that is told of another's head, and asked to follow it, does not move, and mistrusts it."""
    before, digest, resyncs = victim.sync.head, victim.state.tree().root, victim.sync.catch_up.resyncs
    assert not await victim.sync.catch_up.follow(evil.peer.peer_id, victim.work)
    assert victim.sync.head == before
    assert victim.state.tree().root == digest
    assert victim.sync.catch_up.resyncs == resyncs
    assert victim.membership.is_mistrusted(evil.peer.peer_id)
    assert not await victim.sync.follow_swarm(victim.work)


async def ask_for_votes(
    asker: SimulatedTrainer, certificate: Certificate, peers: Sequence[str]
) -> list[tuple[str, bytes]]:
    """The signatures of a body that peers give to whom asks for them."""
    proofs = []
    for peer in peers:
        try:
            reply = await asker.rpc.call(peer, VOTE, AskVote(certificate.to_bytes()), Vote, 5.0)
        except PeerRefusedError:
            continue
        assert asker.peer.signer.verify(peer, vote(certificate.body.body_hash), reply.proof)
        proofs.append((peer, reply.proof))
    return proofs
