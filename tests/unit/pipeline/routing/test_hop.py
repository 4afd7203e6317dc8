"""Hosts that answer wrongly, late or never: they leave the routes, and another one does the work."""

import asyncio
import math
import struct
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from p2ptrain.network.rpc.channel import Channel
from p2ptrain.network.schema import to_wire
from p2ptrain.network.simulated import LinkModel, SimulatedNetwork
from p2ptrain.pipeline.messages import HopFailedError, HopRequest, Keepalive, News
from tests.support.coroutines import simulated
from tests.support.sim.stage_hosts import (
    HOP_LIMITS,
    Hosts,
    check_sums,
    check_untouched,
    hosts,
    lie,
    send_and_settle,
    stay,
)

# Hosts that lie

Answer = Callable[[Channel, HopRequest], Awaitable[None]]

LIAR = "the liar's id"


def reply_of(request: HopRequest, **changes: object) -> dict[str, Any]:
    """A reply that is right but for some fields."""
    leg = [1, LIAR]
    return {"type": "reply", "loss": 1.0, "legs": [leg], "gradient": to_wire(request.inputs), **changes}


def answer(values: torch.Tensor | None = None, **changes: object) -> Answer:
    """A reply that is right but for some fields, and a gradient of zeros, or these values."""

    async def send(channel: Channel, request: HopRequest) -> None:
        gradient = torch.broadcast_to(torch.zeros(()) if values is None else values, request.inputs.shape)
        await channel.send(reply_of(request, **changes))
        await channel.send_bytes(gradient.contiguous().numpy().tobytes())

    return send


def trail(*legs: list[Any]) -> Answer:
    return answer(legs=list(legs))


def head(codec: str, *shape: int) -> Answer:
    """A reply with a gradient of another kind."""
    return answer(gradient={"codec": codec, "shape": list(shape)})


def say(*messages: object) -> Answer:
    """Messages, and then nothing more."""

    async def send(channel: Channel, request: HopRequest) -> None:
        for message in messages:
            await channel.send(message)
        await stay()

    return send


async def nothing(channel: Channel, request: HopRequest) -> None:
    await stay()


async def end(channel: Channel, request: HopRequest) -> None:
    return


async def no_gradient(channel: Channel, request: HopRequest) -> None:
    await channel.send(reply_of(request))
    await stay()


async def beats_for_ever(channel: Channel, request: HopRequest) -> None:
    while True:
        await channel.send(Keepalive())
        await asyncio.sleep(1.0)


async def late(channel: Channel, request: HopRequest) -> None:
    await asyncio.sleep(6.0)
    await answer()(channel, request)


async def short_gradient(channel: Channel, request: HopRequest) -> None:
    await channel.send(reply_of(request))
    await channel.send_bytes(b"abc")


async def bytes_first(channel: Channel, request: HopRequest) -> None:
    await channel.send_bytes(struct.pack("<f", 1.0) * 100)


LIES = {
    "garbage": (bytes_first, True),
    "an unknown message": (say({"type": "hello"}), True),
    "news of a stage before it": (say(News(0, "x")), True),
    "news of no stage": (say(News(2, "x")), True),
    "endless news": (say(*[News(1, "x")] * 5000), True),
    "an empty trail": (trail(), True),
    "a trail of another host": (trail([1, "another"]), True),
    "a trail of another stage": (trail([0, LIAR]), True),
    "a trail through more stages than there are": (trail([1, LIAR], [2, LIAR]), True),
    "no gradient's head": (answer(gradient=None), True),
    "a gradient of another shape": (head("fp32", 2, 16, 8), True),
    "a gradient of another size": (head("fp32", 2, 8, 17), True),
    "a gradient in another codec": (head("topk", 2, 8, 16), True),
    "a gradient that is no number": (answer(torch.tensor(math.nan)), True),
    "an infinite gradient": (answer(torch.tensor(-math.inf)), True),
    "a gradient that is cut off": (short_gradient, True),
    "a gradient that never comes": (no_gradient, False),
    "a reply that is late": (late, False),
    "nothing": (nothing, False),
    "nothing but heartbeats": (beats_for_ever, False),
    "the end": (end, False),
}


@pytest.mark.parametrize(("lie_", "is_counted"), LIES.values(), ids=LIES.keys())
@simulated(hosts, seed=24)
async def test_a_host_that_answers_wrongly_leaves_the_routes_and_another_does_the_work(
    swarm: Hosts, lie_: Answer, is_counted: bool
) -> None:
    trainer, (first, last) = swarm.trainers[0], swarm.hosts
    liar = await swarm.add_trainer("liar")

    async def tell(channel: Channel, request: HopRequest) -> None:
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


class Named:
    """A channel that puts the liar's id where it belongs."""

    def __init__(self, channel: Channel, peer: str) -> None:
        self._channel = channel
        self._peer = peer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._channel, name)

    async def send(self, message: Any) -> None:
        if isinstance(message, dict) and message.get("legs"):
            legs = [[self._peer if value == LIAR else value for value in leg] for leg in message["legs"]]
            message = {**message, "legs": legs}
        await self._channel.send(message)


@pytest.mark.parametrize("value", [1e30, 3e38, -1e12])
@simulated(hosts, seed=25)
async def test_a_gradient_so_large_that_it_would_drown_all_others_is_not_added(swarm: Hosts, value: float) -> None:
    """Taking it out again would leave nothing of what others added."""
    trainer, (first, last) = swarm.trainers[0], swarm.hosts
    await send_and_settle(swarm, trainer, 0, swarm.hosts)
    liar = await swarm.add_trainer("liar")

    async def tell(channel: Channel, request: HopRequest) -> None:
        huge = answer(torch.tensor(value))
        await huge(Named(channel, liar.rpc.peer_id), request)  # type: ignore[arg-type]

    lie(liar, 1, tell)
    with pytest.raises(HopFailedError, match=r"too large|not finite"):
        await swarm.send(trainer, replace(swarm.hop(trainer, 1), route=(liar.rpc.peer_id,)), first)
    check_untouched(swarm, 0)
    assert last.sum.passes == 1


@simulated(hosts, (0, 1, 1), model=LinkModel((0.01, 0.01), buffer_bytes=256))
async def test_a_host_that_stops_before_it_has_the_tensors_is_noticed_as_soon_as_one_that_stops_later(
    swarm: Hosts, network: SimulatedNetwork
) -> None:
    trainer, (first, stopped, other) = swarm.trainers[0], swarm.hosts
    network.stall(stopped.peer)
    began = network.loop.time()
    reply = await swarm.send(trainer, swarm.hop(trainer, 0, stopped), first)
    assert [leg.host for leg in reply.legs] == [first.id, other.id]
    assert network.loop.time() - began < HOP_LIMITS.quiet_seconds + 2.0
    assert first.router.stages[1].has_failed(stopped.id)
    swarm.hosts.remove(stopped)
    check_sums(swarm, [0])
    swarm.hosts.append(stopped)
