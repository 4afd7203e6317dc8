"""How groups form in swarms of 8 to 512 peers: time, messages, directory requests, and what a failing leader costs.

The product's own matchmaking and averaging, with a small vector, on a simulated network in virtual time: round trips of
20 to 150 ms, drawn for each pair, 100 Mbit/s. In each round every peer is ready after a random delay of up to 0.2 s.
Peers know of each other beforehand, as in a swarm that is up. Times are exact and repeat from the seed; how long the
command takes is another matter (512 peers: one to two minutes of CPU a size of groups).

    python -m benchmarks.bench_groups --sizes 64x16 512x64 --json results/groups.json
"""

from __future__ import annotations

import argparse
import asyncio
import random
import re
import statistics
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

import torch

from benchmarks.counting import CountingTransport, Messages
from benchmarks.findings import Finding, Section, run
from benchmarks.harness import Measured, arguments, progress
from p2ptrain.averaging.grouping.cells import Cells
from p2ptrain.averaging.grouping.pending_group import PendingGroup
from p2ptrain.averaging.protocol.certificate import Roster, Ticket
from p2ptrain.manifest import AveragingSpec
from p2ptrain.network.simulated import LinkModel, SimulatedNetwork, simulate
from p2ptrain.node.presence import Presence
from tests.support.sim.averagers import AveragingPeer, record_at, start_averagers, stop_averagers

T = TypeVar("T")

SIZES = ("8x16", "64x16", "512x16", "512x64")
ROUNDS = {8: 10, 64: 4, 512: 2}
"""Rounds that are measured, by the most peers; fewer for larger swarms."""
NUM_VALUES = 1024
LATENCY_SECONDS = (0.010, 0.075)
"""One way."""
LONGEST_DELAY_SECONDS = 0.2
GOAL_SECONDS, COUNTED_GOAL = 1.0, 0.98
"""Until a group stands, at p95; the share of peers that count in a round."""
WATCHED = 8
"""Peers that publish and read records as real ones do; so many that what one does can be told from it."""
FAULTS: dict[str, Callable[[SimulatedNetwork, AveragingPeer], None]] = {
    "killed": lambda network, leader: network.crash(leader.peer),
    "silent": lambda network, leader: network.cut(leader.peer),
}


@dataclass(frozen=True)
class Found:
    """A group that a peer found.

    Attributes:
        level: Of the tree.
        cell: On that level.
        started: When the peer began to look for it.
        seconds: How long that took.
        members: In its roster.
    """

    level: int
    cell: int
    started: float
    seconds: float
    members: int


@dataclass
class Watch:
    """Record one swarm's rounds.

    Attributes:
        found: Groups of the round in progress, as each of their members found them, in order.
        messages: Of the round in progress.
        on_form: Called by a leader that is about to put a group together; whether it shall go on.
    """

    found: list[Found] = field(default_factory=list)
    messages: Messages = field(default_factory=Messages)
    on_form: Callable[[AveragingPeer, PendingGroup], bool] = lambda leader, group: True

    def follow(self, each: AveragingPeer) -> None:
        """Note the groups that a peer finds, and ask `on_form` before it puts one together."""
        matchmaker, coordinator = each.averager.matchmaker, each.averager.matchmaker._coordinator
        find, finish = matchmaker.find_group, coordinator._finish

        async def find_group(sign: Callable[[], Ticket]) -> Roster:
            started = asyncio.get_running_loop().time()
            roster = await find(sign)
            seconds = asyncio.get_running_loop().time() - started
            ticket = next(ticket for ticket in roster.tickets if ticket.peer == matchmaker.position.peer)
            cell = matchmaker.cells.key_of(ticket, ticket.peer, ticket.level).cell
            self.found.append(Found(ticket.level, cell, started, seconds, len(roster.members)))
            return roster

        def finish_or_fail(group: PendingGroup, expected: list[str], reason: str) -> None:
            if self.on_form(each, group):
                finish(group, expected, reason)

        matchmaker.find_group = find_group  # type: ignore[method-assign]
        coordinator._finish = finish_or_fail  # type: ignore[method-assign]


@dataclass
class Swarm:
    """Peers that average, and what is seen of them."""

    network: SimulatedNetwork
    peers: list[AveragingPeer]
    watch: Watch
    delays: random.Random

    async def round(self) -> dict[AveragingPeer, float]:
        """One round of all that live; by peer that committed it: seconds from being ready until it had the result."""
        self.watch.found.clear()
        self.watch.messages.clear()
        self.network.trace.clear()
        taken = await asyncio.gather(*(self._take_part(each) for each in self.peers if each.peer.alive))
        return {each: seconds for each, seconds in taken if seconds is not None}

    async def _take_part(self, each: AveragingPeer) -> tuple[AveragingPeer, float | None]:
        await asyncio.sleep(self.delays.uniform(0, LONGEST_DELAY_SECONDS))
        started = asyncio.get_running_loop().time()
        task = each.peer.spawn(each.try_round())
        await asyncio.wait({task})
        done = not task.cancelled() and task.result()
        return each, asyncio.get_running_loop().time() - started if done else None


