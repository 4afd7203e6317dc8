"""A stage: the modules of a span of blocks, which run one after another.

The input is the hidden states of the previous blocks (``[batch, length, hidden]``), or the model's input in the first
stage. The output is hidden states, or the model's output in the last stage. All stages in sequence are the model.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import defaultdict
from dataclasses import dataclass

import torch
from torch import nn

from p2ptrain.models.blocks import Span


def layer_numbers(span: Span, num_layers: int) -> range:
    """Return the layers in a span of a model whose blocks are embeddings, layers and head."""
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
    """Positions of a pass's inputs in their sequences.

    Attributes:
        first: Position of each sequence's first input.
        caches: Caches of the positions before ``first``, by layer number; extended by the pass. None for no cache.
    """

    first: int = 0
    caches: defaultdict[str, LayerCache] | None = None

    def cache(self, layer: str) -> LayerCache | None:
        return None if self.caches is None else self.caches[layer]


WHOLE = StageContext()
"""Context of whole sequences, as in training."""


class Stage(nn.Module):
    """Base of the families' stages. A family creates its own as ``Stage(spec, span, num_blocks)``.

    Attributes:
        is_first: True if its input is the model's input.
        is_last: True if its output is the model's output.
    """

    def __init__(self, span: Span, num_blocks: int) -> None:
        super().__init__()
        self.span = span
        self.is_first = span.start == 0
        self.is_last = span.stop == num_blocks

    @abstractmethod
    def forward(self, inputs: torch.Tensor, context: StageContext = WHOLE) -> torch.Tensor:
        """Run one pass; the module's docstring has the shapes. Families without a cache accept `WHOLE` alone."""
