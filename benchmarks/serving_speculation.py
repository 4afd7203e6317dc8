"""Speculation on hosts of four stages, 100 ms apart: copied text, prose and noise, with drafts and without.

The network is simulated; each batch takes the processor time that it takes to compute here. The model has random
weights, so the last stage computes its logits as ever, and then favours the token of a given text. A client's draft of
3 layers that favours it, too, is always right: no draft gains more.
"""

from __future__ import annotations

import asyncio
import random
import re
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch

from benchmarks.findings import Finding, Section
from benchmarks.serving_chain import ComputedRuntime
from p2ptrain.manifest import ModelSpec
from p2ptrain.models import Span, build_stage, whole
from p2ptrain.models.exact import ExactStage, PageStore, Part, exact_stage
from p2ptrain.network.simulated import LinkModel, SimulatedNetwork, simulate
from p2ptrain.serving.client.draft import Draft
from p2ptrain.training.distill import draft_spec
from tests.support.sim.serving import ServingSwarm, SmallStage

NUM_STAGES, ONE_WAY, PROMPT, ANSWER, EDIT = 4, 0.1, 300, 240, 40
"""Stages, seconds a hop, tokens of prompt and answer, and tokens from one edit of the copied text to the next."""
TEXT = Path(__file__).resolve().parents[1] / "docs" / "explanation"
GOALS = {"copied text": 4.0, "prose": 0.98, "eight words in random order": 0.98}
DRAFT_LAYERS, SHORT_ANSWER = 3, 40


class ScriptedStage:
    """A stage whose logits favour a text's tokens, by position."""

    def __init__(self, stage: ExactStage, text: Sequence[int]) -> None:
        self._stage, self._text = stage, text
        self._positions: dict[bytes, int] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stage, name)

    def step(self, parts: Sequence[Part], inputs: torch.Tensor, store: PageStore) -> torch.Tensor:
        outputs = self._stage.step(parts, inputs, store)
        positions = [at for part in parts for at in range(part.first, part.first + part.rows)]
        self._positions.update((row.numpy().tobytes(), at) for row, at in zip(outputs, positions, strict=True))
        return outputs

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        found = self._stage.logits(hidden).clone()
        for row, values in zip(hidden, found, strict=True):
            values[self._text[self._positions[row.numpy().tobytes()] + 1]] = 1e6
        return found


def texts() -> dict[str, list[int]]:
    """Return prompts with answers: the same text with a new word here and there, its continuation, and random words."""
    pages = "".join(path.read_text() for path in sorted(TEXT.glob("*.md")))
    words = re.findall(r"\w+|[^\w\s]", pages)
    number = {word: at for at, word in enumerate(dict.fromkeys(words))}
    ids = [number[word] for word in words[: PROMPT + ANSWER + 1]]
    copied = [len(number) + at if at % EDIT == EDIT - 1 else ids[at] for at in range(ANSWER + 1)]
    noise = random.Random(0).choices(range(8), k=len(ids))
    return dict(zip(GOALS, (ids[:PROMPT] + copied, ids, noise), strict=True))


def speculation(spec: ModelSpec, threads: int, repeats: int) -> Section:
    """Tokens a second of one session with drafts, against plain ones."""
    end = whole(spec).stop
    spans = [Span(end * each // NUM_STAGES, end * (each + 1) // NUM_STAGES) for each in range(NUM_STAGES)]
    stages = [exact_stage(build_stage(spec, span), spec, threads=threads) for span in spans]
    section = Section(
        f"Tokens of {NUM_STAGES} stages, {1000 * ONE_WAY:g} ms apart",
        ("text", "plain, s", "with drafts, s", "accepted"),
    )

    def measure(name: str, text: Sequence[int], answer: int, guesser: ExactStage | None = None) -> None:
        found: list[tuple[float, float]] = []
        for seed in range(repeats):
            plain, _ = _answer(stages, text, answer, False, None, seed)
            drafted, share = _answer(stages, text, answer, True, guesser, seed)
            found.append((plain, drafted))
            section.rows.append((name, f"{plain:.2f}", f"{drafted:.2f}", share))
        ratio = statistics.median(plain / drafted for plain, drafted in found)
        section.findings.append(Finding(f"tokens a second with drafts, {name}", ratio, "plain", GOALS.get(name), True))
        section.results[name] = found

    for name, text in texts().items():
        measure(name, text, ANSWER)
    small = draft_spec(spec, DRAFT_LAYERS)
    guesser = exact_stage(build_stage(small, whole(small)), small, weights="int8", threads=threads)
    strange = random.Random(1).sample(range(spec.vocabulary), PROMPT + ANSWER + 1)
    for answer in (SHORT_ANSWER, ANSWER):
        measure(f"{answer} new words, by a client whose draft is right", strange, answer, guesser)
    return section


def _answer(
    stages: Sequence[ExactStage], text: Sequence[int], answer: int, speculates: bool, guesser: ExactStage | None,
    seed: int,
) -> tuple[float, str]:  # fmt: skip
    """Return the virtual seconds of an answer, and how many of its drafts were accepted."""

    async def main(network: SimulatedNetwork) -> tuple[float, str]:
        swarm = ServingSwarm(
            network, NUM_STAGES, vocabulary=stages[0].vocabulary, runtime=ComputedRuntime, speculates=speculates,
            kind=lambda number: cast(SmallStage, ScriptedStage(stages[number], text)),
        )  # fmt: skip
        await swarm.start(*[1] * NUM_STAGES)
        client, loop = await swarm.start_client(runtime=ComputedRuntime), asyncio.get_running_loop()
        if guesser is not None:
            client.generator.draft = Draft(cast(ExactStage, ScriptedStage(guesser, text)), PROMPT + ANSWER)
        start = loop.time()
        ids, _ = await client.peer.spawn(client.ask(text[:PROMPT], answer))
        seconds = loop.time() - start
        if ids != text[PROMPT : PROMPT + answer]:
            raise RuntimeError("an answer has other tokens than its text")
        totals = swarm.hosts["s0a"].host.book.meter.totals()
        await swarm.end(client)
        return seconds, f"{totals.accepted_tokens} of {totals.drafted_tokens}"

    model = LinkModel(latency_seconds=(ONE_WAY, ONE_WAY))
    found: tuple[float, str] = simulate(main, seed, model=model)
    return found
