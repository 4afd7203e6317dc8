"""A stage: the modules of a span of blocks, which run one after another.

The input is the hidden states of the previous blocks (``[batch, length, hidden]``), or the model's input in the first
stage. The output is hidden states, or the model's output in the last stage. All stages in sequence are the model.
"""

from __future__ import annotations

from abc import abstractmethod

import torch
from torch import nn

from p2ptrain.models.blocks import Span


def layer_numbers(span: Span, num_layers: int) -> range:
    """Return the layers in a span of a model whose blocks are embeddings, layers and head."""
    return range(max(span.start - 1, 0), min(span.stop - 1, num_layers))


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
    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """Run one pass; the module's docstring has the shapes."""
