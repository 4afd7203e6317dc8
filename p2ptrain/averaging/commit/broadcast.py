"""The way down the tree: how the result of a round reaches those that averaged in a cell and sent a delegate up.

A member asks its delegate, which says that it is at it until it holds the result
(`p2ptrain.averaging.timing.keepalive`), and then answers: the certificates of all levels above, by which the member
sees that its cell's result is in it, and a hash of each piece of the encoded means. Then every member fetches its own
pieces, one in n, from the delegate, and all others from the members whose own they are. So the delegate sends one
vector, whatever the number of members, and nobody sends or receives more than one. What somebody fails to bring is
fetched from the delegate; every piece is checked by itself, so that who sends a false one is known.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Annotated, Any, TypeVar

from msgspec import Meta

from p2ptrain.averaging.commit.round_log import History, Means
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
from p2ptrain.hashing import HASH_BYTES, bulk_hash
from p2ptrain.network.rpc.channel import Channel
from p2ptrain.network.rpc.client import Rpc
from p2ptrain.network.schema import Hash, Message
from p2ptrain.runtime import Runtime
from p2ptrain.tasks import Tasks

logger = logging.getLogger(__name__)

PIECE_BYTES = 1 << 18
OPEN_TIMEOUT_SECONDS = 8.0
QUIET_GRACES = 0.5
"""By so much of the grace period a delegate's sign of life may be late, and so may the next one's, before the groups of
the level above, whose grace period is longer, go on without their cell."""
KNOWN_WAIT_SECONDS = 5.0
"""How long a member may take to come to know of a cell's result that another member holds."""
TRIES_ABOVE = 4
"""How often those that made a result are asked for it, within a grace period."""
MAX_REPLY_BYTES = 8 << 20
FALSE_PIECE = "false piece"
"""What is counted against who sent other bytes than the result has."""
MAX_KEPT = 2
MAX_CELLS_KEPT = 8

Known = TypeVar("Known")
Path = tuple[Certificate, ...]
"""The certificates of the levels above a cell's, up to the one that ends the round."""


class AskResult(Message, frozen=True):
    """What became of the cell's result whose hash this is?"""

    cell: Hash


class FromDelegate(Message, frozen=True, tag=True):
    """What a delegate says until its cell's result is in the round's, or is not."""


class Waiting(FromDelegate, Keepalive, frozen=True, tag="waiting"):
    """The answer will come."""


class ResultAbove(FromDelegate, frozen=True, tag="result"):
    """The round's result.

    Attributes:
        path: The certificates of the levels above the cell's.
        pieces: A hash of each piece of the encoded means, joined.
    """

    path: Annotated[tuple[bytes, ...], Meta(min_length=1, max_length=MAX_LEVELS - 1)]
    pieces: bytes


class DecidedError(TemporaryError):
    """A round has ended with a result that could not be had; replaying it will bring it."""


@dataclass(frozen=True)
class Ascent:
    """What became of a cell's result.

    Attributes:
        path: How it got there.
        means: The encoded means of the last one's shares.
    """

    path: Path
    means: Means

    def counts(self, body: Body) -> bool:
        """Whether a cell's result is in the round's, by the way that `path` shows."""
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


@dataclass
class _Pieces:
    """Encoded means, in the making, complete, or given up."""

    means: Means
    cuts: list[tuple[int, int, int]]
    there: list[bool]
    given_up: bool = False
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    def view(self, piece: int) -> memoryview:
        """The piece's bytes."""
        share, low, high = self.cuts[piece]
        return memoryview(self.means[share])[low:high]

    def arrived(self, piece: int) -> None:
        """Let the piece go on to others."""
        self.there[piece] = True
        self._wake()

    def give_up(self) -> None:
        """Nothing more arrives."""
        self.given_up = True
        self._wake()

    def _wake(self) -> None:
        self.changed.set()
        self.changed = asyncio.Event()


def cut_pieces(sizes: list[int]) -> list[tuple[int, int, int]]:
    """(share, first byte, the byte after its last) of all pieces of means of so many bytes."""
    return [
        (share, low, min(low + PIECE_BYTES, size))
        for share, size in enumerate(sizes)
        for low in range(0, size, PIECE_BYTES)
    ]


