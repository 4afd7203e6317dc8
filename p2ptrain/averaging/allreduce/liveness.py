"""Telling a member that is gone from one that is slow: how long the streams of an attempt may be silent."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from functools import partial
from typing import TYPE_CHECKING

from p2ptrain.averaging.allreduce.member import Member
from p2ptrain.averaging.allreduce.messages import Request
from p2ptrain.averaging.timing.deadlines import beat_seconds, silence_seconds
from p2ptrain.network.rpc.channel import Channel, ChannelLimits

if TYPE_CHECKING:
    from p2ptrain.averaging.allreduce.session import AllReduceSession

ALLREDUCE = "allreduce"
"""The name that members open streams for."""
OPEN_TIMEOUT_SECONDS = 10.0


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
