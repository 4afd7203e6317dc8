"""The state that all holders of one certificate share, bit for bit.

`SharedState` owns the master vector and the shared optimizer. Only a certified round changes it (`SharedState.apply`),
or a download, which writes chunks of it (`SharedState.patch`), or a checkpoint (`SharedState.replace`). Newcomers read
the live bytes a chunk at a time, each with a proof of the digest that it belongs to (`SharedState.read`): no copy is
made for them, however many there are and however long they take (`p2ptrain.training.sync.download`).

Threads: one at a time (that of `Runtime.compute`) calls `apply`, `patch`, `replace` and `tree`; any calls `read`. One
lock keeps a reader from seeing half a step.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from p2ptrain.averaging.protocol.head import Head
from p2ptrain.errors import IncompatibleError, TemporaryError
from p2ptrain.hashing import HASH_BYTES
from p2ptrain.training.state.digest import ChunkedBytes, MerkleTree, NamedTensors, TensorSpec, new_tensors, tree_of
from p2ptrain.training.state.fragments import Fragment, Fragments
from p2ptrain.training.state.layout import Layout
from p2ptrain.training.state.outer_optimizers import Stepper

__all__ = ["Head", "SharedState", "Stamp"]

VECTOR_NAME = "vector"

_STAMP = struct.Struct(f">Q{HASH_BYTES}s{HASH_BYTES}s")


@dataclass(frozen=True)
class Stamp:
    """Which state a chunk is of; follows the chunk on the wire, and is followed by its proof.

    Attributes:
        round: Of the head.
        lineage: Of the head, 32 bytes.
        digest: Of the head, 32 bytes.
    """

    round: int
    lineage: bytes
    digest: bytes

    NUM_BYTES = _STAMP.size

    @classmethod
    def of(cls, head: Head) -> Stamp:
        """The stamp of chunks of this head's state."""
        return cls(head.round, head.lineage, head.digest)

    def to_bytes(self) -> bytes:
        """`NUM_BYTES` bytes."""
        return _STAMP.pack(self.round, self.lineage, self.digest)

    @classmethod
    def from_bytes(cls, data: bytes | memoryview) -> Stamp:
        """What `to_bytes` made."""
        return cls(*_STAMP.unpack(data))


def stamped_bytes(chunk_bytes: int, depth: int) -> int:
    """Size of a chunk with its stamp and proof, in a tree of this depth."""
    return chunk_bytes + Stamp.NUM_BYTES + depth * HASH_BYTES


