"""The map between a module's tensors and one flat fp32 vector, and the vector's fragments.

Averaging, outer steps, digests and downloads work on this vector, on the CPU. It holds the trainable parameters (tied
ones once), then the persistent buffers, both in the module's order of registration. Frozen parameters and
non-persistent buffers are equal on all peers, and not in it. Personal tensors differ among peers, and are not in it.

Integer and boolean buffers are stored as fp32 and rounded on the way back, so they are exact up to 2**24.

The vector may be synchronised in P parts, its *fragments* (Streaming DiLoCo, Douillard et al., arXiv 2501.18512). Round
r averages fragment r mod P. Blocks (modules in a list, such as a transformer's layers) are assigned in turn, block b to
fragment b mod P: the paper's strided pattern. Other tensors, such as embeddings, go to the smallest fragment, the
largest first. The assignment follows from the layout alone.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property
from itertools import accumulate
from typing import Any, Literal

import torch
from torch import Tensor, nn

from p2ptrain.codecs import Codec, get_codec
from p2ptrain.codecs.mixed import by_size
from p2ptrain.manifest import AveragingSpec

MAX_EXACT_INTEGER = 1 << 24
"""Largest magnitude up to which fp32 holds all integers."""

PERSONAL = "personal."
"""Prefix of the names of personal tensors in a checkpoint."""
_COMPILED_PREFIX = "_orig_mod."


@dataclass(frozen=True)
class Entry:
    """One tensor of the module.

    Attributes:
        name: Its qualified name, without the prefix of `torch.compile`.
        kind: ``param`` if it is trained, else ``buffer``.
        offset: Index of its first value in the vector.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    kind: Literal["param", "buffer"]
    offset: int

    @property
    def num_values(self) -> int:
        return math.prod(self.shape)

    @property
    def end(self) -> int:
        return self.offset + self.num_values

    @property
    def integral(self) -> bool:
        """True if its values are integers or booleans in the module."""
        return not self.dtype.is_floating_point


