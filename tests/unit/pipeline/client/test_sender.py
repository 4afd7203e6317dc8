"""A trainer's microbatches while the round takes no more: they wait for the next one, and are no failures."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import torch

from p2ptrain.errors import TemporaryError
from p2ptrain.network.simulated import SimulatedNetwork
from p2ptrain.pipeline.client import sender as sender_module
from p2ptrain.pipeline.client.sender import MicrobatchSender
from p2ptrain.pipeline.routing.hop import Caller
from p2ptrain.pipeline.stage.host import AdmissionQueue
from tests.support.coroutines import simulated
from tests.support.sim.stage_hosts import HOP_LIMITS, Hosts, hosts

AVERAGING_SECONDS = 120.0


@asynccontextmanager
async def _sender(swarm: Hosts) -> AsyncIterator[MicrobatchSender]:
    trainer = swarm.trainers[0]
    router = swarm.router(trainer)
    caller = Caller(trainer.rpc, router, limits=HOP_LIMITS)
    sender = MicrobatchSender(caller, trainer.peer.signer)
    try:
        yield sender
    finally:
        await sender.tasks.close()


async def _send(swarm: Hosts, sender: MicrobatchSender, is_own_loss: bool) -> int:
    """The round in which one microbatch was accepted."""
    hop = swarm.hop(swarm.trainers[0], 1)
    if not is_own_loss:
        return (await sender.send(hop.inputs, hop.targets, hop.samples, hop.tokens)).id.round
    shape = (*hop.targets.shape, swarm.plan.num_classes)
    opened = await sender.open(hop.inputs, hop.samples, hop.tokens, shape, requires_grad=True)
    return (await opened.backward(torch.ones(shape))).id.round


class _Closed(AdmissionQueue):
    """A round that takes no samples, as while it is averaged."""

    is_closed = True

    async def admit(self, samples: int) -> bool:
        return not self.is_closed


@pytest.mark.parametrize("is_own_loss", [False, True])
@simulated()
async def test_a_microbatch_waits_while_the_stages_average(network: SimulatedNetwork, is_own_loss: bool) -> None:
    gate = _Closed()
    async with hosts(network, gate=gate) as swarm, _sender(swarm) as sender:
        sending = asyncio.create_task(_send(swarm, sender, is_own_loss))
        await asyncio.sleep(AVERAGING_SECONDS)
        assert not sending.done()
        gate.is_closed = False
        for each in swarm.hosts:
            await each.host.close_round(0.0)
            each.host.begin_round(1)
        assert await sending == 1
        assert sender.resent == 0


@pytest.mark.parametrize("is_own_loss", [False, True])
@simulated()
async def test_a_round_that_never_ends_is_an_error_that_names_it(
    network: SimulatedNetwork, is_own_loss: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sender_module, "STUCK_SECONDS", 30.0)
    async with hosts(network, gate=_Closed()) as swarm, _sender(swarm) as sender:
        with pytest.raises(TemporaryError, match="round 0 takes no more samples, and has not ended for 30 s"):
            await _send(swarm, sender, is_own_loss)
