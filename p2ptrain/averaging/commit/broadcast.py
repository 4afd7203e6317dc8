"""The way down the tree: how the result of a round reaches those that averaged in a cell and sent a delegate up.

A member asks its delegate, which says that it is at it until it holds the result
(`p2ptrain.averaging.timing.keepalive`), and then answers: the certificates of all levels above, by which the member
sees that its cell's result is in it, and the hashes of the result's chunks, for which the last certificate vouches.
Then every member fetches its own chunks, one in n, from the delegate, and all others from the members whose own they
are (`p2ptrain.network.chunks`). So the delegate sends one vector, whatever the number of members, and nobody sends or
receives more than one. Chunks go on while others arrive, on all levels: a delegate answers once it knows the
certificates and the hashes, and hands each chunk on when it has it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from p2ptrain.averaging.commit.result_chunks import RESULT, Means, ResultChunks
from p2ptrain.averaging.commit.round_log import KNOWN_WAIT_SECONDS, History
from p2ptrain.averaging.protocol.certificate import MAX_LEVELS, Body, Certificate
from p2ptrain.averaging.timing.deadlines import patience_seconds, quiet_seconds, quorum_of_others
from p2ptrain.averaging.timing.keepalive import Keepalive, KeepaliveStatus, Patience, answer_after_beats, beat_until
from p2ptrain.errors import (
    DeadlineError,
    IntegrityError,
    PeerError,
    PeerRefusedError,
    ProtocolError,
    TemporaryError,
)
from p2ptrain.network.rpc.channel import Channel
from p2ptrain.network.rpc.client import Rpc
from p2ptrain.network.schema import Hash, Message
from p2ptrain.runtime import Runtime
from p2ptrain.tasks import Tasks

logger = logging.getLogger(__name__)

OPEN_TIMEOUT_SECONDS = 8.0
QUIET_GRACES = 0.5
"""By so much of the grace period a delegate's sign of life may be late, and so may the next one's, before the groups of
the level above, whose grace period is longer, go on without their cell."""
TRIES_ABOVE = 4
"""Rounds of asking those that made a result for it, within a grace period."""
MAX_REPLY_BYTES = 8 << 20
MAX_CELLS_KEPT = 8

OUTCOME = "broadcast.outcome"
FAILURES = (PeerError, DeadlineError, IntegrityError)
Path = tuple[Certificate, ...]
"""The certificates of the levels above a cell's, up to the one that ends the round."""


class AskOutcome(Message, frozen=True):
    """Ask how a cell's result ended; the delegate says that it is at it until it knows."""

    cell: Hash


class FromDelegate(Message, frozen=True, tag=True):
    """What a delegate says until it knows how its cell's result ended, and then."""


class Waiting(FromDelegate, Keepalive, frozen=True, tag="waiting"):
    """The answer will come."""


class Outcome(FromDelegate, frozen=True, tag="outcome"):
    """The certificates above a cell's result, and the hashes of the last one's chunks."""

    path: Annotated[tuple[bytes, ...], Meta(min_length=1, max_length=MAX_LEVELS - 1)]
    hashes: tuple[Hash, ...]


class DecidedError(TemporaryError):
    """A round has ended with a result that could not be had; replaying it will bring it."""


@dataclass(frozen=True)
class TreePath:
    """The way of a cell's result into the round's.

    Attributes:
        path: How it got there.
        means: The encoded means of the last one's shares.
    """

    path: Path
    means: Means

    def counts(self, body: Body) -> bool:
        """True if a cell's result is in the round's, by the way that `path` shows."""
        for certificate in self.path:
            above = certificate.body
            brought = {above.children[index] for index, *_ in above.contributors}
            if body.body_hash not in brought:
                return False
            body = above
        return True

    def place_of(self, body: Body, index: int) -> tuple[int, int]:
        """A member's place among all peers of the round, and their number.

        Args:
            body: Of the group of level 0.
            index: The member's, in that group.
        """
        for certificate in self.path:
            above = certificate.body
            index += sum(above.peers[: above.children.index(body.body_hash)])
            body = above
        return index, sum(body.peers)


