"""The streams that other members open: their parts come in; the own share's mean and signatures go out.

This side only checks that messages are well-formed; `AllReduceSession` decides what to reply.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from typing import TYPE_CHECKING, Any

from p2ptrain.averaging.allreduce.member import Member
from p2ptrain.averaging.allreduce.messages import (
    GAVE_UP,
    MAX_REFUSAL_LENGTH,
    Arrived,
    AskChunks,
    AskStatements,
    Bring,
    GaveUp,
    Mask,
    MeanFollows,
    Request,
    Shown,
    Signature,
    Trace,
)  # fmt: skip
from p2ptrain.averaging.commit.encodings import part_codecs
from p2ptrain.averaging.commit.provenance import Source
from p2ptrain.averaging.timing.deadlines import FORWARD_SECONDS
from p2ptrain.averaging.vector.reduce import PartCheck
from p2ptrain.averaging.vector.streaming import receive_checked
from p2ptrain.averaging.verification.opening import MAX_CHUNKS
from p2ptrain.codecs import Codec
from p2ptrain.errors import IntegrityError, ProtocolError
from p2ptrain.network.rpc.channel import Channel
from p2ptrain.tasks import Tasks

if TYPE_CHECKING:
    from p2ptrain.averaging.allreduce.session import AllReduceSession

MAX_QUESTIONS = 256
"""Requests that a member may make beside its main stream: checks after complaints, and owners' statements."""


class IncomingStreams:
    """The streams that the other members opened in one attempt."""

    def __init__(self, session: AllReduceSession) -> None:
        self._session = session
        self._served: dict[int, asyncio.Task[Any]] = {}
        self._questions: Counter[int] = Counter()

    async def serve(self, channel: Channel, request: Request, source: Source | None = None) -> None:
        """See `AllReduceSession.serve`."""
        session = self._session
        index = session.attempt.roster.index_of(channel.remote)
        if index in (-1, session.own.index):
            raise ProtocolError(channel.remote, "is not expected on this roster")
        member = session.members[index]
        if not isinstance(request, Bring):
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
                await channel.interrupt(session.given_up.result(), GAVE_UP)

    async def _answer(self, channel: Channel, member: Member, question: Request) -> None:
        session = self._session
        self._questions[member.index] += 1
        if self._questions[member.index] > MAX_QUESTIONS:
            raise ProtocolError(channel.remote, "asks too much")
        if session.given_up.done():
            await channel.send(session.given_up.result())
        elif isinstance(question, AskChunks):
            await session.verifier.open_chunks(channel, question.chunks)
        elif isinstance(question, AskStatements):
            await channel.send(session.verifier.heard())

    async def _serve_member(self, channel: Channel, member: Member, request: Bring, source: Source | None) -> None:
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
            await channel.send(Signature(attempt.body.body_hash, proof))
            await session.is_certified.wait()
            await asyncio.wait({channel.lost}, timeout=FORWARD_SECONDS)
        if not channel.lost.done():  # It still waits for signatures: it may be unable to reach their authors.
            await channel.send(session.signatures())

    # No coroutine that waits for signatures holds large buffers: cancelled streams leave frames in reference cycles.

    async def _take_part(self, channel: Channel, member: Member, request: Bring, source: Source | None) -> None:
        """Receive a member's part of the own share, and verify its commitment and origin."""
        session = self._session
        try:
            check = session.share.new_check(self._codec_of_part(request.codec))
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
        await channel.send(Arrived())
        if not session.own_mean.done():
            session.share.add(member.index, part, check, tree)
            session.changed()

    def _codec_of_part(self, name: str) -> Codec:
        attempt, index = self._session.attempt, self._session.own.index
        for codec in part_codecs(attempt.spec, attempt.codec, attempt.bounds[-1]):
            if codec.name == name:
                return codec.part(attempt.bounds[index], attempt.bounds[index + 1])
        raise IntegrityError(f"encodes its part in a way that is not allowed beside {attempt.codec.name}")

    async def _receive_part(self, channel: Channel, check: PartCheck) -> memoryview:
        session, loop, arrived = self._session, asyncio.get_running_loop(), 0
        began = loop.time()

        def watch(filled: int) -> None:
            nonlocal arrived
            arrived = filled

        try:
            part, _ = await receive_checked(
                channel, session.context.runtime, check.codec, session.own.size, session.context.spec.round_seconds,
                check, hashed=False, on_progress=watch,
            )  # fmt: skip
            return part
        finally:
            session.observer.part_arrived(channel.remote, arrived, loop.time() - began, len(session.others))

    async def _trace(self, channel: Channel, source: Source, part: memoryview, codec: Codec) -> None:
        """Check the origin of random chunks of a delegate's part; raise `IntegrityError` if it is wrong."""
        context, attempt, index = self._session.context, self._session.attempt, self._session.own.index
        count, seconds = attempt.num_chunks(index), context.spec.round_seconds
        chunks = context.runtime.random.sample(range(count), min(context.spec.spot_checks, count, MAX_CHUNKS))
        spans = [attempt.span(index, chunk) for chunk in chunks]
        await channel.send(Trace(tuple(chunks)))
        size = (await channel.receive(Shown, seconds)).num_bytes
        if not 0 < size <= source.max_bytes(spans):
            raise IntegrityError("shows something of an impossible size")
        shown = await channel.receive_bytes(size, seconds)
        await context.runtime.offload(source.check, attempt.bounds[index], spans, shown, part, codec)

    async def _give_mean(self, channel: Channel, member: Member) -> None:
        """Send a member the own mask, then the own share's mean."""
        session = self._session
        mask = await asyncio.shield(session.own_mask)
        refusal = session.share.refused.get(member.index, "")
        await channel.send(Mask(tuple(sorted(mask)), refusal[:MAX_REFUSAL_LENGTH]))
        mean = await asyncio.shield(session.own_mean)
        await channel.send(MeanFollows())  # Until then the owner can still send `GaveUp`.
        await mean.send(channel)

    async def close(self, linger_seconds: float) -> None:
        """Close the streams, after up to ``linger_seconds`` in which the others fetch mean and signature."""
        session = self._session
        if linger_seconds:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(linger_seconds):
                    await self._serve_everybody()
        if not session.given_up.done():  # Waiting members learn that the attempt is over, without blame.
            session.given_up.set_result(GaveUp())
        if self._served:
            await asyncio.wait(list(self._served.values()), timeout=FORWARD_SECONDS)
        session.own_mask.cancel()
        session.own_mean.cancel()
        for task in self._served.values():
            task.cancel()
        self._served.clear()
        session.share.forget()

    async def _serve_everybody(self) -> None:
        """Wait until every other member was served. A member without a share may be done before they open streams."""
        session = self._session
        while any(member.incoming is None and not member.lost for member in session.others):
            session.attempt.changed.clear()
            await session.attempt.changed.wait()
        if self._served:
            await asyncio.wait(list(self._served.values()))
