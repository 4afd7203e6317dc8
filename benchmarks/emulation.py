"""A swarm without a network: some trainers in one process, synchronised with the product's own arithmetic.

What a peer contributes, encodes, keeps back, averages, applies and mixes is done by the code that does it in a swarm
(`LocalContribution`, codecs, `ErrorFeedback`, `Fragments`, outer steps). Streams, deadlines and failures are left out;
all contribute to every round, with equal weight.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from itertools import pairwise
from typing import Any

import torch

from p2ptrain.averaging.allreduce.bandwidth import split_shares
from p2ptrain.averaging.vector.error_feedback import Encoded, ErrorFeedback
from p2ptrain.codecs import Codec, PartList, get_codec
from p2ptrain.manifest import Manifest, ModelSpec, TrainingSpec
from p2ptrain.models import build_model
from p2ptrain.training.data.corpus import Corpus
from p2ptrain.training.data.windows import Sampler
from p2ptrain.training.evaluate import held_out_loss, language_model_loss
from p2ptrain.training.learning_rate import Shape, WrappedOptimizer, learning_rate_factor
from p2ptrain.training.local_update import LocalContribution
from p2ptrain.training.state.initial_state import initial_state
from p2ptrain.training.state.layout import Fragment

CURVE_POINTS = 10
CURVE_WINDOWS, FINAL_WINDOWS = 64, 512


@dataclass(frozen=True)
class Method:
    """How the trainers of one run synchronise.

    Attributes:
        name: For the table.
        training: What differs from `TrainingSpec`'s defaults.
        codec: How contributions are encoded, and means, unless they are gathered.
        gathered: Whether an owner returns the list of the parts rather than their mean, as under `topk`.
        feedback_decay: How much of what the codec drops is kept for the next round: 0 for no error feedback.
        workers: How many trainers.
        schedule: Of the inner learning rate, after a warm-up.
    """

    name: str
    training: dict[str, Any] = field(default_factory=dict)
    codec: str = "fp32"
    gathered: bool = False
    feedback_decay: float = 1.0
    workers: int = 4
    schedule: Shape = "cosine"


@dataclass(frozen=True)
class Setting:
    """What all methods have in common.

    Attributes:
        model: The model.
        steps: Local batches of each of ``workers`` trainers; a lone one takes as many more.
        local_batch: Samples in each.
        workers: Trainers of a swarm.
    """

    model: ModelSpec
    steps: int
    local_batch: int
    workers: int = 4


@dataclass(frozen=True)
class Run:
    """What came out of one run.

    Attributes:
        curve: (steps, held-out loss in nats per token) as training went on.
        loss: Held-out loss of the shared state at the end, on more text.
        tokens: Of all trainers together.
        bytes_per_round: What each trainer sends in a round, on average.
        rounds: How many there were.
        step_seconds: CPU time of a local batch, the median.
    """

    method: str
    seed: int
    curve: list[tuple[int, float]]
    loss: float
    tokens: int
    bytes_per_round: float
    rounds: int
    step_seconds: float


class Swarm:
    """The trainers of one run, their shared state, and what each keeps for itself."""

    def __init__(
        self, method: Method, setting: Setting, corpus: Corpus, seed: int, beginning: torch.Tensor | None = None
    ) -> None:
        """
        Args:
            method: How its trainers synchronise.
            setting: What they train, and how long.
            corpus: The text.
            seed: Of the order of samples and, without a beginning, of the first parameters.
            beginning: Parameters to start from, as `parameters` gives them.
        """
        self.method, self.setting, self.corpus, self.seed = method, setting, corpus, seed
        self.spec = TrainingSpec.model_validate({"local_batch": setting.local_batch, **method.training})
        model = setting.model.model_copy(update={"initial_seed": seed})
        # With one global batch a step all replicas are equal at any time: one stands for all.
        count = 1 if self.spec.every == 1 else method.workers
        self.modules = [build_model(model) for _ in range(count)]
        if beginning is not None:
            for module in self.modules:
                torch.nn.utils.vector_to_parameters(beginning.clone(), module.parameters())
        self.inner = [
            torch.optim.AdamW(
                module.parameters(), self.spec.learning_rate, betas=(0.9, 0.95), weight_decay=self.spec.weight_decay,
                fused=True,
            )
            for module in self.modules
        ]  # fmt: skip
        manifest = Manifest(model=model, training=self.spec)
        at_a_time = method.workers * self.spec.local_batch
        self.total_steps = setting.steps * setting.workers * setting.local_batch // at_a_time
        schedule = partial(
            learning_rate_factor, warmup_steps=self.total_steps // 20, schedule=method.schedule,
            total_steps=self.total_steps,
        )  # fmt: skip
        wrapped = [WrappedOptimizer(inner, schedule, self.spec.clip_norm) for inner in self.inner]
        self.rates = [each.rates for each in wrapped]
        self.state = initial_state(self.modules[0], wrapped[0], manifest, manifest.digest)
        mixing = self.spec.mixing if self.spec.overlap_steps else None
        self.works = [LocalContribution(module, self.state, accumulate=False, mixing=mixing) for module in self.modules]
        self.codec = get_codec(method.codec)
        self.feedbacks = [
            [ErrorFeedback(fragment.num_values, self.codec, method.feedback_decay) for fragment in self.state.fragments]
            for _ in range(method.workers)
        ]
        self.sampler = Sampler(corpus.train, model.context, seed)
        self.sent_bytes = self.rounds = 0
        self.seconds: list[float] = []

    # --- training ---------------------------------------------------------------------------------------------------

    def train(self) -> Run:
        """All steps; what is still to be synchronised at the end is, as when a trainer leaves."""
        curve: list[tuple[int, float]] = []
        flight: tuple[int, Fragment, torch.Tensor, list[tuple[int, int]]] | None = None
        for step in range(1, self.total_steps + 1):
            batches = self._batches(step - 1)
            if self.spec.every == 1:
                self._global_step(batches, step - 1)
            else:
                for worker, batch in enumerate(batches):
                    self._local_step(worker, batch, step - 1)
            if self.spec.every > 1 and step % self.spec.steps_per_round == 0:
                flight = (step, *self._average_work(self.state.fragments.of_round(self.rounds)))
            if flight is not None and step >= flight[0] + self.spec.overlap_steps:
                self._apply(*flight[1:])
                flight = None
            if step % max(1, self.total_steps // CURVE_POINTS) == 0:
                curve.append((step, self._held_out(CURVE_WINDOWS)))
        if flight is not None:
            self._apply(*flight[1:])
        for _ in range(len(self.state.fragments) if self.spec.every > 1 else 0):
            fragment = self.state.fragments.of_round(self.rounds)
            if all(work.tokens_of(fragment) for work in self.works):
                self._apply(*self._average_work(fragment))
        tokens = self.total_steps * self.method.workers * self.spec.local_batch * self.setting.model.context
        return Run(
            self.method.name, self.seed, curve, self._held_out(FINAL_WINDOWS), tokens, self.sent_bytes / self.rounds,
            self.rounds, sorted(self.seconds)[len(self.seconds) // 2],
        )  # fmt: skip

    def parameters(self) -> torch.Tensor:
        """The first replica's parameters in one vector, for another swarm to begin with."""
        return torch.nn.utils.parameters_to_vector(self.modules[0].parameters()).detach()

    def _batches(self, step: int) -> Iterator[torch.Tensor]:
        """Each trainer's samples, ``[local_batch, context + 1]``; all methods read the same, in the same order."""
        count, size = self.method.workers, self.spec.local_batch
        for rank in range(count):
            samples = self.sampler.batch(step * count * size, (rank, count), f"peer{rank}", step, 0, size)
            yield torch.from_numpy(samples)

    def _backward(self, worker: int, samples: torch.Tensor) -> None:
        started = time.thread_time()
        self.inner[worker].zero_grad()
        language_model_loss(self.modules[worker], samples).backward()  # type: ignore[no-untyped-call]
        self.seconds.append(time.thread_time() - started)

    def _local_step(self, worker: int, samples: torch.Tensor, step: int) -> None:
        self.rates[worker].set(step)
        self._backward(worker, samples)
        torch.nn.utils.clip_grad_norm_(self.modules[worker].parameters(), self.spec.clip_norm)
        self.inner[worker].step()
        self.works[worker].add_step(len(samples), samples.shape[0] * self.setting.model.context)

    def _global_step(self, batches: Iterator[torch.Tensor], step: int) -> None:
        (fragment,) = self.state.fragments
        contributions = []
        for batch in batches:
            self._backward(0, batch)
            contribution = torch.zeros(fragment.num_values)
            for entry, parameter in self.state.layout.parameters_of(self.modules[0]):
                assert parameter.grad is not None
                contribution[entry.offset : entry.end] = parameter.grad.reshape(-1)
            contributions.append(contribution)
        self.state.apply(self._mean(contributions, fragment), step, fragment)

    # --- synchronising ----------------------------------------------------------------------------------------------

    def _average_work(self, fragment: Fragment) -> tuple[Fragment, torch.Tensor, list[tuple[int, int]]]:
        counted, contributions = [], []
        for work in self.works:
            counted.append((work.tokens_of(fragment), work.samples))
            contribution = torch.empty(fragment.num_values)
            work.collect(contribution, fragment)
            contributions.append(contribution)
        return fragment, self._mean(contributions, fragment), counted

    def _apply(self, fragment: Fragment, mean: torch.Tensor, counted: list[tuple[int, int]]) -> None:
        self.state.apply(mean, self.rounds, fragment)
        for work, own in zip(self.works, counted, strict=True):
            work.adopt(True, None, fragment, own)

    def _mean(self, contributions: list[torch.Tensor], fragment: Fragment) -> torch.Tensor:
        """What all decode in one round; keeps what was dropped, and counts what each trainer sends."""
        self.rounds += 1
        if len(contributions) == 1:
            return contributions[0]
        kept = [feedbacks[fragment.index] for feedbacks in self.feedbacks]
        for contribution, feedback in zip(contributions, kept, strict=True):
            feedback.add_to(contribution)
        return (self._gather if self.method.gathered else self._butterfly)(contributions, kept)

    def _gather(self, contributions: list[torch.Tensor], kept: list[ErrorFeedback]) -> torch.Tensor:
        count, whole = len(contributions), (0, len(contributions[0]))
        mean = torch.zeros(len(contributions[0]))
        for contribution, feedback in zip(contributions, kept, strict=True):
            encoded = self.codec.encode(contribution)
            self.codec.accumulate_into(encoded, 1 / count, mean)
            feedback.update(
                [Encoded(contribution, whole, {0: encoded}, self.codec, 1.0, 0, None, b"", self.codec, 0.0)]
            )
        shares = split_shares(len(mean), [Fraction(1, count)] * count, self.codec.block_size)
        bounds = (0, *(high for _, high in shares))
        lists = PartList(self.codec, count)
        self.sent_bytes += round(
            (count - 1) / count * (encoded_bytes(self.codec, bounds) + encoded_bytes(lists, bounds))
        )
        return mean

    def _butterfly(self, contributions: list[torch.Tensor], kept: list[ErrorFeedback]) -> torch.Tensor:
        count, codec = len(contributions), self.codec
        mean = torch.empty(len(contributions[0]))
        shares = split_shares(len(mean), [Fraction(1, count)] * count, codec.block_size)
        bounds = (0, *(high for _, high in shares))
        sent: list[dict[int, bytearray]] = [{} for _ in contributions]
        exacts: list[torch.Tensor] = []
        means: list[bytearray] = []
        for owner, (low, high) in enumerate(pairwise(bounds)):
            exacts.append(contributions[owner][low:high] / count)
            for sender in range(count):
                if sender != owner:
                    sent[sender][owner] = codec.encode(contributions[sender][low:high])
                    codec.accumulate_into(sent[sender][owner], 1 / count, exacts[owner])
            means.append(codec.encode(exacts[owner]))
            codec.decode_into(means[owner], mean[low:high])
        for worker, feedback in enumerate(kept):
            exact = [(0, len(exacts[worker]), exacts[worker])]
            encoded = Encoded(
                contributions[worker], bounds, sent[worker], codec, 1.0, worker, exact, means[worker], codec,
                float(count),
            )  # fmt: skip
            feedback.update([encoded])
        self.sent_bytes += round(2 * (count - 1) / count * encoded_bytes(codec, bounds))
        return mean

    def _held_out(self, windows: int) -> float:
        """The shared state's loss; the module that measures it gets its own values back."""
        own = self.state.layout.new_vector()
        self.state.layout.read(self.modules[0], own)
        self.state.layout.write(self.state.vector, self.modules[0])
        context = self.setting.model.context
        loss = held_out_loss(self.modules[0], self.corpus.held_out, context, max_windows=windows, batch_size=64).loss
        self.state.layout.write(own, self.modules[0])
        return loss


def encoded_bytes(codec: Codec | PartList, bounds: tuple[int, ...]) -> int:
    """The size of all shares."""
    return sum(codec.encoded_bytes(high - low) for low, high in pairwise(bounds))
