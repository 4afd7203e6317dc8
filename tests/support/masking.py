"""How much bytes look like random ones."""

import math

import numpy as np
import numpy.typing as npt


def uniformity(data: bytes | npt.NDArray[np.uint8]) -> float:
    """Return the probability that uniform bytes are at least as uneven: Pearson's chi-squared test on 256 counts.

    By Wilson and Hilferty's approximation (1931), the cube root of chi-squared is normal. Needs 1280 bytes or more.
    """
    values = np.frombuffer(data, np.uint8) if isinstance(data, bytes) else data
    expected, freedom = len(values) / 256, 255
    if expected < 5:
        raise ValueError(f"{len(values)} bytes are too few")
    chi = float(((np.bincount(values, minlength=256) - expected) ** 2 / expected).sum())
    deviation = 2 / (9 * freedom)
    score = ((chi / freedom) ** (1 / 3) - (1 - deviation)) / math.sqrt(deviation)
    return 0.5 * math.erfc(score / math.sqrt(2))
