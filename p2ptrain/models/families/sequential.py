"""Stages of a user's ``nn.Sequential``: its children are the blocks."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from p2ptrain.errors import UsageError
from p2ptrain.models.blocks import Block, Span, check_span
from p2ptrain.models.stage import WHOLE, Stage, StageContext


class SequentialStage(Stage):
    """A span of a module's children, shared with that module."""

    def __init__(self, module: nn.Sequential, span: Span) -> None:
        check_span(span, sequential_blocks(module))
        super().__init__(span, len(module))
        self.blocks = nn.ModuleDict({str(number): module[number] for number in range(*span)})

    def forward(self, inputs: torch.Tensor, context: StageContext = WHOLE) -> torch.Tensor:
        if context != WHOLE:
            raise ValueError("blocks of a module of one's own keep nothing of earlier positions")
        for block in self.blocks.values():
            inputs = block(inputs)
        return inputs


def sequential_blocks(module: nn.Sequential) -> Sequence[Block]:
    """Return a module's children as blocks; raises `UsageError` if two share a parameter."""
    blocks, owners = [], dict[int, str]()
    for number, child in enumerate(module):
        shapes = {}
        for name, parameter in child.named_parameters():
            own = f"blocks.{number}.{name}"
            if id(parameter) in owners:
                raise UsageError(f"{own} is {owners[id(parameter)]} as well: blocks must not share parameters")
            owners[id(parameter)] = own
            shapes[own] = tuple(parameter.shape)
        blocks.append(Block(f"{number} {type(child).__name__}", shapes))
    return blocks
