"""The life of a microbatch on a stage host: it counts once, and what is given up leaves no trace."""

import asyncio
from dataclasses import replace

import pytest
import torch

from p2ptrain.errors import PeerError
from p2ptrain.network.simulated import SimulatedNetwork
from p2ptrain.pipeline.messages import (
    Answers,
    DoneRequest,
    FullError,
    HopFailedError,
    OtherRoundError,
    Payload,
    RoundReply,
    RoundRequest,
    pack,
)
from p2ptrain.pipeline.stage.host import FORGET_SECONDS, NOT_YET, ORPHAN_SECONDS, SIGNED_TWICE, STATE_SECONDS
from tests.support.coroutines import simulated
from tests.support.sim.peers import until
from tests.support.sim.stage_hosts import (
    PASS_SECONDS,
    HostPeer,
    Hosts,
    OpenRound,
    RefusedError,
    check_sums,
    check_untouched,
    expected_sums,
    hosts,
    parts,
    send_and_settle,
    send_raw,
)


@simulated(hosts, (0, 1, 2), seed=27)
async def test_an_evaluation_gives_the_same_loss_and_counts_nowhere(swarm: Hosts) -> None:
    trainer, (first, *after) = swarm.trainers[0], swarm.hosts
    hop = swarm.hop(trainer, 0, *after)
    reply = await swarm.send(trainer, swarm.hop(trainer, 0, *after, requires_grad=False), first)
    assert reply.gradient is None
    assert [leg.host for leg in reply.legs] == [each.id for each in swarm.hosts]
    check_untouched(swarm)
    assert all(len(each.host.ledger) == 0 for each in swarm.hosts)
    many = [swarm.hop(trainer, number, *after, requires_grad=False) for number in range(40)]
    replies = await asyncio.gather(*(swarm.send(trainer, each, first) for each in many))
    assert replies[0].loss == reply.loss, "who is told that a host is full comes again"
    learned = await swarm.send(trainer, hop, first)
    assert learned.loss == pytest.approx(reply.loss, rel=1e-6)
    for each in swarm.hosts:
        assert await swarm.settle(trainer, each, 0) == [True]
    check_untouched(swarm, 0)


@simulated(hosts, seed=28)
async def test_a_host_that_rests_refuses_what_is_new_and_answers_for_what_it_counted(swarm: Hosts) -> None:
    trainer, (first, last) = swarm.trainers[0], swarm.hosts
    known = swarm.hop(trainer, 0, last)
    reply = await swarm.send(trainer, known, first)
    first.host.is_resting = True
    for requires_grad in (True, False):
        with pytest.raises(FullError, match="paused by its owner"):
            first.host.expect(swarm.hop(trainer, 1, last, requires_grad=requires_grad))
    assert (await swarm.send(trainer, known, first)).loss == reply.loss
    first.host.is_resting = False
    await swarm.send(trainer, swarm.hop(trainer, 2, last), first)


@simulated(hosts, seed=4)
async def test_only_hosts_of_a_stage_answer_for_it(swarm: Hosts) -> None:
    trainer, (first, last) = swarm.trainers[0], swarm.hosts
    for number, wrong in enumerate((first.id, trainer.rpc.peer_id, "nobody at all")):
        hop = replace(swarm.hop(trainer, number), route=(wrong,))
        reply = await swarm.send(trainer, hop, first)
        assert [leg.host for leg in reply.legs] == [first.id, last.id]
        assert await swarm.settle(trainer, first, number) == await swarm.settle(trainer, last, number)
    check_untouched(swarm, 0, 1, 2)
    assert not first.rpc.refusals


# Rounds


class Counting(OpenRound):
    """Counts how often a host hears that its round is over elsewhere."""

    times_over = 0

    def note_over(self) -> None:
        self.times_over += 1


