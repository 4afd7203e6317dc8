"""Shamir's secret sharing of 32-byte secrets (A. Shamir, How to share a secret, CACM 22(11), 1979).

Fewer shares than the threshold tell nothing of the secret: every secret is then equally likely. The field's order is
the smallest prime above 2^256, so that each secret is an element.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

PRIME = 2**256 + 297
SECRET_BYTES, SHARE_BYTES = 32, 33
MAX_SUBSETS = 256
"""Limit of the sets of shares that `recover` tries, besides the first."""


def split(secret: bytes, threshold: int, count: int, generator: random.Random) -> list[bytes]:
    """Return ``count`` shares of a secret, `SHARE_BYTES` each, of which any ``threshold`` recover it.

    Share i is the value at ``i + 1`` of a polynomial of degree ``threshold - 1``, whose value at 0 is the secret.
    """
    if len(secret) != SECRET_BYTES or not 1 <= threshold <= count:
        raise ValueError(f"cannot share {len(secret)} bytes among {count} with a threshold of {threshold}")
    coefficients = [int.from_bytes(secret, "big"), *(generator.randrange(PRIME) for _ in range(threshold - 1))]
    shares = []
    for x in range(1, count + 1):
        value = 0
        for coefficient in reversed(coefficients):
            value = (value * x + coefficient) % PRIME
        shares.append(value.to_bytes(SHARE_BYTES, "big"))
    return shares


def combine(shares: Mapping[int, bytes]) -> bytes | None:
    """Return the secret of exactly as many shares as the threshold, by index; None if their value is no secret."""
    total = 0
    for index, share in shares.items():
        above = below = 1
        for other in shares:
            if other != index:
                above = above * (other + 1) % PRIME
                below = below * (other - index) % PRIME
        total = (total + int.from_bytes(share, "big") * above * pow(below, -1, PRIME)) % PRIME
    return total.to_bytes(SECRET_BYTES, "big") if total >> 256 == 0 else None


def recover(shares: Mapping[int, bytes], threshold: int, is_right: Callable[[bytes], bool]) -> bytes | None:
    """Return the secret that passes ``is_right``, although some of the shares may be false; None without it.

    Tries up to `MAX_SUBSETS` sets of ``threshold`` shares, drawn at random.
    """
    indices, generator = sorted(shares), random.Random(0)
    if len(indices) < threshold:
        return None
    subset = indices[:threshold]
    for _ in range(1 + MAX_SUBSETS):
        secret = combine({index: shares[index] for index in subset})
        if secret is not None and is_right(secret):
            return secret
        if len(indices) == threshold:
            return None
        subset = generator.sample(indices, threshold)
    return None