class Layout:
    """The order, shapes and offsets of all shared tensors of one module; holds no tensor itself.

    Copies raise `ValueError` for a module of another layout, or a vector that is not fp32 ``[num_values]`` on the CPU.

    Attributes:
        entries: All tensors: parameters, then buffers.
        num_values: Length of the vector.
        num_parameters: Length of its first part, the parameters.
        rule: The peers' common step on the mean of this vector; empty for the manifest's.
        personal: Tensors that stay with each peer and are not in the vector; their offsets have no meaning.
        fingerprint: SHA-256 of kinds, names, shapes, dtypes and rule, 32 bytes; equal on peers that can average
            together.
    """

    def __init__(self, entries: tuple[Entry, ...], rule: str = "", personal: tuple[Entry, ...] = ()) -> None:
        self.entries = entries
        self.rule = rule
        self.personal = personal
        self.num_values = sum(entry.num_values for entry in entries)
        self.num_parameters = sum(entry.num_values for entry in entries if entry.kind == "param")
        described = json.dumps([_describe(entries), rule]).encode()
        self.fingerprint = hashlib.sha256(b"p2ptrain layout 2" + described).digest()

    @classmethod
    def from_module(cls, module: nn.Module, rule: str = "", personal: Sequence[str] = ()) -> Layout:
        """Return the layout of a module's trainable parameters and persistent buffers, in order of registration.

        ``personal`` are patterns of the names of tensors that stay with each peer (see `PrivateSpec.personal`).

        Raises:
            ValueError: A tensor is complex, sparse or quantized, a buffer is too large for fp32 or not finite, no
                parameter is trainable and shared, or a pattern matches no tensor.
        """
        entries: list[Entry] = []
        kept: list[Entry] = []
        offset, unmatched = 0, set(personal)
        for kind, tensors in (("param", _parameters(module)), ("buffer", _buffers(module))):
            for name, tensor in tensors:
                entry = Entry(name, tuple(tensor.shape), tensor.dtype, kind, offset)  # type: ignore[arg-type]
                if matching := {pattern for pattern in personal if fnmatchcase(name, pattern)}:
                    unmatched -= matching
                    kept.append(entry)
                    continue
                _check_tensor(name, tensor)
                entries.append(entry)
                offset = entry.end
            if kind == "param" and not entries:
                raise ValueError("the module has no trainable parameter to share: set requires_grad on what is trained")
        if unmatched:
            raise ValueError(f"private.personal: {min(unmatched)!r} matches no trained tensor of this model")
        return cls(tuple(entries), rule, tuple(kept))

    def describe(self) -> list[list[list[Any]]]:
        """Return kind, name, shape and dtype of the shared and of the personal tensors, as JSON holds them."""
        return [_describe(self.entries), _describe(self.personal)]

    @classmethod
    def of_description(cls, described: Any) -> Layout:
        """Return the layout of a description by `describe`; raise `ValueError` if it is none."""
        try:
            shared, personal = map(_entries_of, described)
        except (TypeError, AttributeError) as error:
            raise ValueError(f"no description of tensors: {error}") from error
        return cls(shared, "", personal)

    @property
    def parameter_entries(self) -> tuple[Entry, ...]:
        return tuple(entry for entry in self.entries if entry.kind == "param")

    @property
    def buffer_entries(self) -> tuple[Entry, ...]:
        return tuple(entry for entry in self.entries if entry.kind == "buffer")

    @torch.no_grad()
    def read_personal(self, module: nn.Module) -> dict[str, Tensor]:
        """Return copies of the module's personal tensors on the CPU, by kind and name."""
        bound = self._bind(module, self.personal)
        return {f"{PERSONAL}{entry.kind}.{entry.name}": tensor.detach().cpu().clone() for entry, tensor in bound}

    @torch.no_grad()
    def write_personal(self, tensors: Mapping[str, Tensor], module: nn.Module) -> None:
        """Copy the output of `read_personal` into the module; raise `ValueError` if a tensor is missing or differs."""
        found = [(live, _personal(tensors, entry)) for entry, live in self._bind(module, self.personal)]
        for live, tensor in found:
            live.copy_(tensor)

    def tensors(self, vector: Tensor, own: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return all tensors by name, in their dtypes: the shared ones of a vector, and the personal ones of ``own``.

        ``own`` is the output of `read_personal`. Raises `ValueError` if one of them is missing or differs.
        """
        self._check_vector(vector)
        shared = {entry.name: _values(entry, vector).to(entry.dtype) for entry in self.entries}
        return shared | {entry.name: _personal(own, entry) for entry in self.personal}

    @cached_property
    def whole(self) -> Fragment:
        return Fragment(0, self.entries)

    def new_vector(self) -> Tensor:
        return torch.zeros(self.num_values, dtype=torch.float32, device="cpu")

    @torch.no_grad()
    def read(self, module: nn.Module, out: Tensor) -> None:
        self._check_vector(out)
        for entry, tensor in self._bind(module, self.entries):
            out[entry.offset : entry.end].view(entry.shape).copy_(tensor)

    @torch.no_grad()
    def write(self, vector: Tensor, module: nn.Module, *, kind: Literal["param", "buffer"] | None = None) -> None:
        """Copy ``vector`` into the module, in place, on any device and in its dtypes.

        Integers are rounded, and clamped to the range of their dtype. ``kind`` selects parameters or buffers alone.
        """
        self._check_vector(vector)
        entries = tuple(entry for entry in self.entries if kind in (None, entry.kind))
        for entry, tensor in self._bind(module, entries):
            tensor.copy_(_values(entry, vector))

    @torch.no_grad()
    def round_integers(self, vector: Tensor) -> None:
        """Round the integer buffers' values of ``vector`` to whole numbers (half to even), in place."""
        for entry in self.buffer_entries:
            if entry.integral:
                vector[entry.offset : entry.end].round_()

    def parameters_of(self, module: nn.Module) -> list[tuple[Entry, Tensor]]:
        """Return the module's live parameters with their entries, in order."""
        return list(self._bind(module, self.parameter_entries))

    def _bind(self, module: nn.Module, entries: tuple[Entry, ...]) -> Iterator[tuple[Entry, Tensor]]:
        parameters = {_plain(name): parameter for name, parameter in module.named_parameters()}  # Frozen since, too.
        live: dict[str, Mapping[str, Tensor]] = {"param": parameters, "buffer": dict(_buffers(module))}
        for entry in entries:
            tensor = live[entry.kind].get(entry.name)
            if tensor is None or tuple(tensor.shape) != entry.shape:
                found = "is missing" if tensor is None else f"has shape {tuple(tensor.shape)}, not {entry.shape}"
                raise ValueError(
                    f"the module changed: {entry.kind} {entry.name} {found}; peers share what there was at the start,"
                    " and a buffer that grows needs persistent=False"
                )
            yield entry, tensor

    def _check_vector(self, vector: Tensor) -> None:
        found = (vector.dtype, vector.device.type, tuple(vector.shape), vector.is_contiguous())
        if found != (torch.float32, "cpu", (self.num_values,), True):
            raise ValueError(
                f"expected a contiguous fp32 CPU vector of {self.num_values} values,"
                f" got {vector.dtype} {tuple(vector.shape)} on {vector.device}"
            )


def vector_codec(spec: AveragingSpec, layout: Layout) -> Codec:
    """Return ``spec.codec``, mixed with ``spec.small_tensors`` if set, and with fp32 for small buffers.

    Raises:
        IncompatibleError: A codec is unknown.
    """
    codec = get_codec(spec.codec)
    small_codec = get_codec(spec.small_tensors) if spec.small_tensors else codec
    sizes = [entry.num_values for entry in layout.entries]
    return by_size(codec, small_codec, sizes, spec.small_values, get_codec("fp32"), len(layout.buffer_entries))


Span = tuple[int, int, int]
"""A run of values: its offset in the vector, its offset in the fragment, its length."""


class Fragment:
    """Some tensors of the vector, packed into a vector of ``num_values`` with a layout of its own.

    ``entries`` are its tensors at their offsets in the whole vector: parameters, then buffers. The spans are the runs
    of both.
    """

    def __init__(self, index: int, entries: tuple[Entry, ...]) -> None:
        self.index = index
        *offsets, self.num_values = accumulate((entry.num_values for entry in entries), initial=0)
        packed = [replace(entry, offset=offset) for entry, offset in zip(entries, offsets, strict=True)]
        self.layout = Layout(tuple(packed))
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
    """The fragments of one layout."""

    def __init__(self, layout: Layout, count: int = 1) -> None:
        """Split into ``count`` fragments; raise `ValueError` if the model has too few blocks and other tensors."""
        if count == 1:
            self._all = [layout.whole]
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


def _describe(entries: Sequence[Entry]) -> list[list[Any]]:
    return [[e.kind, e.name, list(e.shape), str(e.dtype).removeprefix("torch.")] for e in entries]


def _entries_of(described: list[list[Any]]) -> tuple[Entry, ...]:
    entries: list[Entry] = []
    for kind, name, shape, dtype in described:
        if not isinstance(type_ := getattr(torch, dtype), torch.dtype):
            raise TypeError(f"{dtype} is no dtype")
        entries.append(Entry(str(name), tuple(map(int, shape)), type_, kind, entries[-1].end if entries else 0))
    return tuple(entries)


def _values(entry: Entry, vector: Tensor) -> Tensor:
    """Return a tensor's values in the vector; integers in its dtype."""
    values = vector[entry.offset : entry.end].view(entry.shape)
    return _to_integers(values, entry.dtype) if entry.integral else values


def _personal(tensors: Mapping[str, Tensor], entry: Entry) -> Tensor:
    tensor = tensors.get(f"{PERSONAL}{entry.kind}.{entry.name}")
    if tensor is None or tensor.shape != entry.shape:
        raise ValueError(f"the personal tensor {entry.name} is missing, or has another shape")
    return tensor


def _plain(name: str) -> str:
    return name.replace(_COMPILED_PREFIX, "")


def _parameters(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in module.named_parameters():
        if parameter.requires_grad:
            yield _plain(name), parameter


def _buffers(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    persistent: set[int] = set()
    for part in module.modules():
        kept = (b for n, b in part.named_buffers(recurse=False) if n not in part._non_persistent_buffers_set)
        persistent.update(id(buffer) for buffer in kept)
    for name, buffer in module.named_buffers():
        if id(buffer) in persistent:
            yield _plain(name), buffer


def _check_tensor(name: str, tensor: Tensor) -> None:
    if tensor.is_complex() or tensor.is_quantized or tensor.layout != torch.strided:
        raise ValueError(f"{name} is complex, quantized or sparse: only dense real tensors can be shared")
    if tensor.is_meta or not tensor.numel() or tensor.dtype == torch.bool:
        return
    if tensor.dtype.is_floating_point:
        if not isinstance(tensor, nn.Parameter) and not bool(tensor.float().isfinite().all()):
            raise ValueError(
                f"the buffer {name} holds values that are not finite in fp32, as a mask does, and cannot be averaged:"
                " register it with persistent=False"
            )
    elif max(int(tensor.max()), -int(tensor.min())) > MAX_EXACT_INTEGER:
        raise ValueError(
            f"the integer buffer {name} holds values beyond 2**24, which fp32 cannot carry:"
            " register it with persistent=False"
        )


def _to_integers(values: Tensor, dtype: torch.dtype) -> Tensor:
    if dtype == torch.bool:
        return values.round() != 0
    limits = torch.iinfo(dtype)
    # In fp64 within 2**53 the cast to integers is defined; NaN becomes 0.
    low, high = max(limits.min, -(1 << 53)), min(limits.max, 1 << 53)
    return values.double().nan_to_num(0.0).round().clamp(low, high).to(dtype)
