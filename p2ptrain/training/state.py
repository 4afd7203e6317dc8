"""The state that all holders of one certificate share, bit for bit, and snapshots of it for those who download it.

`SharedState` owns the master vector and the shared optimizer. Only a certified round changes it: `SharedState.apply`,
or `SharedState.replace` with a whole other state. Who serves or saves a state takes a `Snapshot`: it refers to the live
bytes, which costs nothing, until a round is about to change them; then they are copied, once. A second such change
evicts the copy, whose readers are told that this peer moved on.

Threads: `apply`, `replace` and `tree` are called by one thread at a time (the compute thread); leases are taken, read
and released from any. One lock keeps a reader from seeing half a step.
"""

from __future__ import annotations

import logging
import threading

import torch
from torch import Tensor, nn

from p2ptrain.averaging.head import Head
from p2ptrain.errors import IncompatibleError, TemporaryError
from p2ptrain.training.digest import ChunkedBytes, MerkleTree, NamedTensors, merkle_tree
from p2ptrain.training.fragments import Fragment, Fragments
from p2ptrain.training.layout import Layout
from p2ptrain.training.outer import Stepper

__all__ = ["MOVED_ON", "Head", "SharedState", "Snapshot"]

logger = logging.getLogger(__name__)

VECTOR_NAME = "vector"

MOVED_ON = "moved on to round "
"""How the refusal starts that a reader of an older round gets; the round's number follows."""


