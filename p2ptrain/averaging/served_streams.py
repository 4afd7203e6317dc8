"""The streams that others open in one attempt, in the order of `p2ptrain.averaging.butterfly`.

Nothing is decided here but whether a message is well-formed: what came is left in the `Exchange`, where the state
machine finds it; what is owed is sent once the state machine has it. `p2ptrain.averaging.opened_streams` is the other
side.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from typing import Any

from p2ptrain.averaging.encodings import part_codecs
from p2ptrain.averaging.exchange import FORWARD_SECONDS, GAVE_UP, Exchange
from p2ptrain.averaging.openings import MAX_CHUNKS
from p2ptrain.averaging.origins import Source
from p2ptrain.averaging.pieces import receive_checked
from p2ptrain.averaging.reduction import PartCheck
from p2ptrain.averaging.sum_tree import SumTree
from p2ptrain.codecs import Codec
from p2ptrain.errors import IntegrityError, ProtocolError
from p2ptrain.network.channel import Channel
from p2ptrain.tasks import Tasks

LINGER_SECONDS = 2.0
QUESTIONS = frozenset({"check", "statements"})
"""What a stream is opened with that asks for something beside the member's own stream."""
MAX_QUESTIONS = 256
"""What one member may ask beside its stream: checks because of others' complaints, and what owners stated."""


