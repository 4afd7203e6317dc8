"""Vectors for tests, and what codecs make of them."""

import numpy as np
import torch

from p2ptrain.codecs import Codec, Decoder


def gaussian(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def exact_values(num_values: int, seed: int) -> torch.Tensor:
    """Values from -1 to 1, the same on every machine: exact integer arithmetic, no library's generator."""
    raw = (np.arange(num_values, dtype=np.uint64) * 2654435761 + seed * 40503) % 2**24
    return torch.from_numpy((raw.astype(np.float32) / np.float32(2**23) - np.float32(1.0)).copy())


def decode(codec: Decoder, data: bytes | bytearray | memoryview, num_values: int) -> torch.Tensor:
    """What encoded values decode to; NaN where the codec writes nothing."""
    out = torch.full((num_values,), torch.nan)
    codec.decode_into(data, out)
    return out


def round_trip(codec: Codec, vector: torch.Tensor) -> torch.Tensor:
    """What a vector becomes on the wire, as its receiver has it: validated and decoded."""
    encoded = codec.encode(vector)
    codec.validate(encoded, len(vector))
    return decode(codec, encoded, len(vector))
