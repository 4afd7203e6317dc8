"""The step that every member of a group takes on the averaged contribution, bit for bit the same.

`NesterovStep`, `AdamStep` and `AverageStep` (``every`` > 1) move the master vector by the mean pseudo-gradient. They
use single IEEE operations only, each rounded to fp32 by itself: torch's fused forms (``alpha=``, ``lerp``, ``addcmul``)
may or may not become fused multiply-adds, depending on the CPU. `GradientStep` (``every = 1``) lets a torch optimizer
step on the mean gradient; its bits are as reproducible as that optimizer's kernels: equal on machines of one kind.
`p2ptrain.training.state.adamw.AdamWStep` does the same for the manifest's own model, with equal bits on all machines.

The buffers' part of the mean is a difference from the vector too, and is subtracted as it is. A step may move one
fragment of the vector alone (`p2ptrain.training.state.fragments`); then ``mean`` holds the values of that fragment.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor, nn

from p2ptrain.errors import IncompatibleError
from p2ptrain.training.gradients import is_sparse
from p2ptrain.training.learning_rate import LearningRates
from p2ptrain.training.state.digest import NamedTensors
from p2ptrain.training.state.fragments import Fragment
from p2ptrain.training.state.layout import Layout

BLOCK_VALUES = 1 << 18
"""Values that are worked on at a time: temporaries stay within 1 MiB."""

_PREFIX = "optim."


class Stepper(ABC):
    """An optimizer that all members of a group share."""

    @abstractmethod
    def state_tensors(self) -> list[tuple[str, Tensor]]:
        """Its state, fp32 on the CPU, in an order that is the same on all peers; the live tensors where possible.

        Which ones there are may change from round to round (a torch optimizer has none before its first step).
        """

    @abstractmethod
    def load_state_tensors(self, tensors: NamedTensors) -> None:
        """Take over the `state_tensors` of another peer, all or none.

        Raises:
            IncompatibleError: They are not the state of this optimizer for this layout.
        """

    @abstractmethod
    def step(self, vector: Tensor, mean: Tensor, round_: int, fragment: Fragment | None = None) -> None:
        """Move ``vector`` by ``mean`` in place.

        Args:
            vector: The master copy; fp32, ``[num_values]``, CPU.
            mean: The averaged contribution: pseudo-gradients or gradients, then buffer differences; fp32,
                ``[fragment.num_values]``; not changed.
            round_: The round that ``mean`` is of. A learning rate that changes is a function of it, so that a peer that
                replays the round later takes the same step.
            fragment: Whose values it holds; None for the whole vector.
        """

    def adopt(self, vector: Tensor) -> None:  # noqa: B027 - most steppers keep nothing of it
        """Take note that ``vector`` was changed by something else than `step`; fp32, ``[num_values]``, CPU."""


class NesterovStep(Stepper):
    """SGD with Nesterov momentum on pseudo-gradients: the outer optimizer of DiLoCo (arXiv 2311.08105, algorithm 1).

    In the form of `torch.optim.SGD`, for the mean pseudo-gradient ``mean``::

        velocity = momentum * velocity + mean
        vector   = vector - learning_rate * (mean + momentum * velocity)
    """

    def __init__(self, layout: Layout, learning_rate: float, momentum: float) -> None:
        self._learning_rate = learning_rate
        self._momentum = momentum
        self._layout = layout
        self._velocity = torch.zeros(layout.num_parameters, dtype=torch.float32)

    def state_tensors(self) -> list[tuple[str, Tensor]]:
        """One tensor: the momentum, ``[num_parameters]``."""
        return [("outer.momentum", self._velocity)]

    def load_state_tensors(self, tensors: NamedTensors) -> None:
        """See `Stepper.load_state_tensors`."""
        if [name for name, _ in tensors] != ["outer.momentum"] or tensors[0][1].shape != self._velocity.shape:
            raise IncompatibleError("the outer optimizer's state does not fit: all peers need the same outer optimizer")
        self._velocity.copy_(tensors[0][1])

    @torch.no_grad()
    def step(self, vector: Tensor, mean: Tensor, round_: int, fragment: Fragment | None = None) -> None:
        """See `Stepper.step`."""
        fragment = fragment or whole(self._layout)
        update = torch.empty(min(BLOCK_VALUES, self._layout.num_parameters), dtype=torch.float32)
        for block, source in _blocks(fragment):
            part = update[: block.stop - block.start]
            velocity, gradient = self._velocity[block], mean[source]
            velocity.mul_(self._momentum)
            velocity.add_(gradient)
            torch.mul(velocity, self._momentum, out=part)
            part.add_(gradient)
            part.mul_(self._learning_rate)
            vector[block].sub_(part)
        step_buffers(self._layout, vector, mean, fragment)


class AdamStep(Stepper):
    """Adam on pseudo-gradients: FedAdam (Reddi et al., arXiv 2003.00295, algorithm 2), with Adam's bias correction.

    In the form of `torch.optim.Adam` (Kingma and Ba, arXiv 1412.6980, algorithm 1), for the mean pseudo-gradient
    ``mean`` and the number ``t`` of steps taken, this one included::

        first  = beta1 * first + (1 - beta1) * mean
        second = beta2 * second + (1 - beta2) * mean * mean
        vector = vector - learning_rate / (1 - beta1**t) * first / (sqrt(second) / sqrt(1 - beta2**t) + epsilon)

    FedAdam leaves the correction out and starts ``second`` above zero instead. What depends on ``t`` alone is computed
    in fp64 and rounded once. IEEE square roots and divisions are correctly rounded, and so are NumPy's roots; torch
    takes its own from MKL where it can, whose last bit may differ.
    """

    def __init__(
        self,
        layout: Layout,
        learning_rate: float,
        beta1: float,
        beta2: float,
        epsilon: float,
        num_fragments: int = 1,
    ) -> None:
        self._learning_rate = learning_rate
        self._beta1, self._beta2, self._epsilon = beta1, beta2, epsilon
        self._layout = layout
        self._first = torch.zeros(layout.num_parameters, dtype=torch.float32)
        self._second = torch.zeros(layout.num_parameters, dtype=torch.float32)
        self._steps = torch.zeros(num_fragments, dtype=torch.float32)

    def state_tensors(self) -> list[tuple[str, Tensor]]:
        """Both moments, ``[num_parameters]``, and each fragment's number of steps (exact up to 2**24)."""
        return [("outer.first", self._first), ("outer.second", self._second), ("outer.steps", self._steps)]

    def load_state_tensors(self, tensors: NamedTensors) -> None:
        """See `Stepper.load_state_tensors`."""
        own = self.state_tensors()
        if [(name, tensor.shape) for name, tensor in tensors] != [(name, tensor.shape) for name, tensor in own]:
            raise IncompatibleError("the outer optimizer's state does not fit: all peers need the same outer optimizer")
        if not bool((tensors[2][1] >= 0).all()) or not bool((tensors[1][1] >= 0).all()):
            raise IncompatibleError("the outer optimizer's state is out of range: ask another peer for it")
        for (_, mine), (_, theirs) in zip(own, tensors, strict=True):
            mine.copy_(theirs)

    @torch.no_grad()
    def step(self, vector: Tensor, mean: Tensor, round_: int, fragment: Fragment | None = None) -> None:
        """See `Stepper.step`."""
        fragment = fragment or whole(self._layout)
        self._steps[fragment.index].add_(1.0)
        taken = int(self._steps[fragment.index])
        rate = self._learning_rate / (1.0 - power(self._beta1, taken))
        correction = math.sqrt(1.0 - power(self._beta2, taken))
        size = min(BLOCK_VALUES, self._layout.num_parameters)
        update, scale = torch.empty(size, dtype=torch.float32), torch.empty(size, dtype=torch.float32)
        for block, source in _blocks(fragment):
            count = block.stop - block.start
            part, divisor, gradient = update[:count], scale[:count], mean[source]
            torch.mul(gradient, 1.0 - self._beta1, out=part)
            self._first[block].mul_(self._beta1).add_(part)
            torch.mul(gradient, gradient, out=part)
            part.mul_(1.0 - self._beta2)
            self._second[block].mul_(self._beta2).add_(part)
            np.sqrt(self._second[block].numpy(), out=divisor.numpy())
            divisor.div_(correction).add_(self._epsilon)
            torch.mul(self._first[block], rate, out=part)
            vector[block].sub_(part.div_(divisor))
        step_buffers(self._layout, vector, mean, fragment)


