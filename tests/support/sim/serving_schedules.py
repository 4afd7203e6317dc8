"""Random faults in simulated generations: what clients ask for, and what must hold whatever fails.

Clients ask for answers of prompts that share prefixes and repeat themselves, for answers in a form, and for logits,
with drafts of their own and without.
Meanwhile hosts crash, restart, stall, lose channels and prefix pages, and take newer weights. Each answer has the
tokens and probabilities of one process, no audit finds a difference, and hosts keep no session and no page.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass
from typing import Any, cast

import msgspec
import torch

from p2ptrain.models.exact import ExactStage
from p2ptrain.network.simulated import LinkModel, SimulatedNetwork, simulate
from p2ptrain.serving.client.draft import Draft
from p2ptrain.serving.grammar import AnswerForm
from p2ptrain.serving.host.sessions import ORPHAN_SECONDS
from p2ptrain.serving.sampling import Drawn, Grammar, Sampling
from tests.support.sim.serving import (
    END,
    VOCABULARY,
    CopyingStage,
    PacedRuntime,
    ServingSwarm,
    SimulatedClient,
    SmallStage,
    digest,
    golden_draws,
    golden_outputs,
    small_grammars,
)

logger = logging.getLogger(__name__)

SAMPLINGS = (
    Sampling(temperature=0.0, logprobs=2),
    Sampling(temperature=1.0, seed=7),
    Sampling(temperature=0.8, top_p=0.95, seed=3, want_logprob=True, frequency_penalty=0.05, presence_penalty=0.1),
)
FORM = AnswerForm({
    "type": "object", "properties": {each: {"type": "integer", "minimum": 0, "maximum": 99} for each in "abc"},
    "required": ["a", "b", "c"], "additionalProperties": False,
}).encode()  # fmt: skip
SHARED = [(11 * at + at // 9) % VOCABULARY for at in range(512)]
PATIENCE_SECONDS = 300.0
LONGEST_SECONDS = 7200.0


@dataclass(frozen=True)
class ServingSchedule:
    """Two hosts of each of ``num_stages``, or three; ``num_clients`` ask for ``num_sessions`` in all."""

    seed: int
    num_stages: int
    num_replicas: int
    num_pages: int
    copies: bool
    num_clients: int
    num_sessions: int
    one_way_seconds: float

    @property
    def command(self) -> str:
        return f'make schedules ARGS="--serving --first {self.seed} --count 1 --sessions {self.num_sessions} --verbose"'


def draw_serving_schedule(seed: int, num_sessions: int = 9) -> ServingSchedule:
    chance = random.Random(f"serving {seed}")
    return ServingSchedule(
        seed, chance.randint(1, 4), chance.choice([2, 2, 3]), chance.choice([24, 64, 256]), chance.random() < 0.5,
        chance.randint(2, 4), num_sessions, chance.choice([0.001, 0.01, 0.1]),
    )  # fmt: skip


def find_serving_problems(schedule: ServingSchedule, hits: Counter[str] | None = None) -> list[str]:
    """Run a schedule; return what is wrong, and how to see it again. ``hits`` counts questions and faults."""
    model = LinkModel(latency_seconds=(schedule.one_way_seconds, schedule.one_way_seconds))
    try:
        found = simulate(_Run(schedule, Counter() if hits is None else hits).run, schedule.seed, model=model)
    except Exception as error:
        logger.debug("seed %d failed", schedule.seed, exc_info=True)
        found = [f"{type(error).__name__}: {error}"]
    return [f"seed {schedule.seed}: {problem}\n{schedule}\nto see it again: {schedule.command}" for problem in found]


class _Run:
    def __init__(self, schedule: ServingSchedule, hits: Counter[str]) -> None:
        self.schedule = schedule
        self.hits = hits
        self.chance = random.Random(schedule.seed)
        self.kind = CopyingStage if schedule.copies else SmallStage
        self.grammars = small_grammars()

    async def run(self, network: SimulatedNetwork) -> list[str]:
        schedule = self.schedule
        self.network = network
        self.swarm = swarm = ServingSwarm(
            network, schedule.num_stages, num_pages=schedule.num_pages, kind=self.kind, grammars=self.grammars
        )
        await swarm.start(*[schedule.num_replicas] * schedule.num_stages)
        clients = [
            await swarm.start_client(f"client{number}", PATIENCE_SECONDS, audit_share=0.3, runtime=PacedRuntime)
            for number in range(schedule.num_clients)
        ]
        audits = [client.peer.spawn(client.generator.auditor.run()) for client in clients]
        striking = asyncio.create_task(self._strike())
        problems: list[str] = []
        try:
            async with asyncio.timeout(LONGEST_SECONDS):
                talks = (self._talk(client, number) for number, client in enumerate(clients))
                problems += [each for some in await asyncio.gather(*talks) for each in some]
        except TimeoutError:
            problems.append(f"clients wait for {LONGEST_SECONDS:g} s")
        for task in (striking, *audits):
            task.cancel()
        await asyncio.wait({striking, *audits})
        problems += [each async for each in self._left()]
        for client in clients:
            self.hits.update({f"audits that {result}": number for result, number in client.generator.audits.items()})
            if client.generator.auditor.num_differences:
                problems.append(f"audits: {dict(client.generator.audits)}")
        await swarm.end(*clients)
        return problems

    async def _strike(self) -> None:
        """Fail one host after another, until cancelled."""
        chance, network, swarm = self.chance, self.network, self.swarm
        while True:
            await asyncio.sleep(chance.uniform(0.1, 1.5))
            held = swarm.hosts[name := chance.choice(sorted(swarm.hosts))]
            fault = chance.choice(["stall", "crash", "crash", "channels", "pages", "weights"])
            if not held.peer.alive:
                continue
            self.hits[fault] += 1
            match fault:
                case "stall":
                    network.stall(held.peer, chance.uniform(0.2, 6.0))
                case "crash":
                    network.crash(held.peer)
                    await asyncio.sleep(chance.uniform(0.1, 2.0))
                    restarted = await swarm.restart(name)
                    restarted.host.book.pool.drop(lambda key: True)
                case "channels":
                    for session in held.host.executor.sessions.values():
                        if session.channel is not None:
                            session.channel.abort()
                case "pages":
                    held.host.book.pool.drop(lambda key: chance.random() < 0.5)
                case "weights" if chance.random() < 0.3:
                    round_ = swarm.rounds[-1] + 1
                    swarm.rounds = (round_ - 1, round_)
                    for each in swarm.hosts.values():
                        if each.peer.alive:
                            each.host.serve((round_, digest(round_, each.number)), cast(ExactStage, each.stage))

    async def _talk(self, client: SimulatedClient, number: int) -> list[str]:
        """Ask for one client's share of the sessions; return what is wrong with the answers."""
        mine = random.Random(f"{self.schedule.seed}/{number}")
        problems: list[str] = []
        before: list[int] = []
        for _ in range(number, self.schedule.num_sessions, self.schedule.num_clients):
            piece = [mine.randrange(VOCABULARY) for _ in range(mine.choice([1, 5, 9, 64, 130]))]
            base = mine.choice([[], SHARED, SHARED[::-1], before])[: mine.choice([64, 200, 512])]
            prompt = [*base, *piece * mine.choice([1, 1, 3, 6])][-900:]
            what = mine.choice(["answer", "answer", "answer", "answer", "form", "logits"])
            has_draft = mine.random() < 0.5  # It is right about copies, or as long as there is one stage.
            client.generator.draft = Draft(cast(ExactStage, self.kind(0)), 4096) if has_draft else None
            self.hits.update([what, "draft"][: 1 + has_draft])
            match what:
                case "logits" if not self.schedule.copies:
                    right = torch.equal(
                        await client.generator.logits(prompt, with_states=True),
                        golden_outputs(prompt, self.schedule.num_stages),
                    )
                case _:
                    right, before = await self._ask(client, mine, prompt, has_form=what == "form")
            if not right:
                problems.append(f"another {what} than one process has, after {len(prompt)} tokens")
        return problems

    async def _ask(
        self, client: SimulatedClient, mine: random.Random, prompt: list[int], has_form: bool
    ) -> tuple[bool, list[int]]:
        """Ask for an answer; return whether it is right, and a prompt that goes on from it."""
        num_tokens, sampling = mine.choice([1, 20, 90, 150]), mine.choice(SAMPLINGS)
        num_tokens, stops = (200, [END]) if has_form else (num_tokens, [])
        matcher = self.grammars.compile(FORM, [END]) if has_form else None
        if has_form:
            sampling = msgspec.structs.replace(sampling, grammar=Grammar(FORM))
        found: list[Drawn] = []

        def note(generation: Any, token: Any) -> None:
            found.append(Drawn(token.id, token.logprob, token.top))

        await client.ask(prompt, num_tokens, sampling, on_token=note, stops=stops)
        wanted = golden_draws(prompt, num_tokens, self.schedule.num_stages, sampling, self.kind, matcher)
        return found == wanted, [*prompt, *(drawn.id for drawn in found)]

    async def _left(self) -> AsyncIterator[str]:
        """Yield what hosts hold after the last session."""
        alive = [each for each in self.swarm.hosts.values() if each.peer.alive]
        for each in alive:
            self.network.resume(each.peer)
        await asyncio.sleep(self.schedule.num_stages * (ORPHAN_SECONDS + 5.0))
        for each in alive:
            pool = each.host.book.pool
            if not each.is_clean:
                yield f"a host of stage {each.number} holds {len(each.host.executor.sessions)} sessions"
            elif len(pool._free) + len(pool._shared) != pool.num_pages:
                yield f"a host of stage {each.number} lost pages"
            each.host.report()
