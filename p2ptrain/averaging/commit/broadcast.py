"""Broadcast of a round's result down the tree, from each delegate to the members of its cell.

1. A member asks its delegate, which sends keepalives until it knows the result's path.
2. The delegate answers with the certificates of all levels above and the hashes of the result's chunks.
   The certificates prove that the cell's result is in the round's; the last one authenticates the hashes.
3. Each of n members fetches one chunk in n from the delegate, and every other chunk from the member assigned to it.

No peer sends or receives more than one vector in a cell. Each peer forwards a chunk as soon as it arrives.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import OrderedDict
from collections.abc import Callable
from typing import Annotated

from msgspec import Meta

from p2ptrain.averaging.commit.result_chunks import RESULT, ResultChunks
from p2ptrain.averaging.commit.round_log import KNOWN_WAIT_SECONDS, Path, RoundLog, TreePath
from p2ptrain.averaging.context import PeerContext
from p2ptrain.averaging.protocol.certificate import MAX_LEVELS, Body, Certificate
from p2ptrain.averaging.protocol.table import Table
from p2ptrain.averaging.timing.deadlines import (
    QUIET_GRACES,
    AnswerTimeouts,
    Keepalive,
    KeepaliveStatus,
    quiet_seconds,
    quorum_of_others,
    receive_answer,
    send_keepalives,
    straggler_seconds,
)
from p2ptrain.errors import (
    DeadlineError,
    IntegrityError,
    PeerError,
    PeerRefusedError,
    ProtocolError,
    TemporaryError,
)
from p2ptrain.network.rpc.channel import Channel
from p2ptrain.network.schema import Hash, Message
from p2ptrain.tasks import Tasks

logger = logging.getLogger(__name__)

OPEN_TIMEOUT_SECONDS = 8.0
TRIES_ABOVE = 4
"""Attempts to fetch a result from its makers, spread over one grace period."""
MAX_REPLY_BYTES = 8 << 20
MAX_CELLS_KEPT = 8

OUTCOME = "broadcast.outcome"
FAILURES = (PeerError, DeadlineError, IntegrityError)


class AskOutcome(Message, frozen=True):
    """Request for the path of a cell's result; the delegate sends keepalives until it knows it."""

    cell: Hash


class FromDelegate(Message, frozen=True, tag=True):
    """A message from the delegate: a keepalive or the outcome."""


class Waiting(FromDelegate, Keepalive, frozen=True, tag="waiting"):
    """Keepalive: the outcome is pending."""


class Outcome(FromDelegate, frozen=True, tag="outcome"):
    """The certificates above a cell's result, and the hashes of the last one's chunks."""

    path: Annotated[tuple[bytes, ...], Meta(min_length=1, max_length=MAX_LEVELS - 1)]
    hashes: tuple[Hash, ...]


class DecidedError(TemporaryError):
    """The round has ended, but this peer could not fetch its result; a replay can fetch it later."""