@dataclass(frozen=True)
class Steady:
    """Rounds in which nothing fails. Seconds; messages are those that a peer sent or received in one round.

    Attributes:
        levels: Of the tree.
        groups: On level 0.
        group: From being ready until the peer's group stands.
        delegates: The same for groups of delegates; empty without.
        round: From being ready until the result is there.
        requests: To the directory, of a peer and round.
        matchmaking: Messages of matchmaking: the mean of all peers, and the most of any.
        all_messages: All messages: the mean, and the most.
        full: Share of the groups of level 0 that have all who were there.
        counted: Share of the peers whose contribution counts.
    """

    levels: int
    groups: float
    group: tuple[float, ...]
    delegates: tuple[float, ...]
    round: tuple[float, ...]
    requests: float
    matchmaking: tuple[float, int]
    all_messages: tuple[float, int]
    full: float
    counted: float


def in_swarm(num_peers: int, group_size: int, seed: int, scenario: Callable[[Swarm], Awaitable[T]]) -> T:
    """Run ``scenario`` on a new swarm whose members they all are, and return its result."""
    spec = AveragingSpec(group_size=group_size)

    async def main(network: SimulatedNetwork) -> T:
        watch, started = Watch(), [network.add_peer(f"p{number}") for number in range(num_peers)]
        peers = await start_averagers(
            network, started, spec, NUM_VALUES, lambda peer: CountingTransport(peer.transport, watch.messages)
        )
        for each in peers:
            watch.follow(each)
        presences = [presence_of(each) for each in peers[:WATCHED]]
        for presence in presences:
            await presence.start()
        swarm = Swarm(network, peers, watch, random.Random(seed))
        try:
            while max(each.averager.head.table.num_awake for each in peers) < num_peers:  # Not all fit in one group.
                await swarm.round()
            await swarm.round()
            return await scenario(swarm)
        finally:
            for presence in presences:
                await presence.close()
            await stop_averagers(peers)

    return simulate(main, seed, model=LinkModel(latency_seconds=LATENCY_SECONDS))


def presence_of(each: AveragingPeer) -> Presence:
    """Return the `Presence` that publishes a peer's record, and reads those of others."""
    peer = each.peer
    return Presence(
        lambda: peer.directory, each.rpc, peer.signer, each.membership, lambda: record_at(peer, each.averager.head)
    )


async def steady(swarm: Swarm, rounds: int) -> Steady:
    """Rounds without faults."""
    ids = [each.peer.peer_id for each in swarm.peers]
    watched = {each.peer.name for each in swarm.peers[:WATCHED]}
    cells = Cells(swarm.peers[0].spec.group_size)
    group, delegates, whole = list[float](), list[float](), list[float]()
    matchmaking, everything, counted = list[int](), list[int](), list[float]()
    requests, groups, full, levels = 0, 0, 0, 1
    for _ in range(rounds):
        head = max((each.averager.head for each in swarm.peers), key=lambda head: head.round)
        there = Counter(cells.key_of(head, peer).cell for peer in ids)
        taken = await swarm.round()
        found = swarm.watch.found
        group += [one.seconds for one in found if not one.level]
        delegates += [one.seconds for one in found if one.level]
        whole += taken.values()
        stood = {one.cell: one.members for one in found if not one.level}
        groups += len(there)
        full += sum(stood.get(cell, 0) == count for cell, count in there.items())
        matchmaking += swarm.watch.messages.handled(ids, "group.")
        everything += swarm.watch.messages.handled(ids)
        requests += sum(event in ("publish", "look up") and who in watched for _, event, who, *_ in swarm.network.trace)
        counted.append(sum(each.outcomes[-1].contributed for each in taken) / len(ids))
        levels = max(each.outcomes[-1].result.certificate.body.levels for each in taken)
    return Steady(
        levels, groups / rounds, tuple(group), tuple(delegates), tuple(whole), requests / rounds / len(watched),
        (statistics.mean(matchmaking), max(matchmaking)), (statistics.mean(everything), max(everything)),
        full / groups, statistics.mean(counted),
    )  # fmt: skip


async def without_leader(swarm: Swarm, level: int, fault: str) -> dict[str, Any]:
    """A round in which the first leader that puts together a group of this level fails when it is about to.

    Returns:
        ``next_group``: seconds from then until the last of the others in that cell has its next group; None when one
        never found any. ``counted``: the share of all other peers whose contribution counts in the round.
    """
    loop, watch = asyncio.get_running_loop(), swarm.watch
    failed: list[tuple[AveragingPeer, int, int, float]] = []

    def fail(leader: AveragingPeer, group: PendingGroup) -> bool:
        members = len(group.members) - group.has(leader.peer.peer_id)
        if failed or group.key.level != level or not members:
            return all(leader is not each for each, *_ in failed)
        failed.append((leader, group.key.cell, members, loop.time()))
        FAULTS[fault](swarm.network, leader)
        return False

    watch.on_form = fail
    others = sum(each.peer.alive for each in swarm.peers) - 1
    taken = await swarm.round()
    watch.on_form = lambda leader, group: True
    leader, cell, members, when = failed[0]
    again = [one for one in watch.found if (one.level, one.cell) == (level, cell)]
    ended = sorted(one.started + one.seconds - when for one in again if one.started + one.seconds >= when)
    counted = sum(each.outcomes[-1].contributed for each in taken if each is not leader) / others
    swarm.network.mend(leader.peer)
    await swarm.round()  # Whoever missed the round comes back.
    return {"next_group": ended[members - 1] if len(ended) >= members else None, "counted": counted}


