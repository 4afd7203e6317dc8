"""A family of language models that mix each position with an earlier one, as WaveNet's dilated convolutions do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from p2ptrain.manifest import ModelSpec
from p2ptrain.models import Block, Family, Span

if TYPE_CHECKING:
    from p2ptrain.models.stage import Stage


class Dilated(Family):
    """``layers`` layers of width ``hidden``; layer *i* reads the position ``2**i`` tokens before.

    Source: van den Oord et al., WaveNet, 2016 (arXiv 1609.03499), with a ReLU in place of the gate.
    """

    name = "dilated"
    lookups = frozenset({"blocks.0.weight"})

    def blocks(self, spec: ModelSpec) -> Sequence[Block]:
        """See `Family`."""
        table = (spec.vocabulary, spec.hidden)
        layers = [
            Block(
                f"layer {number}",
                {
                    f"blocks.{number}.mix.weight": (spec.hidden, 2 * spec.hidden),
                    f"blocks.{number}.mix.bias": (spec.hidden,),
                },
            )
            for number in range(1, spec.layers + 1)
        ]
        head = f"blocks.{spec.layers + 1}"
        last = Block("head", {f"{head}.weight": table, f"{head}.bias": table[:1]})
        return [Block("embeddings", {"blocks.0.weight": table}), *layers, last]

    def stage(self, spec: ModelSpec, span: Span) -> Stage:
        """See `Family`."""
        from torch import nn

        from lab_plugin.layers import Layer
        from p2ptrain.models.families.sequential import SequentialStage

        layers = [Layer(spec.hidden, 2**number) for number in range(spec.layers)]
        model = nn.Sequential(
            nn.Embedding(spec.vocabulary, spec.hidden), *layers, nn.Linear(spec.hidden, spec.vocabulary)
        )
        return SequentialStage(model, span)

    def initial_std(self, spec: ModelSpec, name: str, shape: tuple[int, ...]) -> float:
        """See `Family`."""
        return 0.0 if name.endswith("bias") else float(shape[-1] ** -0.5)
