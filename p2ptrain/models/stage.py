"""A stage: the modules of a span of blocks, which run one after another.

What goes in is what the blocks before it gave (``[batch, length, hidden]``), or the model's own input in the first
stage; what comes out is the hidden states, or the model's output in the last one. Stages of one model, run one after
another, are that model.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import defaultdict
from dataclasses import dataclass

import torch
from torch import nn

from p2ptrain.models.family import Span


def layer_numbers(span: Span, num_layers: int) -> range:
    """The layers in a span of a model whose blocks are embeddings, layers and head."""
    return range(max(span.start - 1, 0), min(span.stop - 1, num_layers))


class LayerCache:
    """Keys and values of all positions so far in one layer, ``[B, H_kv, positions, D]`` each."""

    def __init__(self) -> None:
        self._held: tuple[torch.Tensor, torch.Tensor] | None = None

    def extend(self, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Append the keys and values of new positions; return those of all positions."""
        if self._held is not None:
            keys, values = (torch.cat(pair, dim=2) for pair in zip(self._held, (keys, values), strict=True))
        self._held = keys, values
        return keys, values


@dataclass(frozen=True)
class StageContext:
    """Where the inputs of a pass stand in their sequences.

    Attributes:
        first: The position of each sequence's first input.
        caches: By the layer's number; hold the positions before ``first``, and take the new ones. None for no cache.
    """

    first: int = 0
    caches: defaultdict[str, LayerCache] | None = None

    def cache(self, layer: str) -> LayerCache | None:
        """Return a layer's cache, if there is one."""
        return None if self.caches is None else self.caches[layer]


WHOLE = StageContext()
"""Of inputs that are whole sequences, as in training."""


class Stage(nn.Module):
    """Base of the families' stages. A family's is made as ``Stage(spec, span, num_blocks)``.

    Args:
        span: Which of the model's blocks.
        num_blocks: How many it has.

    Attributes:
        span: As given.
        is_first: Whether it takes the model's input.
        is_last: Whether it gives the model's output.
    """

    def __init__(self, span: Span, num_blocks: int) -> None:
        super().__init__()
        self.span = span
        self.is_first = span.start == 0
        self.is_last = span.stop == num_blocks

    @abstractmethod
    def forward(self, inputs: torch.Tensor, context: StageContext = WHOLE) -> torch.Tensor:
        """One pass; see the module's docstring for shapes.

        A family whose positions see later ones has no use for a context, and raises `ValueError` for a cache.
        """
