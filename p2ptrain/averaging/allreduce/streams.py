"""The streams of a session.

* `OutgoingStream`, opened by this member: its part goes out, the owner's mean and signatures come back.
* `IncomingStreams`, opened by the others: their parts come in, the own share's mean and signatures go out.

Both only check that messages are well-formed; `AllReduceSession` decides what to send and when.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

from p2ptrain.averaging.allreduce import messages
from p2ptrain.averaging.allreduce.member import Member
from p2ptrain.averaging.commit.result_chunks import Source
from p2ptrain.averaging.timing.deadlines import FORWARD_SECONDS, least_mask
from p2ptrain.averaging.vector.chunks import ListCheck, PartCheck, SumTree
from p2ptrain.averaging.vector.reduce import receive_checked, send_encoded
from p2ptrain.averaging.verification.opening import MAX_CHUNKS
from p2ptrain.codecs import Codec, CodecError
from p2ptrain.errors import (
    DeadlineError,
    IntegrityError,
    PeerError,
    PeerLostError,
    PeerRefusedError,
    PeerSilentError,
    ProtocolError,
)
from p2ptrain.network.rpc.channel import Channel
from p2ptrain.tasks import Tasks

if TYPE_CHECKING:
    from p2ptrain.averaging.allreduce.session import AllReduceSession

BAD_ANSWER, BAD_SIGNATURE, ANOTHER_RESULT = "bad answer", "bad signature", "another result"
"""Refusal counters: malformed mask or mean, invalid signature, signature of another result."""
M = TypeVar("M", bound=messages.FromOwner)


class GaveUpError(Exception):
    """The other member gave up; the session has recorded it."""


class OutgoingStream:
    """This member's stream to another one; ``channel`` is unset until it is open."""

    def __init__(self, session: AllReduceSession, member: Member) -> None:
        self.member = member
        self.channel: Channel
        self._session = session

    async def run(self) -> None:
        """Open the stream and follow the protocol; the session learns how it ended."""
        session, member, attempt = self._session, self.member, self._session.attempt
        codec, origin = session.contribution.codec, session.contribution.origin
        part_codec, mean_codec = attempt.part_of(codec, member.index), attempt.mean_codec_of(member.index)
        total = part_codec.encoded_bytes(member.size) + mean_codec.encoded_bytes(member.size)
        request = messages.Bring(attempt.roster.group_id, codec.name, origin.credential if origin else b"")
        member.is_opening = True
        try:
            async with session.liveness.open(member, request, total) as self.channel:
                member.is_opening = False
                member.outgoing = self.channel
                if member.size and not await self._average(part_codec):
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
        if isinstance(error, PeerRefusedError) and error.reason == messages.GAVE_UP:
            session.note_gave_up(member, messages.GaveUp())
        if not member.gave_up:
            member.lost = str(error)
            if isinstance(error, PeerSilentError):
                session.liveness.note_silent(member)
            if isinstance(error, PeerLostError) and member.arrived_at is None:
                member.was_cut_short = True
        if isinstance(error, ProtocolError):
            session.context.rpc.count_refusal(member.peer, BAD_ANSWER)

    async def hear(self, *kinds: type[M], max_bytes: int = 1 << 16) -> M:
        """Return the owner's next message, of one of these kinds.

        Raises:
            GaveUpError: The owner gave up instead.
            ProtocolError: The message is of another kind.
            PeerError, DeadlineError: See `Channel.receive`.
        """
        message = await self.channel.receive(messages.FromOwner, self.seconds_left(), max_bytes)
        if isinstance(message, messages.GaveUp):
            self._session.note_gave_up(self.member, message)
            raise GaveUpError
        if not isinstance(message, kinds):
            raise ProtocolError(self.member.peer, f"sent {type(message).__name__} out of turn")
        return message

    def seconds_left(self) -> float:
        return self._session.deadline - asyncio.get_running_loop().time()

    async def _average(self, codec: Codec) -> bool:
        """Send the part, and receive mask and mean; return True if the mean passed its checks."""
        session, member, attempt = self._session, self.member, self._session.attempt
        await self._send_part(codec)
        message = await self.hear(messages.Arrived, messages.Trace)
        if isinstance(message, messages.Trace):
            await self._show_origin(message)
            await self.hear(messages.Arrived)
        member.arrived_at = asyncio.get_running_loop().time()
        session.changed()
        mask = await self.hear(messages.Mask)
        member.mask, member.refused_us = self._contributors(mask), mask.refusal
        session.changed()
        await self.hear(messages.MeanFollows)
        if attempt.lists_parts:
            await self._receive_list()
            return True
        mean_codec = attempt.mean_codec_of(member.index)
        assert isinstance(mean_codec, Codec)
        hashes = PartCheck(mean_codec, session.context.spec, attempt.chunk, measured=False, hashed=True)
        mean = await receive_checked(
            self.channel, session.context.runtime, mean_codec, member.size, self.seconds_left(), hashes
        )
        tree = await session.context.runtime.process(len(mean), SumTree, hashes.leaves)
        attempt.add_mean(member.index, mean, tree.root[0])
        return await session.verifier.mean_received(self, tree)

    async def _send_part(self, codec: Codec) -> None:
        session, attempt, index = self._session, self._session.attempt, self.member.index
        part = session.contribution.vector[attempt.bounds[index] : attempt.bounds[index + 1]]
        check = session.verifier.new_check(codec)
        try:
            await session.verifier.before_part(self.channel)
            sent = await send_encoded(self.channel, session.context.runtime, codec, part, check)
            if session.contribution.has_error or session.context.sending_log is not None:
                session.sent_parts[index] = sent
            await session.verifier.part_sent(self, check)
        except PeerError:
            with contextlib.suppress(PeerError, DeadlineError):  # The owner may have sent `GaveUp` before.
                message = await self.channel.receive(messages.FromOwner, 0.0)
                if isinstance(message, messages.GaveUp):
                    session.note_gave_up(self.member, message)
            raise

    async def _show_origin(self, trace: messages.Trace) -> None:
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
        await self.channel.send(messages.Shown(len(shown)))
        await self.channel.send_bytes(shown)

    def _contributors(self, mask: messages.Mask) -> frozenset[int]:
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
        check_list = ListCheck(codec, session.context.spec)

        def check(piece: memoryview, low: int, high: int) -> None:
            check_list(piece, low, high)
            attempt.check_quotes(index, piece, session.own.index)

        mean = await receive_checked(
            self.channel, session.context.runtime, codec, self.member.size, self.seconds_left(), check
        )
        attempt.add_mean(index, mean, check_list.root)

    async def _fetch_signatures(self) -> None:
        """Receive the member's signature, and the others that it holds if a majority is still missing."""
        session, attempt, peer = self._session, self._session.attempt, self.member.peer
        message = await self.hear(messages.Clear, messages.Signature, messages.Signatures)
        if isinstance(message, messages.Clear):
            session.verifier.note_clear(self.member)
            message = await self.hear(messages.Signature, messages.Signatures)
        if isinstance(message, messages.Signatures):
            session.note_signatures(message)
            return
        assert isinstance(message, messages.Signature)
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
            session.note_signatures(await self.hear(messages.Signatures))

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


