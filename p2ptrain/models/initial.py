"""Initial parameters by integer arithmetic, because peers must start from equal bits.

torch's normal generator gives other bits on CPUs with other vector instructions.
"""

from __future__ import annotations

import hashlib

import numpy as np
import torch


def deterministic_normal_(parameter: torch.Tensor, std: float, key: str) -> None:
    """Fill a contiguous fp32 CPU tensor with nearly normal values of mean 0 that depend on ``key`` alone.

    Each value is a sum of four 16-bit integers from Philox, whose stream NumPy keeps stable across versions. It lies
    within 3.5 ``std``. The only rounding is in the final multiplication, which IEEE 754 defines.
    """
    seed = int.from_bytes(hashlib.sha256(f"initial {key}".encode()).digest()[:16], "little")
    words = np.random.Philox(key=seed).random_raw(parameter.numel()).astype("<u8", copy=False)
    sums = words.view("<u2").reshape(-1, 4).sum(axis=1, dtype=np.int32) - 2 * 65535
    variance = 4 * (65536**2 - 1) / 12  # of four independent uniform integers below 65536
    values = sums.astype(np.float32) * np.float32(std / variance**0.5)
    parameter.copy_(torch.from_numpy(values).view(parameter.shape))
