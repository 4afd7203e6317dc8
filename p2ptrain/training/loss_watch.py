"""The loss of a script's own training loop, read from its model's outputs."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn


class LossWatch:
    """Reads the ``loss`` of a model's outputs, as the models of transformers have it, by a forward hook.

    Outputs without a loss, and forward passes without gradients, are ignored.
    """

    def __init__(self, module: nn.Module) -> None:
        self._total: Tensor | None = None
        self._count = 0
        self._are_parts = False
        module.register_forward_hook(self._on_forward, with_kwargs=True)

    def _on_forward(self, module: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
        loss = getattr(output, "loss", None)
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad or not module.training:
            return
        value = loss.detach().reshape(())
        self._total = value if self._total is None else self._total + value
        self._count += 1
        # In transformers' Trainer each microbatch's sum is divided by the tokens of all microbatches.
        self._are_parts = kwargs.get("num_items_in_batch") is not None

    def take(self) -> Tensor | None:
        """Return the loss of the microbatches since the last call, on the model's device; None for none."""
        total, count = self._total, self._count
        self._total, self._count = None, 0
        if total is None or self._are_parts:
            return total
        return total / count
