"""Measured send rates of the members, and the share sizes and part codecs that follow from them.

**Rates.** Every owner measures how fast parts arrive, the sender's compute included, and reports this in its next
tickets. The lower median of the other members' reports counts, so that a few liars cannot move a share. A ticket
reports up to 64 peers in 9 bytes each: the start of the peer id's SHA-256, and a rate code that means
``(8 + code % 8) << code // 8`` bytes per second. Rates are rounded up to a ladder of powers of 3/4 in integer
arithmetic: all members compute the same shares, and noise does not move them.

**Shares.** Each owner reduces one share of the vector, sized by its bandwidth. Member i of a group of n owns a fraction
w_i of the vector. It sends ``1 - w_i`` vectors of its own contribution to the other owners, and ``(n - 1) w_i`` vectors
of its mean to the other members. It receives as much: in all ``1 + (n - 2) w_i`` vectors each way. A round takes at
least ``max_i (1 + (n - 2) w_i) / b_i`` (vectors per unit of bandwidth). `share_weights` minimises this bound. Diskin et
al., "Distributed Deep Learning in Open Collaborations" (DeDLOC), section 3.2, https://arxiv.org/abs/2106.10207, solve
it as a linear program.
"""

from __future__ import annotations

import hashlib
import math
import statistics
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import accumulate, pairwise

from p2ptrain.averaging.protocol.certificate import Ticket
from p2ptrain.averaging.timing.deadlines import SLACK
from p2ptrain.buffers import Bounded
from p2ptrain.codecs import Codec

MIN_BYTES = 64 * 1024  # smaller parts measure no link: they arrive at once
LONG_SECONDS = 1.0  # but they count if they take this long, which latency does not explain
MIN_SECONDS = 0.001
MAX_RATE = 1 << 40
MAX_PEERS = 512
KEPT = 5
TAG_BYTES = 8
MAX_REPORTED = 64
LATE = 0.25  # factor on the rate of an owner that was late
RECOVERY = 1.25  # the factor recovers by this much in each round in time; 1 at most
MAX_SMALL_PARTS = 32  # unmeasurable parts in a row after which a peer's rate is forgotten


@dataclass
class _Seen:
    rates: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))
    factor: float = 1.0
    small_parts: int = 0


class SendRates:
    """The last rates at which other peers' parts arrived here; bounded by `MAX_PEERS`.

    A send rate does not show how fast a peer receives and reduces. A late owner therefore counts as slower for a while.
    """

    def __init__(self) -> None:
        self._seen = Bounded[str, _Seen](MAX_PEERS)

    def observe(self, peer: str, num_bytes: int, seconds: float, num_streams: int) -> None:
        """Record a transfer from a peer that sent to ``num_streams`` members at once.

        A slow peer may come to send too little to be measured. It is then forgotten: its link may have improved.
        """
        if num_bytes < MIN_BYTES and seconds < LONG_SECONDS:
            if peer in self._seen:
                self._seen[peer].small_parts += 1
                if self._seen[peer].small_parts >= MAX_SMALL_PARTS:
                    del self._seen[peer]
            return
        seen = self._seen[peer] = self._seen.get(peer) or _Seen()
        seen.small_parts = 0
        seen.rates.append(min(MAX_RATE, num_bytes * num_streams / max(seconds, MIN_SECONDS)))

    def was_late(self, peer: str) -> None:
        """Lower the rate of a peer whose share or signature timed out."""
        if peer in self._seen:
            self._seen[peer].factor *= LATE

    def was_in_time(self, peer: str) -> None:
        """Raise a peer's rate again after a round in which it contributed."""
        if peer in self._seen:
            self._seen[peer].factor = min(1.0, self._seen[peer].factor * RECOVERY)

    def encoded(self) -> bytes:
        """Return the rates that a ticket reports: those of the last `MAX_REPORTED` peers."""
        latest = list(self._seen.items())[-MAX_REPORTED:]
        entries = [_tag(peer) + bytes([_code(statistics.median(s.rates) * s.factor)]) for peer, s in latest]
        return b"".join(sorted(entries))


def _tag(peer: str) -> bytes:
    return hashlib.sha256(peer.encode()).digest()[:TAG_BYTES]


