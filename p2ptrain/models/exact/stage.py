"""Stages for serving: they cut batches, run the programs and check the results."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch

from p2ptrain.errors import IntegrityError, ResourceError, UsageError
from p2ptrain.manifest import ModelSpec
from p2ptrain.models.exact.gpu import GpuKernels
from p2ptrain.models.exact.program import Program, WeightFormat, write_programs
from p2ptrain.models.exact.runners import (
    KernelRunner,
    PageStore,
    Piece,
    Rotary,
    Rows,
    Runner,
    TorchRunner,
    device_of,
    padded,
)
from p2ptrain.models.stage import Stage
from p2ptrain.native.cuda import MAX_HEAD_WIDTH
from p2ptrain.native.exact import PAGE, AnyKernels, load_kernels

MAX_ROWS, MAX_HEAD_ROWS = 256, 64
"""Rows of layers and head that are computed at one time; more are cut. Buffers are this long."""
FREE_SHARE = 0.5
"""Share of a GPU's free memory for pages; the rest is for the next version, and for training."""
_NO_ROWS = np.zeros(0, dtype=np.int64)


class Part(NamedTuple):
    """Consecutive rows of one session in a batch.

    Attributes:
        rows: Their number.
        first: Position of the first of them.
        pages: Numbers of the session's pages in the store; page ``i`` holds the positions from ``i * PAGE``. They
            reach at least to the last row.
    """

    rows: int
    first: int
    pages: Sequence[int]


class NotFiniteError(IntegrityError):
    """Results of some sessions are not finite; ``parts`` has their numbers in the batch. The others may try again."""

    def __init__(self, parts: Sequence[int]) -> None:
        super().__init__("the model's result is not finite: end this session, and check the model's weights")
        self.parts = tuple(parts)


