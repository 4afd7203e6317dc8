"""Who reduces which part of the vector in a butterfly all-reduce, by bandwidth.

Member i of a group of n owns the fraction w_i of the vector. It sends the other n - 1 owners their parts of its own
contribution, 1 - w_i, and its finished mean to the n - 1 others, (n - 1) w_i, and receives as much: in all
``1 + (n - 2) w_i`` vectors each way. So a round takes at least ``max_i (1 + (n - 2) w_i) / b_i`` (vectors per unit of
bandwidth), which `split_shares` minimises: Diskin et al., "Distributed Deep Learning in Open Collaborations" (DeDLOC),
section 3.2, https://arxiv.org/abs/2106.10207, there solved as a linear program.

An *auxiliary* owns a share and contributes nothing. With the fraction w_a it receives n parts of its share and sends
its mean to n members: ``n w_a`` vectors each way. The more auxiliaries own, the nearer members come to sending their
vector once and receiving the mean once. In a group of one or two they do so anyway, and auxiliaries own nothing there.

Both counts are of what goes each way. Members send in one half of a round and receive in the other, so what is gained
is time on their uplinks: nearly half of it in large groups, if downlinks are wide; nothing where both are alike.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction

Share = tuple[int, int]
"""First value and the value after the last; equal for who owns nothing."""


def share_weights(bandwidths: Sequence[float], auxiliaries: Sequence[tuple[float, Fraction]] = ()) -> list[Fraction]:
    """The fractions that minimise the slowest owner's time; they sum to exactly 1.

    Water-filling. Pour the work to one level T: ``w_i = max(0, (T b_i - 1) / (n - 2))`` for members and
    ``w_a = min(c_a, T b_a / n)`` for auxiliaries that may own c_a at most, with T such that all sum to 1. The sum grows
    with T, in straight lines between the levels ``1 / b_i`` at which a member begins and ``n c_a / b_a`` at which an
    auxiliary is full: so T lies on one of those lines, and is found by walking along them.

    Why this is optimal: in any other split some owner with w > 0 that is not full gets at least as much, so it takes at
    least T; and each member takes at least 1 / b_j, which its own contribution needs whatever it owns. The split
    reaches the larger of the two. Members that are slower than T own nothing, and do not slow down those who do.

    For n <= 2 every split takes the same time, so members share alike.

    Args:
        bandwidths: Each member's bandwidth in any common unit; 0 for one that cannot own a share (it accepts no
            connections). All equal if none is known.
        auxiliaries: Each auxiliary's bandwidth, and the most that it may own.

    Returns:
        One for each member, then for each auxiliary.

    Raises:
        ValueError: A bandwidth is negative or not finite, or those of all members are 0.
    """
    everybody = [*bandwidths, *(bandwidth for bandwidth, _ in auxiliaries)]
    if not all(math.isfinite(bandwidth) and bandwidth >= 0 for bandwidth in everybody):
        raise ValueError(f"bandwidths must be finite and not negative: {everybody}")
    # Exact: every member computes the split for itself, and all must come to the same.
    members = [Fraction(bandwidth) for bandwidth in bandwidths]
    owners = [index for index, bandwidth in enumerate(members) if bandwidth]
    if not owners:
        raise ValueError("no member of the group can own a share: at least one bandwidth must be positive")
    count = len(members)
    if count <= 2:
        alike = [Fraction(index in owners, len(owners)) for index in range(count)]
        return [*alike, *(Fraction(0) for _ in auxiliaries)]
    lenders = [(Fraction(bandwidth) / count, Fraction(most)) for bandwidth, most in auxiliaries]
    slopes = [bandwidth / (count - 2) for bandwidth in members]
    bends = [(1 / members[index], slopes[index]) for index in owners]
    bends += [(most / slope, -slope) for slope, most in lenders if slope]
    level, poured, slope = Fraction(0), Fraction(0), sum((slope for slope, _ in lenders), Fraction(0))
    for bend, change in sorted(bends):
        if poured + (bend - level) * slope >= 1:
            break
        level, poured, slope = bend, poured + (bend - level) * slope, slope + change
    level += (1 - poured) / slope
    weights = [max(Fraction(0), (level * bandwidth - 1) / (count - 2)) for bandwidth in members]
    return [*weights, *(min(most, level * slope) for slope, most in lenders)]


def split_shares(num_values: int, weights: Sequence[Fraction], block_size: int) -> list[Share]:
    """Cut ``[0, num_values)`` into one contiguous share for each owner, in their order.

    Cuts fall on multiples of ``block_size``. Whole blocks follow ``weights`` by the largest remainder, so an owner gets
    at most one block more or less than its exact fraction, and never fewer than one with a smaller weight.

    Args:
        num_values: Length of the vector.
        weights: From `share_weights`; one for each owner.
        block_size: Values that a codec encodes together.

    Returns:
        (start, stop) for each owner; empty shares are (start, start).

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
