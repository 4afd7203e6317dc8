"""Distils a draft: a model of few layers that guesses the next tokens of a served one.

The draft begins with the served model's embeddings, head, first layers and last ones. Embeddings and head stay; layers
and final norm learn to draw as the served model does, by the divergence of its distributions (Hinton et al.,
*Distilling the Knowledge in a Neural Network*, 2015). The step is that of a swarm's stages.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch.nn import functional

from p2ptrain.errors import DivergedError
from p2ptrain.manifest import ModelSpec, TrainingSpec
from p2ptrain.models import build_model, model_blocks
from p2ptrain.models.stage import LayerCache, Stage, StageContext
from p2ptrain.training.data.corpus import Tokens
from p2ptrain.training.data.windows import Sampler
from p2ptrain.training.state.adamw import AdamWStep
from p2ptrain.training.state.layout import Layout

WINDOW = 128
"""Tokens of a sample."""
HELD_OUT = 32
"""Samples to measure on."""
SAMPLED, REUSE, KEPT = 32, 4, 2048
"""Samples that the served model writes at a time, readings of each in the mean, and samples that are kept."""
MEASURING = 10.0
"""Time between measurements, in multiples of the time that one takes."""
LEARNING_RATE, WARMUP_SHARE = 1e-3, 20
"""Peak rate, and the part of all steps that warms up: one in so many."""

Read = Callable[[int], torch.Tensor]
"""Returns so many samples, ``[samples, tokens]``."""


class Progress(NamedTuple):
    """One measurement.

    Attributes:
        loss: Mean divergence since the measurement before, in nats a token; 0 at the first one.
        acceptance: Share of held-out positions at which draft and served model have the same likeliest token.
        tokens: Tokens trained on.
    """

    step: int
    loss: float
    acceptance: float
    tokens: int


def draft_spec(spec: ModelSpec, layers: int) -> ModelSpec:
    return spec.model_copy(update={"layers": layers, "weights": "", "weight_digests": []})


def initial_draft(served: Stage, spec: ModelSpec, layers: int) -> Stage:
    """Return a draft with parameters of the whole served model; the first layers are one more than the last ones."""
    own, theirs = model_blocks(draft_spec(spec, layers)), model_blocks(spec)
    first = len(own) - 1 - layers // 2  # Embeddings included.
    chosen = [*theirs[:first], *theirs[len(theirs) - len(own) + first :]]
    state = served.state_dict()
    names = [
        pair for mine, other in zip(own, chosen, strict=True) for pair in zip(mine.shapes, other.shapes, strict=True)
    ]
    draft = build_model(draft_spec(spec, layers))
    draft.load_state_dict({name: state[original] for name, original in names})
    return draft


def freeze_ends(draft: Stage, spec: ModelSpec) -> None:
    """Leave embeddings and head out of the training: they are the served model's, and most of a draft's values."""
    parameters, blocks = dict(draft.named_parameters()), model_blocks(spec)
    for block in (blocks[0], blocks[-1]):
        for name, shape in block.shapes.items():
            parameters[name].requires_grad_(len(shape) == 1)


def read_text(tokens: Tokens, seed: int) -> Read:
    """Return samples of a text, in passes of an order by ``seed``; raise `ConfigError` if it is shorter than one."""
    sampler, position = Sampler(tokens, WINDOW, seed), 0

    def read(count: int) -> torch.Tensor:
        nonlocal position
        found = sampler.batch(position, (0, 1), "", 0, 0, count)
        position += count
        return torch.from_numpy(found[:, :-1])

    return read


def read_samples(served: Stage, vocabulary: int, seed: int) -> Read:
    """Return samples that the served model writes, each after a random token, and more of them again and again."""
    generator = torch.Generator().manual_seed(seed)
    kept, left = torch.empty(0, WINDOW, dtype=torch.int64), 0

    def read(count: int) -> torch.Tensor:
        nonlocal kept, left
        while left < count:
            written = write(served, torch.randint(vocabulary, (SAMPLED, 1), generator=generator), WINDOW, generator)
            kept, left = torch.cat([kept, written])[-KEPT:], left + REUSE * SAMPLED
        left -= count
        return kept[torch.randint(len(kept), (count,), generator=generator)]

    return read


@torch.inference_mode()
def write(model: Stage, ids: torch.Tensor, length: int, generator: torch.Generator) -> torch.Tensor:
    """Return ``[rows, length]``: ids ``[rows, 1]``, and tokens drawn after them."""
    caches: defaultdict[str, LayerCache] = defaultdict(LayerCache)
    for position in range(length - 1):
        logits = model(ids[:, -1:].to(device_of(model)), StageContext(position, caches))[:, -1]
        drawn = torch.multinomial(functional.softmax(logits.float().cpu(), dim=-1), 1, generator=generator)
        ids = torch.cat([ids, drawn], dim=1)
    return ids.clone()


@torch.inference_mode()
def likeliest(model: Stage, windows: torch.Tensor) -> torch.Tensor:
    """Return the likeliest next token at each position of some windows, as they are."""
    return torch.cat([model(part.to(device_of(model))).argmax(-1).cpu() for part in torch.split(windows, 4)])


def is_faster_in_half(model: Stage, windows: torch.Tensor) -> bool:
    """True if this machine computes products in bf16 faster than in fp32, by the second time of each."""
    seconds: dict[bool, float] = {}
    for is_half in (False, True) * 2:
        began = time.monotonic()
        with torch.autocast(device_of(model).type, torch.bfloat16, enabled=is_half):
            likeliest(model, windows)
        seconds[is_half] = time.monotonic() - began
    return seconds[True] < seconds[False]


def device_of(model: Stage) -> torch.device:
    return next(model.parameters()).device


class Distillation:
    """Trains a draft, whose trainable parameters it changes in place."""

    def __init__(self, served: Stage, draft: Stage, steps: int) -> None:
        self._served, self._draft, self._steps = served.eval().requires_grad_(False), draft, steps
        warmup = min(-(-steps // WARMUP_SHARE), steps - 1)
        training = TrainingSpec(
            every=1, learning_rate=LEARNING_RATE, warmup_steps=warmup, schedule="cosine", rounds=steps,
        )  # fmt: skip
        self._layout = Layout.from_module(draft)
        self._optimizer = AdamWStep(self._layout, training)
        self._vector, self._gradient = self._layout.new_vector(), self._layout.new_vector()
        self._layout.read(draft, self._vector)
        self._is_half = False

    def step(self, windows: torch.Tensor, at: int) -> float:
        """Take one step at the rate of step ``at``; return the divergence, the mean over all positions.

        Raises `DivergedError` if the divergence is not finite.
        """
        windows = windows.to(device_of(self._draft))
        with torch.autocast(windows.device.type, torch.bfloat16, enabled=self._is_half):
            with torch.no_grad():
                wanted = functional.log_softmax(self._served(windows).float().flatten(0, 1), dim=-1)
            found = functional.log_softmax(self._draft(windows).float().flatten(0, 1), dim=-1)
        loss = functional.kl_div(found, wanted, reduction="batchmean", log_target=True)
        if not bool(loss.isfinite()):
            raise DivergedError("the draft's values are not finite any more: begin again with another --seed")
        self._draft.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        for entry, parameter in self._layout.parameters_of(self._draft):
            assert parameter.grad is not None
            self._gradient[entry.offset : entry.end] = parameter.grad.flatten()
        self._optimizer.step(self._vector, self._gradient, at)
        self._layout.write(self._vector, self._draft)
        return float(loss.detach())

    def run(
        self, read: Read, held_out: torch.Tensor, batch: int, seconds: float, every_seconds: float
    ) -> Iterator[Progress]:
        """Train; yield a measurement at the start, each ``every_seconds`` or later if it takes long, and at the end.

        The rate follows the steps, or the time if that passes sooner; it ends after ``seconds``, 0 for no such limit.
        """
        self._is_half = is_faster_in_half(self._served, held_out[:4])
        wanted, began = likeliest(self._served, held_out), time.monotonic()
        yield Progress(0, 0.0, self._acceptance(held_out, wanted), 0)
        told, losses, at, step = time.monotonic(), list[float](), 0, 0
        pause = max(every_seconds, MEASURING * (told - began))
        while at < self._steps:
            losses.append(self.step(read(batch), at))
            step, now = step + 1, time.monotonic()
            passed = int(self._steps * (now - began) / seconds) if seconds else 0
            at = max(at + 1, passed)
            if at >= self._steps or now - told >= pause:
                acceptance = self._acceptance(held_out, wanted)
                yield Progress(step, sum(losses) / len(losses), acceptance, step * batch * held_out.shape[1])
                told, losses = time.monotonic(), []

    def _acceptance(self, held_out: torch.Tensor, wanted: torch.Tensor) -> float:
        return float((likeliest(self._draft, held_out) == wanted).float().mean())