class ServedStreams:
    """The streams that others open: their parts come in, this owner's mean goes out."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._served: dict[int, asyncio.Task[Any]] = {}
        self._gone: set[int] = set()
        self._stream_came = asyncio.Event()
        self._questions: Counter[int] = Counter()

    async def serve(self, channel: Channel, request: dict[str, Any], source: Source | None = None) -> None:
        """Handle another member's stream for this attempt.

        Args:
            channel: The stream.
            request: What it was opened with.
            source: Above level 0: what the member brings.
        """
        exchange = self._exchange
        sender = exchange.attempt.roster.index_of(channel.remote)
        expected = exchange.attempt.roster.has_member(sender) and sender != exchange.index
        if expected and not QUESTIONS.isdisjoint(request):
            await self._answer(channel, sender, request)
            return
        if not expected or sender in self._served:
            raise ProtocolError(channel.remote, "is not expected on this roster")
        task = asyncio.current_task()
        assert task is not None
        self._served[sender] = task
        exchange.served[channel.remote] = channel
        self._stream_came.set()
        exchange.agreed.set()
        try:
            async with Tasks() as tasks:
                work = tasks.call(self._serve_member(channel, sender, request, source), f"serve-{sender}")
                waiting: set[asyncio.Future[Any]] = {work, exchange.given_up}
                await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                if work.done():
                    work.result()
                elif not exchange.given_up.cancelled():
                    # Cancelling the work first would end the stream without a word, and the other member would blame
                    # this one for that.
                    await channel.interrupt(exchange.farewell(), GAVE_UP)
        finally:
            self._gone.add(sender)
            if exchange.lends:
                exchange.changed()

    async def _answer(self, channel: Channel, sender: int, question: dict[str, Any]) -> None:
        """Answer what another member asks beside its stream."""
        exchange = self._exchange
        if self._questions[sender] >= MAX_QUESTIONS:
            raise ProtocolError(channel.remote, "asks too much")
        self._questions[sender] += 1
        if exchange.given_up.done() and not exchange.given_up.cancelled():
            await channel.send(exchange.farewell())
        elif "check" in question:
            await self._open_chunks(channel, question["check"])
        else:
            await channel.send({"statements": exchange.audit.heard_statements() if exchange.audit else []})

    async def until_told(self) -> None:
        """As an auxiliary: wait until a member told of the result, or all that came are gone."""
        while self._exchange.result is None and not self.all_are_gone:
            self._exchange.agreed.clear()
            await self._exchange.agreed.wait()

    @property
    def anybody_came(self) -> bool:
        """Whether a member opened a stream."""
        return bool(self._served)

    @property
    def all_are_gone(self) -> bool:
        """Whether members opened streams, and none of those is left."""
        return 0 < len(self._served) == len(self._gone)

    async def _serve_member(
        self, channel: Channel, sender: int, request: dict[str, Any], source: Source | None
    ) -> None:
        exchange, attempt = self._exchange, self._exchange.attempt
        if attempt.size(exchange.index):
            await self._take_part(channel, sender, request, source)
            await self._give_mean(channel, sender)
            if exchange.audit is not None:
                await channel.send({"statement": (await asyncio.shield(exchange.audit.statement)).to_wire()})
                if not await self._answer_check(channel):
                    return
        if exchange.lends:
            exchange.hear_result((await channel.receive(exchange.spec.round_seconds)).get("certificate"))
            return
        if exchange.clears:
            await exchange.own_clear.wait()
            await channel.send({"clear": True})
        await exchange.own_proof.wait()
        if (proof := attempt.proofs.get(exchange.rpc.peer_id)) is not None:
            assert attempt.body is not None
            await channel.send({"body": attempt.body.body_hash, "proof": proof})
            await exchange.certified.wait()
            await asyncio.wait({channel.lost}, timeout=FORWARD_SECONDS)
        if not channel.lost.done():  # It waits for signatures still: perhaps it cannot reach those that gave theirs.
            await channel.send(exchange.signatures())

    # What may be large is in no frame that waits for signatures: streams that are cut then leave frames in cycles.

    async def _take_part(self, channel: Channel, sender: int, request: dict[str, Any], source: Source | None) -> None:
        """Receive a member's part of the own share, and what is said about it."""
        exchange, size = self._exchange, self._exchange.attempt.size(self._exchange.index)
        check = exchange.share.new_check(self._codec_of_part(channel.remote, request.get("codec")))
        part = await self._receive_part(channel, check, size)
        tree = await self._receive_commitment(channel, sender, check, request["codec"])
        if source is not None and exchange.attempt.audited and source.is_traceable:
            await self._trace(channel, source, part, check.codec)
        await channel.send({"have": size})
        if not exchange.own_mask.done():
            exchange.share.add(sender, part, check, tree)
            exchange.part_changed.set()

    async def _give_mean(self, channel: Channel, sender: int) -> None:
        """Tell a member the own mask, and send it the own share's mean."""
        exchange = self._exchange
        mask = await asyncio.shield(exchange.own_mask)
        refusal = exchange.share.refused.get(sender, "")
        await channel.send({"mask": sorted(mask), **({"refused": refusal} if refusal else {})})
        if exchange.lends:
            told = await channel.receive(exchange.spec.round_seconds)
            exchange.hear_contributors(channel.remote, sender, told.get("contributors"))
        mean = await asyncio.shield(exchange.own_mean)
        # So that it can say in its place that it gave up.
        await channel.send({"mean": exchange.attempt.size(exchange.index)})
        await mean.send(channel)

    async def _answer_check(self, channel: Channel) -> bool:
        """Answer a member's check of the own share; whether it asked before a majority had signed.

        A member that is slow may hold its last mean long after that. All that it needs then are the signatures; and
        they are sent while this member is still there.
        """
        exchange = self._exchange
        # Cancelling it would end the channel, on which a farewell may have to go: it ends with the channel.
        asking = exchange.tasks.call(channel.receive(exchange.spec.round_seconds), "asking")
        asking.add_done_callback(lambda task: task.cancelled() or task.exception())
        async with Tasks() as tasks:
            certified = tasks.call(exchange.certified.wait(), "certified")
            await asyncio.wait({asking, certified}, return_when=asyncio.FIRST_COMPLETED)
            if asking.done():
                return await self._open_chunks(channel, asking.result().get("check"))
            await channel.send(exchange.signatures())
            await asyncio.wait({asking})
            return False

    async def _receive_commitment(self, channel: Channel, sender: int, check: PartCheck, codec: str) -> SumTree | None:
        exchange = self._exchange
        if exchange.audit is None:
            return None
        message = await channel.receive(exchange.spec.round_seconds)
        try:
            return await exchange.audit.admit(sender, codec, check, message.get("commitment"))
        except IntegrityError as error:
            exchange.refuse(channel.remote, f"peer {channel.remote[-8:]}: {error}")
            raise ProtocolError(channel.remote, str(error)) from error

    async def _trace(self, channel: Channel, source: Source, part: memoryview, codec: Codec) -> None:
        """Have a delegate show where some chunks of its part come from.

        Raises:
            ProtocolError: They are not of its group's result; it is refused.
        """
        exchange, attempt = self._exchange, self._exchange.attempt
        count, seconds = attempt.num_chunks(exchange.index), exchange.spec.round_seconds
        chunks = exchange.runtime.random.sample(range(count), min(exchange.spec.spot_checks, count, MAX_CHUNKS))
        spans = [attempt.span(exchange.index, chunk) for chunk in chunks]
        await channel.send({"trace": chunks})
        size = (await channel.receive(seconds)).get("shown")
        try:
            if type(size) is not int or not 0 < size <= source.max_bytes(spans):
                raise IntegrityError("shows something of an impossible size")
            shown = await channel.receive_bytes(size, seconds)
            low = attempt.bounds[exchange.index]
            await exchange.runtime.offload(source.check, low, spans, shown, part, codec)
        except IntegrityError as error:
            exchange.refuse(channel.remote, f"peer {channel.remote[-8:]} {error}")
            raise ProtocolError(channel.remote, str(error)) from error

    async def _open_chunks(self, channel: Channel, chunks: Any) -> bool:
        """Answer a check, which may be of nothing; False if it came when a majority had signed."""
        exchange = self._exchange
        if chunks == [] or exchange.audit is None:
            return True
        if exchange.certified.is_set():
            await channel.send(exchange.signatures())
            return False
        answer = await exchange.audit.answer(chunks)
        await channel.send({"opening": len(answer)})
        await channel.send_bytes(answer)
        return True

    def _codec_of_part(self, peer: str, name: Any) -> Codec:
        attempt, index = self._exchange.attempt, self._exchange.index
        own, low, high = attempt.codec, *attempt.bounds[index : index + 2]
        for codec in part_codecs(attempt.spec, own, attempt.bounds[-1]):
            if codec.name == name:
                return codec.part(low, high)
        reason = f"encodes its part in a way that is not allowed beside {own.name}"
        self._exchange.refuse(peer, reason)
        raise ProtocolError(peer, reason)

    async def _receive_part(self, channel: Channel, check: PartCheck, size: int) -> memoryview:
        exchange, loop, arrived = self._exchange, asyncio.get_running_loop(), 0
        began = loop.time()

        def watch(filled: int) -> None:
            nonlocal arrived
            arrived = filled

        try:
            part, _ = await receive_checked(
                channel, exchange.runtime, check.codec, size, exchange.spec.round_seconds, check, hashed=False,
                on_progress=watch,
            )  # fmt: skip
        except ProtocolError as error:
            exchange.refuse(channel.remote, str(error))
            raise
        finally:
            exchange.on_part(channel.remote, arrived, loop.time() - began)
        return part

    async def stop(self, linger: bool) -> None:
        """End the streams; with ``linger``, first let the others fetch mean and signature for a bounded time."""
        if linger:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LINGER_SECONDS):
                    await self._serve_everybody()
        if not self._exchange.given_up.done():
            self._exchange.given_up.set_result([])  # Who is not through yet hears that it is over, and nobody's fault.
        if self._served:
            await asyncio.wait(list(self._served.values()), timeout=FORWARD_SECONDS)
        self._exchange.own_mask.cancel()
        self._exchange.own_mean.cancel()
        self._exchange.given_up.cancel()
        for task in self._served.values():
            task.cancel()
        self._served.clear()
        self._exchange.share.forget()

    async def _serve_everybody(self) -> None:
        """Wait until all others came and went; who owns nothing may be done before a stream of another is there."""
        members, lost = self._exchange.attempt.roster.members, self._exchange.lost
        others = [i for i, peer in enumerate(members) if i != self._exchange.index and peer not in lost]
        while any(i not in self._served for i in others):
            self._stream_came.clear()
            await self._stream_came.wait()
        if self._served:
            await asyncio.wait(list(self._served.values()))
