"""A stage host against all that can come its way: what is bad is refused and counted, and leaves the sum as it was."""

from __future__ import annotations

import asyncio
import math
import struct
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from p2ptrain.errors import PeerError, PeerRefusedError
from p2ptrain.network.channel import Channel
from p2ptrain.network.simulated import SimulatedNetwork, simulate
from p2ptrain.pipeline.hops import HopFailedError, OtherRoundError
from p2ptrain.pipeline.host import FORGET_SECONDS
from p2ptrain.pipeline.ledger import Limits
from p2ptrain.pipeline.messages import IDS, Hop, Payload, pack
from p2ptrain.pipeline.running import ORPHAN_SECONDS
from tests.support.simulation import Member, until
from tests.support.stage_hosts import (
    PASS_SECONDS,
    HostPeer,
    Hosts,
    expected_sums,
    hosts,
    lie,
    send_raw,
    stay,
)

Main = Callable[[SimulatedNetwork], Awaitable[None]]


def bits(each: HostPeer) -> bytes:
    """Of a host's sum."""
    return each.compute.sum.numpy().tobytes()


def check_sums(swarm: Hosts, numbers: list[int]) -> None:
    """Each host's sum is, bit by bit, that of these microbatches and no others."""
    expected = expected_sums(swarm.plan, numbers)
    for each in swarm.hosts:
        assert torch.equal(each.compute.sum, expected[each.host.stage]), f"stage {each.host.stage}"


def check_untouched(swarm: Hosts, *numbers: int) -> None:
    """What is in the sums is what was settled, and nothing is kept of anything else."""
    check_sums(swarm, list(numbers))
    for each in swarm.hosts:
        assert {id.number for id in each.host.ledger.settled()} == set(numbers)
        assert (each.host.ledger.num_bytes, each.host.ledger.num_unsettled) == (0, 0)


async def send_and_settle(swarm: Hosts, trainer: Member, number: int, route: list[HostPeer]) -> None:
    """An honest microbatch, from its way there to its settlement."""
    reply = await swarm.send(trainer, swarm.hop(trainer, number, *route[1:]), route[0])
    assert [leg.host for leg in reply.legs] == [each.id for each in route]
    for each in route:
        assert await swarm.settle(trainer, each, number) == [True]


def test_a_microbatch_counts_once_at_each_stage() -> None:
    async def main(network: SimulatedNetwork) -> None:
        async with hosts(network, (0, 1, 2)) as swarm:
            for number in range(3):
                await send_and_settle(swarm, swarm.trainers[0], number, swarm.hosts)
            check_untouched(swarm, 0, 1, 2)
            assert all(not each.rpc.refusals for each in swarm.hosts)
            assert all(each.host.tokens_per_second > 0 for each in swarm.hosts)

    simulate(main, seed=1)


# What a hop may be


def heads(hop: Hop) -> tuple[dict[str, Any], list[Any]]:
    """A hop as it goes over the wire."""
    return hop.to_wire(), [hop.inputs.data, hop.targets.data]


@dataclass(frozen=True)
class Case:
    """A bad hop.

    Attributes:
        change: Makes it of a good one: request and payloads.
        reason: What the refusal says.
        cause: What it is counted as.
        stage: Where it goes to.
    """

    change: Callable[[Hop], tuple[dict[str, Any], list[Any]]]
    reason: str
    cause: str = "ProtocolError"
    stage: int = 0


def with_field(name: str, value: object) -> Callable[[Hop], tuple[dict[str, Any], list[Any]]]:
    return lambda hop: ({**hop.to_wire(), name: value}, [hop.inputs.data, hop.targets.data])


def with_values(tensor: str, values: torch.Tensor) -> Callable[[Hop], tuple[dict[str, Any], list[Any]]]:
    """Other values of the right shape."""

    def change(hop: Hop) -> tuple[dict[str, Any], list[Any]]:
        old: Payload = getattr(hop, tensor)
        return heads(with_tensor(hop, tensor, torch.broadcast_to(values, old.shape).contiguous()))

    return change


def with_tensor(hop: Hop, name: str, values: torch.Tensor) -> Hop:
    """Inputs or targets replaced."""
    if name == "inputs":
        return replace(hop, inputs=pack_raw(values, hop.inputs))
    return replace(hop, targets=pack_raw(values, hop.targets))


def pack_raw(values: torch.Tensor, like: Payload) -> Payload:
    """Without the checks that a codec makes."""
    if like.codec == IDS:
        return pack(values, IDS)
    return Payload(like.codec, tuple(values.shape), values.float().numpy().tobytes())


