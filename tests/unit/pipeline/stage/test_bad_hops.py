"""What no honest peer sends to a stage host: it is refused and counted, and leaves the sum as it was."""

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from p2ptrain.errors import PeerRefusedError
from p2ptrain.network.schema import to_wire
from p2ptrain.network.simulated import SimulatedNetwork
from p2ptrain.pipeline.messages import IDS, FromHost, Hop, Payload, Refused, pack
from p2ptrain.pipeline.stage.budget import Limits
from tests.support.coroutines import simulated
from tests.support.sim.stage_hosts import (
    Hosts,
    RefusedError,
    bits,
    check_untouched,
    hosts,
    parts,
    send_and_settle,
    send_raw,
)

REFUSED = (RefusedError, PeerRefusedError)

# What a hop may be


Sign = Callable[[Hop], Hop]
Change = Callable[[Hop, Sign], tuple[dict[str, Any], Any, Any]]


@dataclass(frozen=True)
class Case:
    """A bad hop.

    Attributes:
        change: Makes it of a good one, and of what signs it: request and payloads.
        reason: What the refusal says.
        cause: What it is counted as.
        stage: Where it goes to.
    """

    change: Change
    reason: str
    cause: str = "ProtocolError"
    stage: int = 0


def with_field(name: str, value: object) -> Change:
    return lambda hop, sign: ({**to_wire(hop.request), name: value}, hop.inputs.data, hop.targets.data)


def with_values(tensor: str, values: torch.Tensor) -> Change:
    """Other values of the right shape, which the trainer signs."""

    def change(hop: Hop, sign: Sign) -> tuple[dict[str, Any], Any, Any]:
        old: Payload = getattr(hop, tensor)
        return parts(sign(with_tensor(hop, tensor, torch.broadcast_to(values, old.shape).contiguous())))

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


def truncated(hop: Hop, sign: Sign) -> tuple[dict[str, Any], Any, Any]:
    return to_wire(hop.request), hop.inputs.data[:-4], hop.targets.data


