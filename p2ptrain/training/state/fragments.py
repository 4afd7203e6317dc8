"""Parts of the vector that are synchronised in turn: Streaming DiLoCo (Douillard et al., arXiv 2501.18512).

A model's tensors are split into P *fragments*. Every H / P inner steps a round averages one: round r takes fragment
r mod P. So each parameter is synchronised every H inner steps, and a round moves 1 / P of the bytes.

Blocks (modules in a list, such as a transformer's layers) are assigned in turn, block b to fragment b mod P: the
paper's strided pattern. Other tensors, such as embeddings, go to the smallest fragment, the largest first. The
assignment follows from the layout alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from p2ptrain.training.state.layout import Entry, Layout

Span = tuple[int, int, int]
"""A run of values: its offset in the vector, its offset in the fragment, its length."""


class Fragment:
    """Some tensors of the vector, packed into a vector of ``num_values`` with a layout of its own.

    ``entries`` are its tensors at their offsets in the whole vector: parameters, then buffers. The spans are the runs
    of both.
    """

    def __init__(self, index: int, entries: tuple[Entry, ...]) -> None:
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
    joined: list[Span] = []
    for start, offset, count in spans:
        if joined and joined[-1][0] + joined[-1][2] == start and joined[-1][1] + joined[-1][2] == offset:
            joined[-1] = (*joined[-1][:2], joined[-1][2] + count)
        elif count:
            joined.append((start, offset, count))
    return tuple(joined)


class Fragments:
    """The fragments of one layout; ``whole`` is the whole vector as one fragment, in the order of the layout."""

    def __init__(self, layout: Layout, count: int = 1) -> None:
        """Split into ``count`` fragments; raise `ValueError` if the model has too few blocks and other tensors."""
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
        return self._all[number % len(self._all)]


def _deal(layout: Layout, count: int) -> dict[tuple[str, str], int]:
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
    """Return the block of a tensor: its name up to the first number (``model.layers.3``); empty for none."""
    parts = name.split(".")
    numbers = [place for place, part in enumerate(parts[:-1]) if part.isdecimal()]
    return ".".join(parts[: numbers[0] + 1]) if numbers else ""
