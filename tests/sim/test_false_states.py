"""A newcomer is offered a state that is not the swarm's: nothing of it is taken over."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
import torch

from p2ptrain.averaging.protocol.certificate import Head
from p2ptrain.network.schema import Nothing
from p2ptrain.network.simulated import SimulatedNetwork
from p2ptrain.training.sync.state_server import HeldHead
from tests.support.coroutines import simulated
from tests.support.sim.trainers import Ledger, SimulatedTrainer, make_manifest


@asynccontextmanager
async def _trainers(network: SimulatedNetwork, names: str) -> AsyncIterator[list[SimulatedTrainer]]:
    """Trainers that have averaged once, but for the last, which has only seen their records."""
    manifest, ledger = make_manifest(history_rounds=1), Ledger()
    trainers = [SimulatedTrainer(network.add_peer(name), manifest, ledger) for name in names]
    *members, newcomer = trainers
    try:
        for each in trainers:
            await each.rpc.start()
            await each.presence.start()
        for each in members:
            await each._join()
        while members[0].sync.head.round < 3:
            for each in members:
                each._step()
            await asyncio.gather(*(each.synchronize() for each in members))
        for each in members:
            await each.presence.publish()
        await asyncio.sleep(30.0)
        await newcomer.presence.refresh()
        yield trainers
    finally:
        for each in trainers:
            await each.close()


def _offer(source: SimulatedTrainer, head: Head) -> None:
    async def info(peer: str, request: Nothing) -> HeldHead:
        return HeldHead(head)

    source.rpc.serve("state.head", Nothing, info)


@pytest.mark.parametrize(
    "forge",
    [
        lambda head: replace(head, tokens=head.tokens + 1),
        lambda head: replace(head, samples=head.samples + 1),
        lambda head: replace(head, round=head.round + 1),
        lambda head: replace(head, members=head.members[:1]),
        lambda head: replace(head, present=head.present + 1),
        lambda head: replace(head, lineage=b"l" * 32),
    ],
    ids=["tokens", "samples", "round", "members", "present", "lineage"],
)
@simulated(seed=1)
async def test_a_head_that_its_certificate_does_not_prove_is_refused(
    network: SimulatedNetwork, forge: Callable[[Head], Head]
) -> None:
    async with _trainers(network, "abn") as (a, _, newcomer):
        before = newcomer.sync.head
        _offer(a, forge(a.sync.head))
        assert not await newcomer.sync.catch_up.follow(a.peer.peer_id, None)
        assert newcomer.sync.head == before
        assert newcomer.sync.catch_up.resyncs == 0


@simulated(seed=2)
async def test_a_state_whose_digest_most_others_do_not_announce_is_refused(network: SimulatedNetwork) -> None:
    """The liar's bytes have the digest that it claims, so that the others' records alone tell them apart."""
    async with _trainers(network, "abcn") as (a, b, _, newcomer):
        before = newcomer.sync.head
        with torch.no_grad():
            a.state.vector.add_(1.0)
        a.sync.state.head = replace(a.sync.head, digest=a.state.tree().root)
        assert not await newcomer.sync.catch_up.follow(a.peer.peer_id, None)
        assert newcomer.sync.head == before
        assert await newcomer.sync.catch_up.follow(b.peer.peer_id, None)
        assert newcomer.sync.head == b.sync.head
