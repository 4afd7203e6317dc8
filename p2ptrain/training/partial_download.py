"""What a state download has so far: only verified chunks, and enough to go on with other sources."""

from __future__ import annotations

from torch import Tensor

from p2ptrain.errors import ResourceError
from p2ptrain.training.digest import ChunkedBytes, TensorSpec, new_tensors, verify_chunk


class PartialDownload:
    """What a download has so far; pass it to the next `download_state` to go on where it stopped.

    Attributes:
        digest: Which state; empty before a first source was heard.
        specs: Its tensors.
        leaves: Hashes of its chunks.
        tensors: Where its bytes go.
        done: For each chunk, 1 once it is verified and in place.
        bytes_done: In chunks that are; ``num_bytes``: of the whole state, 0 before a first source was heard.
    """

    def __init__(self) -> None:
        self.digest = b""
        self.specs: tuple[TensorSpec, ...] = ()
        self.leaves: list[bytes] = []
        self.tensors: list[tuple[str, Tensor]] = []
        self.done = bytearray()
        self.bytes_done = 0
        self.num_bytes = 0
        self._chunks: ChunkedBytes | None = None

    @property
    def num_done(self) -> int:
        """Chunks in place."""
        return self.done.count(1)

    def begin(self, digest: bytes, specs: tuple[TensorSpec, ...], leaves: list[bytes]) -> None:
        """Make room for a state whose description is verified; raises `ResourceError` when there is none."""
        try:
            tensors = new_tensors(specs)
        except MemoryError as error:
            needed = sum(spec.num_bytes for spec in specs) >> 20
            raise ResourceError(f"no memory for a state of {needed} MiB: close other programs") from error
        self.digest, self.specs, self.leaves, self.tensors = digest, specs, leaves, tensors
        self.done = bytearray(len(leaves))
        self.bytes_done, self.num_bytes = 0, sum(spec.num_bytes for spec in specs)
        self._chunks = ChunkedBytes(tensors)

    def chunk_bytes(self, index: int) -> int:
        """Size of a chunk."""
        assert self._chunks is not None
        return self._chunks.chunk_bytes(index)

    def put(self, index: int, data: memoryview) -> bool:
        """Verify a chunk and put it in place; False when its hash is wrong."""
        assert self._chunks is not None
        if self.done[index]:
            return True
        if not verify_chunk(index, data, self.leaves):
            return False
        self._chunks.write(index, data)
        self.done[index] = 1
        self.bytes_done += len(data)
        return True
