"""The state that all holders of one certificate share, bit for bit.

`SharedState` owns the master vector and the shared optimizer. Three calls change it: `SharedState.apply` with a
certified mean, `SharedState.patch` with downloaded chunks, and `SharedState.replace` with a checkpoint. Newcomers read
the live bytes by chunk, each with a proof of its digest (`SharedState.read`), so the server needs no copy.

Threads: `apply`, `patch`, `replace` and `tree` run on the thread of `Runtime.compute`; any thread may call `read`. A
lock keeps readers from seeing half a step.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from torch import Tensor, nn

from p2ptrain.averaging.protocol.certificate import Head
from p2ptrain.errors import IncompatibleError, TemporaryError
from p2ptrain.hashing import HASH_BYTES
from p2ptrain.training.state.digest import (
    ChunkedBytes,
    MerkleTree,
    NamedTensors,
    TensorSpec,
    byte_view,
    new_tensors,
    specs_of,
    tree_of,
)
from p2ptrain.training.state.layout import Fragment, Fragments, Layout
from p2ptrain.training.state.outer_optimizers import Stepper

VECTOR_NAME = "vector"
SPEC_BYTES = 512
"""Limit of an encoded `TensorSpec` without its parameter's name, and of what surrounds a `Description`."""

_STAMP = struct.Struct(f">Q{HASH_BYTES}s{HASH_BYTES}s")


@dataclass(frozen=True)
class Stamp:
    """The round, lineage and digest (32 bytes each) of the head of a chunk's state.

    On the wire it lies between the chunk and its proof.
    """

    round: int
    lineage: bytes
    digest: bytes

    NUM_BYTES = _STAMP.size

    @classmethod
    def of(cls, head: Head) -> Stamp:
        return cls(head.round, head.lineage, head.digest)

    def to_bytes(self) -> bytes:
        return _STAMP.pack(self.round, self.lineage, self.digest)

    @classmethod
    def from_bytes(cls, data: bytes | memoryview) -> Stamp:
        return cls(*_STAMP.unpack(data))


def stamped_bytes(chunk_bytes: int, depth: int) -> int:
    """Return the size of a chunk with its stamp and its proof in a tree of this depth."""
    return chunk_bytes + Stamp.NUM_BYTES + depth * HASH_BYTES


@dataclass(frozen=True)
class Snapshot:
    """A copy of a settled state's vector, with what proves it.

    Attributes:
        specs: Of all tensors of the state, whose digest ``head`` names.
        vector: Its bytes.
    """

    head: Head
    specs: tuple[TensorSpec, ...]
    tree: MerkleTree
    vector: memoryview