def _code(rate: float) -> int:
    whole = max(8, int(rate))
    exponent = min(whole.bit_length() - 4, 31)
    return exponent * 8 + min(whole >> exponent, 15) - 8


def _parse(encoded: bytes) -> dict[bytes, int]:
    entries = [encoded[at : at + TAG_BYTES + 1] for at in range(0, len(encoded) - TAG_BYTES, TAG_BYTES + 1)]
    return {entry[:TAG_BYTES]: (8 + entry[-1] % 8) << entry[-1] // 8 for entry in entries}


def agreed_rates(tickets: Sequence[Ticket]) -> list[int]:
    """Return the rate of each ticket's peer in bytes per second, at least 1; unknown peers get the median."""
    reports = {ticket.peer: _parse(ticket.rates) for ticket in tickets}
    rates = []
    for ticket in tickets:
        tag, limits = _tag(ticket.peer), [ticket.bandwidth]
        if told := [seen[tag] for other, seen in reports.items() if other != ticket.peer and tag in seen]:
            limits.append(statistics.median_low(told))
        rates.append(min((rate for rate in limits if rate), default=0))
    known = [rate for rate in rates if rate] or [1]
    return [_on_ladder(rate or statistics.median_high(known), max(known)) for rate in rates]


def owner_rates(tickets: Sequence[Ticket], rates: Sequence[int]) -> list[float]:
    """Return the rates for `share_weights`: 0 for unreachable members, unless all are."""
    reachable = [ticket.reachable for ticket in tickets]
    return [float(rate) if able or not any(reachable) else 0.0 for rate, able in zip(rates, reachable, strict=True)]


@dataclass(frozen=True)
class SharePlan:
    """The shares of a group's members.

    Attributes:
        rates: By member: bytes per second.
        weights: By member: fraction of the vector that it owns.
        bounds: Offsets between the shares; one more than members.
    """

    rates: Sequence[int]
    weights: Sequence[Fraction]
    bounds: tuple[int, ...]

    @property
    def shareless(self) -> frozenset[int]:
        """Indices of the members that are too slow to own a share, or unreachable."""
        return frozenset(index for index, weight in enumerate(self.weights) if not weight)

    def part_codec(self, codecs: Sequence[Codec], index: int, grace_seconds: float) -> Codec:
        """Return a member's codec for its own parts: the first of ``codecs`` for which the others would wait.

        The others wait for `SLACK` more than their own transfer time, and for the grace period, half of which is kept
        for jitter. A slower member sends its parts in fewer bits; error feedback carries the loss to later rounds.

        Args:
            codecs: The swarm's codec, then alternatives of decreasing size. A lossless codec is always kept.
        """
        codec, num_members, num_values = codecs[0], len(self.rates), self.bounds[-1]
        if not codec.lossy or num_members < 2:
            return codec
        loads = [float(1 + (num_members - 2) * weight) for weight in self.weights]
        times = [load * codec.encoded_bytes(num_values) / rate for load, rate in zip(loads, self.rates, strict=True)]
        usual = statistics.median(time for time, weight in zip(times, self.weights, strict=True) if weight)
        allowed = (1 + SLACK) * usual + grace_seconds / 2
        for candidate in codecs:
            if loads[index] * candidate.encoded_bytes(num_values) / self.rates[index] <= allowed:
                return candidate
        return codecs[-1]


def plan_shares(tickets: Sequence[Ticket], num_values: int, block_size: int) -> SharePlan:
    """Return the shares that follow from the tickets; all members compute the same."""
    rates = agreed_rates(tickets)
    weights = share_weights(owner_rates(tickets, rates))
    return SharePlan(rates, weights, (0, *(high for _, high in split_shares(num_values, weights, block_size))))


def _on_ladder(rate: int, fastest: int) -> int:
    """Return ``rate`` rounded up to ``fastest`` times a power of 3/4, each step rounded down to an integer."""
    step = max(fastest, rate)
    while step * 3 // 4 >= max(rate, 1):
        step = step * 3 // 4
    return step


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
        return [Fraction(bool(each), len(owners)) for each in exact]
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
    stops = [min(total * block_size, num_values) for total in accumulate(blocks)]
    return list(pairwise([0, *stops]))