BAD = "BadMicrobatchError"
CASES = {
    "another's name": Case(with_field("id", ["somebody else", 0, 0]), "in another's name", "NotSignedError"),
    "no samples": Case(with_field("samples", 0), "samples: Expected `int` >= 1", "malformed header"),
    "a route through more stages than there are": Case(with_field("route", ["a", "b"]), "route", BAD),
    "a route beyond the last stage": Case(with_field("route", ["a"]), "route", BAD, 1),
    # As an example of all that no stage takes: `PipelinePlan.check` refuses it.
    "inputs of another length": Case(
        lambda hop, sign: parts(with_tensor(hop, "inputs", torch.zeros((2, 7), dtype=torch.int64))),
        "takes an input of shape", BAD,
    ),
    "inputs that are not signed": Case(
        lambda hop, sign: parts(with_tensor(hop, "inputs", torch.ones(hop.inputs.shape, dtype=torch.int64))),
        "other inputs than its trainer signed", "NotSignedError",
    ),
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
@simulated(hosts, (0, 1), Limits(max_bytes=1 << 20), seed=2)
async def test_a_bad_hop_is_refused_and_counted_and_leaves_the_sum_as_it_was(swarm: Hosts, case: Case) -> None:
    trainer, host = swarm.trainers[0], swarm.hosts[case.stage]
    await send_and_settle(swarm, trainer, 0, swarm.hosts)
    before = bits(host)
    hop = swarm.hop(trainer, 1, swarm.hosts[1]) if case.stage == 0 else swarm.hidden(trainer, 1)
    sent = case.change(hop, lambda hop: swarm.sign(trainer, hop))
    with pytest.raises(REFUSED, match=case.reason) as caught:
        await send_raw(trainer.rpc, host, *sent)
    assert "\n" not in str(caught.value)
    assert host.rpc.refusals == {(trainer.rpc.peer_id, case.cause): 1}
    assert bits(host) == before
    check_untouched(swarm, 0)
    await send_and_settle(swarm, trainer, 1, swarm.hosts)
    check_untouched(swarm, 0, 1)


@simulated(hosts, seed=3)
async def test_what_is_refused_for_its_shape_is_refused_before_it_is_sent(swarm: Hosts) -> None:
    trainer, host = swarm.trainers[0], swarm.hosts[0]
    request = {**to_wire(swarm.hop(trainer, 0).request), "inputs": {"codec": IDS, "shape": [1 << 10, 1 << 14]}}
    with pytest.raises(REFUSED, match="takes an input of shape"):
        await send_raw(trainer.rpc, host, request)  # And no tensors.


# Floods


@simulated(seed=11)
async def test_a_trainer_that_floods_is_told_that_it_is_full_and_another_still_gets_in(
    network: SimulatedNetwork,
) -> None:
    limits = Limits(max_bytes=1 << 20, max_running=8, max_share=0.5)
    async with hosts(network, (0, 1), limits, num_trainers=2) as swarm:
        (flooder, other), (first, last) = swarm.trainers, swarm.hosts
        network.stall(last.peer, 2.0)
        hops = [swarm.hop(flooder, number, last) for number in range(20)]
        flood = [flooder.peer.spawn(send_raw(flooder.rpc, first, *parts(hop))) for hop in hops]
        await asyncio.sleep(0.5)
        assert first.host.ledger.num_running == 4
        full = [task for task in flood if task.done()]
        assert len(full) == 16
        for task in full:
            with pytest.raises(REFUSED, match="full: 4 microbatches of this peer are under way"):
                task.result()
        assert first.rpc.refusals == {(flooder.rpc.peer_id, "FullError"): 16}
        await send_and_settle(swarm, other, 50, swarm.hosts)
        await asyncio.gather(*flood, return_exceptions=True)
        for each in swarm.hosts:
            await each.host.close_round(0.1)
        check_untouched(swarm, 50)


@pytest.mark.parametrize("round", [0, 1])
@simulated(seed=12)
async def test_what_is_still_coming_or_comes_early_takes_no_more_memory_than_there_is(
    network: SimulatedNetwork, round: int
) -> None:
    """A flood of streams, each of which announces as much as a host takes, and sends all but the end of it."""
    async with hosts(network, (0, 1), Limits(max_bytes=5000, max_running=64), num_trainers=2) as swarm:
        (flooder, other), last = swarm.trainers, swarm.hosts[1]

        async def flood(number: int) -> None:
            hop = swarm.hidden(flooder, number, round=round)
            async with flooder.rpc.open(last.id, last.service, hop.request, 5.0) as channel:
                await channel.send_bytes(hop.inputs.data)
                if round:
                    await channel.send_bytes(hop.targets.data)
                while True:
                    match await channel.receive(FromHost, 5.0):
                        case Refused(kind=kind, reason=reason):
                            raise RefusedError(kind.value, reason)

        flooding = [flooder.peer.spawn(flood(number)) for number in range(12)]
        await asyncio.sleep(2.0)
        told = [task.exception() for task in flooding if task.done()]
        assert len(told) == 10, "two of 1088 bytes are its share"
        assert all("full: 2 microbatches of this peer are on their way here" in str(error) for error in told), told
        await send_and_settle(swarm, other, 50, swarm.hosts)
        for task in flooding:
            task.cancel()
        await asyncio.gather(*flooding, return_exceptions=True)
        check_untouched(swarm, 50)


@simulated(hosts, (0, 1), Limits(max_bytes=1 << 20, max_running=2, max_share=0.5), seed=13)
async def test_a_full_host_says_so_before_tensors_are_sent(swarm: Hosts, network: SimulatedNetwork) -> None:
    trainer, (first, last) = swarm.trainers[0], swarm.hosts
    network.stall(last.peer, 2.0)
    running = trainer.peer.spawn(swarm.send(trainer, swarm.hop(trainer, 0, last), first))
    await asyncio.sleep(0.5)
    with pytest.raises(REFUSED, match="full: "):
        await send_raw(trainer.rpc, first, to_wire(swarm.hop(trainer, 1, last).request))
    first.host.ledger.is_closed = True
    with pytest.raises(REFUSED, match="late: "):
        await send_raw(trainer.rpc, first, to_wire(swarm.hop(trainer, 1, last).request))
    await running