def measure(num_peers: int, group_size: int, seed: int, faults: bool) -> dict[str, Any]:
    """All of one size."""
    rounds = next(count for most, count in ROUNDS.items() if num_peers <= most or most == max(ROUNDS))

    async def scenario(swarm: Swarm) -> dict[str, Any]:
        calm = await steady(swarm, rounds)
        costs = {}
        for name in FAULTS if faults else ():
            for level in range(min(2, calm.levels)):
                progress(f"{num_peers} peers in groups of {group_size}: leader of level {level} {name}")
                costs[f"{name}, level {level}"] = await without_leader(swarm, level, name)
        return {"steady": asdict(calm), "faults": costs}

    started = time.process_time()
    found = in_swarm(num_peers, group_size, seed, scenario)
    return {"peers": num_peers, "group_size": group_size, "cpu_seconds": time.process_time() - started, **found}


def quantiles(values: Sequence[float]) -> str:
    """Median and 95th percentile, for a table."""
    return f"{Measured(tuple(values)).median:.2f} / {Measured(tuple(values)).quantile(0.95):.2f}" if values else ""


def row(found: dict[str, Any]) -> tuple[object, ...]:
    """One line of the table."""
    calm = found["steady"]
    return (
        f"{found['peers']} in {found['group_size']}", f"{calm['levels']}", f"{calm['groups']:.0f}",
        quantiles(calm["group"]), quantiles(calm["delegates"]), quantiles(calm["round"]), f"{calm['requests']:.1f}",
        "{:.0f} / {}".format(*calm["matchmaking"]), "{:.0f} / {}".format(*calm["all_messages"]),
        f"{calm['full']:.0%}", f"{calm['counted']:.1%}",
    )  # fmt: skip


def fault_rows(found: dict[str, Any]) -> list[tuple[object, ...]]:
    """Return a row for each kind of failing leader: what it costs."""
    return [
        (
            f"{found['peers']} in {found['group_size']}", what,
            "never" if one["next_group"] is None else f"{one['next_group']:.2f}", f"{one['counted']:.1%}",
        )
        for what, one in found["faults"].items()
    ]  # fmt: skip


def size(text: str) -> tuple[int, int]:
    """(peers, group size) of a text like ``512x16``, for argparse."""
    found = re.fullmatch(r"(\d+)x(\d+)", text)
    if found is None or int(found[1]) < 2 or not 2 <= int(found[2]) <= 256:
        raise argparse.ArgumentTypeError(f"{text!r} is no size: write peers x members of a group, like 512x16")
    return int(found[1]), int(found[2])


def compare(sizes: Sequence[tuple[int, int]], seed: int, faults: bool) -> tuple[Section, Section]:
    """All sizes: rounds without faults, and with failing leaders."""
    calm = Section(
        "Until groups stand (p50 / p95, seconds), and messages that a peer handles in a round (mean / most of any)",
        ("peers", "levels", "cells", "group", "of delegates", "whole round", "DHT requests", "matchmaking", "all",
         "full groups", "counted"),
    )  # fmt: skip
    costs = Section("Failing leaders", ("peers", "leader, about to form a group", "next group (s)", "others counted"))
    for num_peers, group_size in sizes:
        name = f"{num_peers} peers in groups of {group_size}"
        progress(name)
        found = measure(num_peers, group_size, seed, faults)
        calm.rows.append(row(found))
        calm.results[name] = found
        stands = Measured(tuple(found["steady"]["group"])).quantile(0.95)
        counted = found["steady"]["counted"]
        calm.findings += [
            Finding(f"{name}: until a group stands, p95", stands, "seconds", GOAL_SECONDS),
            Finding(f"{name}: peers that count", counted, "all", COUNTED_GOAL, at_least=True),
        ]
        costs.rows += fault_rows(found)
    return calm, costs


def main() -> int:
    """Measure and report."""
    parser = arguments(__doc__, "8 peers, without faults")
    parser.add_argument("--sizes", nargs="+", type=size, default=[size(text) for text in SIZES], metavar="NxG")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--calm", action="store_true", help="leave out the rounds in which leaders fail")
    options = parser.parse_args()
    if options.quick:
        options.sizes, options.calm = [(8, 16)], True
    torch.set_num_threads(1)
    calm, costs = compare(options.sizes, options.seed, not options.calm)
    return run("groups", {"steady": lambda: calm, "faults": lambda: None if options.calm else costs}, options)


if __name__ == "__main__":
    sys.exit(main())