def power(base: float, exponent: int) -> float:
    """``base ** exponent`` in fp64, from multiplications alone: C libraries' ``pow`` differ in the last bit."""
    result = 1.0
    while exponent:
        if exponent & 1:
            result *= base
        base *= base
        exponent >>= 1
    return result


class AverageStep(Stepper):
    """Plain steps on pseudo-gradients, ``vector - learning_rate * mean``; at rate 1, FedAvg (arXiv 1602.05629)."""

    def __init__(self, layout: Layout, learning_rate: float) -> None:
        self._learning_rate = learning_rate
        self._layout = layout

    def state_tensors(self) -> list[tuple[str, Tensor]]:
        """None: there is no state."""
        return []

    def load_state_tensors(self, tensors: NamedTensors) -> None:
        """See `Stepper.load_state_tensors`."""
        if tensors:
            raise IncompatibleError("the outer optimizer has no state: all peers need the same outer optimizer")

    @torch.no_grad()
    def step(self, vector: Tensor, mean: Tensor, round_: int, fragment: Fragment | None = None) -> None:
        """See `Stepper.step`."""
        fragment = fragment or whole(self._layout)
        update = torch.empty(min(BLOCK_VALUES, self._layout.num_parameters), dtype=torch.float32)
        for block, source in _blocks(fragment):
            part = update[: block.stop - block.start]
            torch.mul(mean[source], self._learning_rate, out=part)
            vector[block].sub_(part)
        step_buffers(self._layout, vector, mean, fragment)