def of_shape(tensor: str, *shape: int) -> Callable[[Hop], tuple[dict[str, Any], list[Any]]]:
    """Zeros of another shape."""

    def change(hop: Hop) -> tuple[dict[str, Any], list[Any]]:
        old: Payload = getattr(hop, tensor)
        zeros = torch.zeros(shape, dtype=torch.int64 if old.codec == IDS else torch.float32)
        return heads(with_tensor(hop, tensor, zeros))

    return change


def in_codec(codec: str) -> Callable[[Hop], tuple[dict[str, Any], list[Any]]]:
    def change(hop: Hop) -> tuple[dict[str, Any], list[Any]]:
        zeros = torch.zeros(hop.inputs.shape, dtype=torch.int64 if codec == IDS else torch.float32)
        return heads(replace(hop, inputs=pack(zeros, codec)))

    return change


def truncated(hop: Hop) -> tuple[dict[str, Any], list[Any]]:
    return hop.to_wire(), [hop.inputs.data[:-4], hop.targets.data]


BAD = "BadMicrobatchError"
CASES = {
    "no id": Case(with_field("id", None), "a malformed microbatch"),
    "an id of words": Case(with_field("id", ["a", "b", "c"]), "a malformed microbatch"),
    "an id of truth values": Case(with_field("id", ["a", True, 0]), "a malformed microbatch"),
    "a negative round": Case(with_field("id", ["a", -1, 0]), "a malformed microbatch"),
    "an endless number": Case(with_field("id", ["a", 0, 1 << 63]), "a malformed microbatch"),
    "an endless name": Case(with_field("id", ["a" * 129, 0, 0]), "a malformed microbatch"),
    "a name of lines": Case(with_field("id", ["a\nb", 0, 0]), "a malformed microbatch", stage=1),
    "another's name": Case(with_field("id", ["somebody else", 0, 0]), "in another's name"),
    "no samples": Case(with_field("samples", 0), "impossible size"),
    "samples of words": Case(with_field("samples", "two"), "impossible size"),
    "fewer tokens than samples": Case(with_field("tokens", 1), "impossible size"),
    "endless tokens": Case(with_field("tokens", 1 << 40), "impossible size"),
    "more tokens than there are": Case(with_field("tokens", 17), "17 tokens", BAD),
    "more samples than there are": Case(with_field("samples", 3), "3 samples", BAD),
    "no route": Case(with_field("route", None), "a malformed route"),
    "a route of numbers": Case(with_field("route", [1]), "a malformed route"),
    "an endless route": Case(with_field("route", ["a"] * 256), "a malformed route"),
    "a route through more stages than there are": Case(with_field("route", ["a", "b"]), "route", BAD),
    "a route beyond the last stage": Case(with_field("route", ["a"]), "route", BAD, 1),
    "no purpose": Case(with_field("learns", 1), "says not what it is for"),
    "no inputs": Case(with_field("inputs", None), "a malformed tensor"),
    "inputs without a shape": Case(with_field("inputs", [IDS]), "a malformed tensor"),
    "inputs of a shape of words": Case(with_field("inputs", [IDS, ["a"]]), "impossible shape"),
    "inputs of no dimensions": Case(with_field("inputs", [IDS, []]), "impossible shape"),
    "inputs of nine dimensions": Case(with_field("inputs", [IDS, [1] * 9]), "impossible shape"),
    "inputs of nothing": Case(with_field("inputs", [IDS, [0, 8]]), "impossible shape"),
    "inputs of a negative size": Case(with_field("inputs", [IDS, [-2, -8]]), "impossible shape"),
    "oversized inputs": Case(with_field("inputs", [IDS, [1 << 20, 1 << 20]]), "too large"),
    "inputs in an unknown codec": Case(with_field("inputs", ["zip9", [2, 8]]), "a codec that is not known"),
    "targets as floats": Case(with_field("targets", ["fp32", [2, 8]]), "no class indices"),
    "oversized targets": Case(with_field("targets", [IDS, [1 << 31, 1 << 31]]), "too large"),
    "inputs of another length": Case(of_shape("inputs", 2, 7), "takes an input of shape", BAD),
    "targets of another length": Case(of_shape("targets", 2, 7), "targets of shape", BAD),
    "longer than the context": Case(with_field("inputs", [IDS, [2, 9]]), "takes an input of shape", BAD),
    "floats for ids": Case(in_codec("fp32"), "does not take fp32", BAD),
    "ids for floats": Case(in_codec(IDS), "does not take ids", BAD, 1),
    "a codec that is not the manifest's": Case(in_codec("fp16"), "does not take fp16", BAD, 1),
    "a sparse codec": Case(in_codec("topk"), "does not take topk", BAD, 1),
    "another width": Case(of_shape("inputs", 2, 8, 15), "takes an input of shape", BAD, 1),
    "hidden states as they come to another stage": Case(of_shape("inputs", 2, 8), "takes an input of shape", BAD, 1),
    "truncated inputs": Case(truncated, "bytes"),
    "an unknown token": Case(with_values("inputs", torch.tensor(20)), "token ids that the model does not know", BAD),
    "a negative token": Case(with_values("inputs", torch.tensor(-1)), "token ids that the model does not know", BAD),
    "an unknown target": Case(with_values("targets", torch.tensor(20)), "targets that the model does not know", BAD, 1),
    "a negative target": Case(with_values("targets", torch.tensor(-9)), "targets that the model does not know", BAD, 1),
    "not a number": Case(with_values("inputs", torch.tensor(math.nan)), "finite", BAD, 1),
    "infinite": Case(with_values("inputs", torch.tensor(math.inf)), "finite", BAD, 1),
    "finite, with infinite gradients": Case(with_values("inputs", torch.tensor(-3e38)), "finite", BAD, 1),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
def test_a_bad_hop_is_refused_and_counted_and_leaves_the_sum_as_it_was(case: Case) -> None:
    async def main(network: SimulatedNetwork) -> None:
        async with hosts(network, (0, 1), Limits(max_bytes=1 << 20)) as swarm:
            trainer, host = swarm.trainers[0], swarm.hosts[case.stage]
            await send_and_settle(swarm, trainer, 0, swarm.hosts)
            before = bits(host)
            hop = swarm.hop(trainer, 1, swarm.hosts[1]) if case.stage == 0 else swarm.hidden(trainer, 1)
            request, data = case.change(hop)
            with pytest.raises(PeerRefusedError, match=case.reason) as caught:
                await send_raw(trainer.rpc, host, request, *data)
            assert "\n" not in caught.value.reason
            assert host.rpc.refusals == {(trainer.rpc.peer_id, case.cause): 1}
            assert bits(host) == before
            check_untouched(swarm, 0)
            await send_and_settle(swarm, trainer, 1, swarm.hosts)
            check_untouched(swarm, 0, 1)

    simulate(main, seed=2)


def test_what_is_refused_for_its_shape_is_refused_before_it_is_sent() -> None:
    async def main(network: SimulatedNetwork) -> None:
        async with hosts(network) as swarm:
            trainer, host = swarm.trainers[0], swarm.hosts[0]
            request = {**swarm.hop(trainer, 0).to_wire(), "inputs": [IDS, [1 << 10, 1 << 14]]}
            with pytest.raises(PeerRefusedError, match="takes an input of shape"):
                await send_raw(trainer.rpc, host, request)  # And no tensors.

    simulate(main, seed=3)


def test_only_hosts_of_a_stage_answer_for_it() -> None:
    async def main(network: SimulatedNetwork) -> None:
        async with hosts(network) as swarm:
            trainer, (first, last) = swarm.trainers[0], swarm.hosts
            for number, wrong in enumerate((first.id, trainer.rpc.peer_id, "nobody at all")):
                hop = replace(swarm.hop(trainer, number), route=(wrong,))
                reply = await swarm.send(trainer, hop, first)
                assert [leg.host for leg in reply.legs] == [first.id, last.id]
                assert await swarm.settle(trainer, first, number) == await swarm.settle(trainer, last, number)
            check_untouched(swarm, 0, 1, 2)
            assert not first.rpc.refusals

    simulate(main, seed=4)


# Rounds


def test_what_comes_late_is_told_so_and_what_comes_early_waits_for_its_round() -> None:
    async def main(network: SimulatedNetwork) -> None:
        async with hosts(network) as swarm:
            trainer, (first, last) = swarm.trainers[0], swarm.hosts
            over = 0

            def note() -> None:
                nonlocal over
                over += 1

            first.host.on_over = note
            early = trainer.peer.spawn(swarm.send(trainer, swarm.hop(trainer, 1, last, round=2), first))
            await send_and_settle(swarm, trainer, 0, swarm.hosts)
            assert not early.done()
            assert over == 1
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

    simulate(main, seed=5)


def test_a_round_that_never_begins_is_waited_for_no_longer_than_there_is_time() -> None:
    async def main(network: SimulatedNetwork) -> None:
        async with hosts(network) as swarm:
            trainer, (first, last) = swarm.trainers[0], swarm.hosts
            request, data = heads(swarm.hop(trainer, 0, last, round=1 << 61))
            with pytest.raises(PeerRefusedError, match=r"early: .* came too early"):
                await send_raw(trainer.rpc, first, request, *data, seconds=600.0)
            check_untouched(swarm)

    simulate(main, seed=6)


def test_a_round_that_closes_takes_out_what_nobody_settled() -> None:
    async def main(network: SimulatedNetwork) -> None:
        async with hosts(network) as swarm:
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

    simulate(main, seed=7)


# Questions about microbatches


@pytest.mark.parametrize(
    ("question", "request_", "words"),
    [
        ("settle", {}, "malformed list of microbatches"),
        ("settle", {"settled": [], "abandoned": None}, "malformed list of microbatches"),
        ("settle", {"settled": [[0]], "abandoned": []}, "malformed list of microbatches"),
        ("settle", {"settled": [[0, "1"]], "abandoned": []}, "malformed list of microbatches"),
        ("settle", {"settled": [[0, True]], "abandoned": []}, "malformed list of microbatches"),
        ("settle", {"settled": [[0, 1, 2]], "abandoned": []}, "malformed list of microbatches"),
        ("settle", {"settled": [], "abandoned": {"0": 1}}, "malformed list of microbatches"),
        ("settle", {"settled": [[0, 0]] * 4097, "abandoned": []}, "malformed list of microbatches"),
        ("round", {}, "asked for no round"),
        ("round", {"after": "0", "seconds": 1.0}, "asked for no round"),
        ("round", {"after": 0, "seconds": 1}, "asked for no round"),
        ("round", {"after": 0, "seconds": math.nan}, "asked for no round"),
        ("round", {"after": 0, "seconds": 1e9}, "asked for no round"),
        ("round", {"after": 0, "seconds": -1.0}, "asked for no round"),
        ("done", {}, "malformed list of microbatches"),
        ("done", {"ids": "all"}, "malformed list of microbatches"),
        ("done", {"ids": [[0.0, 1]]}, "malformed list of microbatches"),
    ],
)
def test_a_malformed_question_is_refused_and_counted(question: str, request_: dict[str, Any], words: str) -> None:
    async def main(network: SimulatedNetwork) -> None:
        async with hosts(network) as swarm:
            trainer, host = swarm.trainers[0], swarm.hosts[0]
            await send_and_settle(swarm, trainer, 0, swarm.hosts)
            with pytest.raises(PeerRefusedError, match=words):
                await trainer.rpc.call(host.id, f"{host.service}.{question}", request_, 5.0)
            assert host.rpc.refusals == {(trainer.rpc.peer_id, "ProtocolError"): 1}
            check_untouched(swarm, 0)

    simulate(main, seed=8)


def test_nobody_settles_or_gives_up_what_is_anothers() -> None:
    async def main(network: SimulatedNetwork) -> None:
        async with hosts(network, num_trainers=2) as swarm:
            (mine, other), (first, last) = swarm.trainers, swarm.hosts
            await swarm.send(mine, swarm.hop(mine, 0, last), first)
            assert await swarm.settle(other, first, 0) == [False]
            await swarm.settle(other, first, abandoned=(0,))
            assert await swarm.settle(mine, first, 0, 1) == [True, False]
            assert await swarm.settle(mine, last, 0) == [True]
            check_untouched(swarm, 0)

    simulate(main, seed=9)


def test_trainers_learn_of_the_next_round_and_of_what_is_in_the_last_ones() -> None:
    async def main(network: SimulatedNetwork) -> None:
        async with hosts(network) as swarm:
            trainer, host = swarm.trainers[0], swarm.hosts[0]
            await send_and_settle(swarm, trainer, 0, swarm.hosts)
            name = f"{host.service}.round"
            asked = trainer.peer.spawn(trainer.rpc.call(host.id, name, {"after": 0, "seconds": 30.0}, 40.0))
            assert await trainer.rpc.call(host.id, name, {"after": 0, "seconds": 1.0}, 5.0) == {"round": 0}
            ids = await host.host.close_round(1.0)
            host.host.begin_round(1)
            assert await asked == {"round": 1}
            name = f"{host.service}.done"
            assert await trainer.rpc.call(host.id, name, {"ids": [[0, 0], [0, 1]]}, 5.0) == {"done": [False, False]}
            host.host.remember_done(0, ids)
            assert await trainer.rpc.call(host.id, name, {"ids": [[0, 0], [0, 1]]}, 5.0) == {"done": [True, False]}
            for round in range(1, 10):
                host.host.remember_done(round, [])
            assert await trainer.rpc.call(host.id, name, {"ids": [[0, 0]]}, 5.0) == {"done": [False]}

    simulate(main, seed=10)


# Floods


def test_a_trainer_that_floods_is_told_that_it_is_full_and_another_still_gets_in() -> None:
    async def main(network: SimulatedNetwork) -> None:
        limits = Limits(max_bytes=1 << 20, max_running=8, max_share=0.5)
        async with hosts(network, (0, 1), limits, num_trainers=2) as swarm:
            (flooder, other), (first, last) = swarm.trainers, swarm.hosts
            network.stall(last.peer, 2.0)
            hops = [swarm.hop(flooder, number, last) for number in range(20)]
            flood = [flooder.peer.spawn(send_raw(flooder.rpc, first, *_flat(hop))) for hop in hops]
            await asyncio.sleep(0.5)
            assert first.host.ledger.num_running == 4
            full = [task for task in flood if task.done()]
            assert len(full) == 16
            for task in full:
                with pytest.raises(PeerRefusedError, match="full: 4 microbatches of this trainer are under way"):
                    task.result()
            assert first.rpc.refusals == {(flooder.rpc.peer_id, "FullError"): 16}
            await send_and_settle(swarm, other, 50, swarm.hosts)
            await asyncio.gather(*flood, return_exceptions=True)
            for each in swarm.hosts:
                await each.host.close_round(0.1)
            check_untouched(swarm, 50)

    simulate(main, seed=11)


def _flat(hop: Hop) -> tuple[Any, ...]:
    request, data = heads(hop)
    return (request, *data)


@pytest.mark.parametrize("round", [0, 1])
def test_what_is_still_coming_or_comes_early_takes_no_more_memory_than_there_is(round: int) -> None:
    """A flood of streams, each of which announces as much as a host takes, and sends all but the end of it."""

    async def main(network: SimulatedNetwork) -> None:
        async with hosts(network, (0, 1), Limits(max_bytes=5000, max_running=64), num_trainers=2) as swarm:
            (flooder, other), last = swarm.trainers, swarm.hosts[1]

            async def flood(number: int) -> None:
                hop = swarm.hidden(flooder, number)
                hop = replace(hop, id=hop.id._replace(round=round))
                async with flooder.rpc.open(last.id, last.service, hop.to_wire(), 5.0) as channel:
                    await channel.send_bytes(hop.inputs.data)
                    if round:
                        await channel.send_bytes(hop.targets.data)
                    while True:
                        await channel.receive(5.0)

            flooding = [flooder.peer.spawn(flood(number)) for number in range(12)]
            await asyncio.sleep(2.0)
            told = [task.exception() for task in flooding if task.done()]
            assert len(told) == 10, "two of 1088 bytes are its share"
            assert all("full: too much of this peer's" in str(error) for error in told), told
            await send_and_settle(swarm, other, 50, swarm.hosts)
            for task in flooding:
                task.cancel()
            await asyncio.gather(*flooding, return_exceptions=True)
            check_untouched(swarm, 50)

    simulate(main, seed=12)


def test_a_full_host_says_so_before_tensors_are_sent() -> None:
    async def main(network: SimulatedNetwork) -> None:
        async with hosts(network, (0, 1), Limits(max_bytes=1 << 20, max_running=2, max_share=0.5)) as swarm:
            trainer, (first, last) = swarm.trainers[0], swarm.hosts
            network.stall(last.peer, 2.0)
            running = trainer.peer.spawn(swarm.send(trainer, swarm.hop(trainer, 0, last), first))
            await asyncio.sleep(0.5)
            with pytest.raises(PeerRefusedError, match="full: "):
                await send_raw(trainer.rpc, first, swarm.hop(trainer, 1, last).to_wire())
            first.host.ledger.is_closed = True
            with pytest.raises(PeerRefusedError, match="late: "):
                await send_raw(trainer.rpc, first, swarm.hop(trainer, 1, last).to_wire())
            await running

    simulate(main, seed=13)


# Hops that come again


def test_a_hop_that_is_repeated_while_it_runs_joins_it_and_counts_once() -> None:
    async def main(network: SimulatedNetwork) -> None:
        async with hosts(network) as swarm:
            trainer, (first, last) = swarm.trainers[0], swarm.hosts
            hop = swarm.hop(trainer, 0, last)
            sending = []
            for _ in range(4):
                sending.append(trainer.peer.spawn(swarm.send(trainer, hop, first)))
                await asyncio.sleep(PASS_SECONDS / 2)
            replies = await asyncio.gather(*sending)
            assert len({reply.loss for reply in replies}) == 1
            assert [each.compute.passes for each in swarm.hosts] == [1, 1]
            assert await swarm.settle(trainer, first, 0) == await swarm.settle(trainer, last, 0) == [True]
            check_untouched(swarm, 0)

    simulate(main, seed=14)


def test_a_hop_that_is_repeated_after_it_counted_gets_the_same_reply_and_counts_once() -> None:
    async def main(network: SimulatedNetwork) -> None:
        async with hosts(network) as swarm:
            trainer, (first, last) = swarm.trainers[0], swarm.hosts
            hop = swarm.hidden(trainer, 0)
            replies = [await swarm.send(trainer, hop, last) for _ in range(2)]
            assert replies[0] == replies[1]
            assert replies[0].gradient is not None
            assert last.compute.passes == 1
            assert first.compute.passes == 0
            await swarm.settle(trainer, last, 0)
            with pytest.raises(HopFailedError, match="settled already"):
                await swarm.send(trainer, hop, last)
            assert last.compute.passes == 1
            assert torch.equal(last.compute.sum, expected_sums(swarm.plan, [0])[1])

    simulate(main, seed=15)


@pytest.mark.parametrize("is_counted", [False, True])
def test_another_microbatch_under_the_same_number_is_refused(is_counted: bool) -> None:
    async def main(network: SimulatedNetwork) -> None:
        async with hosts(network) as swarm:
            trainer, (first, last) = swarm.trainers[0], swarm.hosts
            hop = swarm.hop(trainer, 0, last)
            other = replace(hop, samples=1, tokens=8, inputs=_half(hop.inputs), targets=_half(hop.targets))
            sending = trainer.peer.spawn(swarm.send(trainer, hop, first))
            if is_counted:
                await sending
            else:
                await asyncio.sleep(PASS_SECONDS)
            with pytest.raises(HopFailedError, match="another microbatch"):
                await swarm.send(trainer, other, first)
            await sending
            for each in swarm.hosts:
                await swarm.settle(trainer, each, 0)
            check_untouched(swarm, 0)

    simulate(main, seed=16)


def _half(payload: Payload) -> Payload:
    return Payload(payload.codec, (1, *payload.shape[1:]), bytes(payload.data)[: len(payload.data) // 2])


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("is_stalled", [False, True])
@pytest.mark.parametrize("is_planned", [False, True])
@pytest.mark.parametrize("num_stages", [2, 3])
def test_a_substitute_goes_to_the_host_that_its_predecessor_went_to_which_counts_once(
    num_stages: int, is_planned: bool, is_stalled: bool, seed: int
) -> None:
    """Also to one that nobody planned: it was drawn on the way."""

    async def main(network: SimulatedNetwork) -> None:
        async with hosts(network, (0, 0, 1, 1, 1, 2)[: num_stages + 3]) as swarm:
            trainer, (first, substitute, *rest) = swarm.trainers[0], swarm.hosts
            seconds, after = rest[:3], rest[3:]
            network.stall(seconds[0].peer, 3600.0)
            hop = swarm.hop(trainer, 0, seconds[1] if is_planned else seconds[0], *after)
            sending = trainer.peer.spawn(swarm.send(trainer, hop, first))
            await until(lambda: any(each.host.ledger.num_running for each in seconds))
            called = next(each for each in seconds if each.host.ledger.num_running)
            await asyncio.sleep(0.7 * PASS_SECONDS)
            assert called.compute.passes == 0, "it is in its first pass"
            if is_stalled:
                network.stall(first.peer, 60.0)
            else:
                network.crash(first.peer)
            reply = await sending
            assert [leg.host for leg in reply.legs] == [each.id for each in (substitute, called, *after)]
            assert sum(each.compute.passes for each in seconds) == 1
            for each in (substitute, called, *after):
                assert await swarm.settle(trainer, each, 0) == [True]
                assert torch.equal(each.compute.sum, expected_sums(swarm.plan, [0])[each.host.stage])
            network.resume(first.peer)
            if is_stalled:  # What it did meanwhile counts for nobody.
                await first.host.close_round(1.0)
                assert not first.compute.sum.any()

    simulate(main, seed)


def test_who_repeats_a_hop_is_told_how_far_it_is_and_is_not_held_up_by_who_is_gone() -> None:
    async def main(network: SimulatedNetwork) -> None:
        async with hosts(network) as swarm:
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
            assert first.compute.passes == 1

    simulate(main, seed=17)


# Taking out


@pytest.mark.parametrize("seconds", [0.5, 1.5, 2.5, 3.5, 4.5])
def test_what_is_given_up_leaves_the_sum_bit_by_bit_without_it(seconds: float) -> None:
    """Whether it waits for a pass, is in one, is at the next host, or has counted."""

    async def main(network: SimulatedNetwork) -> None:
        async with hosts(network) as swarm:
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

    simulate(main, seed=18)


def test_what_a_silent_trainer_never_settles_is_taken_out_after_a_while() -> None:
    async def main(network: SimulatedNetwork) -> None:
        async with hosts(network, num_trainers=2) as swarm:
            (mortal, other), (first, last) = swarm.trainers, swarm.hosts
            await swarm.send(mortal, swarm.hop(mortal, 1, last), first)
            network.crash(mortal.peer)
            await send_and_settle(swarm, other, 0, swarm.hosts)
            check_sums(swarm, [1, 0])
            await asyncio.sleep(FORGET_SECONDS + 1.0)
            check_untouched(swarm, 0)

    simulate(main, seed=19)


def test_what_is_counted_again_is_kept_as_long_as_any() -> None:
    async def main(network: SimulatedNetwork) -> None:
        async with hosts(network) as swarm:
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

    simulate(main, seed=20)


def test_what_nobody_asks_for_any_more_is_kept_for_a_while_and_then_given_up() -> None:
    async def main(network: SimulatedNetwork) -> None:
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

    simulate(main, seed=21)


def test_a_bad_microbatch_that_is_given_up_during_its_pass_harms_no_other() -> None:
    """Nothing was added by a pass that failed, and nothing is taken out for it."""

    async def main(network: SimulatedNetwork) -> None:
        async with hosts(network) as swarm:
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

    simulate(main, seed=22)


def test_a_host_that_is_closed_leaves_nothing_to_come() -> None:
    async def main(network: SimulatedNetwork) -> None:
        async with hosts(network) as swarm:
            trainer, (first, last) = swarm.trainers[0], swarm.hosts
            await swarm.send(trainer, swarm.hop(trainer, 0, last), first)
            sending = trainer.peer.spawn(swarm.send(trainer, swarm.hop(trainer, 1, last), first))
            await asyncio.sleep(2.5 * PASS_SECONDS)
            for each in swarm.hosts:
                await each.host.close()
            passes = [each.compute.passes for each in swarm.hosts]
            await asyncio.sleep(FORGET_SECONDS + 1.0)
            assert [each.compute.passes for each in swarm.hosts] == passes
            await asyncio.gather(sending, return_exceptions=True)

    simulate(main, seed=23)


# Hosts that lie

GOOD_LEG = [1, "", 0.1, 0.1]
Answer = Callable[[Channel, dict[str, Any]], Awaitable[None]]


def answer(change: Callable[[dict[str, Any]], None], gradient: torch.Tensor | None = None) -> Answer:
    """A reply that is right but for what ``change`` does to it."""

    async def send(channel: Channel, request: dict[str, Any]) -> None:
        shape = request["inputs"][1]
        values = torch.zeros(shape) if gradient is None else torch.broadcast_to(gradient, shape)
        reply = {"loss": 1.0, "legs": [[1, LIAR, 0.1, 0.1]], "gradient": ["fp32", list(values.shape)]}
        change(reply)
        await channel.send(reply)
        await channel.send_bytes(values.contiguous().numpy().tobytes())

    return send


LIAR = "the liar's id"


def field(name: str, value: object) -> Answer:
    return answer(lambda reply: reply.update({name: value}))


def trail(*legs: list[Any]) -> Answer:
    return field("legs", list(legs))


def say(*messages: dict[str, Any]) -> Answer:
    """Messages, and then nothing more."""

    async def send(channel: Channel, request: dict[str, Any]) -> None:
        for message in messages:
            await channel.send(message)
        await stay()

    return send


async def nothing(channel: Channel, request: dict[str, Any]) -> None:
    await stay()


async def end(channel: Channel, request: dict[str, Any]) -> None:
    return


async def no_gradient(channel: Channel, request: dict[str, Any]) -> None:
    await channel.send({"loss": 1.0, "legs": [[1, LIAR, 0.1, 0.1]], "gradient": request["inputs"]})
    await stay()


async def beats_for_ever(channel: Channel, request: dict[str, Any]) -> None:
    while True:
        await channel.send({"beat": True})
        await asyncio.sleep(1.0)


async def late(channel: Channel, request: dict[str, Any]) -> None:
    await asyncio.sleep(6.0)
    await answer(lambda reply: None)(channel, request)


async def short_gradient(channel: Channel, request: dict[str, Any]) -> None:
    await channel.send({"loss": 1.0, "legs": [[1, LIAR, 0.1, 0.1]], "gradient": request["inputs"]})
    await channel.send_bytes(b"abc")


async def bytes_first(channel: Channel, request: dict[str, Any]) -> None:
    await channel.send_bytes(struct.pack("<f", 1.0) * 100)


LIES = {
    "garbage": (bytes_first, True),
    "no reply": (say({"hello": 1}), True),
    "news of words": (say({"stage": "one", "host": "x"}), True),
    "news of a stage before it": (say({"stage": 0, "host": "x"}), True),
    "news of no stage": (say({"stage": 2, "host": "x"}), True),
    "news of an endless host": (say({"stage": 1, "host": "x" * 5000}), True),
    "endless news": (say(*[{"stage": 1, "host": "x"}] * 5000), True),
    "a loss of words": (field("loss", "low"), True),
    "a loss that is no number": (field("loss", math.nan), True),
    "an infinite loss": (field("loss", math.inf), True),
    "no trail": (field("legs", None), True),
    "an empty trail": (trail(), True),
    "a trail of another host": (trail([1, "another", 0.1, 0.1]), True),
    "a trail of another stage": (trail([0, LIAR, 0.1, 0.1]), True),
    "a trail through more stages than there are": (trail([1, LIAR, 0.1, 0.1], [2, LIAR, 0.1, 0.1]), True),
    "a trail of nested lists": (trail([[1], [LIAR], [0.1], [0.1]]), True),
    "a trail of negative times": (trail([1, LIAR, -0.1, 0.1]), True),
    "a trail of endless times": (trail([1, LIAR, 0.1, math.inf]), True),
    "a trail of times that are no numbers": (trail([1, LIAR, math.nan, 0.1]), True),
    "no gradient's head": (field("gradient", None), True),
    "a gradient of another shape": (field("gradient", ["fp32", [2, 16, 8]]), True),
    "a gradient of another size": (field("gradient", ["fp32", [2, 8, 17]]), True),
    "an endless gradient": (field("gradient", ["fp32", [1 << 20, 1 << 10]]), True),
    "a gradient in an unknown codec": (field("gradient", ["zip9", [2, 8, 16]]), True),
    "a gradient in another codec": (field("gradient", ["topk", [2, 8, 16]]), True),
    "a gradient of whole numbers": (field("gradient", [IDS, [2, 8, 16]]), True),
    "a gradient that is no number": (answer(lambda reply: None, torch.tensor(math.nan)), True),
    "an infinite gradient": (answer(lambda reply: None, torch.tensor(-math.inf)), True),
    "a gradient that is cut off": (short_gradient, True),
    "a gradient that never comes": (no_gradient, False),
    "a reply that is late": (late, False),
    "nothing": (nothing, False),
    "nothing but heartbeats": (beats_for_ever, False),
    "the end": (end, False),
}


@pytest.mark.parametrize(("lie_", "is_counted"), LIES.values(), ids=LIES.keys())
def test_a_host_that_answers_wrongly_leaves_the_routes_and_another_does_the_work(
    lie_: Answer, is_counted: bool
) -> None:
    async def main(network: SimulatedNetwork) -> None:
        async with hosts(network) as swarm:
            trainer, (first, last) = swarm.trainers[0], swarm.hosts
            liar = await swarm.add_trainer("liar")

            async def tell(channel: Channel, request: dict[str, Any]) -> None:
                await lie_(Named(channel, liar.rpc.peer_id), request)  # type: ignore[arg-type]

            lie(liar, 1, tell)
            swarm.introduce(2, liar=1)
            hop = replace(swarm.hop(trainer, 0), route=(liar.rpc.peer_id,))
            reply = await swarm.send(trainer, hop, first)
            assert [leg.host for leg in reply.legs] == [first.id, last.id]
            assert first.router.stages[1].has_failed(liar.rpc.peer_id)
            expected = {(liar.rpc.peer_id, "bad answer"): 1} if is_counted else {}
            assert first.rpc.refusals == expected
            for each in swarm.hosts:
                assert await swarm.settle(trainer, each, 0) == [True]
            check_untouched(swarm, 0)

    simulate(main, seed=24)


class Named:
    """A channel that puts the liar's id where it belongs."""

    def __init__(self, channel: Channel, peer: str) -> None:
        self._channel = channel
        self._peer = peer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._channel, name)

    async def send(self, message: dict[str, Any]) -> None:
        legs = message.get("legs")
        if isinstance(legs, list):
            legs = [[self._peer if value == LIAR else value for value in leg] for leg in legs]
            message = {**message, "legs": legs}
        await self._channel.send(message)


@pytest.mark.parametrize("value", [1e30, 3e38, -1e12])
def test_a_gradient_so_large_that_it_would_drown_all_others_is_not_added(value: float) -> None:
    """Taking it out again would leave nothing of what others added."""

    async def main(network: SimulatedNetwork) -> None:
        async with hosts(network) as swarm:
            trainer, (first, last) = swarm.trainers[0], swarm.hosts
            await send_and_settle(swarm, trainer, 0, swarm.hosts)
            liar = await swarm.add_trainer("liar")

            async def tell(channel: Channel, request: dict[str, Any]) -> None:
                huge = answer(lambda reply: None, torch.tensor(value))
                await huge(Named(channel, liar.rpc.peer_id), request)  # type: ignore[arg-type]

            lie(liar, 1, tell)
            with pytest.raises(HopFailedError, match=r"too large|not finite"):
                await swarm.send(trainer, replace(swarm.hop(trainer, 1), route=(liar.rpc.peer_id,)), first)
            check_untouched(swarm, 0)
            assert last.compute.passes == 1

    simulate(main, seed=25)
