"""How fast each member sends, as the others saw it, and what follows: whose share is how large, who sends fewer bits.

What a peer declares is not relied on: every owner measures how fast each other member's part arrives, its computer's
speed included, and its next tickets tell. The median of what all others saw counts, so that a few that lie move
nobody's share. A ticket's own limit can only lower it.

A ticket tells of up to 64 peers, 9 bytes each: the start of the peer id's SHA-256 and a rate with four significant
bits, ``(8 + code % 8) << code // 8`` bytes per second. Rates are then rounded up to a ladder of three quarters, in
whole numbers: every member must come to the same shares, and noise must not move them from round to round.
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

MIN_BYTES = 64 * 1024
"""Smaller parts say nothing about a link: they are there at once."""
LONG_SECONDS = 1.0
"""Unless they take this long: then it is not the latency that was measured, even if hardly anything came."""
MIN_SECONDS = 0.001
MAX_RATE = 1 << 40
MAX_PEERS = 512
KEPT = 5
TAG_BYTES = 8
MAX_TOLD = 64
LATE = 0.25
RECOVERY = 1.25
MAX_SMALL_PARTS = 32


@dataclass
class _Seen:
    rates: deque[float] = field(default_factory=lambda: deque(maxlen=KEPT))
    factor: float = 1.0
    small_parts: int = 0


class Speeds:
    """The last rates at which other peers' parts arrived here; bounded.

    How fast a peer receives and reduces does not show in what it sends. So an owner that kept the others waiting counts
    as slower than it sends from then on, and recovers with every round in which it does not.
    """

    def __init__(self) -> None:
        self._seen: OrderedDict[str, _Seen] = OrderedDict()

    def observe(self, peer: str, num_bytes: int, seconds: float, num_streams: int) -> None:
        """Note that so many bytes came from a peer, which sent to ``num_streams`` members at once.

        A peer that sends too little to be measured, because it was slow once, is forgotten after a while, and has to
        show anew how slow it is: it may have a better link now.
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
        """Note that the others waited for a peer's share in vain."""
        if peer in self._seen:
            self._seen[peer].factor *= LATE

    def was_in_time(self, peer: str) -> None:
        """Note that a peer did its part in a round."""
        if peer in self._seen:
            self._seen[peer].factor = min(1.0, self._seen[peer].factor * RECOVERY)

    def told(self) -> bytes:
        """What a ticket says of the peers seen last."""
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
    """Rates by tag; of what is no whole entry nothing is taken."""
    entries = [told[at : at + TAG_BYTES + 1] for at in range(0, len(told) - TAG_BYTES, TAG_BYTES + 1)]
    return {entry[:TAG_BYTES]: (8 + entry[-1] % 8) << entry[-1] // 8 for entry in entries}


def agreed_rates(tickets: Sequence[Ticket]) -> list[int]:
    """The rate of each ticket's peer in bytes per second; the same for whoever computes it from the same tickets.

    Returns:
        At least 1 each; all 1 when nothing is known of anybody.
    """
    told = {ticket.peer: _parse(ticket.rates) for ticket in tickets}
    rates = []
    for ticket in tickets:
        limits = (_measured(ticket.peer, told), ticket.bandwidth)
        rates.append(min((rate for rate in limits if rate), default=0))
    known = sorted(rate for rate in rates if rate)
    typical, fastest = known[len(known) // 2] if known else 1, max([1, *known])
    return [_on_ladder(rate or typical, fastest) for rate in rates]


def _measured(peer: str, told: dict[str, dict[bytes, int]]) -> int:
    """The median of what the other members say of a peer's rate; 0 if nobody says anything."""
    tag = _tag(peer)
    seen = sorted(rates[tag] for other, rates in told.items() if other != peer and tag in rates)
    return seen[(len(seen) - 1) // 2] if seen else 0


def owner_rates(tickets: Sequence[Ticket], rates: Sequence[int]) -> list[float]:
    """Rates for `p2ptrain.averaging.vector.partition`: 0 for members that cannot be dialled, unless none can."""
    reachable = [ticket.reachable for ticket in tickets]
    return [float(rate) if able or not any(reachable) else 0.0 for rate, able in zip(rates, reachable, strict=True)]


def plan_shares(
    tickets: Sequence[Ticket], num_values: int, block_size: int
) -> tuple[list[int], list[Fraction], tuple[int, ...]]:
    """Who owns what of a vector: the members' rates, their weights, and the offsets at which their shares meet."""
    rates = agreed_rates(tickets)
    weights = share_weights(owner_rates(tickets, rates))
    return rates, weights, (0, *(high for _, high in split_shares(num_values, weights, block_size)))


def _on_ladder(rate: int, fastest: int) -> int:
    """``rate`` rounded up to ``fastest`` times a power of 3/4, each rounded down to a whole number."""
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
    """How a member encodes its own parts: like the mean, unless it is so slow that the others would not wait for it.

    The others wait for a fifth longer than they take themselves, and the grace period, of which half is left for what
    varies. Who needs more sends its parts in fewer bits: error feedback keeps the rest for later rounds.

    Args:
        codec: The codec of the swarm; one that loses nothing is kept, since then nobody wants less.
        smaller: Codecs to choose from, with less and less bytes.
        rates: Of the members; see `agreed_rates`.
        weights: The members' shares; see `plan_shares`.
        index: Which member.
        num_values: Length of the vector.
        grace_seconds: The grace period.
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