class SharedState:
    """Parameters, buffers and shared optimizer state on the CPU, and the head of their lineage.

    A new state has the module's present values, and no head: the caller sets it, because it names their digest.

    Attributes:
        vector: The master copy; fp32, ``[layout.num_values]``, CPU. Only this class changes it, always in place.
        fragments: The parts of the vector that rounds synchronise in turn.
        is_settled: True if ``head`` names this state; False between a step and its head.
    """

    def __init__(self, module: nn.Module, layout: Layout, stepper: Stepper, fragments: Fragments | None = None) -> None:
        self.vector = layout.new_vector()
        layout.read(module, self.vector)
        self.layout = layout
        self.stepper = stepper
        self.fragments = fragments or Fragments(layout)
        self.is_settled = False
        self._head: Head | None = None
        self._hashed: tuple[ChunkedBytes, MerkleTree] | None = None
        self._lock = threading.RLock()

    @property
    def head(self) -> Head:
        """The lineage's head. The caller sets it after `apply`; until then the state cannot be read."""
        if self._head is None:
            raise ValueError("the shared state has no head yet: set it before use")
        return self._head

    @head.setter
    def head(self, head: Head) -> None:
        with self._lock:
            self._head, self.is_settled = head, True

    def tensors(self) -> list[tuple[str, Tensor]]:
        """Return all tensors by name, the vector first: live memory, not to be kept across a round."""
        return [(VECTOR_NAME, self.vector), *self.stepper.state_tensors()]

    def tree(self) -> MerkleTree:
        """Hash the whole state anew, to detect corrupted memory."""
        chunks = ChunkedBytes(self.tensors())
        tree = tree_of(chunks)
        self._hashed = chunks, tree
        return tree

    @property
    def max_description_bytes(self) -> int:
        """Limit of the size of an encoded `Description` that `check_specs` accepts."""
        longest = max((len(entry.name.encode()) for entry in self.layout.entries), default=0)
        return (1 + self.stepper.max_tensors) * (longest + SPEC_BYTES) + SPEC_BYTES

    def check_specs(self, specs: tuple[TensorSpec, ...]) -> None:
        """Raise `IncompatibleError` unless a state of this model and optimizer can have these specs."""
        if specs[:1] != specs_of([(VECTOR_NAME, self.vector)]):
            raise IncompatibleError("the state is that of another model: check that all peers build the same one")
        self.stepper.check_specs(specs[1:])

    def apply(self, mean: Tensor, round_: int, fragment: Fragment | None = None) -> None:
        """Take the shared step on a round's certified mean (fp32, ``[fragment.num_values]``, CPU).

        The caller sets ``head`` afterwards. Without a fragment the mean covers the whole vector.
        """
        with self._lock:
            self._unsettle()
            self.stepper.step(self.vector, mean, round_, fragment)

    def replace(self, tensors: NamedTensors, head: Head) -> None:
        """Replace the whole state by copies of these tensors, in the form of `tensors` and with the digest of ``head``.

        Raises:
            IncompatibleError: They do not fit this model and optimizer; nothing was changed.
        """
        self.check_specs(specs_of(tensors))
        with self._lock:
            self._unsettle()
            self.stepper.load_state_tensors(tensors[1:])
            self.vector.copy_(tensors[0][1])
            self.stepper.adopt(self.vector)
            self._head, self.is_settled = head, True

    def patch(self, specs: tuple[TensorSpec, ...], chunks: Iterable[tuple[int, memoryview]]) -> None:
        """Overwrite chunks, given by index, in place. The caller sets ``head`` once all chunks are of one round.

        Raises:
            IncompatibleError: ``specs``, the tensors of the chunks, do not fit this model and optimizer.
        """
        self.check_specs(specs)
        with self._lock:
            self._unsettle()
            tensors = self.tensors()
            live = ChunkedBytes(tensors)
            if live.specs != specs:  # A torch optimizer has no state before its first step.
                tensors = new_tensors(specs)
                live = ChunkedBytes(tensors)
                tensors[0][1].copy_(self.vector)
            for index, data in chunks:
                live.write(index, data)
            self.stepper.load_state_tensors(tensors[1:])
            self.vector.copy_(tensors[0][1])
            self.stepper.adopt(self.vector)

    def read(self, index: int, out: memoryview, specs: tuple[TensorSpec, ...], *, wait: bool = True) -> int:
        """Copy one chunk, its `Stamp` and its proof to the start of ``out``, which has room for them.

        Without ``wait`` it does not block on the lock. ``specs`` are the reader's view of the state's tensors.

        Returns:
            The size in bytes; -1 if the lock is busy without ``wait``, or the state has no head or digest yet.

        Raises:
            TemporaryError: This peer's state is damaged, or has other tensors.
        """
        if not self._lock.acquire(blocking=wait):
            return -1
        try:
            if (readable := self._readable()) is None:
                return -1
            chunks, tree = readable
            if chunks.specs != specs:
                raise TemporaryError("the optimizer's state has other tensors now: ask again")
            size = chunks.read(index, out)
            for part in (Stamp.of(self.head).to_bytes(), tree.proof(index)):
                out[size : size + len(part)] = part
                size += len(part)
            return size
        finally:
            self._lock.release()

    def snapshot(self, allocate: Callable[[int], memoryview]) -> Snapshot | None:
        """Copy the vector into memory from ``allocate``, which gets its size in bytes; None while a round changes it.

        Raises:
            TemporaryError: The state in memory is damaged.
        """
        with self._lock:
            if not self.is_settled:
                return None
            if self._hashed is None:
                self.tree()
            if (readable := self._readable()) is None:
                return None
            live = byte_view(self.vector)
            copy = allocate(len(live))
            copy[:] = live
            return Snapshot(self.head, readable[0].specs, readable[1], copy)

    def describe(self) -> tuple[Head, tuple[TensorSpec, ...]] | None:
        """Return head and specs, or None while a round changes the state; raise `TemporaryError` if it is damaged."""
        if not self._lock.acquire(blocking=False):
            return None
        try:
            readable = self._readable()
            return (self.head, readable[0].specs) if readable is not None else None
        finally:
            self._lock.release()

    def is_being_changed(self) -> bool:
        if self._lock.acquire(blocking=False):
            self._lock.release()
            return False
        return True

    @property
    def needs_tree(self) -> bool:
        """True if `tree` must be called before the next `read`."""
        return self._hashed is None and self.is_settled

    def _readable(self) -> tuple[ChunkedBytes, MerkleTree] | None:
        if not self.is_settled or self._hashed is None:
            return None
        if self._hashed[1].root != self.head.digest:
            raise TemporaryError("this peer's state is damaged and being repaired: ask another peer")
        return self._hashed

    def _unsettle(self) -> None:
        self.is_settled, self._hashed = False, None