class GradientStep(Stepper):
    """One step of a torch optimizer on the mean gradient: the same as one step on one large batch (``every = 1``).

    The live parameters must hold the vector's values; afterwards they, and the vector, hold the new ones, and their
    ``.grad`` is the clipped mean. Learning rates and other settings are no shared state: all peers give the same ones,
    and the same schedule by round.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        module: nn.Module,
        layout: Layout,
        clip_norm: float = 0.0,
        rates: LearningRates | None = None,
    ) -> None:
        """Wrap ``optimizer``, which steps the parameters of ``module``.

        Args:
            optimizer: Any torch optimizer whose state is tensors and numbers, one set a parameter.
            module: The live module.
            layout: Its layout.
            clip_norm: Limit of the mean gradient's norm over all parameters; 0 for none.
            rates: The optimizer's learning rates by round; None for constant ones.

        Raises:
            ValueError: The optimizer holds a parameter that is not the module's.
        """
        self._optimizer = optimizer
        self._module = module
        self._layout = layout
        self._clip_norm = clip_norm
        self._rates = rates or LearningRates(optimizer)
        owned = {id(parameter) for parameter in module.parameters()}
        if any(id(p) not in owned for group in optimizer.param_groups for p in group["params"]):
            raise ValueError("the optimizer has parameters that are not the module's")

    def state_tensors(self) -> list[tuple[str, Tensor]]:
        """The optimizer's state as ``optim.<parameter>.<key>``, by order of the layout and then by key."""
        tensors: list[tuple[str, Tensor]] = []
        for entry, parameter in self._layout.parameters_of(self._module):
            state = self._optimizer.state.get(parameter) or {}
            for key in sorted(state):
                value = state[key]
                if value is None:
                    continue
                if isinstance(value, Tensor):
                    shared = value.detach().to("cpu", torch.float32).contiguous()
                elif isinstance(value, (bool, int, float)):
                    key = f"{key}:{type(value).__name__}"
                    shared = torch.tensor(float(value), dtype=torch.float32)
                else:
                    raise IncompatibleError(
                        f"{type(self._optimizer).__name__} keeps {key!r} of type {type(value).__name__}, which peers"
                        " cannot share: choose an optimizer whose state is tensors and numbers"
                    )
                tensors.append((f"{_PREFIX}{entry.name}.{key}", shared))
        return tensors

    def load_state_tensors(self, tensors: NamedTensors) -> None:
        """See `Stepper.load_state_tensors`; also for an optimizer that has not stepped yet."""
        entries = {entry.name: (entry, parameter) for entry, parameter in self._layout.parameters_of(self._module)}
        places = self._places()
        state: dict[int, dict[str, Tensor | bool | int | float]] = {}
        for name, tensor in tensors:
            owner, _, key = name.removeprefix(_PREFIX).rpartition(".")
            if not name.startswith(_PREFIX) or owner not in entries:
                raise IncompatibleError(f"optimizer state {name[:100]!r} belongs to no parameter of this model")
            entry, parameter = entries[owner]
            if id(parameter) not in places:
                raise IncompatibleError(
                    f"optimizer state {name[:100]!r} belongs to a parameter that is not optimized here"
                )
            key, _, kind = key.partition(":")
            if tensor.dtype != torch.float32 or tensor.numel() > max(1, entry.num_values):
                raise IncompatibleError(f"optimizer state {name[:100]!r} does not fit its parameter")
            number = {"bool": bool, "int": int, "float": float}.get(kind)
            if kind and (number is None or tensor.numel() != 1 or not math.isfinite(float(tensor))):
                raise IncompatibleError(f"optimizer state {name[:100]!r} is not a number")
            state.setdefault(places[id(parameter)], {})[key] = (
                tensor.clone() if number is None else number(float(tensor))
            )
        self._load(state)

    @torch.no_grad()
    def step(self, vector: Tensor, mean: Tensor, round_: int, fragment: Fragment | None = None) -> None:
        """See `Stepper.step`; ``fragment`` is the whole vector."""
        parameters = self._layout.parameters_of(self._module)
        scale = clip_scale(mean, self._layout.num_parameters, self._clip_norm)
        for entry, parameter in parameters:
            gradient = mean[entry.offset : entry.end].view(entry.shape)
            if parameter.grad is None or is_sparse(parameter.grad):
                parameter.grad = torch.empty_like(parameter)
            parameter.grad.copy_(gradient)
            if scale != 1.0:
                parameter.grad.mul_(scale)
        self._rates.set(round_)
        with torch.enable_grad():
            self._optimizer.step()
        for entry, parameter in parameters:
            vector[entry.offset : entry.end].view(entry.shape).copy_(parameter)
        step_buffers(self._layout, vector, mean, fragment or whole(self._layout))
        self._layout.write(vector, self._module, kind="buffer")

    def adopt(self, vector: Tensor) -> None:
        """See `Stepper.adopt`: the torch optimizer steps the live parameters."""
        self._layout.write(vector, self._module, kind="param")

    def _load(self, state: dict[int, dict[str, Tensor | bool | int | float]]) -> None:
        """Let torch place ``state`` on the right devices, but keep the containers: wrappers refer to them."""
        optimizer = self._optimizer
        groups, container = optimizer.param_groups, optimizer.state
        whole = optimizer.state_dict()
        whole["state"] = state
        optimizer.load_state_dict(whole)
        loaded = dict(optimizer.state)
        container.clear()
        container.update(loaded)
        optimizer.state = container
        optimizer.param_groups = groups

    def _places(self) -> dict[int, int]:
        """The index that the optimizer's ``state_dict`` uses for each parameter, by identity."""
        order = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
        return {id(parameter): place for place, parameter in enumerate(order)}