class SharedState:
    """Parameters, buffers and shared optimizer state on the CPU, and where their lineage stands.

    Attributes:
        vector: The master copy; fp32, ``[layout.num_values]``, CPU. Changed by this class alone, always in place.
        layout: What is where in it.
        stepper: The optimizer that is shared.
        fragments: What of it each round synchronises.
    """

    def __init__(
        self,
        vector: Tensor,
        layout: Layout,
        stepper: Stepper,
        head: Head | None = None,
        fragments: Fragments | None = None,
    ) -> None:
        """
        Args:
            vector: The values at the start; owned by this object from now on.
            layout: Its layout.
            stepper: The shared optimizer.
            head: Where the lineage stands; None until it is set, since it names the digest of this very state.
            fragments: What of it each round synchronises; None for all of it.
        """
        self.vector = vector
        self.layout = layout
        self.stepper = stepper
        self.fragments = fragments or Fragments(layout)
        self._head = head
        self._settled = head is not None
        self._tree: MerkleTree | None = None
        self._chunks: ChunkedBytes | None = None
        self._lock = threading.RLock()

    @classmethod
    def from_module(
        cls, module: nn.Module, layout: Layout, stepper: Stepper, fragments: Fragments | None = None
    ) -> SharedState:
        """The state that the module's present values are the beginning of; its ``head`` is still to be set."""
        vector = layout.new_vector()
        layout.read(module, vector)
        return cls(vector, layout, stepper, fragments=fragments)

    @property
    def head(self) -> Head:
        """Where the lineage stands. Set it after `apply`: until then the state has no name, and cannot be read."""
        if self._head is None:
            raise ValueError("the shared state has no head yet: set it before use")
        return self._head

    @head.setter
    def head(self, head: Head) -> None:
        with self._lock:
            self._head = head
            self._settled = True

    def tensors(self) -> list[tuple[str, Tensor]]:
        """All of it by name, the vector first: the live memory, so not to be kept across a round."""
        return [(VECTOR_NAME, self.vector), *self.stepper.state_tensors()]

    def tree(self) -> MerkleTree:
        """Hash all of it anew, so that a change in memory that no round made is found."""
        chunks = ChunkedBytes(self.tensors())
        tree = tree_of(chunks)
        self._chunks, self._tree = chunks, tree
        return tree

    def apply(self, mean: Tensor, round_: int, fragment: Fragment | None = None) -> None:
        """Take the shared step on a certified mean. Set ``head`` afterwards.

        Args:
            mean: fp32, ``[fragment.num_values]``, CPU.
            round_: The round that it is of.
            fragment: Whose values it holds; None for the whole vector.
        """
        with self._lock:
            self._unsettle()
            self.stepper.step(self.vector, mean, round_, fragment)

    def replace(self, tensors: NamedTensors, head: Head) -> None:
        """Take over another state as a whole.

        Args:
            tensors: As `tensors` gives them; copied. They must have the digest that ``head`` names.
            head: Where its lineage stands.

        Raises:
            IncompatibleError: They do not fit this model and optimizer; nothing was changed.
        """
        self._check_vector(tensors)
        with self._lock:
            self._unsettle()
            self.stepper.load_state_tensors(tensors[1:])
            self.vector.copy_(tensors[0][1])
            self.stepper.adopt(self.vector)
            self._head = head
            self._settled = True

    def patch(self, specs: tuple[TensorSpec, ...], chunks: Iterable[tuple[int, memoryview]]) -> None:
        """Overwrite chunks of it, in place. Set ``head`` once all of it is of one round.

        Args:
            specs: What the chunks were cut from.
            chunks: Index and bytes of each.

        Raises:
            IncompatibleError: The specs do not fit this model and optimizer.
        """
        with self._lock:
            self._unsettle()
            tensors = self.tensors()
            live = ChunkedBytes(tensors)
            if live.specs != specs:  # A torch optimizer has no state before its first step.
                tensors = new_tensors(specs)
                live = ChunkedBytes(tensors)
                self._check_vector(tensors)
                tensors[0][1].copy_(self.vector)
            for index, data in chunks:
                live.write(index, data)
            self.stepper.load_state_tensors(tensors[1:])
            self.vector.copy_(tensors[0][1])
            self.stepper.adopt(self.vector)

    def read(self, index: int, out: memoryview, specs: tuple[TensorSpec, ...], *, wait: bool = True) -> int:
        """Copy one chunk, its `Stamp` and its proof to the start of ``out``.

        Args:
            index: Which chunk, as in `p2ptrain.training.state.digest.Cut`.
            out: Writable, with room for it.
            specs: What the reader takes the state to consist of.
            wait: Whether to wait while a step is applied.

        Returns:
            The size in bytes; -1 while a round changes the state, unless ``wait`` says to wait for a step's end.

        Raises:
            TemporaryError: This peer's state is damaged, or it consists of other tensors.
        """
        if not self._lock.acquire(blocking=wait):
            return -1
        try:
            readable = self._readable()
            if readable is None:
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

    def describe(self) -> tuple[Head, tuple[TensorSpec, ...]] | None:
        """What is to be read now: its head, and what it consists of; None while a round changes it.

        Raises:
            TemporaryError: This peer's state is damaged.
        """
        if not self._lock.acquire(blocking=False):
            return None
        try:
            readable = self._readable()
            return (self.head, readable[0].specs) if readable is not None else None
        finally:
            self._lock.release()

    @property
    def is_settled(self) -> bool:
        """Whether ``head`` names this state: not between a step and its head."""
        return self._settled

    def is_being_changed(self) -> bool:
        """Whether another thread holds the lock: it changes the state, or reads a chunk of it."""
        if self._lock.acquire(blocking=False):
            self._lock.release()
            return False
        return True

    def needs_tree(self) -> bool:
        """Whether `tree` has to be called before the next `read`."""
        return self._tree is None and self._settled

    def _readable(self) -> tuple[ChunkedBytes, MerkleTree] | None:
        if not self._settled or self._tree is None or self._chunks is None:
            return None
        if self._tree.root != self.head.digest:
            raise TemporaryError("this peer's state is damaged and being repaired: ask another peer")
        return self._chunks, self._tree

    def _unsettle(self) -> None:
        self._settled = False
        self._tree = self._chunks = None

    def _check_vector(self, tensors: NamedTensors) -> None:
        fits = bool(tensors) and tensors[0][0] == VECTOR_NAME
        if not fits or tensors[0][1].shape != self.vector.shape or tensors[0][1].dtype != torch.float32:
            raise IncompatibleError("the state is that of another model: check that all peers build the same one")
