"""A stage: the modules of a span of blocks, which run one after another.

What goes in is what the blocks before it gave (``[batch, length, hidden]``), or the model's own input in the first
stage; what comes out is the hidden states, or the model's output in the last one. Stages of one model, run one after
another, are that model.
"""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import nn

from p2ptrain.models.family import Span


def layer_numbers(span: Span, num_layers: int) -> range:
    """The layers in a span of a model whose blocks are embeddings, layers and head."""
    return range(max(span.start - 1, 0), min(span.stop - 1, num_layers))


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
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """One pass; see the module's docstring for shapes."""
