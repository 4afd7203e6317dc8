"""Codecs that hand their whole blocks to machine code where there is some; see `p2ptrain.kernels`."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from p2ptrain.codecs.base import Codec, CodecError
from p2ptrain.kernels import Kernel

ENERGY_VALUES = 1 << 14
"""The only step of `Codec.squared_norms` that has kernels: `p2ptrain.averaging.vector.reduce.CHUNK_VALUES`."""

NO_KERNELS: Mapping[str, Kernel] = MappingProxyType({})


class KernelCodec(Codec):
    """A codec that does with torch or NumPy what kernels do not: the rest after the last whole block, or everything.

    Attributes:
        kernels: By operation, some or all of ``encode``, ``decode``, ``accumulate``, ``validate``, ``squares`` and
            ``energy``;
            `p2ptrain.codecs.warm_up` puts them here. They compute the same bits, so it does not matter when.
        kernel_values: Values in a block of the kernels.
        refusal: What is said of values that cannot be encoded.
    """

    kernels: Mapping[str, Kernel] = NO_KERNELS
    kernel_values: int
    refusal: str

    def squared_norms(self, data: bytes | bytearray | memoryview, num_values: int, step: int) -> list[float]:
        """See `Codec.squared_norms`."""
        import numpy as np

        from p2ptrain.codecs.arrays import byte_array
        from p2ptrain.codecs.norms import HALVED_COLUMNS, halved

        kernel = self.kernels.get("energy")
        if kernel is None or step != ENERGY_VALUES:
            return super().squared_norms(data, num_values, step)
        array, whole = byte_array(data, self.encoded_bytes(num_values), self.name), num_values // step
        columns = np.zeros((whole, HALVED_COLUMNS), np.float32)
        kernel.at(array.ctypes.data, columns.ctypes.data, whole, 1.0)
        rest, start = num_values - whole * step, self.encoded_bytes(whole * step)
        with np.errstate(over="ignore"):
            energies = halved(columns)
        return [*energies, self.squared_norm(memoryview(data).cast("B")[start:], rest)] if rest else energies

    def _run_kernel(
        self, operation: str, source: int, target: int, num_values: int, weight: float = 1.0, refusal: str = ""
    ) -> int:
        """Do ``operation`` on all whole blocks among ``num_values`` values; returns how many values that were.

        Args:
            source: The address of what is read; the caller has checked its size, as that of ``target``.
            target: The address of what is written.
            refusal: The message for values that the kernel refuses; by default that of the codec.

        Raises:
            CodecError: It refuses some.
        """
        kernel = self.kernels.get(operation)
        blocks = num_values // self.kernel_values
        if kernel is None or blocks == 0:
            return 0
        if kernel.at(source, target, blocks, weight):
            raise CodecError(f"{self.name}: {refusal or self.refusal}")
        return blocks * self.kernel_values
