"""Shared optimizer steps on the averaged contribution, with the same bits on all peers.

With ``every`` > 1 `NesterovStep`, `AdamStep` and `AverageStep` move the master vector by the mean pseudo-gradient.
They use single IEEE operations, each rounded to fp32 by itself. CPUs differ in whether torch's fused forms (``alpha=``,
``lerp``, ``addcmul``) use fused multiply-adds. With ``every = 1`` `GradientStep` lets a torch optimizer step on the
mean gradient; its bits are equal on machines of one kind. `p2ptrain.training.state.adamw.AdamWStep` gives equal bits on
all machines.

The buffers' part of the mean is a difference from the vector, and is subtracted. A step may move one fragment
(`p2ptrain.training.state.layout`); then ``mean`` holds the values of that fragment.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn

from p2ptrain.errors import IncompatibleError
from p2ptrain.training.gradients import is_sparse
from p2ptrain.training.learning_rate import WrappedOptimizer
from p2ptrain.training.state.digest import NamedTensors, TensorSpec, specs_of
from p2ptrain.training.state.layout import Fragment, Layout

BLOCK_VALUES = 1 << 18
"""Values per block of work, so that temporaries stay within 1 MiB."""

MAX_TENSORS_PER_PARAMETER = 8
"""Limit of a torch optimizer's tensors for one parameter, each at most of its size. Such a state is not known in
advance: a download of it is at most nine times the model's size."""

_PREFIX = "optim."
_CHOOSE = "choose an optimizer whose state is tensors and numbers of each parameter"


_NUMBERS: dict[str, Callable[[float], bool | int | float]] = {"bool": bool, "int": int, "float": float}


class Stepper(ABC):
    """An optimizer that all members of a group share."""

    @abstractmethod
    def state_tensors(self) -> list[tuple[str, Tensor]]:
        """Return the state, fp32 on the CPU, in the same order on all peers; live tensors where possible.

        The set may change between rounds: a torch optimizer has no state before its first step.
        """

    @property
    @abstractmethod
    def max_tensors(self) -> int:
        """Limit of the number of `state_tensors`."""

    @abstractmethod
    def check_specs(self, specs: Sequence[TensorSpec]) -> None:
        """Raise `IncompatibleError` unless `state_tensors` can have these specs."""

    @abstractmethod
    def load_state_tensors(self, tensors: NamedTensors) -> None:
        """Load another peer's `state_tensors`, all or none; raise `IncompatibleError` if they do not fit."""

    @abstractmethod
    def step(self, vector: Tensor, mean: Tensor, round_: int, fragment: Fragment | None = None) -> None:
        """Move ``vector`` by ``mean`` in place.

        Args:
            vector: The master copy; fp32, ``[num_values]``, CPU.
            mean: Mean pseudo-gradients or gradients, then buffer differences; fp32, ``[fragment.num_values]``; not
                changed.
            round_: The round of ``mean``; learning rates are a function of it, so a replay takes the same step.
            fragment: The part of the vector; None for all of it.
        """

    def adopt(self, vector: Tensor) -> None:  # noqa: B027 - most steppers keep nothing of it
        """Observe a change of ``vector`` (fp32, ``[num_values]``, CPU) by other code than `step`."""


class VectorStep(Stepper):
    """A step on the CPU vectors, whose state is a fixed set of tensors.

    Attributes:
        misfit: Error message for another optimizer's state.
        unsound: Error message for values that no step leads to.
    """

    misfit: ClassVar[str] = "the outer optimizer's state does not fit: all peers need the same outer optimizer"
    unsound: ClassVar[str] = "the outer optimizer's state is out of range: ask another peer for it"

    def __init__(self, layout: Layout, state: NamedTensors = ()) -> None:
        self._layout = layout
        self._state = list(state)

    def state_tensors(self) -> list[tuple[str, Tensor]]:
        return list(self._state)

    @property
    def max_tensors(self) -> int:
        return len(self._state)

    def check_specs(self, specs: Sequence[TensorSpec]) -> None:
        if tuple(specs) != specs_of(self._state):
            raise IncompatibleError(self.misfit)

    def load_state_tensors(self, tensors: NamedTensors) -> None:
        self.check_specs(specs_of(tensors))
        if not self.is_sound([tensor for _, tensor in tensors]):
            raise IncompatibleError(self.unsound)
        for (_, mine), (_, theirs) in zip(self._state, tensors, strict=True):
            mine.copy_(theirs)

    def is_sound(self, values: Sequence[Tensor]) -> bool:
        """True if a state of these values, in the order of `state_tensors`, can come from steps."""
        return True


