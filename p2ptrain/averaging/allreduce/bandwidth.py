"""Measured send rates of the members, and the share sizes and part codecs that follow from them.

Every owner measures how fast parts arrive, the sender's compute included, and reports this in its next tickets. The
lower median of the other members' reports counts, so that a few liars cannot move a share. A declared rate can only
lower it. A ticket reports up to 64 peers in 9 bytes each: the start of the peer id's SHA-256, and a rate code that
means ``(8 + code % 8) << code // 8`` bytes per second. Rates are rounded up to a ladder of powers of 3/4 in integer
arithmetic: all members compute the same shares, and noise does not move them.
"""

from __future__ import annotations

import hashlib
import statistics
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from fractions import Fraction

from p2ptrain.averaging.protocol.certificate import Ticket
from p2ptrain.averaging.timing.deadlines import SLACK
from p2ptrain.averaging.vector.partition import share_weights, split_shares
from p2ptrain.codecs import Codec

MIN_BYTES = 64 * 1024  # smaller parts measure no link: they arrive at once
LONG_SECONDS = 1.0  # but they count if they take this long, which latency does not explain
MIN_SECONDS = 0.001
MAX_RATE = 1 << 40
MAX_PEERS = 512
KEPT = 5
TAG_BYTES = 8
MAX_TOLD = 64
LATE = 0.25  # factor on the rate of an owner that was late
RECOVERY = 1.25  # the factor recovers by this much in each round in time; 1 at most
MAX_SMALL_PARTS = 32  # unmeasurable parts in a row after which a peer's rate is forgotten


@dataclass
class _Seen:
    rates: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))
    factor: float = 1.0
    small_parts: int = 0


class Speeds:
    """The last rates at which other peers' parts arrived here; bounded by `MAX_PEERS`.

    A send rate does not show how fast a peer receives and reduces. A late owner therefore counts as slower for a while.
    """

    def __init__(self) -> None:
        self._seen: OrderedDict[str, _Seen] = OrderedDict()

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
        seen = self._seen.setdefault(peer, _Seen())
        seen.small_parts = 0
        seen.rates.append(min(MAX_RATE, num_bytes * num_streams / max(seconds, MIN_SECONDS)))
        self._seen.move_to_end(peer)
        while len(self._seen) > MAX_PEERS:
            self._seen.popitem(last=False)

    def was_late(self, peer: str) -> None:
        """Lower the rate of a peer whose share or signature timed out."""
        if peer in self._seen:
            self._seen[peer].factor *= LATE

    def was_in_time(self, peer: str) -> None:
        """Raise a peer's rate again after a round in which it contributed."""
        if peer in self._seen:
            self._seen[peer].factor = min(1.0, self._seen[peer].factor * RECOVERY)

    def told(self) -> bytes:
        """Return the rates that a ticket reports: those of the last `MAX_TOLD` peers."""
        latest = list(self._seen.items())[-MAX_TOLD:]
        entries = [_tag(peer) + bytes([_code(statistics.median(s.rates) * s.factor)]) for peer, s in latest]
        return b"".join(sorted(entries))


def _tag(peer: str) -> bytes:
    return hashlib.sha256(peer.encode()).digest()[:TAG_BYTES]


def _code(rate: float) -> int:
    whole = max(8, int(rate))
    exponent = min(whole.bit_length() - 4, 31)
    return exponent * 8 + min(whole >> exponent, 15) - 8


def _parse(told: bytes) -> dict[bytes, int]:
    entries = [told[at : at + TAG_BYTES + 1] for at in range(0, len(told) - TAG_BYTES, TAG_BYTES + 1)]
    return {entry[:TAG_BYTES]: (8 + entry[-1] % 8) << entry[-1] // 8 for entry in entries}


def agreed_rates(tickets: Sequence[Ticket]) -> list[int]:
    """Return the rate of each ticket's peer in bytes per second, at least 1; unknown peers get the median."""
    told = {ticket.peer: _parse(ticket.rates) for ticket in tickets}
    rates = []
    for ticket in tickets:
        limits = (_measured(ticket.peer, told), ticket.bandwidth)
        rates.append(min((rate for rate in limits if rate), default=0))
    known = sorted(rate for rate in rates if rate)
    typical, fastest = known[len(known) // 2] if known else 1, max([1, *known])
    return [_on_ladder(rate or typical, fastest) for rate in rates]


def _measured(peer: str, told: dict[str, dict[bytes, int]]) -> int:
    """Return the lower median of the other members' reports about a peer; 0 without any."""
    tag = _tag(peer)
    seen = sorted(rates[tag] for other, rates in told.items() if other != peer and tag in rates)
    return seen[(len(seen) - 1) // 2] if seen else 0


def owner_rates(tickets: Sequence[Ticket], rates: Sequence[int]) -> list[float]:
    """Return the rates for `p2ptrain.averaging.vector.partition`: 0 for unreachable members, unless all are."""
    reachable = [ticket.reachable for ticket in tickets]
    return [float(rate) if able or not any(reachable) else 0.0 for rate, able in zip(rates, reachable, strict=True)]


def plan_shares(
    tickets: Sequence[Ticket], num_values: int, block_size: int
) -> tuple[list[int], list[Fraction], tuple[int, ...]]:
    """Return the members' rates, their weights, and the offsets between their shares."""
    rates = agreed_rates(tickets)
    weights = share_weights(owner_rates(tickets, rates))
    return rates, weights, (0, *(high for _, high in split_shares(num_values, weights, block_size)))


def _on_ladder(rate: int, fastest: int) -> int:
    """Return ``rate`` rounded up to ``fastest`` times a power of 3/4, each step rounded down to an integer."""
    step = max(fastest, rate)
    while step * 3 // 4 >= max(rate, 1):
        step = step * 3 // 4
    return step


def part_codec(
    codec: Codec,
    smaller: Sequence[Codec],
    rates: Sequence[int],
    weights: Sequence[Fraction],
    index: int,
    num_values: int,
    grace_seconds: float,
) -> Codec:
    """Return a member's codec for its own parts: the mean's, or a smaller one if the others would time out on it.

    The others wait for `SLACK` more than their own transfer time, and for the grace period, half of which is kept for
    jitter. A slower member sends its parts in fewer bits; error feedback carries the loss to later rounds.

    Args:
        codec: The swarm's codec. A lossless one is always kept.
        smaller: Alternatives, in order of decreasing size.
        weights: The members' shares; see `plan_shares`.
        num_values: Length of the vector.
    """
    if not codec.lossy or len(rates) < 2:
        return codec
    loads = [float(1 + (len(rates) - 2) * weight) for weight in weights]
    num_bytes = codec.encoded_bytes(num_values)
    usual = statistics.median(
        load * num_bytes / rate for load, rate, weight in zip(loads, rates, weights, strict=True) if weight
    )
    allowed = (1 + SLACK) * usual + grace_seconds / 2
    for candidate in (codec, *smaller):
        if loads[index] * candidate.encoded_bytes(num_values) / rates[index] <= allowed:
            return candidate
    return smaller[-1] if smaller else codec
