"""What this peer knows of one member of a group in one attempt."""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum

from p2ptrain.averaging.protocol.certificate import Ticket
from p2ptrain.network.rpc.channel import Channel


@dataclass(eq=False)
class Member:
    """One member, this peer included: what it has said, and how its two streams stand.

    Attributes:
        index: Its place in the roster.
        ticket: Its ticket.
        size: Values in its share; 0 if it owns none.
        mask: As an owner: whose parts it holds completely.
        arrived_at: As an owner: when it had this peer's part, in the loop's time.
        refused_us: As an owner: why it left this peer's part out; empty if it did not.
        refusal: Why this peer left its part out; empty if it did not.
        outgoing: The stream that this peer opened to it.
        incoming: The stream that it opened.
        is_opening: True while no stream to it stands.
        has_mean: True once nothing but signatures is missing on ``outgoing``.
        is_through: True once nothing is missing there.
        lost: Why ``outgoing`` broke; empty if it did not.
        is_silent: True if its stream stood and said nothing for long.
        was_cut_short: True if ``outgoing`` ended while this peer's part was on its way: perhaps that took too long.
        blames: Whom it blames, once it has given up.
        contradiction: That it signed another result; only where no third member could have told it.
        accusation: What others proved it guilty of.
        is_checked: As an owner: True once its share passed this peer's checks.
        is_clear: True once it said that its own checks passed.
    """

    index: int
    ticket: Ticket
    size: int
    mask: frozenset[int] | None = None
    arrived_at: float | None = None
    refused_us: str = ""
    refusal: str = ""
    outgoing: Channel | None = None
    incoming: Channel | None = None
    is_opening: bool = False
    has_mean: bool = False
    is_through: bool = False
    lost: str = ""
    is_silent: bool = False
    was_cut_short: bool = False
    blames: frozenset[int] | None = None
    contradiction: str = ""
    accusation: str = ""
    is_checked: bool = False
    is_clear: bool = False

    @property
    def peer(self) -> str:
        """Its id."""
        return self.ticket.peer

    @property
    def gave_up(self) -> bool:
        """True once it said so."""
        return self.blames is not None

    @property
    def last_heard(self) -> float:
        """When it was last heard, in the loop's time: what it says on one stream may wait for data on the other."""
        return max((each.last_heard for each in (self.outgoing, self.incoming) if each is not None), default=-math.inf)


class Trouble(StrEnum):
    """How a member kept an attempt from its end."""

    LATE = "late"
    """It stood still, or was late with its contribution: it may be alive, but slow."""
    SLOW = "slow"
    """It was late with its share's mean or a signature."""
    FAULT = "fault"
    """Its share did not pass a check."""
    BROKE = "broke"
    """Its stream broke, or it said something malformed."""


@dataclass(frozen=True)
class Blame:
    """One member that kept an attempt from its end."""

    peer: str
    trouble: Trouble
    reason: str
