"""The interface of a model family: the blocks of its models, and how to build a stage.

A model is a list of blocks. A stage is a contiguous span of them; its host builds those blocks alone. Names and shapes
need no torch, so a peer can estimate sizes before it imports torch.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

from p2ptrain.errors import UsageError
from p2ptrain.manifest import ModelSpec

if TYPE_CHECKING:
    from p2ptrain.models.stage import Stage

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


class Family(ABC):
    """A model family; stateless. Other packages add theirs by the entry point group ``p2ptrain.models``."""

    name: ClassVar[str]
    reads_text: ClassVar[bool] = True
    """True if a sample is a sequence of token ids, and the model predicts the next token."""
    lookups: ClassVar[frozenset[str]] = frozenset()
    """Parameters of two or more dimensions that the first block reads rows of, instead of multiplying."""

    settings: ClassVar[Mapping[str, str]] = {}
    """Settings of the model, with their names in a transformers configuration; empty if there is none."""
    only_settings: ClassVar[tuple[str, ...]] = ()
    """Settings of a transformers configuration with one supported value."""
    has_fixed_context: ClassVar[bool] = False
    """True if a pretrained model has learned positions, which fix its context."""

    def check(self, spec: ModelSpec) -> None:  # noqa: B027 (most families have models of all settings)
        """Raise `ManifestError` for settings without a model, naming the setting."""

    @abstractmethod
    def blocks(self, spec: ModelSpec) -> Sequence[Block]:
        """Return the model's blocks, in the order of a forward pass. Needs no torch."""

    @abstractmethod
    def stage(self, spec: ModelSpec, span: Span) -> Stage:
        """Return the modules of a span, with the names and shapes of `blocks` and undefined values. Imports torch."""

    @abstractmethod
    def initial_std(self, spec: ModelSpec, name: str, shape: Shape) -> float | None:
        """Return the standard deviation of a parameter's initial normal values; None for all ones."""

    def hugging_face(self, spec: ModelSpec) -> object:
        """Return the transformers configuration of the model, for export; raises `UsageError` if there is none."""
        raise UsageError(f"models of the family {self.name!r} cannot be written as a Hugging Face model")

    def from_hugging_face(self, config: Any) -> dict[str, Any]:
        """Return this family's settings from a transformers configuration; raises `UsageError` if it cannot."""
        if not self.settings:
            raise UsageError(f"pretrained models of the family {self.name!r} cannot be read")
        return {own: getattr(config, theirs) for own, theirs in self.settings.items()}

    def translated(self, spec: ModelSpec) -> dict[str, Any]:
        """Return the model's `settings` by their names in a transformers configuration."""
        return {theirs: getattr(spec, own) for own, theirs in self.settings.items()}

    def tokens(self, spec: ModelSpec) -> int:
        """Return the number of positions of one sample."""
        return spec.context

    def inputs(self, spec: ModelSpec) -> Shape:
        """Return the shape of one sample for the first block: token ids, or values if the family reads no text."""
        return (spec.context,)

    def work(self, spec: ModelSpec) -> Sequence[int]:
        """Return the multiply-adds of one sample's forward pass per block, used to balance stages.

        Counts products with parameters, and in all blocks but the first and the last attention's products of every
        position with every other.
        """
        blocks, tokens = self.blocks(spec), self.tokens(spec)
        shapes = {name: shape for block in blocks for name, shape in block.shapes.items()}
        found = []
        for number, block in enumerate(blocks):
            names = [name for name in block.shapes if name not in self.lookups] + list(block.tied.values())
            products = sum(math.prod(shapes[name]) for name in names if len(shapes[name]) > 1)
            attention = 2 * tokens * spec.hidden if 0 < number < len(blocks) - 1 else 0
            found.append(tokens * (products + attention))
        return found

    def outputs(self, spec: ModelSpec) -> int:
        """Return the number of output values per position, or per sample for a classifier."""
        return spec.vocabulary


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