MAX_QUESTIONS = 256
"""Requests that a member may make beside its main stream: checks after complaints, and owners' statements."""


class IncomingStreams:
    """The streams that the other members opened in one attempt."""

    def __init__(self, session: AllReduceSession) -> None:
        self._session = session
        self._served: dict[int, asyncio.Task[Any]] = {}
        self._questions: Counter[int] = Counter()

    async def serve(self, channel: Channel, request: messages.Request, source: Source | None = None) -> None:
        """Serve another member's stream; above level 0, ``source`` is the group result that it brings."""
        session = self._session
        index = session.attempt.roster.index_of(channel.remote)
        if index in (-1, session.own.index):
            raise ProtocolError(channel.remote, "is not expected on this roster")
        member = session.members[index]
        if not isinstance(request, messages.Bring):
            await self._answer(channel, member, request)
            return
        if index in self._served:
            raise ProtocolError(channel.remote, "opened its stream twice")
        task = asyncio.current_task()
        assert task is not None
        self._served[index] = task
        member.incoming = channel
        session.changed()
        async with Tasks() as tasks:
            work = tasks.call(self._serve_member(channel, member, request, source), f"serve-{index}")
            waiting: set[asyncio.Future[Any]] = {work, session.given_up}
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
            else:
                # Cancelling the work first would end the stream without `GaveUp`: the member would blame this one.
                await channel.interrupt(session.given_up.result(), messages.GAVE_UP)

    async def _answer(self, channel: Channel, member: Member, question: messages.Request) -> None:
        session = self._session
        self._questions[member.index] += 1
        if self._questions[member.index] > MAX_QUESTIONS:
            raise ProtocolError(channel.remote, "asks too much")
        if session.given_up.done():
            await channel.send(session.given_up.result())
        else:
            await session.verifier.answer(channel, question)

    async def _serve_member(
        self, channel: Channel, member: Member, request: messages.Bring, source: Source | None
    ) -> None:
        session, attempt = self._session, self._session.attempt
        if session.own.size:
            await self._take_part(channel, member, request, source)
            await self._give_mean(channel, member)
            if not await session.verifier.mean_sent(channel):
                return
        await session.verifier.before_signature(channel)
        await session.has_signed.wait()
        if (proof := attempt.proofs.get(session.own.peer)) is not None:
            assert attempt.body is not None
            await channel.send(messages.Signature(attempt.body.body_hash, proof))
            await session.is_certified.wait()
            await asyncio.wait({channel.lost}, timeout=FORWARD_SECONDS)
        if not channel.lost.done():  # It still waits for signatures: it may be unable to reach their authors.
            await channel.send(session.signatures())

    # No coroutine that waits for signatures holds large buffers: cancelled streams leave frames in reference cycles.

    async def _take_part(
        self, channel: Channel, member: Member, request: messages.Bring, source: Source | None
    ) -> None:
        """Receive a member's part of the own share, and verify its commitment and origin."""
        session = self._session
        try:
            check = session.share.new_check(self._codec_of_part(request.codec))
            await session.verifier.part_follows(channel, member)
            part = await self._receive_part(channel, check)
            tree = await session.verifier.part_received(channel, member, request.codec, check)
            if source is not None and session.attempt.audited and source.is_traceable:
                await self._trace(channel, source, part, check.codec)
        except ProtocolError as error:
            session.refuse(channel.remote, error.reason)
            raise
        except IntegrityError as error:
            session.refuse(channel.remote, str(error))
            raise ProtocolError(channel.remote, str(error)) from error
        await channel.send(messages.Arrived())
        if not session.own_mean.done():
            session.share.add(member.index, part, check, tree)
            session.changed()

    def _codec_of_part(self, name: str) -> Codec:
        attempt, index = self._session.attempt, self._session.own.index
        for codec in attempt.part_codecs:
            if codec.name == name:
                return attempt.part_of(codec, index)
        raise IntegrityError(f"encodes its part in a way that is not allowed beside {attempt.codec.name}")

    async def _receive_part(self, channel: Channel, check: PartCheck) -> memoryview:
        session, loop, arrived = self._session, asyncio.get_running_loop(), 0
        began = loop.time()

        def watch(filled: int) -> None:
            nonlocal arrived
            arrived = filled

        try:
            return await receive_checked(
                channel, session.context.runtime, check.codec, session.own.size, session.context.spec.round_seconds,
                check, watch,
            )  # fmt: skip
        finally:
            session.observer.part_arrived(channel.remote, arrived, loop.time() - began, len(session.others))

    async def _trace(self, channel: Channel, source: Source, part: memoryview, codec: Codec) -> None:
        """Check the origin of random chunks of a delegate's part; raise `IntegrityError` if it is wrong."""
        context, attempt, index = self._session.context, self._session.attempt, self._session.own.index
        count, seconds = attempt.num_chunks(index), context.spec.round_seconds
        chunks = context.runtime.random.sample(range(count), min(context.spec.spot_checks, count, MAX_CHUNKS))
        spans = [attempt.span(index, chunk) for chunk in chunks]
        await channel.send(messages.Trace(tuple(chunks)))
        size = (await channel.receive(messages.Shown, seconds)).num_bytes
        if not 0 < size <= source.max_bytes(spans):
            raise IntegrityError("shows something of an impossible size")
        shown = await channel.receive_bytes(size, seconds)
        await context.runtime.offload(source.check, attempt.bounds[index], spans, shown, part, codec)

    async def _give_mean(self, channel: Channel, member: Member) -> None:
        """Send a member the own mask, then the own share's mean."""
        session = self._session
        mask = await asyncio.shield(session.own_mask)
        refusal = session.share.refused.get(member.index, "")
        await channel.send(messages.Mask(tuple(sorted(mask)), refusal[: messages.MAX_REFUSAL_LENGTH]))
        mean = await asyncio.shield(session.own_mean)
        await channel.send(messages.MeanFollows())  # Until then the owner can still send `GaveUp`.
        await mean.send(channel)

    async def close(self, linger_seconds: float) -> None:
        """Close the streams, after up to ``linger_seconds`` in which the others fetch mean and signature."""
        session = self._session
        if linger_seconds:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(linger_seconds):
                    await self._serve_everybody()
        if not session.given_up.done():  # Waiting members learn that the attempt is over, without blame.
            session.given_up.set_result(messages.GaveUp())
        if self._served:
            await asyncio.wait(list(self._served.values()), timeout=FORWARD_SECONDS)
        session.own_mask.cancel()
        session.own_mean.cancel()
        for task in self._served.values():
            task.cancel()
        self._served.clear()
        session.share.parts.clear()

    async def _serve_everybody(self) -> None:
        """Wait until every other member was served. A member without a share may be done before they open streams."""
        session = self._session
        while any(member.incoming is None and not member.lost for member in session.others):
            session.attempt.changed.clear()
            await session.attempt.changed.wait()
        if self._served:
            await asyncio.wait(list(self._served.values()))
