"""Hosts of four stages some way apart: a long prompt in chunks against whole, and tokens sent directly against relayed.

The network is simulated. Each batch takes the time of its computation here: processor time of the one thread that
computes, so that other work of the machine hardly counts.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import statistics
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from typing import Any, ClassVar, TypeVar, cast
from unittest.mock import patch

from benchmarks.findings import Finding, Section
from p2ptrain.manifest import ModelSpec
from p2ptrain.models import Span, build_stage, whole
from p2ptrain.models.exact import ExactStage, exact_stage
from p2ptrain.network.simulated import LinkModel, SimulatedNetwork, simulate
from p2ptrain.serving.host.scheduler import ALONE_ROWS, Costs
from p2ptrain.serving.link import StageLink
from tests.support.sim.serving import GREEDY, PacedRuntime, ServingSwarm, SimulatedClient, SmallStage

T = TypeVar("T")
Answer = tuple[float, list[int]]
"""Seconds between its tokens, and their ids."""
NUM_STAGES, PROMPT, START, ANSWER = 4, 2000, 32, 48
"""Stages; tokens of the long prompt, and of the one before the answers; an answer's tokens."""
ONE_WAY = (0.05, 0.1)
"""Seconds a hop."""
SETTLED = 16
"""Tokens of an answer after which its pace counts; a client that cannot reach the last host dials it in vain first."""
PREFILL_GOAL, DIRECT_GOAL, SHARE_GOAL = 2.5, 1.4, 0.95