class NesterovStep(VectorStep):
    """SGD with Nesterov momentum on pseudo-gradients: the outer optimizer of DiLoCo (arXiv 2311.08105, algorithm 1).

    In the form of `torch.optim.SGD`, for the mean pseudo-gradient ``mean``::

        velocity = momentum * velocity + mean
        vector   = vector - learning_rate * (mean + momentum * velocity)
    """

    def __init__(self, layout: Layout, learning_rate: float, momentum: float) -> None:
        self._learning_rate = learning_rate
        self._momentum = momentum
        self._velocity = torch.zeros(layout.num_parameters, dtype=torch.float32, device="cpu")
        super().__init__(layout, [("outer.momentum", self._velocity)])

    @torch.no_grad()
    def step(self, vector: Tensor, mean: Tensor, round_: int, fragment: Fragment | None = None) -> None:
        fragment = fragment or self._layout.whole
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


class AdamStep(VectorStep):
    """Adam on pseudo-gradients: FedAdam (Reddi et al., arXiv 2003.00295, algorithm 2), with Adam's bias correction.

    In the form of `torch.optim.Adam` (Kingma and Ba, arXiv 1412.6980, algorithm 1), for the mean pseudo-gradient
    ``mean`` and step ``t``, from 1::

        first  = beta1 * first + (1 - beta1) * mean
        second = beta2 * second + (1 - beta2) * mean * mean
        vector = vector - learning_rate / (1 - beta1**t) * first / (sqrt(second) / sqrt(1 - beta2**t) + epsilon)

    FedAdam instead omits the correction and starts ``second`` above zero. Factors of ``t`` alone are computed in fp64
    and rounded once. NumPy's square roots are correctly rounded; torch's may come from MKL and differ in the last bit.
    The state is both moments, and each fragment's number of steps (exact up to 2**24).
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
        self._first = torch.zeros(layout.num_parameters, dtype=torch.float32, device="cpu")
        self._second = torch.zeros(layout.num_parameters, dtype=torch.float32, device="cpu")
        self._steps = torch.zeros(num_fragments, dtype=torch.float32, device="cpu")
        named = {"first": self._first, "second": self._second, "steps": self._steps}
        super().__init__(layout, [(f"outer.{name}", tensor) for name, tensor in named.items()])

    def is_sound(self, values: Sequence[Tensor]) -> bool:
        _, second, steps = values
        return bool((steps >= 0).all()) and bool((second >= 0).all())

    @torch.no_grad()
    def step(self, vector: Tensor, mean: Tensor, round_: int, fragment: Fragment | None = None) -> None:
        fragment = fragment or self._layout.whole
        self._steps[fragment.index].add_(1.0)
        taken = int(self._steps[fragment.index])
        rule = AdamRule(self._beta1, self._beta2, self._epsilon, self._learning_rate, taken)
        buffer = torch.empty(2, min(BLOCK_VALUES, self._layout.num_parameters), dtype=torch.float32)
        for block, source in _blocks(fragment):
            part, divisor = buffer[:, : block.stop - block.start]
            rule.step(vector[block], mean[source], self._first[block], self._second[block], (part, divisor))
        step_buffers(self._layout, vector, mean, fragment)


class AdamRule:
    """Adam's step number ``taken``, from 1, in IEEE operations that are each rounded to fp32 by themselves."""

    def __init__(self, beta1: float, beta2: float, epsilon: float, learning_rate: float, taken: int) -> None:
        self._beta1, self._beta2, self._epsilon = beta1, beta2, epsilon
        self._rate = learning_rate / (1.0 - _power(beta1, taken))
        self._correction = math.sqrt(1.0 - _power(beta2, taken))

    def step(self, values: Tensor, gradient: Tensor, first: Tensor, second: Tensor, scratch: Sequence[Tensor]) -> None:
        """Move values and moments ``[n]`` in place by a gradient; ``scratch`` are two buffers ``[n]``."""
        part, divisor = scratch
        torch.mul(gradient, 1.0 - self._beta1, out=part)
        first.mul_(self._beta1).add_(part)
        torch.mul(gradient, gradient, out=part)
        part.mul_(1.0 - self._beta2)
        second.mul_(self._beta2).add_(part)
        np.sqrt(second.numpy(), out=divisor.numpy())
        divisor.div_(self._correction).add_(self._epsilon)
        torch.mul(first, self._rate, out=part)
        values.sub_(part.div_(divisor))


def _power(base: float, exponent: int) -> float:
    """Return ``base ** exponent`` in fp64 by multiplications alone: C libraries' ``pow`` differ in the last bit."""
    result = 1.0
    while exponent:
        if exponent & 1:
            result *= base
        base *= base
        exponent >>= 1
    return result


