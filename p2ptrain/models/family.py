"""The interface of a model family: the blocks of its models, and how to build a stage.

A model is a list of blocks. A stage is a contiguous span of them; its host builds those blocks alone.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from p2ptrain.errors import UsageError
from p2ptrain.manifest import ModelSpec
from p2ptrain.models.blocks import Block, Shape, Span

if TYPE_CHECKING:
    from p2ptrain.models.stage import Stage


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
            attention = 2 * tokens * spec.heads * spec.width_of_head if 0 < number < len(blocks) - 1 else 0
            found.append(tokens * (products + attention))
        return found

    def outputs(self, spec: ModelSpec) -> int:
        """Return the number of output values per position, or per sample for a classifier."""
        return spec.vocabulary
