"""The two ways to run a program: kernels on CPU or GPU, whose bits are promised, and torch, whose bits are not."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from p2ptrain.models.exact.elementary import exp, log, sine_cosine
from p2ptrain.models.exact.gpu import GpuKernels
from p2ptrain.models.exact.program import Geometry, Op, Program
from p2ptrain.models.families.layers import stretched
from p2ptrain.models.int8 import int8_linear
from p2ptrain.native.exact import LANES, PAGE, QUERIES, AnyKernels, Batch, Kind, Operation

Longs = npt.NDArray[np.int64]
CPU = torch.device("cpu")
TILE_ROWS = 8
"""Rows that kernels read at one time: buffers hold a multiple."""


class PageStore:
    """Keys and values of a number of pages in all layers of a stage.

    Attributes:
        keys: ``[layers, pages, kv_heads, width, PAGE]``.
        values: ``[layers, pages, kv_heads, PAGE, width]``, with the width rounded up to a multiple of `LANES`.
    """

    def __init__(self, geometry: Geometry, number: int, device: torch.device = CPU) -> None:
        layers, kv_heads, width = geometry.layers, geometry.kv_heads, geometry.width
        self.number = number
        self.keys = _zeros(device, layers, number, kv_heads, width, PAGE)
        self.values = _zeros(device, layers, number, kv_heads, PAGE, padded(width))


def _zeros(device: torch.device, *shape: int) -> torch.Tensor:
    """Return zeros, whose memory the system provides on first use; torch would write them, and a GPU has it at once."""
    on_cpu = device.type == "cpu"
    return torch.from_numpy(np.zeros(shape, np.float32)) if on_cpu else torch.zeros(shape, device=device)


def padded(width: int) -> int:
    """Return the width of a value in a page."""
    return -(-width // LANES) * LANES


class Piece(NamedTuple):
    """Consecutive rows of a session in one batch: row, number of rows, first position, and page numbers."""

    row: int
    rows: int
    first: int
    pages: Longs


class Rows(NamedTuple):
    """One batch: its pieces, and each row's position and the page that holds it."""

    pieces: Sequence[Piece]
    positions: Longs
    row_pages: Longs


class Rotary:
    """Tables of rotary position embeddings (Su et al., *RoFormer*, 2021), which grow with the positions asked for."""

    def __init__(self, geometry: Geometry, device: torch.device = CPU) -> None:
        width = geometry.width
        self._device = device
        self._speeds = np.zeros(0)
        if geometry.theta:
            exponents = np.arange(0, width, 2, dtype=np.float64) / width
            self._speeds = stretched(exp(-exponents * log(np.array([geometry.theta]))), geometry.scaling)
        self.cosines = self.sines = torch.zeros(0, len(self._speeds))

    def grow(self, length: int) -> bool:
        """Provide at least the positions below ``length``; return True if there are rotary positions at all."""
        if len(self._speeds) and length > len(self.cosines):
            angles = np.arange(max(length, 2 * len(self.cosines), 512), dtype=np.float64)[:, None] * self._speeds
            tables = (torch.from_numpy(each.astype(np.float32)) for each in sine_cosine(angles))
            self.sines, self.cosines = (each.to(self._device) for each in tables)
        return bool(len(self._speeds))


class Runner(Protocol):
    """A program with buffers for ``max_rows`` rows."""

    buffers: dict[str, torch.Tensor]

    def run(self, rows: Rows, store: PageStore | None) -> None:
        """Run the program; its input and output are in ``buffers``, flat."""


