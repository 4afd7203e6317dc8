"""Random numbers that nobody can repeat: the noise and the draws of differential privacy.

A simulation alone passes keys of its own, so that it can be repeated.

The bits are the key stream of ChaCha20 (RFC 8439) under a key of the operating system, a fresh one for each call. A
generator of torch would not do: on a CPU its stream has 2^32 seeds, so whoever sees a noisy step could try them all.

Noise is computed in fp64 and added in fp64, and only the sum is rounded to fp32. So each fp32 value near the sum is
reached from many noises, and the gaps between the fp64 ones tell nothing (the attack of Mironov, CCS 2012).
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20

CHUNK = 1 << 20
"""Numbers computed at once: fits into a cache, and bounds the memory of temporary values."""


Keys = Callable[[], bytes]
"""Returns the next key, 32 bytes."""


def fresh_key() -> bytes:
    """Return a key of the operating system."""
    return secrets.token_bytes(32)


def uniform(count: int, keys: Keys = fresh_key) -> torch.Tensor:
    """Return independent numbers in (0, 1], multiples of 2^-53, fp64, ``[count]``."""
    stream = Cipher(ChaCha20(keys(), bytes(16)), None).encryptor().update(bytes(8 * count))
    bits = torch.from_numpy(np.frombuffer(stream, dtype=np.uint64) >> np.uint64(11)).to(torch.float64)
    return bits.add_(1.0).mul_(2.0**-53)


def gaussian(count: int, keys: Keys = fresh_key) -> torch.Tensor:
    """Return independent numbers of deviation 1 (Box and Muller, 1958), fp64, ``[count]``.

    None is beyond 8.6, where less than 1e-17 of a Gaussian is: far below any delta.
    """
    half = -(-count // 2)
    radius, angle = uniform(half, keys).log_().mul_(-2.0).sqrt_(), uniform(half, keys).mul_(2.0 * math.pi)
    return torch.cat([radius * angle.cos(), radius * angle.sin()])[:count]


def add_noise(values: torch.Tensor, deviation: float, keys: Keys = fresh_key) -> None:
    """Add noise to fp32 values, or to values of less precision, in place."""
    flat = values.view(-1)
    for start in range(0, len(flat), CHUNK):
        part = flat[start : start + CHUNK]
        noise = gaussian(len(part), keys).mul_(deviation)
        part.copy_(noise.add_(part.cpu()).float())