class ComputedRuntime(PacedRuntime):
    """A runtime whose batches take as long in virtual time as they compute here.

    Attributes:
        seconds: Of all batches of all hosts.
    """

    seconds: ClassVar[list[float]] = []

    async def serve(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        start = time.thread_time()
        result = function(*args, **kwargs)
        self.seconds.append(time.thread_time() - start)
        await asyncio.sleep(self.seconds[-1])
        return result


def stages_of(spec: ModelSpec) -> list[ExactStage]:
    """Return the model with random weights in stages of equally many blocks."""
    end = whole(spec).stop
    bounds = [end * each // NUM_STAGES for each in range(NUM_STAGES + 1)]
    return [exact_stage(build_stage(spec, Span(*each)), spec) for each in itertools.pairwise(bounds)]


def simulated(
    stages: Sequence[ExactStage], one_way: float, ask: Callable[[ServingSwarm, SimulatedClient], Coroutine[Any, Any, T]]
) -> T:
    """Return what ``ask`` returns beside hosts of the stages, so many seconds apart, with open connections."""

    async def main(network: SimulatedNetwork) -> T:
        swarm = ServingSwarm(
            network, NUM_STAGES, vocabulary=stages[0].vocabulary, runtime=ComputedRuntime, speculates=False,
            kind=lambda number: cast(SmallStage, stages[number]),
        )  # fmt: skip
        await swarm.start(*[1] * NUM_STAGES)
        client = await swarm.start_client()
        found: T = await client.peer.spawn(ask(swarm, client))
        await swarm.end(client)
        return found

    model = LinkModel(latency_seconds=(one_way, one_way), jitter=0.0, are_dials_free=True)
    result: T = simulate(main, 0, model=model)
    return result


@contextlib.contextmanager
def prompts_whole(num_rows: int) -> Iterator[None]:
    """Make each host compute a prompt's rows in long batches, and send them once it has all."""
    send = StageLink._send

    async def send_whole(link: StageLink, *arguments: Any) -> None:
        while link._journal.end < num_rows:
            await link._journal.changed.wait()
        await send(link, *arguments)

    with (
        patch.object(StageLink, "_send", send_whole),
        patch.object(Costs, "rows_alone", lambda costs, waiting, num_later: ALONE_ROWS),
    ):
        yield


def long_prompts(spec: ModelSpec, repeats: int) -> Section:
    """The time to the first token after a long prompt, whose chunks are on all hosts at once, and without that."""
    stages, ids = stages_of(spec), [37 * each % spec.vocabulary for each in range(PROMPT)]
    section = Section(
        f"First token after {PROMPT} tokens, {NUM_STAGES} stages, s", ("ms a hop", "whole", "in chunks", "computing")
    )

    async def ask(swarm: ServingSwarm, client: SimulatedClient) -> tuple[float, int]:
        now = asyncio.get_running_loop().time
        times = [now()]
        (id,), _ = await client.ask(ids, 1, on_token=lambda *_: times.append(now()))
        return times[1] - times[0], id

    for one_way in ONE_WAY:
        wholes: list[float] = []
        chunked: list[float] = []
        for _ in range(repeats):
            with prompts_whole(PROMPT):
                seconds, id = simulated(stages, one_way, ask)
            wholes.append(seconds)
            ComputedRuntime.seconds.clear()
            seconds, other = simulated(stages, one_way, ask)
            chunked.append(seconds)
            if other != id:
                raise RuntimeError("a prompt in chunks has another token")
        name, computing = f"{1000 * one_way:g}", sum(ComputedRuntime.seconds)
        medians = (statistics.median(each) for each in (wholes, chunked))
        section.rows.append((name, *(f"{each:.2f}" for each in medians), f"{computing:.2f}"))
        ratio = statistics.median(one / other for one, other in zip(wholes, chunked, strict=True))
        section.findings.append(
            Finding(f"a prompt whole, {name} ms a hop", ratio, "the time in chunks", PREFILL_GOAL, at_least=True)
        )
        section.results[name] = {"whole": wholes, "chunks": chunked}
    return section


def direct_tokens(spec: ModelSpec, repeats: int) -> Section:
    """Tokens a second where the last host reaches client and first host, and where tokens come up the chain."""
    stages, ids = stages_of(spec), [37 * each % spec.vocabulary for each in range(START)]
    section = Section(
        f"A token on {NUM_STAGES} stages, ms", ("ms a hop", "relayed", "direct", "N·L + C", "C: computing")
    )

    def asking(is_direct: bool) -> Callable[[ServingSwarm, SimulatedClient], Coroutine[Any, Any, Answer]]:
        async def ask(swarm: ServingSwarm, client: SimulatedClient) -> Answer:
            first, last = swarm.hosts["s0a"].peer, swarm.hosts[f"s{NUM_STAGES - 1}a"].peer
            if not is_direct:
                swarm.network.block(client.peer, last)
                swarm.network.block(last, first)
            times: list[float] = []

            def note(*_: object) -> None:
                times.append(asyncio.get_running_loop().time())
                if len(times) == SETTLED:
                    ComputedRuntime.seconds.clear()

            found, _ = await client.ask(ids, ANSWER, GREEDY, on_token=note)
            return (times[-1] - times[SETTLED - 1]) / (ANSWER - SETTLED), found

        return ask

    for one_way in ONE_WAY:
        ratios: list[float] = []
        shares: list[float] = []
        for _ in range(repeats):
            relayed, tokens = simulated(stages, one_way, asking(False))
            direct, others = simulated(stages, one_way, asking(True))
            if tokens != others:
                raise RuntimeError("relayed tokens differ")
            computing = sum(ComputedRuntime.seconds) / (ANSWER - SETTLED)
            best = NUM_STAGES * one_way + computing
            ratios.append(relayed / direct)
            shares.append(best / direct)
        name = f"{1000 * one_way:g}"
        section.rows.append((name, *(f"{1000 * each:.1f}" for each in (relayed, direct, best, computing))))
        section.findings += [
            Finding(f"tokens a second, {name} ms a hop", statistics.median(ratios), "relayed", DIRECT_GOAL, True),
            Finding("the same", statistics.median(shares), "1 / (N·L + C)", SHARE_GOAL, True),
        ]
        section.results[name] = {"of relayed": ratios, "of the bound": shares}
    return section
