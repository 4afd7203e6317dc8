"""Held-out loss on the same windows in the same order for every peer, so that losses are comparable."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn import functional

from p2ptrain.progress import Advance
from p2ptrain.training.data.windows import permute

_VISITING_ORDER = (1, 2, 3, 4)


@dataclass(frozen=True)
class HeldOut:
    """A measured loss.

    Attributes:
        loss: Mean negative log-likelihood in nats per token.
        error: Standard error of ``loss`` over the windows; infinite for a single window.
        num_windows: Windows read; fewer than asked for after a timeout.
    """

    loss: float
    error: float
    num_windows: int


def language_model_loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy of the next token, computed in fp32 for any dtype of the model.

    Args:
        model: Token ids ``[batch, context]`` to logits ``[batch, context, vocab]``.
        tokens: Token ids, int64, ``[batch, context + 1]``.
    """
    return _cross_entropy(model, tokens, "mean")


def _cross_entropy(model: nn.Module, tokens: torch.Tensor, reduction: str) -> torch.Tensor:
    logits = model(tokens[:, :-1])
    return functional.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten(), reduction=reduction)


def window_losses(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy of each window, ``[batch]``; see `language_model_loss`."""
    return _cross_entropy(model, tokens, "none").view(len(tokens), -1).mean(1)


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean of values, and its standard error; infinite for a single value."""
    count = len(values)
    mean = sum(values) / count
    if count < 2:
        return mean, math.inf
    return mean, math.sqrt(sum((value - mean) ** 2 for value in values) / (count - 1) / count)


def held_out_loss(
    model: nn.Module,
    tokens: npt.NDArray[np.unsignedinteger[Any]],
    context: int,
    *,
    max_windows: int = 128,
    batch_size: int = 16,
    max_seconds: float | None = None,
    advance: Advance = lambda done, total: None,
) -> HeldOut:
    """Measure the model on a fixed subset of held-out text; raise `ValueError` if that is shorter than one window.

    Windows of ``context`` tokens are spread evenly over the text and visited in a fixed shuffled order, so an early
    stop still gives a fair sample. Each module's mode is restored afterwards.

    Args:
        model: Measured in eval mode, on the device of its first parameter.
        tokens: Held-out tokens, ``[num_tokens]``, at least ``context + 1``.
        batch_size: Windows per forward pass.
        max_seconds: Timeout, checked after each batch; None for none.
        advance: Receives windows read, and their total.
    """
    available = (len(tokens) - 1) // context
    if available < 1:
        raise ValueError(f"{len(tokens)} held-out tokens are too few for a context of {context}")
    count = min(max_windows, available)
    starts = [permute(slot, count, _VISITING_ORDER) * available // count * context for slot in range(count)]
    device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
    modes = [(module, module.training) for module in model.modules()]
    deadline = None if max_seconds is None else time.monotonic() + max_seconds
    losses: list[float] = []
    model.eval()
    try:
        with torch.no_grad():
            for first in range(0, count, batch_size):
                rows = [tokens[start : start + context + 1] for start in starts[first : first + batch_size]]
                batch = torch.from_numpy(np.stack(rows).astype(np.int64)).to(device)
                losses += window_losses(model, batch).tolist()
                advance(len(losses), count)
                if deadline is not None and time.monotonic() >= deadline:
                    break
    finally:
        for module, training in modes:
            module.training = training
    return HeldOut(*mean_and_error(losses), len(losses))
