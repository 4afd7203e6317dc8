"""What a model family tells about its models: which blocks they are made of, and how a stage of them is built.

A model is a list of blocks. A stage is a contiguous span of them, and whoever hosts one builds those blocks and no
others. Names and shapes are known without torch, so that a peer can say what it has room for before it imports it.
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
        shapes: Of its parameters, by their names in the family's Hugging Face form, in the order of the module.
        tied: Parameters that it shares with an earlier block: its own name for one, to the name there.
    """

    name: str
    shapes: Mapping[str, Shape]
    tied: Mapping[str, str] = field(default_factory=dict)

    @property
    def num_parameters(self) -> int:
        """How many it has of its own."""
        return sum(math.prod(shape) for shape in self.shapes.values())


class Family(ABC):
    """A model family. One without state; other packages add theirs by the entry point group ``p2ptrain.models``."""

    name: ClassVar[str]
    reads_text: ClassVar[bool] = True
    """Whether a sample is a sequence of token ids, and the model says which comes next."""
    lookups: ClassVar[frozenset[str]] = frozenset()
    """Parameters of two or more dimensions that the first block reads rows of, rather than multiplies by."""

    only_settings: ClassVar[tuple[str, ...]] = ()
    """Settings of a transformers configuration for which a pretrained model can have but one value."""
    has_fixed_context: ClassVar[bool] = False
    """Whether a pretrained model's samples have as many positions as it has parameters for."""

    def check(self, spec: ModelSpec) -> None:  # noqa: B027 (most families have models of all settings)
        """Refuse settings that this family has no models for.

        Raises:
            ManifestError: Names the setting.
        """

    @abstractmethod
    def blocks(self, spec: ModelSpec) -> Sequence[Block]:
        """The model's blocks, in the order in which a microbatch passes them. Needs no torch."""

    @abstractmethod
    def stage(self, spec: ModelSpec, span: Span) -> Stage:
        """The modules of a span, with the names and shapes of `blocks`; what its parameters hold is undefined.

        Imports torch.
        """

    @abstractmethod
    def initial_std(self, spec: ModelSpec, name: str, shape: Shape) -> float | None:
        """The standard deviation of a parameter's initial values, which are normal about 0; None for all ones."""

    def hugging_face(self, spec: ModelSpec) -> object:
        """The transformers configuration of the model, for export.

        Raises:
            UsageError: There is none.
        """
        raise UsageError(f"models of the family {self.name!r} cannot be written as a Hugging Face model")

    def from_hugging_face(self, config: Any) -> dict[str, Any]:
        """The settings of a model, as far as this family has them, from its transformers configuration.

        Raises:
            UsageError: Pretrained models of this family cannot be read.
        """
        raise UsageError(f"pretrained models of the family {self.name!r} cannot be read")

    def tokens(self, spec: ModelSpec) -> int:
        """How many positions one sample has."""
        return spec.context

    def inputs(self, spec: ModelSpec) -> Shape:
        """The shape of one sample as the first block takes it: of token ids, or of values where it reads no text."""
        return (spec.context,)

    def work(self, spec: ModelSpec) -> Sequence[int]:
        """Multiply-adds of one sample's forward pass, block by block: what stages are balanced by.

        Counts products with parameters, and in all blocks but the first and the last attention's products of every
        position with every other one.
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
        """How many values the model gives for one position, or for one sample where it classifies."""
        return spec.vocabulary


def check_span(span: Span, blocks: Sequence[Block]) -> None:
    """Refuse a span that is empty or not within the model.

    Raises:
        UsageError: It is.
    """
    if not 0 <= span.start < span.stop <= len(blocks):
        raise UsageError(
            f"the model has the blocks 0 to {len(blocks) - 1}: {span.start} to {span.stop - 1} are no span of it"
        )


def stage_shapes(blocks: Sequence[Block], span: Span) -> dict[str, Shape]:
    """The parameters that a stage holds: those of its blocks, and copies of what they share with earlier stages."""
    held = {name: shape for block in blocks[span.start : span.stop] for name, shape in block.shapes.items()}
    everything = {name: shape for block in blocks for name, shape in block.shapes.items()}
    for block in blocks[span.start : span.stop]:
        held |= {own: everything[shared] for own, shared in block.tied.items() if shared not in held}
    return held


def stage_ties(blocks: Sequence[Block], span: Span) -> dict[str, str]:
    """Of a stage's parameters those that are copies: their names there, to the names in the stages that own them."""
    held = stage_shapes(blocks, span)
    return {
        own: shared for block in blocks[span.start : span.stop] for own, shared in block.tied.items() if own in held
    }
