"""The stream that a member opens to another one: its part goes out, the mean and signatures come back."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from p2ptrain.averaging.allreduce.member import Member
from p2ptrain.averaging.allreduce.messages import (
    GAVE_UP,
    Arrived,
    Bring,
    Clear,
    FromOwner,
    GaveUp,
    Mask,
    MeanFollows,
    Shown,
    Signature,
    Signatures,
    Trace,
)  # fmt: skip
from p2ptrain.averaging.timing.deadlines import FORWARD_SECONDS, least_mask
from p2ptrain.averaging.vector.merkle_sum import SumTree
from p2ptrain.averaging.vector.reduce import PartCheck, RangeCheck
from p2ptrain.averaging.vector.streaming import receive_checked, send_encoded
from p2ptrain.codecs import Codec, CodecError
from p2ptrain.errors import DeadlineError, PeerError, PeerLostError, PeerRefusedError, PeerSilentError, ProtocolError
from p2ptrain.network.rpc.channel import Channel

if TYPE_CHECKING:
    from p2ptrain.averaging.allreduce.session import AllReduceSession

BAD_ANSWER, BAD_SIGNATURE, ANOTHER_RESULT = "bad answer", "bad signature", "another result"
"""Refusal counters: malformed mask or mean, invalid signature, signature of another result."""

M = TypeVar("M", bound=FromOwner)


class GaveUpError(Exception):
    """The other member gave up; the session has recorded it."""


class OutgoingStream:
    """This member's stream to another one; ``channel`` is unset until it is open."""

    def __init__(self, session: AllReduceSession, member: Member) -> None:
        self.member = member
        self.task: asyncio.Task[None] | None = None
        self.channel: Channel
        self._session = session
        self._codec: Codec | None = None

    def start(self) -> None:
        """Open the stream, and run the protocol on it in a task."""
        self.task = self._session.tasks.start(self._run(), f"allreduce-{self.member.index}")

    def cancel(self) -> None:
        if self.task is not None:
            self.task.cancel()

    async def _run(self) -> None:
        session, member, attempt = self._session, self.member, self._session.attempt
        codec, origin = session.contribution.codec, session.contribution.origin
        self._codec = codec.part(attempt.bounds[member.index], attempt.bounds[member.index + 1])
        total = self._codec.encoded_bytes(member.size) + attempt.mean_codec_of(member.index).encoded_bytes(member.size)
        request = Bring(attempt.roster.group_id, codec.name, origin.credential if origin else b"")
        member.is_opening = True
        try:
            async with session.liveness.open(member, request, total) as self.channel:
                member.is_opening = False
                member.outgoing = self.channel
                if member.size and not await self._average():
                    return
                member.has_mean = True
                await self._fetch_signatures()
                member.is_through = True
        except GaveUpError:
            return
        except (PeerError, DeadlineError) as error:
            self._note_lost(error)
        except CodecError as error:
            session.unencodable = str(error)
        session.changed()

    def _note_lost(self, error: PeerError | DeadlineError) -> None:
        session, member = self._session, self.member
        if isinstance(error, PeerRefusedError) and error.reason == GAVE_UP:
            session.note_gave_up(member, GaveUp())
        if not member.gave_up:
            member.lost = str(error)
            if isinstance(error, PeerSilentError):
                session.liveness.note_silent(member)
            if isinstance(error, PeerLostError) and member.arrived_at is None:
                member.was_cut_short = True
        if isinstance(error, ProtocolError):
            session.context.rpc.count_refusal(member.peer, BAD_ANSWER)

    async def hear(self, *kinds: type[M]) -> M:
        """Return the owner's next message, of one of these kinds.

        Raises:
            GaveUpError: The owner gave up instead.
            ProtocolError: The message is of another kind.
            PeerError, DeadlineError: See `Channel.receive`.
        """
        message = await self.channel.receive(FromOwner, self.seconds_left())
        if isinstance(message, GaveUp):
            self._session.note_gave_up(self.member, message)
            raise GaveUpError
        if not isinstance(message, kinds):
            raise ProtocolError(self.member.peer, f"sent {type(message).__name__} out of turn")
        return message

    def seconds_left(self) -> float:
        return self._session.deadline - asyncio.get_running_loop().time()

    async def _average(self) -> bool:
        """Send the part, and receive mask and mean; return True if the mean passed its checks."""
        session, member, attempt = self._session, self.member, self._session.attempt
        await self._send_part()
        message = await self.hear(Arrived, Trace)
        if isinstance(message, Trace):
            await self._show_origin(message)
            await self.hear(Arrived)
        member.arrived_at = asyncio.get_running_loop().time()
        session.changed()
        mask = await self.hear(Mask)
        member.mask, member.refused_us = self._contributors(mask), mask.refusal
        session.changed()
        await self.hear(MeanFollows)
        if attempt.lists_parts:
            await self._receive_list()
            return True
        codec = attempt.mean_codec_of(member.index)
        assert isinstance(codec, Codec)
        hashes = PartCheck(codec, session.context.spec, attempt.chunk, measured=False, hashed=True)
        mean, _ = await receive_checked(
            self.channel, session.context.runtime, codec, member.size, self.seconds_left(), hashes, hashed=False
        )
        tree = await session.context.runtime.offload(SumTree, hashes.leaves)
        attempt.add_mean(member.index, mean, tree.root[0])
        return await session.verifier.mean_received(self, tree)

    async def _send_part(self) -> None:
        session, attempt, index = self._session, self._session.attempt, self.member.index
        assert self._codec is not None
        part = session.contribution.vector[attempt.bounds[index] : attempt.bounds[index + 1]]
        check = session.verifier.new_check(self._codec)
        try:
            session.sent_parts[index] = await send_encoded(
                self.channel, session.context.runtime, self._codec, part, check
            )
            await session.verifier.part_sent(self, check)
        except PeerError:
            with contextlib.suppress(PeerError, DeadlineError):  # The owner may have sent `GaveUp` before.
                message = await self.channel.receive(FromOwner, 0.0)
                if isinstance(message, GaveUp):
                    session.note_gave_up(self.member, message)
            raise

    async def _show_origin(self, trace: Trace) -> None:
        session, attempt, peer = self._session, self._session.attempt, self.member.peer
        origin = session.contribution.origin
        if origin is None or not attempt.audited:
            raise ProtocolError(peer, "asks where a part comes from that is not to be traced")
        if len(trace.chunks) > session.context.spec.spot_checks or len(set(trace.chunks)) < len(trace.chunks):
            raise ProtocolError(peer, "asks for too many chunks, or for one of them twice")
        if max(trace.chunks) >= attempt.num_chunks(self.member.index):
            raise ProtocolError(peer, "asks for chunks that are not there")
        spans = [attempt.span(self.member.index, chunk) for chunk in trace.chunks]
        shown = await session.context.runtime.offload(origin.show, spans)
        await self.channel.send(Shown(len(shown)))
        await self.channel.send_bytes(shown)

    def _contributors(self, mask: Mask) -> frozenset[int]:
        size, contributors = len(self._session.members), frozenset(mask.contributors)
        if max(contributors, default=0) >= size:
            raise ProtocolError(self.member.peer, "counts members that are not there")
        if len(contributors) < least_mask(size, self._session.context.spec.quorum):
            raise ProtocolError(self.member.peer, f"counts only {len(contributors)} of {size} contributions")
        return contributors

    async def _receive_list(self) -> None:
        """Receive a mean that lists the parts; its length depends on the number of contributors."""
        session, attempt, index = self._session, self._session.attempt, self.member.index
        await self.until(lambda: attempt.contributors is not None)
        codec = attempt.mean_codec_of(index)
        check_range = RangeCheck(codec, session.context.spec)

        def check(piece: memoryview, low: int, high: int) -> None:
            check_range(piece, low, high)
            attempt.check_quotes(index, piece, session.own.index)

        mean, digest = await receive_checked(
            self.channel, session.context.runtime, codec, self.member.size, self.seconds_left(), check
        )
        attempt.add_mean(index, mean, digest)

    async def _fetch_signatures(self) -> None:
        """Receive the member's signature, and the others that it holds if a majority is still missing."""
        session, attempt, peer = self._session, self._session.attempt, self.member.peer
        message = await self.hear(Clear, Signature, Signatures)
        if isinstance(message, Clear):
            session.verifier.note_clear(self.member)
            message = await self.hear(Signature, Signatures)
        if isinstance(message, Signatures):
            session.note_signatures(message)
            return
        assert isinstance(message, Signature)
        await self.until(lambda: attempt.body is not None)
        assert attempt.body is not None
        if message.body != attempt.body.body_hash:
            session.context.rpc.count_refusal(peer, ANOTHER_RESULT)
            if len(session.members) == 2:  # No third member can have caused the difference.
                self.member.contradiction = f"peer {peer[-8:]} signed {ANOTHER_RESULT}"
                session.changed()
            await session.verifier.other_result(self.member)
        elif not attempt.add_proof(peer, message.proof, session.context.signer):
            session.context.rpc.count_refusal(peer, BAD_SIGNATURE)
        if attempt.certificate() is None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(FORWARD_SECONDS):
                    await session.is_certified.wait()
        if attempt.certificate() is None:
            session.note_signatures(await self.hear(Signatures))

    async def until(self, holds: Callable[[], bool]) -> None:
        """Wait until ``holds()``; raise `DeadlineError` at the attempt's deadline."""
        attempt = self._session.attempt
        try:
            async with asyncio.timeout(self.seconds_left()):
                while not holds():
                    attempt.changed.clear()
                    await attempt.changed.wait()
        except TimeoutError:
            raise DeadlineError("others did not get there in time") from None