class Descent:
    """Hands the results of rounds on to those that wait for them, and fetches them from others."""

    def __init__(self, rpc: Rpc, runtime: Runtime, history: History, grace_seconds: float) -> None:
        """
        Args:
            rpc: To reach the others.
            runtime: For arithmetic.
            history: Checks what was fetched.
            grace_seconds: How long those may take that are slower than most.
        """
        self._rpc = rpc
        self._runtime = runtime
        self._history = history
        self._grace_seconds = grace_seconds
        self._ends: OrderedDict[bytes, asyncio.Future[Path | None]] = OrderedDict()
        self._kept: OrderedDict[bytes, _Pieces] = OrderedDict()
        self._changed = asyncio.Event()
        self._status = KeepaliveStatus()
        rpc.serve_channel("descent.result", AskResult, self._serve_result)
        rpc.serve_channel("descent.pieces", dict, self._serve_pieces)

    def expect(self, cell: Body) -> None:
        """Note that this peer holds a cell's result, and will `conclude` what becomes of it."""
        self._ends[cell.body_hash] = asyncio.get_running_loop().create_future()
        while len(self._ends) > MAX_CELLS_KEPT:
            self._ends.popitem(last=False)[1].cancel()
        self._wake()

    def conclude(self, cell: Body, ascent: Ascent | None) -> None:
        """Tell those that wait what became of a cell's result: None for nothing that this peer could bring about."""
        if (end := self._ends.get(cell.body_hash)) is None or end.done():
            self.expect(cell)
        if ascent is not None and ascent.path[-1].body.body_hash not in self._kept:
            cuts = cut_pieces([len(mean) for mean in ascent.means])
            self._keep(ascent.path[-1].body, _Pieces(ascent.means, cuts, [True] * len(cuts)))
        self._ends[cell.body_hash].set_result(None if ascent is None else ascent.path)

    def stands(self, joined: bool) -> None:
        """Tell those that wait whether this peer is in a group of the level above."""
        self._status.set(joined)

    def close(self) -> None:
        """Nobody waits here any more."""
        for end in self._ends.values():
            end.cancel()

    def _keep(self, body: Body, pieces: _Pieces) -> None:
        self._kept[body.body_hash] = pieces
        while len(self._kept) > MAX_KEPT:
            self._kept.popitem(last=False)
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    # --- serving ---------------------------------------------------------------------------------------------------

    async def _serve_result(self, channel: Channel, request: AskResult) -> None:
        # `expect` is followed by `conclude` within the deadlines of the levels above; and the asker has one of its own.
        async with Tasks() as tasks:
            end = tasks.call(self._end_of(request.cell), "end of a result")
            await beat_until(channel, end, self._grace_seconds, Waiting, self._status)
            if not end.done():
                return
            path = end.result()
        if path is None:
            raise PeerRefusedError(self._rpc.peer_id, "nothing came of that result here")
        pieces = self._kept.get(path[-1].body.body_hash)
        if pieces is None:
            raise PeerRefusedError(self._rpc.peer_id, "this result is not kept here any more")
        hashes = await self._runtime.offload(_hash_all, pieces)
        await channel.send(ResultAbove(tuple(certificate.to_bytes() for certificate in path), hashes))

    async def _end_of(self, cell: bytes) -> Path | None:
        """What became of a cell's result, once that is clear."""
        end = await self._wait_until_known(self._ends, cell, "this peer knows of no such result")
        await asyncio.wait({end})
        return None if end.cancelled() else end.result()

    async def _serve_pieces(self, channel: Channel, request: dict[str, Any]) -> None:
        pieces = await self._wait_until_known(self._kept, request.get("body"), "this result is not kept here")
        wanted = request.get("pieces")
        if not isinstance(wanted, list) or not all(
            type(piece) is int and 0 <= piece < len(pieces.cuts) for piece in wanted
        ):
            raise IntegrityError("malformed request for pieces")
        for piece in wanted[: len(pieces.cuts)]:
            while not pieces.there[piece]:
                if pieces.given_up:
                    raise PeerRefusedError(self._rpc.peer_id, "this result did not come here either")
                await pieces.changed.wait()
            await channel.send_bytes(pieces.view(piece))
        await channel.send({"done": True})

    async def _wait_until_known(self, known: OrderedDict[bytes, Known], key: object, otherwise: str) -> Known:
        if not isinstance(key, bytes):
            raise IntegrityError("malformed name of a result")
        try:
            async with asyncio.timeout(KNOWN_WAIT_SECONDS):
                while key not in known:
                    await self._changed.wait()
        except TimeoutError:
            raise PeerRefusedError(self._rpc.peer_id, otherwise) from None
        return known[key]

    # --- fetching --------------------------------------------------------------------------------------------------

    async def fetch(
        self,
        delegate: str,
        cell: Body,
        num_values: int,
        seconds: float,
        on_quiet: Callable[[], None] = lambda: None,
    ) -> Ascent:
        """What became of a cell's result, by way of a member that stands for it or waits for who does.

        Args:
            delegate: Another member of the cell.
            cell: Its result, as all its members hold it.
            num_values: Length of the vectors.
            seconds: How long the round may take up there.
            on_quiet: Called when the delegate falls quiet; it is listened to on.

        Raises:
            PeerError, DeadlineError: It failed, or nothing came of the result.
            ProtocolError: What it sent does not verify.
            DecidedError: The round has ended; its result came neither from there nor from those that made it.
        """
        reply = await self._ask(delegate, cell, seconds, on_quiet)
        try:
            path = await self._runtime.offload(self._check_path, cell, reply.path)
        except IntegrityError as error:
            raise ProtocolError(delegate, f"sent a way to the result in which {error}") from error
        body = path[-1].body
        try:
            return Ascent(path, await self._bring_down(delegate, cell, body, num_values, reply.pieces, seconds))
        except (PeerError, DeadlineError, IntegrityError) as error:
            logger.debug("round %d: the result did not come from %s: %s", body.round, delegate[-8:], error)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                return Ascent(path, await self._fetch_from_above(delegate, body, num_values, seconds))
        raise DecidedError("the round has ended, but its result did not come")

    async def _fetch_from_above(self, delegate: str, body: Body, num_values: int, seconds: float) -> Means:
        """The result's encoded means from one of the others that made it, who hold them once they have applied them."""
        others = [peer for peer in body.members if peer not in (delegate, self._rpc.peer_id)]
        for _ in range(TRIES_ABOVE):
            for peer in self._runtime.random.sample(others, len(others)):
                with contextlib.suppress(PeerError, DeadlineError, IntegrityError):
                    return await self._history.fetch_means(peer, body, num_values, seconds)
            await asyncio.sleep(self._grace_seconds / TRIES_ABOVE)
        raise DecidedError("the round has ended, but nobody who made its result brings it")

    async def _bring_down(
        self, delegate: str, cell: Body, body: Body, num_values: int, hashes: bytes, seconds: float
    ) -> Means:
        """The result's encoded means, in pieces from all members of the cell."""
        codecs = self._history.codecs_of(delegate, body, num_values)
        sizes = [
            codec.encoded_bytes(high - low) for codec, (low, high) in zip(codecs, pairwise(body.bounds), strict=True)
        ]
        cuts = cut_pieces(sizes)
        if len(hashes) != HASH_BYTES * len(cuts):
            raise ProtocolError(delegate, "sent a malformed list of hashes")
        means: Means = [self._runtime.buffers.lend(size) for size in sizes]
        pieces = _Pieces(means, cuts, [False] * len(cuts))
        self._keep(body, pieces)
        try:
            await self._fill(pieces, body, hashes, delegate, cell.members, seconds)
            await self._history.check_means(delegate, body, means)
        except BaseException:
            pieces.give_up()
            self._kept.pop(body.body_hash, None)
            raise
        return means

    async def _ask(self, delegate: str, cell: Body, seconds: float, on_quiet: Callable[[], None]) -> ResultAbove:
        loop, grace, allowance = asyncio.get_running_loop(), self._grace_seconds, QUIET_GRACES * self._grace_seconds
        began = loop.time()
        unreached = loop.call_later(quiet_seconds(grace, allowance, 0.0, 0.0), on_quiet)
        try:
            async with self._rpc.open(
                delegate, "descent.result", AskResult(cell.body_hash), OPEN_TIMEOUT_SECONDS
            ) as channel:
                unreached.cancel()
                patience = Patience(seconds, grace, allowance, loop.time() - began)
                answer = await answer_after_beats(channel, FromDelegate, patience, MAX_REPLY_BYTES, on_quiet)
                assert isinstance(answer, ResultAbove), "the only other message is a keepalive"
                return answer
        finally:
            unreached.cancel()

    def _check_path(self, cell: Body, raw: Sequence[bytes]) -> Path:
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

    async def _fill(
        self, pieces: _Pieces, body: Body, hashes: bytes, delegate: str, members: tuple[str, ...], seconds: float
    ) -> None:
        """Fetch all pieces: the own ones from the delegate, the others from those whose own they are."""
        others, loop = [member for member in members if member != delegate], asyncio.get_running_loop()
        began = loop.time()
        by_source: dict[str, list[int]] = {}
        for piece in range(len(pieces.cuts)):
            holder = others[piece % len(others)]
            by_source.setdefault(delegate if holder == self._rpc.peer_id else holder, []).append(piece)
        async with Tasks() as tasks:
            pulls = {
                tasks.start(self._pull(pieces, body, hashes, source, wanted, seconds), f"pull-{source[-8:]}")
                for source, wanted in by_source.items()
            }
            pending, until = set(pulls), began + seconds
            while pending and loop.time() < until:
                _, pending = await asyncio.wait(
                    pending, timeout=until - loop.time(), return_when=asyncio.FIRST_COMPLETED
                )
                if until == began + seconds and len(pulls) - len(pending) >= quorum_of_others(len(pulls), 0.5):
                    waited = loop.time() - began
                    until = min(until, loop.time() + patience_seconds(waited, self._grace_seconds))
        missing = [piece for piece, there in enumerate(pieces.there) if not there]
        if missing:
            logger.debug("round %d: %d pieces come from the delegate after all", body.round, len(missing))
            await self._pull(pieces, body, hashes, delegate, missing, max(1.0, began + seconds - loop.time()))
        if not all(pieces.there):
            raise DeadlineError("not all of the result came")

    async def _pull(
        self, pieces: _Pieces, body: Body, hashes: bytes, source: str, wanted: list[int], seconds: float
    ) -> None:
        """Fetch pieces from one peer, as far as it brings them."""
        deadline = asyncio.get_running_loop().time() + seconds
        request = {"body": body.body_hash, "pieces": wanted}
        total = sum(len(pieces.view(piece)) for piece in wanted)
        try:
            async with self._rpc.open(
                source, "descent.pieces", request, OPEN_TIMEOUT_SECONDS, expected_bytes=total
            ) as channel:
                for piece in wanted:
                    room = bytearray(len(pieces.view(piece)))
                    await channel.receive_bytes(
                        len(room), deadline - asyncio.get_running_loop().time(), memoryview(room)
                    )
                    if await self._runtime.offload(bulk_hash, room) != _hash_of(hashes, piece):
                        self._rpc.count_refusal(source, FALSE_PIECE)
                        raise ProtocolError(source, "sent a piece that is not of the result")
                    pieces.view(piece)[:] = room
                    pieces.arrived(piece)
                await channel.receive(dict, deadline - asyncio.get_running_loop().time())
        except (PeerError, DeadlineError) as error:
            logger.debug("round %d: pieces from peer %s did not come: %s", body.round, source[-8:], error)


def _hash_all(pieces: _Pieces) -> bytes:
    return b"".join(bulk_hash(pieces.view(piece)) for piece in range(len(pieces.cuts)))


def _hash_of(hashes: bytes, piece: int) -> bytes:
    return hashes[HASH_BYTES * piece : HASH_BYTES * (piece + 1)]
