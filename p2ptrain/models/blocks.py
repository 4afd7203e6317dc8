"""Blocks of models, and the spans of blocks that make stages.

Names and shapes need no torch, so a peer can estimate sizes before it imports torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from p2ptrain.errors import UsageError

Shape = tuple[int, ...]


class Span(NamedTuple):
    """The blocks ``start`` to ``stop - 1``."""

    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start

    def __str__(self) -> str:
        last = self.stop - 1
        return f"block {last}" if last == self.start else f"blocks {self.start} to {last}"


@dataclass(frozen=True)
class Block:
    """One block of a model.

    Attributes:
        name: Such as ``embeddings`` or ``layer 3``.
        shapes: Shapes of its parameters, by Hugging Face name, in the module's order.
        tied: Parameters shared with an earlier block: the name here to the name there.
    """

    name: str
    shapes: Mapping[str, Shape]
    tied: Mapping[str, str] = field(default_factory=dict)

    @property
    def num_parameters(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes.values())


def layer_blocks(prefix: str, shapes: Mapping[str, Shape], count: int) -> list[Block]:
    """Return equal layers as blocks, with parameters named ``PREFIX.NUMBER.NAME``."""
    return [
        Block(f"layer {number}", {f"{prefix}.{number}.{name}": shape for name, shape in shapes.items()})
        for number in range(count)
    ]


def check_span(span: Span, blocks: Sequence[Block]) -> None:
    """Raise `UsageError` for an empty span, or one beyond the model."""
    if not 0 <= span.start < span.stop <= len(blocks):
        raise UsageError(
            f"the model has the blocks 0 to {len(blocks) - 1}: {span.start} to {span.stop - 1} are no span of it"
        )


def stage_shapes(blocks: Sequence[Block], span: Span) -> dict[str, Shape]:
    """Return the parameters of a stage: those of its blocks, and copies of those shared with earlier stages."""
    held = {name: shape for block in blocks[span.start : span.stop] for name, shape in block.shapes.items()}
    everything = {name: shape for block in blocks for name, shape in block.shapes.items()}
    for block in blocks[span.start : span.stop]:
        held |= {own: everything[shared] for own, shared in block.tied.items() if shared not in held}
    return held


def stage_ties(blocks: Sequence[Block], span: Span) -> dict[str, str]:
    """Return the copied parameters of a stage: the name there to the name in the owner's stage."""
    held = stage_shapes(blocks, span)
    return {
        own: shared for block in blocks[span.start : span.stop] for own, shared in block.tied.items() if own in held
    }
