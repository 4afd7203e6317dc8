"""Shares of the vector in a butterfly all-reduce: each owner reduces one, sized by its bandwidth.

Member i of a group of n owns the fraction w_i of the vector. It sends ``1 - w_i`` vectors of its own contribution to
the other owners, and ``(n - 1) w_i`` vectors of its mean to the other members. It receives as much: in all
``1 + (n - 2) w_i`` vectors each way. A round takes at least ``max_i (1 + (n - 2) w_i) / b_i`` (vectors per unit of
bandwidth). `share_weights` minimises this bound. Diskin et al., "Distributed Deep Learning in Open Collaborations"
(DeDLOC), section 3.2, https://arxiv.org/abs/2106.10207, solve it as a linear program.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

Share = tuple[int, int]
"""(start, stop) in values; equal for a member that owns nothing."""


def share_weights(bandwidths: Sequence[float]) -> list[Fraction]:
    """Return the fractions that minimise the slowest member's time; they sum to exactly 1.

    The solution is water-filling to a level T: ``w_i = max(0, (T b_i - 1) / (n - 2))``, with T such that the w_i sum
    to 1. If the k fastest members own shares, ``T = (n - 2 + k) / (b_1 + ... + b_k)``. k is the largest count for which
    member k's share is positive: ``T b_k > 1``.

    Proof of optimality: in any other split, some member i with w_i > 0 gets at least as much, and takes at least T.
    Each member j takes at least 1 / b_j for its own contribution. The split reaches the larger of the two bounds.

    For n <= 2 every split takes the same time, so all owners get equal shares.

    Args:
        bandwidths: Bandwidth of each member in any common unit. 0 for a member that accepts no connections and cannot
            own a share. All equal if none is known.

    Raises:
        ValueError: A bandwidth is negative or not finite, or all are 0.
    """
    if not all(math.isfinite(bandwidth) and bandwidth >= 0 for bandwidth in bandwidths):
        raise ValueError(f"bandwidths must be finite and not negative: {list(bandwidths)}")
    # Exact fractions: every member computes the split itself, and all results must be equal.
    exact = [Fraction(bandwidth) for bandwidth in bandwidths]
    owners = sorted((index for index, bandwidth in enumerate(exact) if bandwidth), key=lambda index: -exact[index])
    if not owners:
        raise ValueError("no member of the group can own a share: at least one bandwidth must be positive")
    weights = [Fraction(0)] * len(exact)
    others = len(exact) - 2
    if others <= 0:
        for index in owners:
            weights[index] = Fraction(1, len(owners))
        return weights
    level, total = Fraction(0), Fraction(0)
    for count, index in enumerate(owners, start=1):
        candidate = (others + count) / (total + exact[index])
        if candidate * exact[index] <= 1:
            break
        level, total = candidate, total + exact[index]
    for index in owners:
        weights[index] = max(Fraction(0), (level * exact[index] - 1) / others)
    return weights


def split_shares(num_values: int, weights: Sequence[Fraction], block_size: int) -> list[Share]:
    """Cut ``[0, num_values)`` into one contiguous share for each member, in their order.

    Cuts fall on multiples of ``block_size``. The largest-remainder method assigns whole blocks, so a member's blocks
    differ from its exact fraction by less than one. A larger weight never gets fewer blocks.

    Args:
        weights: One for each member, from `share_weights`.
        block_size: Values that a codec encodes together.

    Returns:
        (start, stop) for each member; empty shares are (start, start).

    Raises:
        ValueError: A size is out of range, or the weights do not sum to 1.
    """
    if num_values < 0 or block_size < 1:
        raise ValueError(f"cannot cut {num_values} values into blocks of {block_size}")
    if sum(weights) != 1 or min(weights) < 0:
        raise ValueError("the weights of shares must be at least 0 and sum to exactly 1")
    num_blocks = -(-num_values // block_size)
    exact = [weight * num_blocks for weight in weights]
    blocks = [math.floor(part) for part in exact]
    by_remainder = sorted(range(len(exact)), key=lambda index: (blocks[index] - exact[index], -weights[index], index))
    for index in by_remainder[: num_blocks - sum(blocks)]:
        blocks[index] += 1
    shares, start = [], 0
    for count in blocks:
        stop = min(start + count * block_size, num_values)
        shares.append((start, stop))
        start = stop
    return shares
