"""Whether a pipeline learns as well when activations travel, and AdamW's moments are kept, in fewer bits.

A small Llama reads the Python standard library's sources, byte by byte, in stages of one host each: the product's own
hosts, feeder and rounds over a simulated network, with all arithmetic and all encodings as they are. Each seed gives
initial parameters and an order of the data, the same for every codec, and one process without stages trains on the same
microbatches. Compared is the mean training loss of the last `LAST` steps, seed by seed. Part of
`benchmarks.bench_pipeline`.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache, partial

import torch
from torch.nn import functional

from benchmarks.findings import Finding, Section
from benchmarks.harness import Measured, progress
from p2ptrain.manifest import DataSpec, Manifest, ModelSpec
from p2ptrain.models import build_model
from p2ptrain.network.simulated import SimulatedNetwork, SimulatedPeer, simulate
from p2ptrain.pipeline.messages import Payload, pack
from p2ptrain.pipeline.plan import PipelinePlan
from p2ptrain.training.data.corpus import load_corpus
from p2ptrain.training.data.windows import Sampler
from p2ptrain.training.learning_rate import learning_rate_factor
from tests.support.sim.peers import until
from tests.support.sim.pipelines import Pipeline, PipelinePeer, make_manifest

CODECS = ("fp32", "fp16", "int8", "int4", "8-bit moments")
"""How activations travel; with the last, in fp32, and moments are kept in 8 bits (`PipelineSpec.moments`)."""
STAGES = (2, 4)
MODEL = ModelSpec(layers=4, hidden=64, heads=2, kv_heads=2, intermediate=168, context=64)
LEARNING_RATE, WARMUP_STEPS = 2e-3, 20
MICROBATCHES, SAMPLES = 2, 8
"""In a step, and in a microbatch."""
LAST = 40
GOAL = 1.01
ALONE = "one process"


@dataclass(frozen=True)
class Case:
    """One training run.

    Attributes:
        codec: Of activations, or `ALONE`.
        stages: How many.
        seed: Of initial parameters and data.
        steps: How many.
    """

    codec: str
    stages: int
    seed: int
    steps: int

    @property
    def activations(self) -> str:
        """The codec in which they travel."""
        return "fp32" if self.codec in (ALONE, CODECS[-1]) else self.codec

    @property
    def manifest(self) -> Manifest:
        """Of the swarm that trains."""
        base = make_manifest(
            max(2, self.stages),  # A manifest without stages has no section for pipelines.
            codec=self.activations,
            moments="8bit" if self.codec == CODECS[-1] else "fp32",
            global_batch=MICROBATCHES * SAMPLES,
            local_batch=SAMPLES,
            learning_rate=LEARNING_RATE,
            warmup_steps=WARMUP_STEPS,
            clip_norm=0.0,
        )
        return base.model_copy(update={"model": MODEL.model_copy(update={"initial_seed": self.seed})})


@cache
def sampler(seed: int) -> Sampler:
    """The order in which the text is read."""
    return Sampler(load_corpus(DataSpec(), MODEL.context, MODEL.vocabulary).train, MODEL.context, seed)


def tokens(seed: int, number: int) -> torch.Tensor:
    """A microbatch: ``[SAMPLES, context + 1]``."""
    return torch.from_numpy(sampler(seed).batch(number * SAMPLES, (0, 1), "", 0, 0, SAMPLES))


class ReadingPeer(PipelinePeer):
    """A peer of a pipeline that reads text."""

    def __init__(self, case: Case, plan: PipelinePlan, peer: SimulatedPeer, stage: int | None, _: float) -> None:
        super().__init__(peer, plan, stage)
        self._case = case

    def _payloads(self, number: int) -> tuple[Payload, Payload]:
        batch = tokens(self._case.seed, number)
        return pack(batch[:, :-1], self._case.activations), pack(batch[:, 1:], self._case.activations)


def train(case: Case) -> list[float]:
    """The training loss of each step."""
    torch.set_num_threads(1)
    if case.codec == ALONE:
        return train_alone(case)
    losses: list[float] = []

    async def main(network: SimulatedNetwork) -> None:
        manifest = case.manifest
        plan = PipelinePlan(manifest)
        pipeline = Pipeline(network, manifest, make=partial(ReadingPeer, case, plan))
        for stage in range(case.stages):
            await pipeline.add(f"host{stage}", stage)
        await until(lambda: all(peer.status == "training" for peer in pipeline.hosts))
        trainer = await pipeline.add("trainer", None)
        for step in range(case.steps):
            numbers = range(MICROBATCHES * step, MICROBATCHES * (step + 1))
            accepted = await pipeline.feed(trainer, numbers, at_once=MICROBATCHES)
            losses.append(sum(one.loss for one in accepted.values() if one is not None) / MICROBATCHES)
            assert all(accepted.values())
            await until(
                lambda ends=step + 1: all(  # type: ignore[misc]
                    peer.hosted is not None and peer.hosted.host.ledger.round == ends for peer in pipeline.hosts
                )
            )
        await pipeline.close()

    simulate(main, case.seed)
    return losses


def train_alone(case: Case) -> list[float]:
    """The same in plain torch."""
    spec, model = case.manifest.training, build_model(case.manifest.model)
    optimizer = torch.optim.AdamW(
        model.parameters(), spec.learning_rate, betas=(0.9, 0.95), weight_decay=spec.weight_decay
    )
    losses = []
    for step in range(case.steps):
        batch = torch.cat([tokens(case.seed, MICROBATCHES * step + number) for number in range(MICROBATCHES)])
        optimizer.param_groups[0]["lr"] = spec.learning_rate * learning_rate_factor(step, warmup_steps=WARMUP_STEPS)
        optimizer.zero_grad()
        loss = functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())
        torch.autograd.backward(loss)
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses


def compare(
    seeds: Sequence[int] = (1, 2, 3), steps: int = 200, codecs: Sequence[str] = CODECS, workers: int = 2
) -> Section:
    """Train with all of them, and compare with fp32."""
    codecs = ("fp32", *(codec for codec in codecs if codec != "fp32"))
    cases = [Case(ALONE, 1, seed, steps) for seed in seeds]
    cases += [Case(codec, stages, seed, steps) for stages in STAGES for codec in codecs for seed in seeds]
    sampler(seeds[0])  # The text is read once, before processes are made.
    found: dict[tuple[str, int, int], list[float]] = {}
    with ProcessPoolExecutor(workers, multiprocessing.get_context("fork")) as pool:
        for case, losses in zip(cases, pool.map(train, cases), strict=True):
            progress(f"{case.codec}, {case.stages} stages, seed {case.seed}: {_end(losses):.4f}")
            found[case.codec, case.stages, case.seed] = losses
    section = Section(
        f"Training loss of the last {LAST} of {steps} steps, {len(seeds)} seeds, by what takes few bits",
        ("stages, codec", "loss", "of fp32, median", "least", "most", "of one process"),
        results={
            "losses": [{"codec": c, "stages": s, "seed": seed, "losses": one} for (c, s, seed), one in found.items()]
        },
    )
    alone = [_end(found[ALONE, 1, seed]) for seed in seeds]
    section.rows.append((ALONE, f"{Measured(tuple(alone)).median:.4f}", "", "", "", ""))
    for stages in STAGES:
        exact = [_end(found["fp32", stages, seed]) for seed in seeds]
        for codec in codecs:
            ends = [_end(found[codec, stages, seed]) for seed in seeds]
            ratio = Measured(tuple(one / other for one, other in zip(ends, exact, strict=True)))
            of_alone = Measured(tuple(one / other for one, other in zip(ends, alone, strict=True)))
            section.rows.append(
                (
                    f"{stages}, {codec}", f"{Measured(tuple(ends)).median:.4f}", f"{ratio.median:.4f}",
                    f"{min(ratio.values):.4f}", f"{max(ratio.values):.4f}", f"{of_alone.median:.4f}",
                )
            )  # fmt: skip
            if codec != "fp32":
                goal = GOAL if codec in ("int8", CODECS[-1]) else None
                worst = max(ratio.values)
                section.findings.append(Finding(f"most loss of 3 seeds, {codec}, {stages} stages", worst, "fp32", goal))
    return section


def _end(losses: Sequence[float]) -> float:
    return sum(losses[-LAST:]) / len(losses[-LAST:])
