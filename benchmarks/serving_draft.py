"""A trained draft on the hosts of four stages, 100 ms apart: prose and code that a real model writes.

The network is simulated; each batch, also of the draft, takes the time that it takes to compute here.
"""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import cast

from benchmarks.findings import Finding, Section
from benchmarks.serving_chain import ComputedRuntime
from benchmarks.serving_speculation import NUM_STAGES, ONE_WAY, TEXT
from p2ptrain.models import Span, build_stage, whole
from p2ptrain.models.exact import ExactStage, exact_stage
from p2ptrain.models.pretrained import describe_pretrained
from p2ptrain.models.tokenizers import load_pretrained_tokenizer
from p2ptrain.network.simulated import LinkModel, SimulatedNetwork, simulate
from p2ptrain.serving.client.draft import Draft, load_draft
from p2ptrain.serving.sampling import Sampling
from tests.support.sim.serving import ServingSwarm, SmallStage

PROMPT, ANSWER = 128, 120
GOAL = 2.5
SETTINGS = {"greedy": Sampling(temperature=0.0), "temperature 0.7": Sampling(temperature=0.7, seed=1)}


def prompts(tokenizer: object) -> dict[str, list[int]]:
    """Return the beginnings of a page and of a module, neither of which the draft is trained on by default."""
    texts = {"prose": (TEXT / "network.md").read_text(), "code": Path(statistics.__file__).read_text()}
    encode = tokenizer.encode  # type: ignore[attr-defined]
    return {name: list(encode(text, add_special_tokens=False))[:PROMPT] for name, text in texts.items()}


def drafting(model: Path, draft: Path, repeats: int) -> Section:
    """Tokens a second of one session: plain, with the hosts' own drafts, and with a trained draft."""
    spec = describe_pretrained(str(model))
    tokenizer = load_pretrained_tokenizer(f"path:{model}")
    guesser = load_draft(draft, spec.vocabulary, tokenizer)
    end = whole(spec).stop
    spans = [Span(end * each // NUM_STAGES, end * (each + 1) // NUM_STAGES) for each in range(NUM_STAGES)]
    stages = [exact_stage(build_stage(spec, span, model), spec) for span in spans]
    section = Section(
        f"Tokens of {NUM_STAGES} stages of a real model, {1000 * ONE_WAY:g} ms apart",
        ("text", "plain, s", "hosts' drafts, s", "trained draft, s", "its guesses accepted"),
    )
    for name, ids in prompts(tokenizer).items():
        for how, sampling in SETTINGS.items():
            found: list[tuple[float, ...]] = []
            for _ in range(repeats):
                plain, own, drafted = (
                    _answer(stages, ids, sampling, speculates, made)
                    for speculates, made in ((False, None), (True, None), (True, guesser))
                )
                if not plain[0] == own[0] == drafted[0]:
                    raise RuntimeError(f"{name}, {how}: the answers differ")
                found.append((plain[1], own[1], drafted[1]))
                section.rows.append((f"{name}, {how}", *(f"{each:.2f}" for each in found[-1]), drafted[2]))
            for at, what in ((1, "hosts' drafts"), (2, "a trained draft")):
                ratio = statistics.median(each[0] / each[at] for each in found)
                goal = GOAL if at == 2 else None
                section.findings.append(
                    Finding(f"tokens a second with {what}, {name}, {how}", ratio, "plain", goal, True)
                )
            section.results[f"{name}, {how}"] = found
    return section


def _answer(
    stages: Sequence[ExactStage], prompt: Sequence[int], sampling: Sampling, speculates: bool, draft: Draft | None
) -> tuple[list[int], float, str]:
    """Return an answer, its virtual seconds, and how many drafts were accepted."""

    async def main(network: SimulatedNetwork) -> tuple[list[int], float, str]:
        swarm = ServingSwarm(
            network, NUM_STAGES, vocabulary=stages[0].vocabulary, runtime=ComputedRuntime, speculates=speculates,
            kind=lambda number: cast(SmallStage, stages[number]),
        )  # fmt: skip
        await swarm.start(*[1] * NUM_STAGES)
        client, loop = await swarm.start_client(runtime=ComputedRuntime), asyncio.get_running_loop()
        client.generator.draft = draft
        start = loop.time()
        ids, _ = await client.peer.spawn(client.ask(prompt, ANSWER, sampling))
        seconds = loop.time() - start
        totals = swarm.hosts["s0a"].host.book.meter.totals()
        await swarm.end(client)
        return ids, seconds, f"{totals.accepted_tokens} of {totals.drafted_tokens}"

    found: tuple[list[int], float, str] = simulate(main, 0, model=LinkModel(latency_seconds=(ONE_WAY, ONE_WAY)))
    return found
