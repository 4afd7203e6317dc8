"""A newcomer is offered a state that is not the swarm's: nothing of it is taken over."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
import torch

from p2ptrain.averaging.protocol.certificate import Body, Certificate, Head, vote
from p2ptrain.averaging.protocol.table import MAX_COUNT
from p2ptrain.errors import IntegrityError
from p2ptrain.network.schema import Nothing
from p2ptrain.network.simulated import SimulatedNetwork
from p2ptrain.training.sync.state_server import HeldHead, check_head
from tests.support.coroutines import simulated
from tests.support.sim.trainers import Ledger, SimulatedTrainer, make_manifest


@asynccontextmanager
async def _trainers(network: SimulatedNetwork, names: str, min_peers: int = 1) -> AsyncIterator[list[SimulatedTrainer]]:
    """Trainers that have averaged once, but for the last, which has only seen their records."""
    manifest, ledger = make_manifest(history_rounds=1, min_peers=min_peers), Ledger()
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


def _falsify(trainer: SimulatedTrainer) -> None:
    """Change a trainer's state, with the digest that belongs to it."""
    with torch.no_grad():
        trainer.state.vector.add_(1.0)
    trainer.sync.state.head = replace(trainer.sync.head, digest=trainer.state.tree().root)


async def _average(*members: SimulatedTrainer) -> None:
    for each in members:
        each._step()
    await asyncio.gather(*(each.synchronize() for each in members))


@simulated(seed=2)
async def test_one_peer_that_announces_another_state_makes_nobody_but_itself_doubt_its_own(
    network: SimulatedNetwork,
) -> None:
    async with _trainers(network, "abcn") as (a, b, c, _):
        _falsify(a)
        await a.presence.publish()
        await asyncio.sleep(30.0)
        assert [each.sync.catch_up.others_hold_another_state() for each in (a, b, c)] == [True, False, False]


@simulated(seed=3)
async def test_a_false_state_is_refused_by_the_certificate_of_the_round_after_it(network: SimulatedNetwork) -> None:
    """No record tells the liar's state apart: the others are a round further by then."""
    async with _trainers(network, "abln") as (a, b, liar, newcomer):
        _falsify(liar)
        await liar.presence.publish()
        liar.sync.participate(False)
        await _average(a, b)
        await asyncio.sleep(30.0)
        await newcomer.presence.refresh()
        assert await newcomer.sync.catch_up.follow(liar.peer.peer_id, None)
        assert newcomer.sync.head == a.sync.head
        assert newcomer.sync.catch_up.resyncs == 1


@simulated(seed=4)
async def test_a_peer_whose_own_state_is_false_does_not_replay_rounds_on_it(network: SimulatedNetwork) -> None:
    async with _trainers(network, "abcn") as (a, b, damaged, _):
        _falsify(damaged)
        damaged._step()
        damaged.sync.participate(False)
        await _average(a, b)
        assert await damaged.sync.catch_up.follow(a.peer.peer_id, damaged.work)
        assert damaged.sync.head == a.sync.head
        assert damaged.sync.catch_up.resyncs == 1
        assert damaged.work.tokens == 0, "work on top of a false state is dropped"


FORGERIES: dict[str, Callable[[Body], Body]] = {
    "tokens": lambda body: replace(body, contributors=((0, 1 << 40, 1),)),
    "the end of the range": lambda body: replace(body, tokens_before=MAX_COUNT - 1),
    "too few peers": lambda body: body,
}


@pytest.mark.parametrize("forgery", FORGERIES)
@simulated(seed=5)
async def test_a_certificate_that_breaks_the_manifests_bounds_is_followed_by_nobody(
    network: SimulatedNetwork, forgery: str
) -> None:
    """One stranger signs it, as the only member of its roster."""
    async with _trainers(network, "abn", min_peers=2 if forgery == "too few peers" else 1) as (a, _, newcomer):
        honest = Certificate.from_bytes(a.sync.head.certificate, a.swarm, a.peer.signer).body
        alone = replace(
            honest, members=(a.peer.peer_id,), peers=(1,), bounds=(0, honest.bounds[-1]), hashes=honest.hashes[:1],
            contributors=((0, 10, 1),),
        )  # fmt: skip
        body = FORGERIES[forgery](alone)
        body.check()
        certificate = Certificate(body, ((a.peer.peer_id, a.peer.signer.sign(vote(body.body_hash))),))
        raw = certificate.to_bytes()
        _offer(a, certificate.next_head(a.sync.head.digest, a.sync.head.table))
        before = newcomer.sync.head
        assert not await newcomer.sync.catch_up.follow(a.peer.peer_id, None)
        assert newcomer.sync.head == before
        with pytest.raises(IntegrityError, match=r"tokens|room|peers"):
            newcomer.sync.replica.context.certificate(raw)


@pytest.mark.fault(42)
@simulated(seed=6)
async def test_a_head_that_leaves_no_room_for_later_rounds_is_followed_by_nobody(network: SimulatedNetwork) -> None:
    """Its certificate keeps to all bounds, but no certificate after it could."""
    async with _trainers(network, "abn") as (a, _, newcomer):
        honest = Certificate.from_bytes(a.sync.head.certificate, a.swarm, a.peer.signer).body
        last = replace(
            honest, members=(a.peer.peer_id,), peers=(1,), bounds=(0, honest.bounds[-1]), hashes=honest.hashes[:1],
            contributors=((0, 10, 1),), tokens_before=MAX_COUNT - 10, lineage=b"m" * 32,
        )  # fmt: skip
        certificate = Certificate(last, ((a.peer.peer_id, a.peer.signer.sign(vote(last.body_hash))),))
        context, head = newcomer.sync.replica.context, certificate.next_head(a.sync.head.digest, a.sync.head.table)
        context.certificate(certificate.to_bytes())
        with pytest.raises(IntegrityError, match="too little room"):
            check_head(context, head)
        _offer(a, head)
        before = newcomer.sync.head
        assert not await newcomer.sync.catch_up.follow(a.peer.peer_id, None)
        assert newcomer.sync.head == before