@simulated(seed=5)
async def test_what_comes_late_is_told_so_and_what_comes_early_waits_for_its_round(network: SimulatedNetwork) -> None:
    gate = Counting()
    async with hosts(network, gate=gate) as swarm:
        trainer, (first, last) = swarm.trainers[0], swarm.hosts
        early = trainer.peer.spawn(swarm.send(trainer, swarm.hop(trainer, 1, last, round=2), first))
        await send_and_settle(swarm, trainer, 0, swarm.hosts)
        assert not early.done()
        assert gate.times_over == 1
        for each in swarm.hosts:
            assert len(await each.host.close_round(1.0)) == 1
            each.host.begin_round(1)
        await asyncio.sleep(1.0)
        assert not early.done()
        with pytest.raises(OtherRoundError, match="came too late: this host is in round 1") as caught:
            await swarm.send(trainer, swarm.hop(trainer, 2, last), first)
        assert caught.value.is_late
        for each in swarm.hosts:
            await each.host.close_round(1.0)
            each.host.begin_round(2)
        assert (await early).loss > 0
        check_sums(swarm, [0, 1])


@simulated(hosts, seed=6)
async def test_a_round_that_never_begins_is_waited_for_no_longer_than_there_is_time(swarm: Hosts) -> None:
    trainer, (first, last) = swarm.trainers[0], swarm.hosts
    sent = parts(swarm.hop(trainer, 0, last, round=1 << 61))
    with pytest.raises(RefusedError, match=r"early: .* came too early"):
        await send_raw(trainer.rpc, first, *sent, seconds=600.0)
    check_untouched(swarm)


@pytest.mark.parametrize("requires_grad", [True, False])
@simulated(hosts, (0, 1, 1), seed=30)
async def test_a_microbatch_goes_elsewhere_if_a_host_is_without_its_state_for_long(
    swarm: Hosts, requires_grad: bool
) -> None:
    """Its model has initial values, and its peer may need minutes to download others."""
    loop, trainer, (first, starting, other) = asyncio.get_running_loop(), swarm.trainers[0], swarm.hosts
    await enter(starting, NOT_YET)
    began, hop = loop.time(), swarm.hop(trainer, 0, starting, requires_grad=requires_grad)
    reply = await swarm.send(trainer, hop, first)
    assert [leg.host for leg in reply.legs] == [first.id, other.id]
    assert STATE_SECONDS < loop.time() - began < STATE_SECONDS + 1.0
    sending = trainer.peer.spawn(swarm.send(trainer, swarm.hop(trainer, 1, starting, requires_grad=False), first))
    await asyncio.sleep(STATE_SECONDS / 2)
    await enter(starting, 0)
    assert [leg.host for leg in (await sending).legs] == [first.id, starting.id]


@pytest.mark.parametrize("behind", [1, 2])
@simulated(hosts, (0, 1, 1), seed=31)
async def test_a_host_evaluates_on_the_state_of_the_last_round_and_on_no_earlier_one(swarm: Hosts, behind: int) -> None:
    trainer, (first, late, other) = swarm.trainers[0], swarm.hosts
    for each, round in ((first, 2), (late, 2 - behind), (other, 2)):
        await enter(each, round)
    reply = await swarm.send(trainer, swarm.hop(trainer, 0, late, round=2, requires_grad=False), first)
    assert [leg.host for leg in reply.legs] == [first.id, late.id if behind == 1 else other.id]


async def enter(each: HostPeer, round: int) -> None:
    await each.host.close_round(1.0)
    each.host.begin_round(round)


@simulated(hosts, seed=7)
async def test_a_round_that_closes_takes_out_what_nobody_settled(swarm: Hosts, network: SimulatedNetwork) -> None:
    trainer, (first, last) = swarm.trainers[0], swarm.hosts
    await send_and_settle(swarm, trainer, 0, swarm.hosts)
    await swarm.send(trainer, swarm.hop(trainer, 1, last), first)  # Its trainer settles nothing.
    network.stall(last.peer)
    running = trainer.peer.spawn(swarm.send(trainer, swarm.hop(trainer, 2, last), first))
    await asyncio.sleep(3 * PASS_SECONDS)
    assert first.host.ledger.num_unsettled == 2
    assert [id.number for id in await first.host.close_round(0.5)] == [0]
    with pytest.raises(OtherRoundError):
        await swarm.send(trainer, swarm.hop(trainer, 3, last), first)
    network.resume(last.peer)
    assert [id.number for id in await last.host.close_round(0.5)] == [0]
    check_untouched(swarm, 0)
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


