"""What this peer knows of one member of a group, and how it tells a slow member from one that is gone."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from typing import TYPE_CHECKING

from p2ptrain.averaging.allreduce.messages import Request
from p2ptrain.averaging.protocol.certificate import Ticket
from p2ptrain.averaging.timing.deadlines import beat_seconds, silence_seconds
from p2ptrain.network.rpc.channel import Channel, ChannelLimits

if TYPE_CHECKING:
    from p2ptrain.averaging.allreduce.session import AllReduceSession

ALLREDUCE = "allreduce"
"""The name that members open streams for."""
OPEN_TIMEOUT_SECONDS = 10.0


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


class Liveness:
    """Opens streams to members, and takes them for silent when they are."""

    def __init__(self, session: AllReduceSession) -> None:
        self._session = session
        self._grace_seconds = session.context.spec.grace_seconds

    @contextlib.asynccontextmanager
    async def open(self, member: Member, request: Request, expected_bytes: int = 0) -> AsyncIterator[Channel]:
        """Open a stream to a member, which says several times in a grace period that it lives.

        Raises:
            See `Rpc.open`.
        """
        loop, began = asyncio.get_running_loop(), asyncio.get_running_loop().time()
        async with self._session.context.rpc.open(
            member.peer, ALLREDUCE, request, OPEN_TIMEOUT_SECONDS, expected_bytes=expected_bytes
        ) as channel:
            seconds = silence_seconds(self._grace_seconds, loop.time() - began)
            channel.expect_beats(seconds, partial(self._silent_at, member, seconds))
            yield channel

    def _silent_at(self, member: Member, seconds: float, last_heard: float) -> float:
        """Return when a member counts as silent that was last heard then on the stream that this one opened.

        Where no majority would be left, this member is rather cut off itself. Then it takes its time, because what the
        rest ends alone is another lineage.
        """
        members = self._session.members
        left = len(members) - sum(self._is_quiet(each, seconds) for each in members)
        if left < self._session.attempt.roster.majority:
            seconds = max(seconds, ChannelLimits().silence_seconds)
        return max(last_heard, member.last_heard) + seconds

    def _is_quiet(self, member: Member, seconds: float) -> bool:
        """Return True if a member is gone, or was not heard for about as long as counts as silence."""
        if member is self._session.own or member.is_through or member.gave_up:
            return False
        if member.lost:  # Perhaps it cannot be reached, and opened a stream itself.
            return member.is_silent or member.incoming is None or member.incoming.lost.done()
        if member.outgoing is None:
            return False
        quiet = asyncio.get_running_loop().time() - member.last_heard
        return quiet >= seconds - beat_seconds(self._grace_seconds)

    def note_silent(self, member: Member) -> None:
        """Take down that a member fell silent, and those others that did so at the same time, within about a beat.

        Members freeze together where they share a machine or a link, and each would otherwise break an attempt.
        """
        member.is_silent = True
        seconds = silence_seconds(self._grace_seconds)
        for other in self._session.others:
            if other.outgoing is not None and not other.lost and self._is_quiet(other, seconds):
                other.lost = f"peer {other.peer[-8:]} sent nothing any more"
                other.is_silent = True
        self._session.changed()