class Snapshot:
    """The bytes of one round's state; made by `SharedState.lease`, to be released by whoever took it.

    Attributes:
        head: Where the lineage stood.
        tree: The digest of these bytes, with the hashes of their chunks.
    """

    def __init__(self, state: SharedState, head: Head, tree: MerkleTree, chunks: ChunkedBytes) -> None:
        self.head = head
        self.tree = tree
        self.specs = chunks.specs
        self.num_bytes = chunks.num_bytes
        self.num_chunks = chunks.num_chunks
        self._state = state
        self._chunks: ChunkedBytes | None = chunks
        self._leases = 0

    def read(self, index: int, out: memoryview, *, wait: bool = True) -> int:
        """Copy one chunk of at most 1 MiB to the start of ``out``.

        Args:
            index: Which chunk, as in `p2ptrain.training.digest.ChunkedBytes`.
            out: Writable, with room for it.
            wait: Whether to wait while a step is applied.

        Returns:
            Its size in bytes; -1 when a step is being applied and ``wait`` is false.

        Raises:
            TemporaryError: The snapshot was evicted; the message starts with `MOVED_ON`.
        """
        lock = self._state._lock
        if not lock.acquire(blocking=wait):
            return -1
        try:
            if self._chunks is None:
                raise self._state._moved_on()
            return self._chunks.read(index, out)
        finally:
            lock.release()

    def release(self) -> None:
        """Give up one lease; the bytes may change or be freed once all are given up."""
        self._state._release(self)


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
        self._lock = threading.RLock()
        self._live: Snapshot | None = None
        self._copied: Snapshot | None = None
        self._offered: Snapshot | None = None

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
        """Where the lineage stands. Set it after `apply`: until then the state has no name, and cannot be leased."""
        if self._head is None:
            raise ValueError("the shared state has no head yet: set it before use")
        return self._head

    @head.setter
    def head(self, head: Head) -> None:
        with self._lock:
            if self._live is not None and self._live.head != head:
                self._detach(same_lineage=True)
            self._head = head
            self._settled = True

    def tensors(self) -> list[tuple[str, Tensor]]:
        """All of it by name, the vector first: the live memory, so not to be kept across a round."""
        return [(VECTOR_NAME, self.vector), *self.stepper.state_tensors()]

    def tree(self) -> MerkleTree:
        """Hash all of it anew, so that a change in memory that no round made is found."""
        tree = merkle_tree(self.tensors())
        self._tree = tree
        return tree

    def apply(self, mean: Tensor, fragment: Fragment | None = None) -> None:
        """Take the shared step on a certified mean. Set ``head`` afterwards.

        Args:
            mean: fp32, ``[fragment.num_values]``, CPU.
            fragment: Whose values it holds; None for the whole vector.
        """
        with self._lock:
            self._detach(same_lineage=True)
            self._settled = False
            self._tree = None
            self.stepper.step(self.vector, mean, fragment)

    def replace(self, tensors: NamedTensors, head: Head) -> None:
        """Take over another state as a whole.

        Args:
            tensors: As `tensors` gives them; copied. They must have the digest that ``head`` names.
            head: Where its lineage stands.

        Raises:
            IncompatibleError: They do not fit this model and optimizer; nothing was changed.
        """
        fits = bool(tensors) and tensors[0][0] == VECTOR_NAME
        if not fits or tensors[0][1].shape != self.vector.shape or tensors[0][1].dtype != torch.float32:
            raise IncompatibleError("the state is that of another model: check that all peers build the same one")
        with self._lock:
            self._detach(same_lineage=False)
            self.stepper.load_state_tensors(tensors[1:])
            self.vector.copy_(tensors[0][1])
            self._tree = None
            self._head = head
            self._settled = True

    def lease(self, lineage: bytes | None = None) -> Snapshot:
        """Pin the bytes of the current round, or of one that others still read.

        Args:
            lineage: Which one, by the lineage of its head; the current one when None.

        Raises:
            TemporaryError: It is gone (the message starts with `MOVED_ON`), or a round is being applied just now.
        """
        if not self._lock.acquire(blocking=False):
            raise TemporaryError("between two rounds: ask again in a moment")
        try:
            snapshot = self._find(lineage)
            snapshot._leases += 1
            return snapshot
        finally:
            self._lock.release()

    def offer(self, oldest_round: int) -> Snapshot:
        """Pin what a newcomer should read: what others read already, unless it is too old, so that all share one copy.

        Args:
            oldest_round: The oldest round that is of use.

        Raises:
            TemporaryError: As `lease`.
        """
        offered = self._offered  # `lease` refuses, without waiting, while a round changes it.
        return self.lease(offered.head.lineage if offered and offered.head.round >= oldest_round else None)

    def needs_tree(self) -> bool:
        """Whether `tree` has to be called before the next `lease`."""
        return self._tree is None

    def _find(self, lineage: bytes | None) -> Snapshot:
        current = self._settled and lineage in (None, self.head.lineage)
        if not current:
            if self._copied is not None and self._copied.head.lineage == lineage:
                return self._copied
            if not self._settled:
                raise TemporaryError("between two rounds: ask again in a moment")
            raise self._moved_on()
        if self._live is None:
            if self._tree is None:
                raise TemporaryError("the state has no digest yet: ask again in a moment")
            if self._tree.root != self.head.digest:
                raise TemporaryError("this peer's state is damaged and being repaired: ask another peer")
            self._live = Snapshot(self, self.head, self._tree, ChunkedBytes(self.tensors()))
        return self._live

    def _detach(self, same_lineage: bool) -> None:
        """Before live bytes change: give those who read them a copy of their own.

        Args:
            same_lineage: Whether who reads the copy can replay the rounds that follow.
        """
        live, self._live = self._live, None
        self._offered = self._offered if same_lineage else None
        if live is None or not live._leases:
            return
        if self._copied is not None:
            self._copied._chunks = None
            self._copied = self._offered = None
        try:
            live._chunks = ChunkedBytes([(name, tensor.clone()) for name, tensor in self.tensors()])
            self._copied = live
            self._offered = live if same_lineage else None
        except RuntimeError as error:  # torch's way of saying that memory is short; the round matters more.
            logger.warning("round %d: no memory to let readers finish: %s", live.head.round, error)
            live._chunks = None

    def _release(self, snapshot: Snapshot) -> None:
        with self._lock:
            snapshot._leases -= 1
            if snapshot._leases == 0:
                snapshot._chunks = None
                if snapshot is self._copied:
                    self._copied = self._offered = None
                elif snapshot is self._live:
                    self._live = None

    def _moved_on(self) -> TemporaryError:
        return TemporaryError(f"{MOVED_ON}{self.head.round}")