class ExactStage:
    """A stage's modules for serving, with bits that depend on a row and its session's earlier rows alone.

    One thread at a time computes; others wait.

    Attributes:
        arithmetic: Id of the bits: stages of equal ids and weights compute equal bits. ``torch-1/…`` promises nothing.
        page_bytes: Size of a page in all layers, keys and values.
        context: Positions that the model was made for; GPT-2 has no others.
    """

    def __init__(
        self,
        stage: Stage,
        spec: ModelSpec,
        *,
        weights: WeightFormat = "fp32",
        threads: int = 1,
        kernels: AnyKernels | None = None,
    ) -> None:
        """Copy a stage's weights, in ``weights`` format, to where the kernels are; without any it uses torch."""
        programs = write_programs(stage, spec, weights)
        if isinstance(kernels, GpuKernels) and programs.geometry.width > MAX_HEAD_WIDTH:
            raise UsageError(f"on a GPU, heads have at most {MAX_HEAD_WIDTH} values: serve with --device cpu")
        self.hidden, self.vocabulary, self.context = spec.hidden, spec.vocabulary, spec.context
        self.num_layers, self.is_first, self.is_last = programs.geometry.layers, stage.is_first, stage.is_last
        self.arithmetic = f"{'exact-1' if kernels else 'torch-1'}/{weights}"
        self._table, self._positions, self._geometry = programs.table, programs.positions, programs.geometry
        self._device, self._stream = device_of(kernels), kernels.stream if isinstance(kernels, GpuKernels) else None
        self._rotary, self._lock = Rotary(programs.geometry, self._device), threading.Lock()

        def runner(program: Program, max_rows: int) -> Runner:
            if kernels is None:
                return TorchRunner(program, programs.geometry, self._rotary, max_rows)
            return KernelRunner(program, programs.geometry, self._rotary, max_rows, kernels, threads)

        with self._computing():
            self._layers = runner(programs.layers, MAX_ROWS) if programs.layers.ops else None
            self._head = runner(programs.head, MAX_HEAD_ROWS) if programs.head else None

    @property
    def page_bytes(self) -> int:
        width = self._geometry.width
        return 4 * self.num_layers * self._geometry.kv_heads * PAGE * (width + padded(width))

    @property
    def free_bytes(self) -> int:
        """Memory that pages may take; a CPU's system tells nobody, and the config alone bounds them."""
        if self._stream is None:
            return sys.maxsize
        return int(FREE_SHARE * torch.cuda.mem_get_info(self._device)[0])

    def new_pages(self, number: int) -> PageStore:
        """Return a store of pages with the numbers below ``number``."""
        with self._computing():
            return PageStore(self._geometry, number, self._device)

    @contextlib.contextmanager
    def _computing(self) -> Iterator[None]:
        if self._stream is None:
            yield
            return
        try:
            with torch.cuda.stream(self._stream):
                yield
        except torch.cuda.OutOfMemoryError as error:
            raise ResourceError(
                "the GPU has too little free memory to serve: set serving.weights to int8, or serve with --device cpu"
            ) from error

    @torch.inference_mode()
    def step(self, parts: Sequence[Part], inputs: torch.Tensor, store: PageStore) -> torch.Tensor:
        """Compute the next rows of some sessions, and write their keys and values to the store.

        Args:
            parts: The sessions' rows in ``inputs``, one after another.
            inputs: Token ids ``[rows]``, int64, in the first stage; else ``[rows, hidden]``.

        Returns:
            ``[rows, hidden]``, in the last stage before normalisation and head.

        Raises:
            NotFiniteError: A result is not finite.
            ValueError: Rows, pages or ids do not fit.
        """
        self._check(parts, inputs, store)
        with self._lock, self._computing():
            outputs = self._embed(parts, inputs)
            if self._layers is not None:
                buffer = self._layers.buffers["hidden"]
                for start, rows in cut(parts):
                    count = len(rows.positions)
                    block = buffer[: count * self.hidden].view(count, self.hidden)
                    block.copy_(outputs[start : start + count])
                    self._layers.run(rows, store)
                    outputs[start : start + count] = block
        if not bool(torch.isfinite(outputs).all()):
            pieces = torch.split(outputs, [part.rows for part in parts])
            raise NotFiniteError([number for number, each in enumerate(pieces) if not torch.isfinite(each).all()])
        return outputs

    @torch.inference_mode()
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return ``[rows, vocabulary]`` for ``[rows, hidden]``; raises `NotFiniteError`, with rows as parts."""
        return self.head(hidden)[0]

    @torch.inference_mode()
    def head(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the logits, and ``[rows, hidden]`` after the last normalisation; raises as `logits`."""
        assert self._head is not None
        outputs, normed = torch.empty(len(hidden), self.vocabulary), torch.empty_like(hidden)
        with self._lock, self._computing():
            for start in range(0, len(hidden), MAX_HEAD_ROWS):
                block = hidden[start : start + MAX_HEAD_ROWS]
                self._head.buffers["hidden"][: block.numel()].copy_(block.flatten())
                self._head.run(Rows((), np.zeros(len(block), dtype=np.int64), _NO_ROWS), None)
                found = self._head.buffers["logits"][: len(block) * self.vocabulary]
                outputs[start : start + len(block)] = found.view(len(block), -1)
                normed[start : start + len(block)] = self._head.buffers["normed"][: block.numel()].view(block.shape)
        if not bool(torch.isfinite(outputs).all()):
            raise NotFiniteError([row for row, each in enumerate(outputs) if not torch.isfinite(each).all()])
        return outputs, normed

    def _embed(self, parts: Sequence[Part], inputs: torch.Tensor) -> torch.Tensor:
        if self._table is None:
            return inputs.clone()
        found = self._table.rows(inputs)
        if self._positions is not None:
            found += self._positions.rows(
                torch.cat([torch.arange(part.first, part.first + part.rows) for part in parts])
            )
        return found

    def _check(self, parts: Sequence[Part], inputs: torch.Tensor, store: PageStore) -> None:
        expected = torch.int64 if self.is_first else torch.float32
        if inputs.dtype != expected or inputs.shape[1:] != (() if self.is_first else (self.hidden,)):
            raise ValueError(f"inputs of {inputs.dtype}, {list(inputs.shape)}, do not fit this stage")
        if not parts or sum(part.rows for part in parts) != len(inputs) or min(part.rows for part in parts) < 1:
            raise ValueError(f"parts of {[part.rows for part in parts]} rows do not make up {len(inputs)} rows")
        if self.is_first and not 0 <= int(inputs.min()) <= int(inputs.max()) < self.vocabulary:
            raise ValueError(f"token ids must be below {self.vocabulary}")
        for part in parts:
            last = part.first + part.rows - 1
            if part.first < 0 or (self._positions is not None and last >= self.context):
                raise ValueError(f"the model has no position {last}")
            needed = part.pages[: last // PAGE + 1]
            if len(needed) <= last // PAGE or min(needed) < 0 or max(needed) >= store.number:
                raise ValueError(f"position {last} has no page in the store")


def cut(parts: Sequence[Part]) -> Iterator[tuple[int, Rows]]:
    """Cut a batch into batches of at most `MAX_ROWS` rows; yield the first row of each, and its rows."""
    start, count, pieces = 0, 0, list[Piece]()
    for part in parts:
        pages, done = np.asarray(part.pages, dtype=np.int64), 0
        while done < part.rows:
            some = min(part.rows - done, MAX_ROWS - count)
            pieces.append(Piece(count, some, part.first + done, pages))
            count, done = count + some, done + some
            if count == MAX_ROWS:
                yield start, _rows(pieces)
                start, count, pieces = start + count, 0, []
    if pieces:
        yield start, _rows(pieces)


def _rows(pieces: Sequence[Piece]) -> Rows:
    positions = [np.arange(piece.first, piece.first + piece.rows) for piece in pieces]
    pages = [piece.pages[each // PAGE] for piece, each in zip(pieces, positions, strict=True)]
    return Rows(pieces, np.concatenate(positions), np.concatenate(pages))


def exact_stage(stage: Stage, spec: ModelSpec, *, weights: WeightFormat = "fp32", threads: int = 1) -> ExactStage:
    """Return a stage on the fastest kernels of this CPU; without kernels on torch, which promises no bits."""
    return ExactStage(stage, spec, weights=weights, threads=threads, kernels=load_kernels())
