"""What one member sends and receives in one attempt, stream by stream, in the order of `p2ptrain.averaging.butterfly`.

Nothing is decided here but whether a message is well-formed: what came is left in the `Exchange`, where the state
machine finds it; what is owed is sent once the state machine has it.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from typing import Any

from p2ptrain.averaging.audit import Audit
from p2ptrain.averaging.encodings import part_codecs
from p2ptrain.averaging.exchange import Exchange
from p2ptrain.averaging.patience import least_mask, patience_seconds, quorum_of_others
from p2ptrain.averaging.pieces import receive_checked, send_encoded
from p2ptrain.averaging.reduction import PartCheck, RangeCheck, chunk_values
from p2ptrain.averaging.sum_tree import SumTree
from p2ptrain.codecs import Codec, CodecError
from p2ptrain.errors import (
    DeadlineError,
    IntegrityError,
    PeerError,
    PeerLostError,
    PeerRefusedError,
    ProtocolError,
)  # fmt: skip
from p2ptrain.network.channel import Channel

OPEN_TIMEOUT_SECONDS = 10.0
LINGER_SECONDS = 2.0
FORWARD_SECONDS = 0.5
MAX_REFUSAL_LENGTH = 120
TO_AUXILIARY = "auxiliary"
BAD_ANSWER, BAD_SIGNATURE, ANOTHER_RESULT = "bad answer", "bad signature", "another result"
"""What is counted against a member: a malformed mask or mean, a signature that is none, one for something else."""
RETRY_SECONDS = 0.3
MAX_QUESTIONS = 256
"""Checks that one member may ask for beside its stream, because of others' complaints."""


class ServedStreams:
    """The streams that others open: their parts come in, this owner's mean goes out."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._served: dict[int, asyncio.Task[Any]] = {}
        self._gone: set[int] = set()
        self._stream_came = asyncio.Event()
        self._questions: Counter[int] = Counter()

    async def serve(self, channel: Channel, request: dict[str, Any]) -> None:
        """Handle another member's stream for this attempt; ``request`` is what it was opened with."""
        exchange = self._exchange
        sender = exchange.attempt.roster.index_of(channel.remote)
        expected = exchange.attempt.roster.has_member(sender) and sender != exchange.index
        if expected and "check" in request and self._questions[sender] < MAX_QUESTIONS:
            self._questions[sender] += 1
            if exchange.given_up.done() and not exchange.given_up.cancelled():
                await channel.send(exchange.farewell())
            else:
                await self._open_chunks(channel, request["check"])
            return
        if not expected or sender in self._served:
            raise ProtocolError(channel.remote, "is not expected on this roster")
        task = asyncio.current_task()
        assert task is not None
        self._served[sender] = task
        self._stream_came.set()
        exchange.agreed.set()
        work = asyncio.create_task(self._serve_member(channel, sender, request), name=f"serve-{sender}")
        try:
            waiting: set[asyncio.Future[Any]] = {work, exchange.given_up}
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
            elif not exchange.given_up.cancelled():
                work.cancel()
                await asyncio.gather(work, return_exceptions=True)
                await channel.send(exchange.farewell())
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
            self._gone.add(sender)
            if exchange.lends:
                exchange.changed()

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

    async def _serve_member(self, channel: Channel, sender: int, request: dict[str, Any]) -> None:
        exchange, attempt = self._exchange, self._exchange.attempt
        size = attempt.size(exchange.index)
        if size:
            check = exchange.share.new_check(self._codec_of_part(channel.remote, request.get("codec")))
            part = await self._receive_part(channel, check, size)
            tree = await self._receive_commitment(channel, sender, check, request["codec"])
            await channel.send({"have": size})
            if not exchange.own_mask.done():
                exchange.share.add(sender, part, check, tree)
                exchange.part_changed.set()
            mask = await asyncio.shield(exchange.own_mask)
            refusal = exchange.share.refused.get(sender, "")
            await channel.send({"mask": sorted(mask), **({"refused": refusal} if refusal else {})})
            if exchange.lends:
                told = await channel.receive(exchange.spec.round_seconds)
                exchange.hear_contributors(channel.remote, sender, told.get("contributors"))
            mean = await asyncio.shield(exchange.own_mean)
            await channel.send({"mean": size})  # So that it can say in its place that it gave up.
            await mean.send(channel)
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

    async def _answer_check(self, channel: Channel) -> bool:
        """Answer a member's check of the own share; whether it asked before a majority had signed.

        A member that is slow may hold its last mean long after that. All that it needs then are the signatures; and
        they are sent while this member is still there.
        """
        exchange = self._exchange
        asking = asyncio.create_task(channel.receive(exchange.spec.round_seconds), name="asking")
        asking.add_done_callback(lambda task: task.cancelled() or task.exception())  # It ends with the channel.
        certified = asyncio.create_task(exchange.certified.wait(), name="certified")
        try:
            await asyncio.wait({asking, certified}, return_when=asyncio.FIRST_COMPLETED)
            if asking.done():
                return await self._open_chunks(channel, asking.result().get("check"))
            await channel.send(exchange.signatures())
            await asyncio.wait({asking})
            return False
        finally:
            certified.cancel()
            await asyncio.gather(certified, return_exceptions=True)

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