def make_buffers(program: Program, max_rows: int, device: torch.device = CPU) -> dict[str, torch.Tensor]:
    rows = -(-max_rows // TILE_ROWS) * TILE_ROWS
    return {name: torch.zeros(rows * width, device=device) for name, width in program.widths.items()}


def device_of(kernels: AnyKernels | None) -> torch.device:
    """Return where kernels compute; without any, torch computes on the CPU."""
    return kernels.device if isinstance(kernels, GpuKernels) else CPU


class KernelRunner:
    """Runs a program with kernels: on a GPU, or in the calling thread and ``threads - 1`` others."""

    def __init__(
        self,
        program: Program,
        geometry: Geometry,
        rotary: Rotary,
        max_rows: int,
        kernels: AnyKernels,
        threads: int,
    ) -> None:
        self._device = device_of(kernels)
        self.buffers = make_buffers(program, max_rows, self._device)
        self._geometry, self._rotary, self._kernels, self._threads = geometry, rotary, kernels, threads
        self._helpers = ThreadPoolExecutor(threads - 1, "exact-kernels") if threads > 1 else None
        self._row_scale = torch.zeros(max_rows, device=self._device)
        self._scratch = torch.zeros(threads, QUERIES * padded(geometry.width))
        self._held: list[torch.Tensor] = []
        lowered = bytearray((Operation * len(program.ops))(*map(self._lower, program.ops)))
        self._program, self._num_ops = torch.frombuffer(lowered, dtype=torch.uint8).to(self._device), len(program.ops)

    def _lower(self, op: Op) -> Operation:
        sums = None
        if op.kind is Kind.LINEAR8:
            assert op.weight is not None
            sums = op.weight.sum(1, dtype=torch.int32)
        weight, scale, bias, sums = (
            None if each is None else each.to(self._device) for each in (op.weight, op.scale, op.bias, sums)
        )
        self._held += [each for each in (weight, scale, bias, sums) if each is not None]
        return Operation(
            op.kind, op.layer, _address(self.buffers[op.x]), _address(weight), _address(scale), _address(bias),
            _address(sums), _address(self._row_scale), _address(self.buffers[op.y]) + 4 * op.column, op.inputs,
            op.outputs, op.stride, op.factor,
        )  # fmt: skip

    def run(self, rows: Rows, store: PageStore | None) -> None:
        geometry, count, pieces = self._geometry, len(rows.positions), rows.pieces
        begins = itertools.accumulate((len(piece.pages) for piece in pieces), initial=0)
        parts = np.array([(*piece[:3], begin) for piece, begin in zip(pieces, begins, strict=False)], dtype=np.int64)
        arrays = [parts.reshape(-1), rows.positions, rows.row_pages, *(piece.pages for piece in pieces)]
        numbers = torch.from_numpy(np.concatenate(arrays)).to(self._device)
        positions = _address(numbers) + parts.nbytes
        batch = Batch(
            rows=count,
            num_parts=len(parts),
            num_ops=self._num_ops,
            threads=self._threads,
            parts=_address(numbers),
            positions=positions,
            row_pages=positions + 8 * count,
            pages=positions + 16 * count,
            heads=geometry.heads,
            kv_heads=geometry.kv_heads,
            width=geometry.width,
            stride=padded(geometry.width),
            scratch=_address(self._scratch),
            scratch_floats=self._scratch.shape[1],
        )
        if store is not None:
            batch.keys, batch.values, batch.num_pages = _address(store.keys), _address(store.values), store.number
            if self._rotary.grow(int(rows.positions.max()) + 1):
                batch.cosines, batch.sines = _address(self._rotary.cosines), _address(self._rotary.sines)
        self._kernels.run(_address(self._program), batch, self._helpers)


def _address(tensor: torch.Tensor | None) -> int:
    if tensor is None:
        return 0
    assert tensor.is_contiguous()
    return tensor.data_ptr()


class TorchRunner:
    """Runs a program with torch."""

    def __init__(self, program: Program, geometry: Geometry, rotary: Rotary, max_rows: int) -> None:
        self.buffers = make_buffers(program, max_rows)
        self._ops, self._geometry, self._rotary = program.ops, geometry, rotary

    def run(self, rows: Rows, store: PageStore | None) -> None:
        number, digits_of = len(rows.positions), ""
        for op in self._ops:
            if op.kind is Kind.DIGITS:
                digits_of = op.x
                continue
            if op.kind is Kind.HEAD_NORM:
                self._norm_heads(op, number)
                continue
            source = op.x if op.x != "digits" else digits_of
            x = self.buffers[source][: number * op.inputs_width].view(number, op.inputs_width)
            if op.kind in (Kind.PLACE, Kind.ATTEND):
                assert store is not None
                (self._place if op.kind is Kind.PLACE else self._attend)(op, x, rows, store)
            else:
                self._write(op, _COMPUTE[op.kind](op, x), number)

    def _write(self, op: Op, result: torch.Tensor, number: int) -> None:
        stride = op.stride or result.shape[1]
        y = self.buffers[op.y][: number * stride].view(number, stride)
        y = y[:, op.column : op.column + result.shape[1]]
        if op.kind is Kind.ADD or (op.factor and op.kind in (Kind.LINEAR, Kind.LINEAR8)):
            y.add_(result, alpha=op.factor or 1.0)
        else:
            y.copy_(result)

    def _norm_heads(self, op: Op, number: int) -> None:
        rows = self.buffers[op.y][: number * op.stride].view(number, op.stride)
        heads = rows[:, op.column : op.column + op.outputs * op.inputs].view(number, op.outputs, op.inputs)
        heads.copy_(_rms_norm(op, heads))

    def _place(self, op: Op, x: torch.Tensor, rows: Rows, store: PageStore) -> None:
        _, heads, kv_heads, width, *_ = self._geometry
        split = x.view(len(x), -1, width)
        positions, pages = torch.from_numpy(rows.positions), torch.from_numpy(rows.row_pages)
        if self._rotary.grow(int(positions.max()) + 1):
            cosines, sines = (each[positions][:, None] for each in (self._rotary.cosines, self._rotary.sines))
            one, other = split[:, : heads + kv_heads].clone().chunk(2, dim=-1)
            turned = (one * cosines - other * sines, other * cosines + one * sines)
            split[:, : heads + kv_heads] = torch.cat(turned, dim=-1)
        split[:, :heads] *= op.factor
        at = positions % PAGE
        store.keys[op.layer][pages, :, :, at] = split[:, heads : heads + kv_heads]
        store.values[op.layer][pages, :, at, :width] = split[:, heads + kv_heads :]

    def _attend(self, op: Op, x: torch.Tensor, rows: Rows, store: PageStore) -> None:
        _, heads, kv_heads, width, *_ = self._geometry
        queries, results = x.view(len(x), -1, width)[:, :heads], []
        for row, count, first, numbers in rows.pieces:
            known = first + count
            pages = torch.from_numpy(numbers)[: -(-known // PAGE)]
            keys = store.keys[op.layer][pages].permute(1, 0, 3, 2).reshape(kv_heads, -1, width)[:, :known]
            values = store.values[op.layer][pages].transpose(0, 1).flatten(1, 2)[:, :known, :width]
            seen = torch.ones(count, known, dtype=torch.bool).tril(first)
            mixed = functional.scaled_dot_product_attention(
                queries[row : row + count].transpose(0, 1)[None], keys[None], values[None], attn_mask=seen, scale=1.0,
                enable_gqa=heads != kv_heads,
            )  # fmt: skip
            results.append(mixed[0].transpose(0, 1).flatten(1))
        self._write(op, torch.cat(results), len(x))


def _linear(op: Op, x: torch.Tensor) -> torch.Tensor:
    assert op.weight is not None
    result = functional.linear(x, op.weight) if op.scale is None else int8_linear(x, op.weight, op.scale)
    return result if op.bias is None else result + op.bias


def _rms_norm(op: Op, x: torch.Tensor) -> torch.Tensor:
    assert op.weight is not None
    return op.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + op.factor))


def _silu(op: Op, x: torch.Tensor) -> torch.Tensor:
    gate, up = x.chunk(2, dim=1)
    return functional.silu(gate) * up


_COMPUTE: dict[Kind, Callable[[Op, torch.Tensor], torch.Tensor]] = {
    Kind.RMS_NORM: _rms_norm,
    Kind.LAYER_NORM: lambda op, x: functional.layer_norm(x, x.shape[1:], op.weight, op.bias, op.factor),
    Kind.LINEAR: _linear,
    Kind.LINEAR8: _linear,
    Kind.SILU: _silu,
    Kind.GELU: lambda op, x: functional.gelu(x, approximate="tanh"),
    Kind.ADD: lambda op, x: x,
}