class ResultBroadcast:
    """Hands the results of rounds on to those that wait for them, and fetches them from others."""

    def __init__(self, rpc: Rpc, runtime: Runtime, history: History, grace_seconds: float) -> None:
        """
        Args:
            rpc: To reach the others.
            runtime: For arithmetic.
            history: Serves and fetches what is in a result.
            grace_seconds: How long those may take that are slower than most.
        """
        self._rpc = rpc
        self._runtime = runtime
        self._history = history
        self._grace_seconds = grace_seconds
        self._ends: OrderedDict[bytes, asyncio.Future[Path | None]] = OrderedDict()
        self._changed = asyncio.Event()
        self._status = KeepaliveStatus()
        rpc.serve_channel(OUTCOME, AskOutcome, self._serve)

    def expect(self, cell: Body) -> None:
        """Note that this peer holds a cell's result, and will `conclude` its way up."""
        self._ends[cell.body_hash] = asyncio.get_running_loop().create_future()
        while len(self._ends) > MAX_CELLS_KEPT:
            self._ends.popitem(last=False)[1].cancel()
        event, self._changed = self._changed, asyncio.Event()
        event.set()

    def tell(self, cell: Body, path: Path) -> None:
        """Tell those that wait how a cell's result ended; the last one's chunks are here, or on their way here."""
        end = self._ends.get(cell.body_hash)
        if end is not None and not end.done():
            end.set_result(path)

    def conclude(self, cell: Body, found: TreePath | None) -> None:
        """Tell those that wait how a cell's result ended: None for nothing that this peer could bring about."""
        end = self._ends.get(cell.body_hash)
        if found is not None and self._history.shared((body := found.path[-1].body).body_hash) is None:
            self._history.share(self._history.chunks_of(self._rpc.peer_id, body, body.bounds[-1], found.means))
        if end is None or end.done():
            self.expect(cell)
        self._ends[cell.body_hash].set_result(None if found is None else found.path)

    def stands(self, joined: bool) -> None:
        """Tell those that wait whether this peer is in a group of the level above."""
        self._status.set(joined)

    def close(self) -> None:
        """Nobody waits here any more."""
        for end in self._ends.values():
            end.cancel()

    # --- serving --------------------------------------------------------------------------------------------------

    async def _serve(self, channel: Channel, request: AskOutcome) -> None:
        # `expect` is followed by `conclude` within the deadlines of the levels above; and the asker has one of its own.
        async with Tasks() as tasks:
            end = tasks.call(self._end_of(request.cell), "end of a result")
            await beat_until(channel, end, self._grace_seconds, Waiting, self._status)
            if not end.done():
                return
            path = end.result()
        if path is None:
            raise PeerRefusedError(self._rpc.peer_id, "nothing came of that result here")
        chunks = self._history.shared(path[-1].body.body_hash)
        if chunks is None:
            raise PeerRefusedError(self._rpc.peer_id, "this result is not kept here any more")
        await channel.send(Outcome(tuple(each.to_bytes() for each in path), await chunks.find_hashes()))

    async def _end_of(self, cell: bytes) -> Path | None:
        """Return how a cell's result ended, once that is clear."""
        try:
            async with asyncio.timeout(KNOWN_WAIT_SECONDS):
                while cell not in self._ends:
                    await self._changed.wait()
        except TimeoutError:
            raise PeerRefusedError(self._rpc.peer_id, "this peer knows of no such result") from None
        end = self._ends[cell]
        await asyncio.wait({end})
        return None if end.cancelled() else end.result()

    # --- fetching -------------------------------------------------------------------------------------------------

    async def fetch(
        self,
        delegate: str,
        cell: Body,
        seconds: float,
        on_path: Callable[[Path], None],
        on_quiet: Callable[[], None] = lambda: None,
    ) -> TreePath:
        """Return how a cell's result ended, by way of a member that stands for it or waits for who does.

        Args:
            delegate: Another member of the cell.
            cell: Its result, as all its members hold it.
            seconds: How long the round may take up there.
            on_path: Called with the way to the end before the end's chunks are here.
            on_quiet: Called when the delegate falls quiet; it is listened to on.

        Raises:
            PeerError, DeadlineError: It failed, or nothing came of the result.
            ProtocolError: What it sent does not verify.
            DecidedError: The round has ended; its result came neither from there nor from those that made it.
        """
        outcome = await self._ask(delegate, cell, seconds, on_quiet)
        try:
            path = await self._runtime.offload(self._check_path, cell, outcome.path)
        except IntegrityError as error:
            raise ProtocolError(delegate, f"sent a way to the result in which {error}") from error
        chunks = self._history.chunks_of(delegate, path[-1].body, cell.bounds[-1])
        try:
            await chunks.trust(delegate, outcome.hashes)
        except ProtocolError:  # The round has ended all the same.
            self._rpc.count_refusal(delegate, f"bad {RESULT}")
            await self._fetch_from_makers(chunks, delegate, seconds)
            return TreePath(path, chunks.means)
        self._history.share(chunks)
        on_path(path)
        try:
            await self._fill(chunks, delegate, cell.members, seconds)
        except BaseException:
            self._history.unshare(chunks)
            raise
        return TreePath(path, chunks.means)

    async def _fill(self, chunks: ResultChunks, delegate: str, members: tuple[str, ...], seconds: float) -> None:
        """Fetch all chunks: the own ones from the delegate, the others from those whose own they are.

        What is late or fails to come is fetched from the delegate, or from those that made the result.
        """
        others = [member for member in members if member != delegate]
        plan: dict[str, list[int]] = {delegate: []}
        for index in range(chunks.num_chunks):
            holder = others[index % len(others)]
            plan.setdefault(delegate if holder == self._rpc.peer_id else holder, []).append(index)
        try:
            async with asyncio.timeout(seconds) as limit, Tasks() as tasks:
                tasks.start(self._hurry(chunks, plan, limit), "hurry")
                await self._history.fetch(chunks, list(plan), plan)
                return
        except (TimeoutError, *FAILURES) as error:
            logger.debug("round %d: not all of the result came from its cell: %s", chunks.body.round, error)
        await self._fetch_from_makers(chunks, delegate, seconds)

    async def _fetch_from_makers(self, chunks: ResultChunks, delegate: str, seconds: float) -> None:
        """Fetch what is missing from the delegate, or from those that made the result.

        Raises:
            DecidedError: It did not come.
        """
        makers = [peer for peer in chunks.body.members if peer not in (delegate, self._rpc.peer_id)]
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                for _ in range(TRIES_ABOVE):  # Those that made it hold it once they have applied it.
                    with contextlib.suppress(*FAILURES):
                        await self._history.fetch(chunks, [delegate, *self._runtime.random.sample(makers, len(makers))])
                        return
                    await asyncio.sleep(self._grace_seconds / TRIES_ABOVE)
        raise DecidedError("the round has ended, but nobody brings its result")

    async def _hurry(self, chunks: ResultChunks, plan: dict[str, list[int]], limit: asyncio.Timeout) -> None:
        """Bring the limit forward once most sources have sent what they should."""
        loop = asyncio.get_running_loop()
        began, asked = loop.time(), [indices for indices in plan.values() if indices]
        while sum(all(chunks.done[index] for index in indices) for indices in asked) < quorum_of_others(
            len(asked), 0.5
        ):
            await chunks.changed.wait()
        until = loop.time() + patience_seconds(loop.time() - began, self._grace_seconds)
        limit.reschedule(min(until, limit.when() or until))

    async def _ask(self, delegate: str, cell: Body, seconds: float, on_quiet: Callable[[], None]) -> Outcome:
        loop, grace, allowance = asyncio.get_running_loop(), self._grace_seconds, QUIET_GRACES * self._grace_seconds
        began = loop.time()
        unreached = loop.call_later(quiet_seconds(grace, allowance, 0.0, 0.0), on_quiet)
        try:
            async with self._rpc.open(delegate, OUTCOME, AskOutcome(cell.body_hash), OPEN_TIMEOUT_SECONDS) as channel:
                unreached.cancel()
                patience = Patience(seconds, grace, allowance, loop.time() - began)
                answer = await answer_after_beats(channel, FromDelegate, patience, MAX_REPLY_BYTES, on_quiet)
                assert isinstance(answer, Outcome), "the only other message is a keepalive"
                return answer
        finally:
            unreached.cancel()

    def _check_path(self, cell: Body, raw: tuple[bytes, ...]) -> Path:
        path: list[Certificate] = []
        below = cell
        for item in raw:
            certificate = self._history.verified(item)
            above = certificate.body
            if not (
                (above.round, above.lineage, above.levels) == (cell.round, cell.lineage, cell.levels)
                and (above.tokens_before, above.samples_before) == (cell.tokens_before, cell.samples_before)
                and above.level == below.level + 1
                and below.body_hash in above.children
            ):
                raise IntegrityError("one does not follow from the other")
            place = above.children.index(below.body_hash)
            told = [counts for index, *counts in above.contributors if index == place]
            if told not in ([], [[below.tokens, below.most_samples]]) or above.peers[place] != sum(below.peers):
                raise IntegrityError("one has another number of tokens, samples or peers than was brought to it")
            path.append(certificate)
            below = above
        if not below.is_last:
            raise IntegrityError("the last is missing")
        return tuple(path)