class ResultBroadcast:
    """Serves the results of rounds to waiting members of a cell, and fetches them from delegates."""

    def __init__(self, context: PeerContext, round_log: RoundLog, status: KeepaliveStatus) -> None:
        """``status`` is the content of this peer's keepalives as a delegate."""
        self._context = context
        self._rpc = context.rpc
        self._runtime = context.runtime
        self._round_log = round_log
        self._grace_seconds = context.spec.grace_seconds
        self._status = status
        self._ends: OrderedDict[bytes, asyncio.Future[Path | None]] = OrderedDict()
        self._changed = asyncio.Event()
        context.rpc.serve_channel(OUTCOME, AskOutcome, self._serve)

    def expect(self, cell: Body) -> None:
        """Register a cell whose result this peer holds; the caller must `conclude` it later."""
        self._ends[cell.body_hash] = asyncio.get_running_loop().create_future()
        while len(self._ends) > MAX_CELLS_KEPT:
            self._ends.popitem(last=False)[1].cancel()
        event, self._changed = self._changed, asyncio.Event()
        event.set()

    def tell(self, cell: Body, path: Path) -> None:
        """Send waiting members the path of a cell's result, whose chunks are here or still arrive."""
        end = self._ends.get(cell.body_hash)
        if end is not None and not end.done():
            end.set_result(path)

    def conclude(self, cell: Body, found: TreePath | None) -> None:
        """Send waiting members the outcome of a cell's result; None refuses them."""
        end = self._ends.get(cell.body_hash)
        if found is not None and (body := found.path[-1].body).body_hash not in self._round_log.shared:
            self._round_log.share(self._round_log.chunks_of(self._rpc.peer_id, body, found.means))
        if end is None or end.done():
            self.expect(cell)
        self._ends[cell.body_hash].set_result(None if found is None else found.path)

    def close(self) -> None:
        for end in self._ends.values():
            end.cancel()

    # --- serving

    async def _serve(self, channel: Channel, request: AskOutcome) -> None:
        # `conclude` follows `expect` within the deadlines of the levels above; the asker has its own deadline.
        async with Tasks() as tasks:
            end = tasks.call(self._end_of(request.cell), "end of a result")
            await send_keepalives(channel, end, self._grace_seconds, Waiting, self._status)
            if not end.done():
                return
            path = end.result()
        if path is None:
            raise PeerRefusedError(self._rpc.peer_id, "nothing came of that result here")
        chunks = self._round_log.shared.get(path[-1].body.body_hash)
        if chunks is None:
            raise PeerRefusedError(self._rpc.peer_id, "this result is not kept here any more")
        await channel.send(Outcome(tuple(each.to_bytes() for each in path), await chunks.find_hashes()))

    async def _end_of(self, cell: bytes) -> Path | None:
        """Wait for the outcome of a cell's result and return its path; None if there is none."""
        try:
            async with asyncio.timeout(KNOWN_WAIT_SECONDS):
                while cell not in self._ends:
                    await self._changed.wait()
        except TimeoutError:
            raise PeerRefusedError(self._rpc.peer_id, "this peer knows of no such result") from None
        end = self._ends[cell]
        await asyncio.wait({end})
        return None if end.cancelled() else end.result()

    # --- fetching

    async def fetch(
        self,
        delegate: str,
        cell: Body,
        table: Table,
        seconds: float,
        on_path: Callable[[Path], None],
        on_quiet: Callable[[], None] = lambda: None,
    ) -> TreePath:
        """Fetch the round's result and its path from a cell's delegate, within ``seconds`` for the levels above.

        Args:
            cell: The cell's result, as all its members hold it.
            table: The member table before the round.
            on_path: Called with the verified path before the chunks arrive.
            on_quiet: Called when the delegate's keepalives stop; the wait continues.

        Raises:
            PeerError, DeadlineError: The delegate failed, or has no outcome.
            ProtocolError: The delegate's path does not verify.
            DecidedError: The round has ended, but neither the cell nor the result's makers sent its result.
        """
        outcome = await self._ask(delegate, cell, seconds, on_quiet)
        try:
            path = await self._runtime.offload(self._check_path, cell, table, outcome.path)
        except IntegrityError as error:
            raise ProtocolError(delegate, f"sent a way to the result in which {error}") from error
        chunks = self._round_log.chunks_of(delegate, path[-1].body)
        try:
            await chunks.trust(delegate, outcome.hashes)
        except ProtocolError:  # The path is valid, so the round has ended.
            self._rpc.count_refusal(delegate, f"bad {RESULT}")
            await self._fetch_from_makers(chunks, delegate, seconds)
            return TreePath(path, chunks.means)
        self._round_log.share(chunks)
        on_path(path)
        try:
            await self._fill(chunks, delegate, cell.members, seconds)
        except BaseException:
            self._round_log.unshare(chunks)
            raise
        return TreePath(path, chunks.means)

    async def _fill(self, chunks: ResultChunks, delegate: str, members: tuple[str, ...], seconds: float) -> None:
        """Fetch this peer's assigned chunks from the delegate and the others from their assigned members.

        Late and failed chunks come from the delegate or the result's makers instead.
        """
        others = [member for member in members if member != delegate]
        plan: dict[str, list[int]] = {delegate: []}
        for index in range(chunks.num_chunks):
            holder = others[index % len(others)]
            plan.setdefault(delegate if holder == self._rpc.peer_id else holder, []).append(index)
        try:
            async with asyncio.timeout(seconds) as limit, Tasks() as tasks:
                tasks.start(self._hurry(chunks, plan, limit), "hurry")
                await self._round_log.fetch(chunks, list(plan), plan)
                return
        except (TimeoutError, *FAILURES) as error:
            logger.debug("round %d: not all of the result came from its cell: %s", chunks.body.round, error)
        await self._fetch_from_makers(chunks, delegate, seconds)

    async def _fetch_from_makers(self, chunks: ResultChunks, delegate: str, seconds: float) -> None:
        """Fetch missing chunks from the delegate or the result's makers; raise `DecidedError` if that fails."""
        makers = [peer for peer in chunks.body.members if peer not in (delegate, self._rpc.peer_id)]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                for _ in range(TRIES_ABOVE):  # A maker serves the result once it has applied it.
                    shuffled = self._runtime.random.sample(makers, len(makers))
                    with contextlib.suppress(*FAILURES):
                        await self._round_log.fetch(chunks, [delegate, *shuffled])
                        return
                    await asyncio.sleep(self._grace_seconds / TRIES_ABOVE)
        raise DecidedError("the round has ended, but nobody brings its result")

    async def _hurry(self, chunks: ResultChunks, plan: dict[str, list[int]], limit: asyncio.Timeout) -> None:
        """Shorten the timeout once a quorum of sources has sent its chunks."""
        loop = asyncio.get_running_loop()
        began, asked = loop.time(), [indices for indices in plan.values() if indices]
        while sum(all(chunks.done[index] for index in indices) for indices in asked) < quorum_of_others(
            len(asked), 0.5
        ):
            await chunks.changed.wait()
        until = loop.time() + straggler_seconds(loop.time() - began, self._grace_seconds)
        limit.reschedule(min(until, limit.when() or until))

    async def _ask(self, delegate: str, cell: Body, seconds: float, on_quiet: Callable[[], None]) -> Outcome:
        loop, grace, allowance = asyncio.get_running_loop(), self._grace_seconds, QUIET_GRACES * self._grace_seconds
        began = loop.time()
        unreached = loop.call_later(quiet_seconds(grace, allowance, 0.0, 0.0), on_quiet)
        try:
            async with self._rpc.open(delegate, OUTCOME, AskOutcome(cell.body_hash), OPEN_TIMEOUT_SECONDS) as channel:
                unreached.cancel()
                timeouts = AnswerTimeouts(seconds, grace, allowance, loop.time() - began)
                answer = await receive_answer(channel, FromDelegate, timeouts, MAX_REPLY_BYTES, on_quiet)
                assert isinstance(answer, Outcome), "the only other message is a keepalive"
                return answer
        finally:
            unreached.cancel()

    def _check_path(self, cell: Body, table: Table, raw: tuple[bytes, ...]) -> Path:
        path: list[Certificate] = []
        below = cell
        for item in raw:
            certificate = self._context.certificate(item)
            certificate.body.check_brought(below)
            path.append(certificate)
            below = certificate.body
        if not below.is_last:
            raise IntegrityError("the last is missing")
        table.check(path[-1])
        return tuple(path)