class AverageStep(VectorStep):
    """Plain steps on pseudo-gradients, ``vector - learning_rate * mean``; at rate 1, FedAvg (arXiv 1602.05629)."""

    misfit = "the outer optimizer has no state: all peers need the same outer optimizer"

    def __init__(self, layout: Layout, learning_rate: float) -> None:
        self._learning_rate = learning_rate
        super().__init__(layout)

    @torch.no_grad()
    def step(self, vector: Tensor, mean: Tensor, round_: int, fragment: Fragment | None = None) -> None:
        fragment = fragment or self._layout.whole
        update = torch.empty(min(BLOCK_VALUES, self._layout.num_parameters), dtype=torch.float32)
        for block, source in _blocks(fragment):
            part = update[: block.stop - block.start]
            torch.mul(mean[source], self._learning_rate, out=part)
            vector[block].sub_(part)
        step_buffers(self._layout, vector, mean, fragment)


class GradientStep(Stepper):
    """A torch optimizer's step on the mean gradient: the same as one step on one large batch (``every = 1``).

    The live parameters must hold the vector's values. After a step both hold the new values, and ``.grad`` holds the
    clipped mean. Learning rates and other settings are not shared state: all peers must use the same ones.

    Any torch optimizer will do whose state is tensors and numbers per parameter.
    """

    def __init__(self, wrapped: WrappedOptimizer, module: nn.Module, layout: Layout) -> None:
        """Raise `ValueError` if the optimizer holds a parameter that is not the module's."""
        self._optimizer = optimizer = wrapped.optimizer
        self._module = module
        self._layout = layout
        self._clip_norm = wrapped.clip_norm
        self._rates = wrapped.rates
        owned = {id(parameter) for parameter in module.parameters()}
        if any(id(p) not in owned for group in optimizer.param_groups for p in group["params"]):
            raise ValueError("the optimizer has parameters that are not the module's")

    def state_tensors(self) -> list[tuple[str, Tensor]]:
        """Return the optimizer's state as ``optim.<parameter>.<key>``, in the order of the layout, then by key."""
        tensors: list[tuple[str, Tensor]] = []
        if others := [key for key in self._optimizer.state if not isinstance(key, Tensor)]:
            raise IncompatibleError(
                f"{type(self._optimizer).__name__} keeps {others[0]!r} for all parameters together, which peers cannot"
                f" share: {_CHOOSE}"
            )
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
                    shared = torch.tensor(float(value), dtype=torch.float32, device="cpu")
                else:
                    raise IncompatibleError(
                        f"{type(self._optimizer).__name__} keeps {key!r} of type {type(value).__name__}, which peers"
                        f" cannot share: {_CHOOSE}"
                    )
                tensors.append((f"{_PREFIX}{entry.name}.{key}", shared))
        return tensors

    @property
    def max_tensors(self) -> int:
        return MAX_TENSORS_PER_PARAMETER * len(self._layout.parameter_entries)

    def check_specs(self, specs: Sequence[TensorSpec]) -> None:
        """See `Stepper.check_specs`; the optimizer need not have stepped yet."""
        entries = {entry.name: (entry, parameter) for entry, parameter in self._layout.parameters_of(self._module)}
        places, counts = self._places(), Counter[str]()
        for spec in specs:
            name = spec.name
            owner, _, key = name.removeprefix(_PREFIX).rpartition(".")
            if not name.startswith(_PREFIX) or owner not in entries:
                raise IncompatibleError(f"optimizer state {name[:100]!r} belongs to no parameter of this model")
            entry, parameter = entries[owner]
            if id(parameter) not in places:
                raise IncompatibleError(
                    f"optimizer state {name[:100]!r} belongs to a parameter that is not optimized here"
                )
            if spec.dtype != "float32" or math.prod(spec.shape) > max(1, entry.num_values):
                raise IncompatibleError(f"optimizer state {name[:100]!r} does not fit its parameter")
            kind = key.partition(":")[2]
            if kind and (kind not in _NUMBERS or math.prod(spec.shape) != 1):
                raise IncompatibleError(f"optimizer state {name[:100]!r} is not a number")
            counts[owner] += 1
            if counts[owner] > MAX_TENSORS_PER_PARAMETER:
                raise IncompatibleError(
                    f"optimizer state {name[:100]!r} is one of more than {MAX_TENSORS_PER_PARAMETER} of its parameter:"
                    " choose an optimizer that keeps fewer"
                )

    def load_state_tensors(self, tensors: NamedTensors) -> None:
        """See `Stepper.load_state_tensors`; the optimizer need not have stepped yet."""
        self.check_specs(specs_of(tensors))
        parameters = {entry.name: parameter for entry, parameter in self._layout.parameters_of(self._module)}
        places = self._places()
        state: dict[int, dict[str, Tensor | bool | int | float]] = {}
        for name, tensor in tensors:
            owner, _, key = name.removeprefix(_PREFIX).rpartition(".")
            key, _, kind = key.partition(":")
            if kind and not math.isfinite(float(tensor)):
                raise IncompatibleError(f"optimizer state {name[:100]!r} is not a number")
            state.setdefault(places[id(parameters[owner])], {})[key] = (
                _NUMBERS[kind](float(tensor)) if kind else tensor.clone()
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
            self._round_to_fp32(parameter)
        self._rates.set(round_)
        before = self._settings()
        with torch.enable_grad():
            self._optimizer.step()
        if self._settings() != before:
            raise IncompatibleError(
                f"{type(self._optimizer).__name__} keeps numbers in its parameter groups, which peers cannot share with"
                f" every = 1: {_CHOOSE}, or set training.every above 1"
            )
        for entry, parameter in parameters:
            vector[entry.offset : entry.end].view(entry.shape).copy_(parameter)
        step_buffers(self._layout, vector, mean, fragment or self._layout.whole)
        self._layout.write(vector, self._module, kind="buffer")

    def _round_to_fp32(self, parameter: Tensor) -> None:
        """Round a parameter and its state to what a newcomer has, which downloads fp32."""
        held = self._optimizer.state.get(parameter, {})
        for live in (parameter, *held.values()):
            if isinstance(live, Tensor) and live.dtype == torch.float64:
                live.copy_(live.float())
        held.update({key: float(np.float32(value)) for key, value in held.items() if isinstance(value, float)})

    def _settings(self) -> list[dict[str, Any]]:
        """Return the numbers of the optimizer's groups, without the rates, which are set anew in each round."""
        groups = self._optimizer.param_groups
        return [{k: v for k, v in group.items() if k != "lr" and isinstance(v, (int, float))} for group in groups]

    def adopt(self, vector: Tensor) -> None:
        """Copy the vector into the live parameters, which the torch optimizer steps."""
        self._layout.write(vector, self._module, kind="param")

    def _load(self, state: dict[int, dict[str, Tensor | bool | int | float]]) -> None:
        """Load ``state`` through torch, which selects the devices, but keep the containers: wrappers refer to them."""
        optimizer = self._optimizer
        groups, container, places = optimizer.param_groups, optimizer.state, self._places()
        whole = optimizer.state_dict()
        whole["state"] = state
        optimizer.load_state_dict(whole)
        loaded = dict(optimizer.state)
        for parameter, held in loaded.items():
            for key, value in state[places[id(parameter)]].items():
                # torch casts all but `step` to the parameter's dtype, such as NAdam's scalars to bf16.
                if isinstance(value, Tensor) and not value.dim() and parameter.dim():
                    held[key] = value.to(held[key].device)
        container.clear()
        container.update(loaded)
        optimizer.state = container
        optimizer.param_groups = groups

    def _places(self) -> dict[int, int]:
        order = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
        return {id(parameter): place for place, parameter in enumerate(order)}


def clip_scale(mean: Tensor, num_parameters: int, clip_norm: float) -> float:
    """Return the scale of a gradient, ``mean[:num_parameters]`` (fp32), as in `torch.nn.utils.clip_grad_norm_`.

    It is 1 if the norm is within ``clip_norm``, or that is 0.
    """
    if not clip_norm:
        return 1.0
    # CPUs differ in the order of summation; in fp64 the difference vanishes when rounded to fp32.
    squares = 0.0
    for start in range(0, num_parameters, BLOCK_VALUES):
        block = mean[start : min(start + BLOCK_VALUES, num_parameters)]
        squares += float(block.double().square_().sum())
    return min(1.0, clip_norm / (math.sqrt(squares) + 1e-6))


def _blocks(fragment: Fragment) -> Iterator[tuple[slice, slice]]:
    """Yield the fragment's parameters in runs of at most `BLOCK_VALUES`: slices of the vector and of the fragment."""
    for start, offset, count in fragment.parameter_spans:
        for done in range(0, count, BLOCK_VALUES):
            size = min(BLOCK_VALUES, count - done)
            yield slice(start + done, start + done + size), slice(offset + done, offset + done + size)


def step_buffers(layout: Layout, vector: Tensor, mean: Tensor, fragment: Fragment) -> None:
    for start, offset, count in fragment.buffer_spans:
        vector[start : start + count].sub_(mean[offset : offset + count])
    layout.round_integers(vector)
