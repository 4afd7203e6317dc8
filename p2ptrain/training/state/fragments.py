"""Parts of the vector that are synchronised in turn: Streaming DiLoCo (Douillard et al., arXiv 2501.18512).

A model's tensors are dealt into P *fragments*, and a round averages one of them: round r fragment r mod P, every H / P
inner steps. So each parameter is still synchronised every H inner steps, and what a peer has to send at a time
shrinks by P. The shared state stays whole: a certified round of a fragment moves the values of that fragment alone.

Blocks (modules in a list, such as a transformer's layers) stay together and are dealt in turn, block b to fragment
b mod P: the paper's strided pattern. What is in no list, such as embeddings, goes to the smallest fragment, largest
tensors first. Everybody computes the same from the layout alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from p2ptrain.training.state.layout import Entry, Layout

Span = tuple[int, int, int]
"""Where consecutive values begin in the vector, where in the fragment, and how many they are."""


class Fragment:
    """Some tensors of the vector, packed into a vector of their own.

    Attributes:
        index: Which one.
        layout: Of the packed vector: the same tensors, at offsets of their own.
        num_values: Length of the packed vector.
        parameter_spans: Where its parameters lie, in order.
        buffer_spans: Where its buffers lie, in order.
    """

    def __init__(self, index: int, entries: tuple[Entry, ...]) -> None:
        """
        Args:
            index: Which one.
            entries: Its tensors, at their offsets in the whole vector: parameters, then buffers.
        """
        self.index = index
        packed: list[Entry] = []
        offset = 0
        for entry in entries:
            packed.append(replace(entry, offset=offset))
            offset = packed[-1].end
        self.layout = Layout(tuple(packed))
        self.num_values = offset
        pairs = list(zip(entries, packed, strict=True))
        self.parameter_spans = _join([(e.offset, p.offset, e.num_values) for e, p in pairs if e.kind == "param"])
        self.buffer_spans = _join([(e.offset, p.offset, e.num_values) for e, p in pairs if e.kind == "buffer"])

    @torch.no_grad()
    def gather(self, vector: Tensor, out: Tensor) -> None:
        """Pack this fragment's values of the whole ``vector`` into ``out`` (fp32, ``[num_values]``)."""
        for start, offset, count in self.parameter_spans + self.buffer_spans:
            out[offset : offset + count].copy_(vector[start : start + count])


def _join(spans: list[Span]) -> tuple[Span, ...]:
    """The same spans, with those in one that follow each other in both vectors."""
    joined: list[Span] = []
    for start, offset, count in spans:
        if joined and joined[-1][0] + joined[-1][2] == start and joined[-1][1] + joined[-1][2] == offset:
            joined[-1] = (*joined[-1][:2], joined[-1][2] + count)
        elif count:
            joined.append((start, offset, count))
    return tuple(joined)


class Fragments:
    """All fragments of one layout.

    Attributes:
        whole: The whole vector as one fragment, in the order of the layout.
    """

    def __init__(self, layout: Layout, count: int = 1) -> None:
        """
        Args:
            layout: Of the whole vector.
            count: How many fragments, ``training.fragments``.

        Raises:
            ValueError: The model has too few blocks and other tensors for so many.
        """
        self.whole = Fragment(0, layout.entries)
        if count == 1:
            self._all = [self.whole]
            return
        chosen = _deal(layout, count)
        dealt = [tuple(e for e in layout.entries if chosen[e.name, e.kind] == index) for index in range(count)]
        if not all(any(entry.kind == "param" for entry in entries) for entries in dealt):
            raise ValueError(
                f"training.fragments = {count} is more than this model can be cut into: it has too few blocks"
            )
        self._all = [Fragment(index, entries) for index, entries in enumerate(dealt)]

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[Fragment]:
        return iter(self._all)

    def of_round(self, number: int) -> Fragment:
        """The fragment that round ``number`` synchronises."""
        return self._all[number % len(self._all)]


def _deal(layout: Layout, count: int) -> dict[tuple[str, str], int]:
    """By name and kind: the fragment of each tensor."""
    chosen: dict[tuple[str, str], int] = {}
    sizes = [0] * count
    blocks: dict[str, int] = {}
    loose: list[Entry] = []
    for entry in layout.entries:
        block = _block(entry.name)
        if not block:
            loose.append(entry)
            continue
        index = blocks.setdefault(block, len(blocks) % count)
        chosen[entry.name, entry.kind] = index
        sizes[index] += entry.num_values
    for entry in sorted(loose, key=lambda entry: (entry.kind != "param", -entry.num_values, entry.name)):
        index = sizes.index(min(sizes))
        chosen[entry.name, entry.kind] = index
        sizes[index] += entry.num_values
    return chosen


def _block(name: str) -> str:
    """The block that a tensor is part of: its name up to the first number (``model.layers.3``); empty for none."""
    parts = name.split(".")
    numbers = [place for place, part in enumerate(parts[:-1]) if part.isdecimal()]
    return ".".join(parts[: numbers[0] + 1]) if numbers else ""
