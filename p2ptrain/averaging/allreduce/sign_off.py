"""The last thing before a member signs: its spot checks are through, and so are the others', or had time enough.

`p2ptrain.averaging.verification.audit` says what is checked, and what a complaint is.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from p2ptrain.averaging.allreduce.outgoing import OpenedStreams
from p2ptrain.averaging.allreduce.session_state import Exchange
from p2ptrain.averaging.commit.attempt import AttemptFailedError, LateError
from p2ptrain.averaging.timing.deadlines import patience_seconds, quorum_of_others
from p2ptrain.tasks import Tasks

CLEAR_SHARE = 0.9
"""The same for the others' checks; so that a slow member, with the signatures that follow, costs no more than that."""
FailIfLost = Callable[[list[str]], None]
"""Raises `AttemptFailedError` if any of these peers is lost, or most gave up."""
REASON_SECONDS = 1.0
"""How long a member waits to learn why another gave up that it still needed."""


class Vouching:
    """Decides when one member may sign."""

    def __init__(self, exchange: Exchange, opened: OpenedStreams) -> None:
        """
        Args:
            exchange: What the streams found.
            opened: To look into complaints.
        """
        self._exchange = exchange
        self._opened = opened
        self._looking = Tasks(exchange.fail)
        self._num_looking = 0

    async def pass_checks(self, deadline: float, fail_if_lost: FailIfLost) -> None:
        """Wait until this member's spot checks of the others' shares are through, or a majority has signed without."""
        exchange, loop = self._exchange, asyncio.get_running_loop()
        attempt = exchange.attempt
        owners = {i for i in range(len(attempt.means)) if attempt.size(i) and i != exchange.index}
        until = deadline
        while missing := owners - exchange.checked:
            certified = exchange.certificate() is not None
            for owner, chunks in () if certified else exchange.unshown.items():
                exchange.find_fault(owner, chunks, "shows signatures of too few in place of a chunk", late=True)
            self._look_into_complaints()
            if certified:
                return
            fail_if_lost([attempt.roster.members[i] for i in missing])
            if missing & exchange.gave_up.keys():  # Perhaps for a reason that is on its way.
                until = min(until, loop.time() + REASON_SECONDS)
            elif until == deadline and len(owners - missing) >= quorum_of_others(len(owners), exchange.spec.quorum):
                until = min(deadline, self._patience_ends(loop.time()))
            attempt.changed.clear()
            async with asyncio.timeout_at(until):
                await attempt.changed.wait()

    def fail_on_faults(self) -> None:
        """Fail once anything did not pass, unless that was only late, and a majority signed without waiting for it."""
        exchange = self._exchange
        for index, (fault, late) in sorted(exchange.faults.items(), key=lambda found: found[1][1]):
            if late and exchange.certificate() is not None:
                continue
            peer, phase = exchange.attempt.roster.members[index], exchange.attempt.phase
            kind = LateError if late else AttemptFailedError
            raise kind(f"{phase}: peer {peer[-8:]}'s share did not pass a check: {fault}", (peer,))

    def _look_into_complaints(self) -> bool:
        """Check what owners did not show to others; whether that goes on. Fails like `fail_on_faults`."""
        exchange = self._exchange
        self.fail_on_faults()
        while exchange.complaints:
            owner, chunk = exchange.complaints.pop()
            self._num_looking += 1
            self._looking.start(self._look_into(owner, chunk), f"complaint-{owner}")
        return self._num_looking > 0

    async def _look_into(self, owner: int, chunk: int) -> None:
        passed = await self._opened.ask_again(owner, [chunk])
        if not passed and owner not in self._exchange.faults and self._exchange.certificate() is None:
            self._exchange.find_fault(owner, [chunk], "it gave up instead of showing a chunk", late=True)
        self._num_looking -= 1
        self._exchange.changed()

    async def wait_for_clears(self, deadline: float, fail_if_lost: FailIfLost) -> None:
        """Wait for the other contributors' spot checks, unless most are through for long, and look into complaints."""
        exchange, loop = self._exchange, asyncio.get_running_loop()
        attempt = exchange.attempt
        members, counted = attempt.roster.members, set(attempt.contributors or ()) - {exchange.index}
        exchange.own_clear.set()
        until = deadline
        while True:
            looking = self._look_into_complaints()
            if exchange.certificate() is not None:
                return
            fail_if_lost([])
            waiting = counted - exchange.cleared - exchange.gave_up.keys() - exchange.excused()
            if not waiting and not looking:
                return
            if until == deadline and 2 * len(counted & exchange.cleared) >= len(counted):
                until = min(deadline, self._patience_ends(loop.time(), CLEAR_SHARE))
            if loop.time() >= until and not looking:  # What is looked into has a deadline of its own.
                exchange.slow_to_clear |= {members[i] for i in waiting}
                return
            attempt.changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(deadline if looking else until):
                    await attempt.changed.wait()
            if loop.time() >= deadline:
                raise TimeoutError

    def _patience_ends(self, quorum_at: float, share: float = 1.0) -> float:
        seconds = patience_seconds(quorum_at - self._exchange.began, self._exchange.spec.grace_seconds)
        return quorum_at + share * seconds

    async def stop(self) -> None:
        """Look into nothing more."""
        await self._looking.close()