@simulated(seed=9)
async def test_nobody_settles_or_gives_up_what_is_anothers(network: SimulatedNetwork) -> None:
    async with hosts(network, num_trainers=2) as swarm:
        (mine, other), (first, last) = swarm.trainers, swarm.hosts
        await swarm.send(mine, swarm.hop(mine, 0, last), first)
        assert await swarm.settle(other, first, 0) == [False]
        await swarm.settle(other, first, abandoned=(0,))
        assert await swarm.settle(mine, first, 0, 1) == [True, False]
        assert await swarm.settle(mine, last, 0) == [True]
        check_untouched(swarm, 0)


@simulated(hosts, seed=10)
async def test_trainers_learn_of_the_next_round_and_of_what_is_in_the_last_ones(swarm: Hosts) -> None:
    trainer, host = swarm.trainers[0], swarm.hosts[0]
    await send_and_settle(swarm, trainer, 0, swarm.hosts)
    name = f"{host.service}.round"
    asked = trainer.peer.spawn(trainer.rpc.call(host.id, name, RoundRequest(0, 30.0), RoundReply, 40.0))
    assert (await trainer.rpc.call(host.id, name, RoundRequest(0, 1.0), RoundReply, 5.0)).round == 0
    ids = await host.host.close_round(1.0)
    host.host.begin_round(1)
    assert (await asked).round == 1

    async def done(*numbers: int) -> tuple[bool, ...]:
        request = DoneRequest(tuple((0, number) for number in numbers))
        return (await trainer.rpc.call(host.id, f"{host.service}.done", request, Answers, 5.0)).answers

    assert await done(0, 1) == (False, False)
    host.host.remember_done(0, ids)
    assert await done(0, 1) == (True, False)
    for round in range(1, 10):
        host.host.remember_done(round, [])
    assert await done(0) == (False,)


# Hops that come again


@simulated(hosts, seed=15)
async def test_a_hop_that_is_repeated_after_it_counted_gets_the_same_reply_and_counts_once(swarm: Hosts) -> None:
    trainer, (first, last) = swarm.trainers[0], swarm.hosts
    hop = swarm.hidden(trainer, 0)
    replies = [await swarm.send(trainer, hop, last) for _ in range(2)]
    assert replies[0] == replies[1]
    assert replies[0].gradient is not None
    assert last.sum.passes == 1
    assert first.sum.passes == 0
    await swarm.settle(trainer, last, 0)
    with pytest.raises(HopFailedError, match="settled already"):
        await swarm.send(trainer, hop, last)
    assert last.sum.passes == 1
    assert torch.equal(last.sum.values, expected_sums(swarm.plan, [0])[1])


@pytest.mark.parametrize("is_counted", [False, True])
@simulated(hosts, seed=16)
async def test_a_trainer_that_signs_two_microbatches_of_one_number_gets_one_counted_and_is_to_blame(
    swarm: Hosts, is_counted: bool
) -> None:
    trainer, (first, last) = swarm.trainers[0], swarm.hosts
    hop = swarm.hop(trainer, 0, last)
    half = replace(hop, samples=1, tokens=8, inputs=_half(hop.inputs), targets=_half(hop.targets))
    other = swarm.sign(trainer, half)
    sending = trainer.peer.spawn(swarm.send(trainer, hop, first))
    if is_counted:
        await sending
    else:
        await asyncio.sleep(PASS_SECONDS)
    with pytest.raises(HopFailedError, match="another microbatch"):
        await swarm.send(trainer, other, first)
    assert first.rpc.refusals[trainer.rpc.peer_id, SIGNED_TWICE] == 1
    await sending
    for each in swarm.hosts:
        await swarm.settle(trainer, each, 0)
    check_untouched(swarm, 0)