class OpenedStreams:
    """The streams that this member opens: its parts go out, means and signatures come back."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._is_through: set[int] = set()
        self._ending: list[asyncio.Task[None]] = []
        self._ended: set[int] = set()
        self._progress = asyncio.Event()

    def start(self, deadline: float) -> None:
        """Open a stream to every other member; all ends by ``deadline``, in the loop's time."""
        own, attempt = self._exchange.index, self._exchange.attempt
        size, owners = len(attempt.roster.tickets), len(attempt.means)
        # Of auxiliaries that own nothing there is nothing to be had.
        order = [*range(own + 1, size), *range(own), *(i for i in range(size, owners) if attempt.size(i))]
        names = [f"exchange-{i}" if i < size else f"{TO_AUXILIARY}-{i}" for i in order]
        self._tasks = {
            i: asyncio.create_task(self._talk_to(i, deadline), name=name) for i, name in zip(order, names, strict=True)
        }

    async def stop(self) -> None:
        """End the streams; the vector is not read any more when this returns.

        Those on which all has been said end in order, so that their connections can be used again: see `end`.
        """
        through = [task for index, task in self._tasks.items() if index in self._is_through]
        others = [task for task in self._tasks.values() if task not in through]
        for task in others:
            task.cancel()
        await asyncio.gather(*others, return_exceptions=True)
        self._ending += through
        self._tasks = {}  # A task that was cancelled refers to where it stood, and so to all that the attempt held.

    async def end(self) -> None:
        """Wait until the last streams have ended, for a bounded time."""
        await asyncio.gather(*self._ending, return_exceptions=True)
        self._ending = []

    async def _talk_to(self, index: int, deadline: float) -> None:
        """The stream to member ``index``, and how it ends."""
        exchange, attempt = self._exchange, self._exchange.attempt
        peer, size = attempt.roster.owners[index], attempt.size(index)
        try:
            header = {"group": attempt.roster.group_id, "codec": exchange.part_codec.name}
            header |= {"credential": attempt.credential} if attempt.credential else {}
            part_codec = exchange.part_codec.part(attempt.bounds[index], attempt.bounds[index + 1])
            total = part_codec.encoded_bytes(size) + attempt.mean_codec_of(index).encoded_bytes(size)
            async with exchange.rpc.open(
                peer, "butterfly", header, OPEN_TIMEOUT_SECONDS, expected_bytes=total
            ) as channel:
                if size and not await self._bring_part(channel, index, part_codec, deadline):
                    return
                if not attempt.roster.has_member(index):
                    await self._tell_result(channel)
                    return
                await self._fetch_signatures(channel, index, deadline)
                self._is_through.add(index)
        except (PeerError, DeadlineError, TimeoutError) as error:
            if index not in exchange.gave_up:
                exchange.lost[peer] = str(error) or "did not answer in time"
                if isinstance(error, PeerLostError) and index not in exchange.arrived_at:
                    exchange.cut_short.add(peer)
            if isinstance(error, ProtocolError):
                exchange.rpc.count_refusal(peer, BAD_ANSWER)
        except CodecError as error:
            exchange.unencodable = str(error)
        self._ended.add(index)
        self._wake()
        exchange.changed()

    async def _members_have_theirs(self, deadline: float) -> None:
        """Wait until the other members have their parts, as long as they would wait for each other's.

        Auxiliaries' parts are the larger ones. If all went out at once, chance would say whose small parts arrive much
        later than the others', and members would not wait for those.
        """
        exchange, loop = self._exchange, asyncio.get_running_loop()
        attempt, members = exchange.attempt, range(len(exchange.attempt.roster.tickets))
        owners = {i for i in members if attempt.size(i) and i != exchange.index}
        quorum, until = quorum_of_others(len(owners), exchange.spec.quorum), deadline
        while owners - exchange.arrived_at.keys() - self._ended:
            if until == deadline and len(owners & exchange.arrived_at.keys()) >= quorum:
                now = loop.time()
                until = min(deadline, now + patience_seconds(now - exchange.began, exchange.spec.grace_seconds))
            try:
                async with asyncio.timeout_at(until):
                    await self._progress.wait()
            except TimeoutError:
                return

    def _wake(self) -> None:
        self._progress.set()
        self._progress = asyncio.Event()

    async def _tell_result(self, channel: Channel) -> None:
        """Tell an auxiliary what became of the round."""
        await self._exchange.certified.wait()
        certificate = self._exchange.attempt.certificate()
        assert certificate is not None
        await channel.send({"certificate": certificate.to_bytes()})

    async def tell_result(self) -> None:
        """Wait, but not for long, until all auxiliaries were told what became of the round."""
        telling = [task for task in self._tasks.values() if task.get_name().startswith(TO_AUXILIARY)]
        if telling:
            await asyncio.wait(telling, timeout=FORWARD_SECONDS)

    async def _bring_part(self, channel: Channel, index: int, part_codec: Codec, deadline: float) -> bool:
        """Send the own part of an owner's share, and receive its mask and its mean; False when it gave up."""
        exchange, attempt, loop = self._exchange, self._exchange.attempt, asyncio.get_running_loop()
        audit = exchange.audit
        part = exchange.vector[attempt.bounds[index] : attempt.bounds[index + 1]]
        if not attempt.roster.has_member(index):
            await self._members_have_theirs(deadline)
        check = RangeCheck(part_codec, exchange.spec) if audit is None else audit.new_check(part_codec)
        try:
            exchange.sent_parts[index] = await send_encoded(channel, exchange.runtime, part_codec, part, check)
            if audit is not None and isinstance(check, PartCheck):
                await channel.send({"commitment": await audit.commit(index, exchange.part_codec.name, check)})
        except PeerError:
            with contextlib.suppress(PeerError, DeadlineError):  # Perhaps it has said why it ended the stream.
                self._notes_that_it_gave_up(index, await channel.receive(0.0))
            raise
        if self._notes_that_it_gave_up(index, await channel.receive(deadline - loop.time())):
            return False
        exchange.arrived_at[index] = loop.time()
        self._wake()
        exchange.agreed.set()
        reply = await channel.receive(deadline - loop.time())
        if self._notes_that_it_gave_up(index, reply):
            return False
        exchange.masks[index] = self._check_mask(channel.remote, reply.get("mask"))
        if reply.get("refused"):
            exchange.refused_by[index] = str(reply["refused"])[:MAX_REFUSAL_LENGTH]
        exchange.agreed.set()
        if not attempt.roster.has_member(index):
            async with asyncio.timeout_at(deadline):
                await exchange.agreed_on.wait()
            await channel.send({"contributors": list(attempt.contributors or ())})
        if self._notes_that_it_gave_up(index, await channel.receive(deadline - loop.time())):
            return False
        began = loop.time()
        if attempt.lists_parts:
            await self._receive_list(channel, index, len(part), deadline)
            return True
        codec = attempt.mean_codec_of(index)
        assert isinstance(codec, Codec)
        hashes = PartCheck(codec, exchange.spec, chunk_values(attempt.codec), measured=False, hashed=True)
        mean, _ = await receive_checked(
            channel, exchange.runtime, codec, len(part), deadline - loop.time(), hashes, hashed=False
        )
        if not attempt.roster.has_member(index):
            exchange.on_part(channel.remote, len(mean), loop.time() - began)
        tree = await exchange.runtime.compute(SumTree, hashes.leaves)
        attempt.add_mean(index, mean, tree.root[0])
        return audit is None or await self._check_mean(audit, channel, index, tree, deadline)

    async def _check_mean(self, audit: Audit, channel: Channel, index: int, tree: SumTree, deadline: float) -> bool:
        """Have some chunks of an owner's share opened, and check them; False when it gave up."""
        exchange, loop = self._exchange, asyncio.get_running_loop()
        reply = await channel.receive(deadline - loop.time())
        if self._notes_that_it_gave_up(index, reply):
            return False
        try:
            audit.hear(index, reply.get("statement"), tree)
        except IntegrityError as error:
            raise ProtocolError(channel.remote, str(error)) from error
        await self._await_body(deadline)  # No mean that is still on its way shares the link with what checks take.
        chunks = audit.draw(index, exchange.checkers_of(index))
        await channel.send({"check": chunks})
        try:
            passed = await exchange.examine(index, chunks, channel)
        except (PeerLostError, PeerRefusedError):
            await asyncio.sleep(RETRY_SECONDS)  # If it gave up, why is on its way.
            passed = await self.ask_again(index, chunks)
        if passed:
            exchange.checked.add(index)
        exchange.changed()
        return passed

    async def ask_again(self, index: int, chunks: list[int]) -> bool:
        """Check what an owner did not show, to this member or another one, on a new stream; whether it is right."""
        exchange = self._exchange
        request = {"group": exchange.attempt.roster.group_id, "check": chunks}
        peer = exchange.attempt.roster.owners[index]
        try:
            async with exchange.rpc.open(peer, "butterfly", request, OPEN_TIMEOUT_SECONDS) as channel:
                return await exchange.examine(index, chunks, channel)
        except (PeerError, DeadlineError) as error:
            exchange.find_fault(index, chunks, str(error), late=True)
            return False

    async def _receive_list(self, channel: Channel, index: int, size: int, deadline: float) -> None:
        """Receive a share's mean that is the list of the parts: its length depends on how many contributed."""
        exchange, attempt, loop = self._exchange, self._exchange.attempt, asyncio.get_running_loop()
        async with asyncio.timeout_at(deadline):
            await exchange.agreed_on.wait()
        codec = attempt.mean_codec_of(index)
        check_range = RangeCheck(codec, exchange.spec)

        def check(piece: memoryview, low: int, high: int) -> None:
            check_range(piece, low, high)
            attempt.check_quotes(index, piece, exchange.index)

        mean, digest = await receive_checked(channel, exchange.runtime, codec, size, deadline - loop.time(), check)
        attempt.add_mean(index, mean, digest)

    async def _fetch_signatures(self, channel: Channel, index: int, deadline: float) -> None:
        """Receive a member's signature of the body; and those that it passes on, should they be needed."""
        attempt, signer, loop = self._exchange.attempt, self._exchange.signer, asyncio.get_running_loop()
        exchange = self._exchange
        reply = await channel.receive(deadline - loop.time())
        if self._notes_that_it_gave_up(index, reply):
            return
        if exchange.clears and reply.get("clear") is True:
            exchange.note_clear(index)
            reply = await channel.receive(deadline - loop.time())
            if self._notes_that_it_gave_up(index, reply):
                return
        if "proofs" in reply:
            exchange.note_signatures(reply["proofs"])
            return
        await self._await_body(deadline)
        assert attempt.body is not None
        same_result = reply.get("body") == attempt.body.body_hash
        if not (same_result and attempt.add_proof(channel.remote, reply.get("proof"), signer)):
            exchange.rpc.count_refusal(channel.remote, BAD_SIGNATURE if same_result else ANOTHER_RESULT)
        if attempt.certificate() is None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(FORWARD_SECONDS):
                    await exchange.certified.wait()
        if attempt.certificate() is None:
            exchange.note_signatures((await channel.receive(deadline - loop.time())).get("proofs"))

    async def _await_body(self, deadline: float) -> None:
        """Wait until every share's mean is here."""
        attempt = self._exchange.attempt
        while attempt.body is None:
            attempt.changed.clear()
            async with asyncio.timeout_at(deadline):
                await attempt.changed.wait()

    def _notes_that_it_gave_up(self, index: int, reply: dict[str, Any]) -> bool:
        blamed = reply.get("gave up")
        if not isinstance(blamed, list):
            return False
        self._exchange.note_gave_up(index, blamed, reply.get("complaints"))
        if not self._exchange.attempt.roster.has_member(index):
            peer = self._exchange.attempt.roster.owners[index]
            self._exchange.lost[peer] = f"auxiliary {peer[-8:]}: it gave up"
        return True

    def _check_mask(self, peer: str, mask: Any) -> frozenset[int]:
        size = len(self._exchange.attempt.roster.tickets)
        if not isinstance(mask, list) or not all(type(i) is int and 0 <= i < size for i in mask):
            raise ProtocolError(peer, "sent a malformed list of contributors")
        contributors = frozenset(mask)
        if len(contributors) < least_mask(size, self._exchange.spec.quorum):
            raise ProtocolError(peer, f"counts only {len(contributors)} of {size} contributions")
        return contributors
