"""A stage host's contribution to averaging; see `p2ptrain.training.sync.replica.Contribution`.

A host averages its stage's own unit and, with tied embeddings, the unit shared with another stage
(`p2ptrain.pipeline.plan.Unit`). Each unit has its own `StageWork` over its parameters and their part of the gradient
sum.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Literal

import torch
from torch import nn

from p2ptrain.averaging.protocol.certificate import genesis
from p2ptrain.manifest import TrainingSpec
from p2ptrain.pipeline.stage.gradients import GradientSum
from p2ptrain.training.state.adamw import AdamWStep
from p2ptrain.training.state.layout import Fragment, Layout
from p2ptrain.training.state.shared_state import SharedState


class Part(nn.Module):
    """Some of a stage's parameters; ``names`` maps names here to names in the stage.

    A part without parameters has a single zero, so that its unit has rounds.
    """

    def __init__(self, stage: nn.Module, names: Mapping[str, str]) -> None:
        super().__init__()
        parameters = dict(stage.named_parameters())
        for name, local in names.items():
            self.register_parameter(name.replace(".", "/"), parameters[local])  # Torch allows no dots.
        if not names:
            self.register_parameter("nothing", nn.Parameter(torch.zeros(1, dtype=torch.float32)))


def unit_state(part: Part, spec: TrainingSpec, swarm: bytes, moments: Literal["fp32", "8bit"] = "fp32") -> SharedState:
    """Return the initial shared state of a unit's hosts; ``swarm`` is the unit's swarm id, 32 bytes.

    Gradients are clipped by the norm of this unit alone.
    """
    layout = Layout.from_module(part)
    state = SharedState(part, layout, AdamWStep(layout, spec, moments))
    state.head = genesis(swarm, state.tree().root)
    return state


class StageWork:
    """Implements `p2ptrain.training.sync.replica.Contribution` for one unit of a stage.

    ``tokens`` and ``samples`` count uncontributed work. ``lock`` is held while parameters or the sum ``total`` change.
    """

    def __init__(
        self, part: Part, state: SharedState, total: GradientSum, lock: AbstractContextManager[object], scale: float
    ) -> None:
        self.tokens = 0
        self.samples = 0
        self._part = part
        self._state = state
        self._lock = lock
        self.model_lock = nullcontext()  # Only passes touch the stage, and ``lock`` excludes them.
        self._scale = scale
        names = dict(part.named_parameters())
        found = [(entry.offset, total.places.get(id(names[entry.name]))) for entry in state.layout.parameter_entries]
        self._sums = [(offset, total.values[place]) for offset, place in found if place is not None]

    def add(self, samples: int, tokens: int) -> None:
        """Count samples whose gradients are in the sum, to be contributed."""
        self.samples += samples
        self.tokens += tokens

    def tokens_of(self, fragment: Fragment) -> int:
        """See `Contribution.tokens_of`."""
        return self.tokens

    def collect(self, out: torch.Tensor, fragment: Fragment | None = None) -> None:
        """Write the mean gradient of the uncontributed tokens to ``out``."""
        out.zero_()
        with self._lock:
            for offset, part in self._sums:
                torch.mul(part, self._scale / max(self.tokens, 1), out=out[offset : offset + len(part)])

    def adopt(
        self,
        contributed: bool,
        carry: torch.Tensor | None,
        fragment: Fragment | None = None,
        counted: tuple[int, int] = (0, 0),
    ) -> None:
        """See `Contribution.adopt`."""
        with self._lock:
            self._state.layout.write(self._state.vector, self._part)
            if contributed or carry is None:
                self.tokens = self.samples = 0
                for _, part in self._sums:
                    part.zero_()
            else:
                for offset, part in self._sums:
                    torch.mul(carry[offset : offset + len(part)], max(self.tokens, 1) / self._scale, out=part)

    def is_adopted(self) -> bool:
        """True if the live parameters are those of the state."""
        live = self._state.layout.new_vector()
        self._state.layout.read(self._part, live)
        return torch.equal(live, self._state.vector)

    def reset(self) -> None:
        """See `Contribution.reset`."""
        self.adopt(False, None)
