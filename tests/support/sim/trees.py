"""Simulated swarms that are larger than a group, of averagers alone."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Any

import torch

from p2ptrain.averaging.grouping.cells import Cells
from p2ptrain.averaging.protocol.certificate import Body, Head
from p2ptrain.manifest import AveragingSpec
from p2ptrain.network.simulated import SimulatedNetwork
from tests.support.sim.averagers import AveragingPeer, start_averagers

NUM_VALUES = 512
MOST_ROUNDS_TO_GROW = 24
SPEC = AveragingSpec(codec="fp32", aggregation="mean", group_size=8, grace_seconds=1.0)


@asynccontextmanager
async def averagers(
    network: SimulatedNetwork, num_peers: int, spec: AveragingSpec = SPEC
) -> AsyncIterator[list[AveragingPeer]]:
    yield await start_averagers(network, [network.add_peer(f"p{i}") for i in range(num_peers)], spec, NUM_VALUES)


async def grow(started: list[AveragingPeer]) -> Head:
    """The rounds until all of these peers are members, and have room in their cells; where they lead."""
    size = started[0].spec.group_size
    for _ in range(MOST_ROUNDS_TO_GROW):
        await asyncio.gather(*(each.try_round() for each in started))
        head = max((each.averager.head for each in started), key=lambda head: head.round)
        cells = Counter(Cells(size).key_of(head, each.peer.peer_id).cell for each in started)
        if head.present == len(started) and max(cells.values()) <= size:
            return head
    raise AssertionError(f"{head.present} of {len(started)} peers are members after {head.round} rounds")


def exact_mean(started: list[AveragingPeer]) -> torch.Tensor:
    return torch.stack([each.vector.double() for each in started]).mean(0).float()


def before_representing(
    started: list[AveragingPeer], hook: Callable[[AveragingPeer, Body], Coroutine[Any, Any, None]]
) -> None:
    """Await ``hook(peer, its cell's result)`` whenever a peer is about to stand for its cell."""

    def watch(each: AveragingPeer) -> None:
        represent = each.averager._represent

        async def watched(*arguments: Any) -> Any:
            await hook(each, arguments[1].certificate.body)
            return await represent(*arguments)

        each.averager._represent = watched  # type: ignore[method-assign, assignment]

    for each in started:
        watch(each)


def hit_first_delegate(
    started: list[AveragingPeer], fault: Callable[[AveragingPeer], object], least: int = 1
) -> list[AveragingPeer]:
    """Let ``fault`` befall the first peer that is about to stand for a cell of ``least``; the list then holds it."""
    hit: list[AveragingPeer] = []

    async def hit_once(each: AveragingPeer, body: Body) -> None:
        if not hit and len(body.members) >= least:
            hit.append(each)
            fault(each)

    before_representing(started, hit_once)
    return hit


def assert_all_took_part(started: list[AveragingPeer], done: dict[AveragingPeer, bool], head: Head) -> None:
    """All of ``done`` committed the round after ``head``, but as many of each cell as it has too many."""
    cells = Cells(SPEC.group_size)
    cell_of = {each: cells.key_of(head, each.peer.peer_id).cell for each in started}
    sizes = Counter(cell_of.values())
    failed = Counter(cell_of[each] for each, committed in done.items() if not committed)
    assert all(number <= sizes[cell] - SPEC.group_size for cell, number in failed.items()), (sizes, failed)
