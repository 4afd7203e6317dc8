"""The attempts that a peer is in now: the other members' streams find theirs here, for as long as they may need it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator

from p2ptrain.averaging.butterfly import Butterfly
from p2ptrain.averaging.exchange import GAVE_UP
from p2ptrain.errors import PeerRefusedError
from p2ptrain.tasks import Tasks, to_its_end

ROSTER_WAIT_SECONDS = 5.0
"""How long another member's stream waits for this peer to learn of the group."""


class Groups:
    """Butterflies by group, from the roster until the others have fetched what they need."""

    def __init__(self, own_id: str) -> None:
        self._own_id = own_id
        self._running: dict[bytes, Butterfly] = {}
        self._arrived = asyncio.Event()
        self._lingering = Tasks()

    def __iter__(self) -> Iterator[Butterfly]:
        return iter(list(self._running.values()))

    def add(self, butterfly: Butterfly) -> None:
        """The others may open their streams from now on, until some time after `leave`."""
        self._running[butterfly.attempt.roster.group_id] = butterfly
        self._arrived.set()
        self._arrived = asyncio.Event()

    async def find(self, group: object, is_over: Callable[[bytes], bool] = lambda group: False) -> Butterfly:
        """The butterfly of a group; waits a while for one that is not known yet.

        Args:
            group: Its name, as it came over the wire.
            is_over: Whether this peer was in it, so that waiting is of no use.

        Raises:
            PeerRefusedError: This peer is not in that group, or not any more.
        """
        if type(group) is not bytes:
            raise PeerRefusedError(self._own_id, "malformed group id")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ROSTER_WAIT_SECONDS):
                while group not in self._running and not is_over(group):
                    await self._arrived.wait()
        if group not in self._running:
            raise PeerRefusedError(self._own_id, GAVE_UP if is_over(group) else "this peer is not in that group")
        return self._running[group]

    async def leave(self, butterfly: Butterfly, committed: bool) -> None:
        """Send nothing more; who committed lets the others fetch mean and signature first, in the background."""
        await to_its_end(butterfly.stop_sending())
        self._lingering.start(self._linger(butterfly, committed), "linger")

    async def _linger(self, butterfly: Butterfly, committed: bool) -> None:
        try:
            await butterfly.stop_serving(linger=committed)
        finally:
            self._running.pop(butterfly.attempt.roster.group_id, None)

    async def close(self) -> None:
        """End all of them."""
        running = list(self._running.values())
        await self._lingering.close()
        for butterfly in running:
            await butterfly.stop_sending()
            await butterfly.stop_serving(linger=False)