def clip_scale(mean: Tensor, num_parameters: int, clip_norm: float) -> float:
    """What to multiply gradients with, as `torch.nn.utils.clip_grad_norm_`; 1 when they are short enough.

    Args:
        mean: The gradient, and what follows it: fp32, ``[at least num_parameters]``.
        num_parameters: How much of it is the gradient.
        clip_norm: The limit of its norm; 0 for none.
    """
    if not clip_norm:
        return 1.0
    # In fp64, so that the order of summation, which differs between CPUs, does not show in fp32.
    squares = 0.0
    for start in range(0, num_parameters, BLOCK_VALUES):
        block = mean[start : min(start + BLOCK_VALUES, num_parameters)]
        squares += float(block.double().square_().sum())
    return min(1.0, clip_norm / (math.sqrt(squares) + 1e-6))


def whole(layout: Layout) -> Fragment:
    """The whole vector as one fragment."""
    return Fragment(0, layout.entries)


def _blocks(fragment: Fragment) -> Iterator[tuple[slice, slice]]:
    """The fragment's parameters, at most `BLOCK_VALUES` at a time: where in the vector, and where in the fragment."""
    for start, offset, count in fragment.parameter_spans:
        for done in range(0, count, BLOCK_VALUES):
            size = min(BLOCK_VALUES, count - done)
            yield slice(start + done, start + done + size), slice(offset + done, offset + done + size)


def step_buffers(layout: Layout, vector: Tensor, mean: Tensor, fragment: Fragment) -> None:
    """Subtract the buffers' part of ``mean`` from ``vector``, and round integer buffers."""
    for start, offset, count in fragment.buffer_spans:
        vector[start : start + count].sub_(mean[offset : offset + count])
    layout.round_integers(vector)
