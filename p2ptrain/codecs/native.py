"""Codecs that hand their whole blocks to the native library where there is one; see `p2ptrain.native`."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from p2ptrain.codecs.base import Codec, CodecError
from p2ptrain.native import Function

ENERGY_VALUES = 1 << 14
"""The only step of `Codec.squared_norms` that is native: `p2ptrain.averaging.vector.reduce.CHUNK_VALUES`."""

NO_FUNCTIONS: Mapping[str, Function] = MappingProxyType({})


class NativeCodec(Codec):
    """A codec that computes with torch or NumPy what is not native: the rest after the last whole block, or everything.

    Attributes:
        functions: By operation, some or all of ``encode``, ``decode``, ``accumulate``, ``validate``, ``squares`` and
            ``energy``; `p2ptrain.codecs.warm_up` puts them here. They compute the same bits, so it does not matter
            when.
        native_values: Values in a block of the functions.
        refusal: The message for values that cannot be encoded.
    """

    functions: Mapping[str, Function] = NO_FUNCTIONS
    native_values: int
    refusal: str

    def squared_norms(self, data: bytes | bytearray | memoryview, num_values: int, step: int) -> list[float]:
        """See `Codec.squared_norms`."""
        import numpy as np

        from p2ptrain.codecs.arrays import byte_array
        from p2ptrain.codecs.norms import HALVED_COLUMNS, halved

        add_squares = self.functions.get("energy")
        if add_squares is None or step != ENERGY_VALUES:
            return super().squared_norms(data, num_values, step)
        array, whole = byte_array(data, self.encoded_bytes(num_values), self.name), num_values // step
        columns = np.zeros((whole, HALVED_COLUMNS), np.float32)
        add_squares(array.ctypes.data, columns.ctypes.data, whole, 1.0)
        rest, start = num_values - whole * step, self.encoded_bytes(whole * step)
        with np.errstate(over="ignore"):
            energies = halved(columns)
        return [*energies, self.squared_norm(memoryview(data).cast("B")[start:], rest)] if rest else energies

    def _run_native(
        self, operation: str, source: int, target: int, num_values: int, weight: float = 1.0, refusal: str = ""
    ) -> int:
        """Do ``operation`` on all whole blocks among ``num_values`` values. Return how many values that were.

        Args:
            source: The address of what is read; the caller has checked its size, as that of ``target``.
            target: The address of what is written.
            refusal: The message for values that the function refuses; by default that of the codec.

        Raises:
            CodecError: It refuses some.
        """
        function = self.functions.get(operation)
        blocks = num_values // self.native_values
        if function is None or blocks == 0:
            return 0
        if function(source, target, blocks, weight):
            raise CodecError(f"{self.name}: {refusal or self.refusal}")
        return blocks * self.native_values