def _half(payload: Payload) -> Payload:
    return Payload(payload.codec, (1, *payload.shape[1:]), bytes(payload.data)[: len(payload.data) // 2])


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("is_stalled", [False, True])
@pytest.mark.parametrize("is_planned", [False, True])
@pytest.mark.parametrize("num_stages", [2, 3])
@simulated()
async def test_a_substitute_goes_to_the_host_that_its_predecessor_went_to_which_counts_once(
    network: SimulatedNetwork, num_stages: int, is_planned: bool, is_stalled: bool, seed: int
) -> None:
    """Also to one that nobody planned: it was drawn on the way."""
    async with hosts(network, (0, 0, 1, 1, 1, 2)[: num_stages + 3]) as swarm:
        trainer, (first, substitute, *rest) = swarm.trainers[0], swarm.hosts
        seconds, after = rest[:3], rest[3:]
        network.stall(seconds[0].peer, 3600.0)
        hop = swarm.hop(trainer, 0, seconds[1] if is_planned else seconds[0], *after)
        sending = trainer.peer.spawn(swarm.send(trainer, hop, first))
        await until(lambda: any(each.host.ledger.num_running for each in seconds))
        called = next(each for each in seconds if each.host.ledger.num_running)
        await asyncio.sleep(0.7 * PASS_SECONDS)
        assert called.sum.passes == 0, "it is in its first pass"
        if is_stalled:
            network.stall(first.peer, 60.0)
        else:
            network.crash(first.peer)
        reply = await sending
        assert [leg.host for leg in reply.legs] == [each.id for each in (substitute, called, *after)]
        assert sum(each.sum.passes for each in seconds) == 1
        for each in (substitute, called, *after):
            assert await swarm.settle(trainer, each, 0) == [True]
            assert torch.equal(each.sum.values, expected_sums(swarm.plan, [0])[each.stage])
        network.resume(first.peer)
        if is_stalled:  # What it did meanwhile counts for nobody.
            await first.host.close_round(1.0)
            assert not first.sum.values.any()


@simulated(hosts, seed=17)
async def test_who_repeats_a_hop_is_told_how_far_it_is_and_is_not_held_up_by_who_is_gone(swarm: Hosts) -> None:
    trainer, (first, last) = swarm.trainers[0], swarm.hosts
    hop, told = swarm.hop(trainer, 0, last), list[tuple[int, str]]()

    async def broken(stage: int, host: str) -> None:
        raise PeerError(trainer.rpc.peer_id, "is gone")

    async def hear(stage: int, host: str) -> None:
        told.append((stage, host))

    gone = first.peer.spawn(first.host.take(hop, broken))
    await asyncio.sleep(0.01)
    reply = await first.peer.spawn(first.host.take(hop, hear))
    assert reply.loss > 0
    assert told == [(0, first.id), (1, last.id)]
    later = list[tuple[int, str]]()

    async def hear_later(stage: int, host: str) -> None:
        later.append((stage, host))

    await asyncio.gather(gone, return_exceptions=True)
    await first.peer.spawn(first.host.take(hop, hear_later))
    assert first.sum.passes == 1


# Taking out


@pytest.mark.parametrize("seconds", [0.5, 1.5, 2.5, 3.5, 4.5])
@simulated(hosts, seed=18)
async def test_what_is_given_up_leaves_the_sum_bit_by_bit_without_it(
    swarm: Hosts, network: SimulatedNetwork, seconds: float
) -> None:
    """Whether it waits for a pass, is in one, is at the next host, or has counted."""
    trainer, (first, last) = swarm.trainers[0], swarm.hosts
    network.set_latency(trainer.peer, first.peer, 0.0)
    network.set_latency(first.peer, last.peer, 0.0)
    await send_and_settle(swarm, trainer, 0, swarm.hosts)
    sending = trainer.peer.spawn(swarm.send(trainer, swarm.hop(trainer, 1, last), first))
    beside = trainer.peer.spawn(send_and_settle(swarm, trainer, 2, swarm.hosts))
    await asyncio.sleep(seconds * PASS_SECONDS)
    for each in swarm.hosts:
        await swarm.settle(trainer, each, abandoned=(1,))
    await beside
    await asyncio.gather(sending, return_exceptions=True)
    for each in swarm.hosts:  # What went on after that is given up again, or was never known.
        await swarm.settle(trainer, each, abandoned=(1,))
    await asyncio.sleep(1.0)
    check_untouched(swarm, 0, 2)
    await send_and_settle(swarm, trainer, 3, swarm.hosts)
    check_untouched(swarm, 0, 2, 3)


@simulated(seed=19)
async def test_what_a_silent_trainer_never_settles_is_taken_out_after_a_while(network: SimulatedNetwork) -> None:
    async with hosts(network, num_trainers=2) as swarm:
        (mortal, other), (first, last) = swarm.trainers, swarm.hosts
        await swarm.send(mortal, swarm.hop(mortal, 1, last), first)
        network.crash(mortal.peer)
        await send_and_settle(swarm, other, 0, swarm.hosts)
        check_sums(swarm, [1, 0])
        await asyncio.sleep(FORGET_SECONDS + 1.0)
        check_untouched(swarm, 0)


@simulated(hosts, seed=20)
async def test_what_is_counted_again_is_kept_as_long_as_any(swarm: Hosts) -> None:
    trainer, (first, last) = swarm.trainers[0], swarm.hosts
    hop = swarm.hop(trainer, 0, last)
    await swarm.send(trainer, hop, first)
    await asyncio.sleep(FORGET_SECONDS / 2)
    for each in swarm.hosts:
        await swarm.settle(trainer, each, abandoned=(0,))
    await swarm.send(trainer, hop, first)
    await asyncio.sleep(FORGET_SECONDS * 0.75)
    for each in swarm.hosts:
        assert await swarm.settle(trainer, each, 0) == [True]
    check_untouched(swarm, 0)


@simulated(seed=21)
async def test_what_nobody_asks_for_any_more_is_kept_for_a_while_and_then_given_up(network: SimulatedNetwork) -> None:
    async with hosts(network, num_trainers=2) as swarm:
        (mortal, other), (first, last) = swarm.trainers, swarm.hosts
        network.stall(last.peer, 3.0)
        mortal.peer.spawn(swarm.send(mortal, swarm.hop(mortal, 1, last), first))
        await asyncio.sleep(0.5)
        network.crash(mortal.peer)
        await asyncio.sleep(1.0)
        assert first.host.ledger.num_running == 1, "another may come for it"
        await asyncio.sleep(ORPHAN_SECONDS + 1.0)
        assert first.host.ledger.num_running == 0
        await send_and_settle(swarm, other, 0, swarm.hosts)
        await asyncio.sleep(FORGET_SECONDS)
        check_untouched(swarm, 0)


@simulated(hosts, seed=22)
async def test_a_bad_microbatch_that_is_given_up_during_its_pass_harms_no_other(
    swarm: Hosts, network: SimulatedNetwork
) -> None:
    """Nothing was added by a pass that failed, and nothing is taken out for it."""
    trainer, last = swarm.trainers[0], swarm.hosts[1]
    network.set_latency(trainer.peer, last.peer, 0.0)
    await send_and_settle(swarm, trainer, 0, swarm.hosts)
    hop = swarm.hidden(trainer, 1)
    hop = replace(hop, inputs=pack(torch.full(hop.inputs.shape, -3e38), "fp32"))
    sending = trainer.peer.spawn(swarm.send(trainer, hop, last))
    await until(lambda: last.host.ledger.num_running == 1)
    await asyncio.sleep(PASS_SECONDS / 4)
    await swarm.settle(trainer, last, abandoned=(1,))
    assert [id.number for id in await last.host.close_round(1.0)] == [0]
    await asyncio.gather(sending, return_exceptions=True)
    check_untouched(swarm, 0)


@simulated(hosts, seed=23)
async def test_a_host_that_is_closed_leaves_nothing_to_come(swarm: Hosts) -> None:
    trainer, (first, last) = swarm.trainers[0], swarm.hosts
    await swarm.send(trainer, swarm.hop(trainer, 0, last), first)
    sending = trainer.peer.spawn(swarm.send(trainer, swarm.hop(trainer, 1, last), first))
    await asyncio.sleep(2.5 * PASS_SECONDS)
    for each in swarm.hosts:
        await each.host.close()
    passes = [each.sum.passes for each in swarm.hosts]
    await asyncio.sleep(FORGET_SECONDS + 1.0)
    assert [each.sum.passes for each in swarm.hosts] == passes
    await asyncio.gather(sending, return_exceptions=True)
