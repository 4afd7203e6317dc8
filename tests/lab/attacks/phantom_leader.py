"""Report steps like a trainer, and name a leader that does not exist in each answer to a probe.

The leader of the round then sends its group to the phantom, if that goes before it in the order of leaders.
"""

import asyncio
import contextlib

from p2ptrain.averaging.grouping.cells import Key
from p2ptrain.averaging.grouping.membership import rank
from p2ptrain.averaging.grouping.messages import STEPS, StepsAdvice, StepsReport
from p2ptrain.averaging.protocol.certificate import Head
from p2ptrain.errors import DeadlineError, PeerError
from tests.lab.stranger import Stranger


async def attack(stranger: Stranger, phantoms: int = 64) -> None:
    names = [stranger.new_signer().peer_id for _ in range(phantoms)]

    def first(key: Key) -> str:
        return min(names, key=lambda name: rank(name, key))

    stranger.act_alive(first)
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(stranger.pose())
        while True:
            head = await stranger.head()
            for victim in await stranger.victims():
                tasks.create_task(_report(stranger, victim, head))
            await asyncio.sleep(1.0)


async def _report(stranger: Stranger, victim: str, head: Head) -> None:
    with contextlib.suppress(PeerError, DeadlineError):
        report = StepsReport(head.without_proof(), steps=1, seconds=0.5, age=0.0, is_stepping=True)
        await stranger.rpc.call(victim, STEPS, report, StepsAdvice, 3.0)
