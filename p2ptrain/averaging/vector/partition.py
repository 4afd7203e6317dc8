"""Shares of the vector in a butterfly all-reduce: each owner reduces one, sized by its bandwidth.

Member i of a group of n owns the fraction w_i of the vector. It sends the other n - 1 owners their parts of its own
contribution, 1 - w_i, and its finished mean to the n - 1 others, (n - 1) w_i, and receives as much: in all
``1 + (n - 2) w_i`` vectors each way. So a round takes at least ``max_i (1 + (n - 2) w_i) / b_i`` (vectors per unit of
bandwidth), which `split_shares` minimises: Diskin et al., "Distributed Deep Learning in Open Collaborations" (DeDLOC),
section 3.2, https://arxiv.org/abs/2106.10207, there solved as a linear program.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

Share = tuple[int, int]
"""First value and the value after the last; equal for a member that owns nothing."""


def share_weights(bandwidths: Sequence[float]) -> list[Fraction]:
    """The fractions that minimise the slowest member's time; they sum to exactly 1.

    Water-filling. Pour the work to one level T: ``w_i = max(0, (T b_i - 1) / (n - 2))``, with T such that the w_i sum
    to 1. If the k fastest members are those with work, ``T = (n - 2 + k) / (b_1 + ... + b_k)``, and k is the largest
    for which member k's share is positive, ``T b_k > 1``.

    Why this is optimal: in any other split some member i with w_i > 0 gets at least as much, so it takes at least T;
    and each member takes at least 1 / b_j, which its own contribution needs whatever it owns. The split reaches the
    larger of the two. Members that are slower than T own nothing, and do not slow down those who do.

    For n <= 2 every split takes the same time, so owners share alike.

    Args:
        bandwidths: Each member's bandwidth in any common unit; 0 for one that cannot own a share (it accepts no
            connections). All equal if none is known.

    Raises:
        ValueError: A bandwidth is negative or not finite, or all are 0.
    """
    if not all(math.isfinite(bandwidth) and bandwidth >= 0 for bandwidth in bandwidths):
        raise ValueError(f"bandwidths must be finite and not negative: {list(bandwidths)}")
    # Exact: every member computes the split for itself, and all must come to the same.
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
    """Cut ``[0, num_values)`` into one contiguous share for each owner, in their order.

    Cuts fall on multiples of ``block_size``. Whole blocks follow ``weights`` by the largest remainder, so a member gets
    at most one block more or less than its exact fraction, and never fewer than one with a smaller weight.

    Args:
        num_values: Length of the vector.
        weights: From `share_weights`; one for each member.
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
