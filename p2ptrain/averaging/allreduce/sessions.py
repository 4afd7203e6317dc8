"""The sessions that a peer is in now: the other members' streams find theirs here, for as long as they may need it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator

from p2ptrain.averaging.allreduce.session import AllReduceSession
from p2ptrain.errors import PeerRefusedError
from p2ptrain.tasks import Tasks

ROSTER_WAIT_SECONDS = 5.0
"""How long another member's stream waits for this peer to learn of the group."""


class Sessions:
    """Sessions by group, from the roster until the others have fetched what they need."""

    def __init__(self, own_id: str) -> None:
        self._own_id = own_id
        self._running: dict[bytes, AllReduceSession] = {}
        self._arrived = asyncio.Event()
        self._lingering = Tasks()

    def __iter__(self) -> Iterator[AllReduceSession]:
        return iter(list(self._running.values()))

    def add(self, session: AllReduceSession) -> None:
        """Let the others open their streams from now on, until some time after `leave`."""
        self._running[session.attempt.roster.group_id] = session
        self._arrived.set()
        self._arrived = asyncio.Event()

    async def find(self, group: bytes, is_over: Callable[[bytes], bool]) -> AllReduceSession:
        """Return the session of a group; wait a while for one that is not known yet.

        Args:
            group: The roster's id.
            is_over: True if this peer was in it, so that waiting is of no use.

        Raises:
            PeerRefusedError: This peer is not in that group.
        """
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ROSTER_WAIT_SECONDS):
                while group not in self._running and not is_over(group):
                    await self._arrived.wait()
        if group not in self._running:
            raise PeerRefusedError(self._own_id, "this peer is not in that group")
        return self._running[group]

    def leave(self, session: AllReduceSession, *, committed: bool) -> None:
        """Close a session in the background; after a commit, let the others fetch mean and signature first."""
        self._lingering.start(self._close(session, committed), "linger")

    async def _close(self, session: AllReduceSession, committed: bool) -> None:
        try:
            await session.close(linger=committed)
        finally:
            self._running.pop(session.attempt.roster.group_id, None)

    async def close(self) -> None:
        """End all of them."""
        running = list(self._running.values())
        await self._lingering.close()
        for session in running:
            await session.close(linger=False)
