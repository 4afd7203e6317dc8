"""The streams that one member opens in one attempt; `p2ptrain.averaging.served_streams` is the other side."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

from p2ptrain.averaging.audit import Audit, FalseMeanError
from p2ptrain.averaging.commitments import MAX_STATEMENT_BYTES
from p2ptrain.averaging.exchange import FORWARD_SECONDS, GAVE_UP, Exchange
from p2ptrain.averaging.openings import MAX_CHUNKS
from p2ptrain.averaging.patience import (
    beat_seconds,
    least_mask,
    patience_seconds,
    quorum_of_others,
    silence_seconds,
)  # fmt: skip
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
    PeerSilentError,
    ProtocolError,
)  # fmt: skip
from p2ptrain.network.channel import Channel, ChannelLimits
from p2ptrain.tasks import until_ended

logger = logging.getLogger(__name__)

OPEN_TIMEOUT_SECONDS = 10.0
MAX_REFUSAL_LENGTH = 120
TO_AUXILIARY = "auxiliary"
BAD_ANSWER, BAD_SIGNATURE, ANOTHER_RESULT = "bad answer", "bad signature", "another result"
"""What is counted against a member: a malformed mask or mean, a signature that is none, one for something else."""
RETRY_SECONDS = 0.3


class OpenedStreams:
    """The streams that this member opens: its parts go out, means and signatures come back."""

    def __init__(self, exchange: Exchange) -> None:
        self._exchange = exchange
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._has_all: set[int] = set()
        self._is_through: set[int] = set()
        self._ending: list[asyncio.Task[None]] = []
        self._waiting: list[asyncio.Task[None]] = []
        self._ended: set[int] = set()
        self._progress = asyncio.Event()
        self._channels: dict[str, Channel] = {}

    def start(self, deadline: float) -> None:
        """Open a stream to every other member; all ends by ``deadline``, in the loop's time."""
        own, attempt = self._exchange.index, self._exchange.attempt
        size, owners = len(attempt.roster.tickets), len(attempt.means)
        # Of auxiliaries that own nothing there is nothing to be had.
        order = [*range(own + 1, size), *range(own), *(i for i in range(size, owners) if attempt.size(i))]
        names = [f"exchange-{i}" if i < size else f"{TO_AUXILIARY}-{i}" for i in order]
        self._tasks = {
            i: self._exchange.tasks.start(self._talk_to(i, deadline), name)
            for i, name in zip(order, names, strict=True)
        }

    async def stop(self) -> None:
        """End the streams; the vector is not read any more when this returns.

        Those on which all has been said end in order, so that their connections can be used again; and so do those of a
        round that was certified before some members had signed, if those sign soon: see `end`.
        """
        soon = self._has_all if self._exchange.certified.is_set() else set()
        self._ending += [task for index, task in self._tasks.items() if index in self._is_through]
        self._waiting += [task for index, task in self._tasks.items() if index in soon - self._is_through]
        others = [task for task in self._tasks.values() if task not in (*self._ending, *self._waiting)]
        for task in others:
            task.cancel()
        await until_ended(*others)
        self._tasks = {}  # A task that was cancelled refers to where it stood, and so to all that the attempt held.

    async def end(self) -> None:
        """Wait until the last streams have ended, for a bounded time."""
        if self._waiting:
            _, late = await asyncio.wait(self._waiting, timeout=FORWARD_SECONDS)
            for task in late:
                task.cancel()
        await until_ended(*self._ending, *self._waiting)
        self._ending, self._waiting = [], []

    async def _talk_to(self, index: int, deadline: float) -> None:
        """The stream to member ``index``, and how it ends."""
        exchange, attempt = self._exchange, self._exchange.attempt
        peer, size = attempt.roster.owners[index], attempt.size(index)
        try:
            header = {"group": attempt.roster.group_id, "codec": exchange.part_codec.name}
            header |= {"credential": attempt.credential} if attempt.credential else {}
            part_codec = exchange.part_codec.part(attempt.bounds[index], attempt.bounds[index + 1])
            total = part_codec.encoded_bytes(size) + attempt.mean_codec_of(index).encoded_bytes(size)
            exchange.opening.add(peer)
            async with self._open(peer, header, total) as channel:
                exchange.opening.discard(peer)
                self._channels[peer] = channel
                if size and not await self._bring_part(channel, index, part_codec, deadline):
                    return
                self._has_all.add(index)
                if not attempt.roster.has_member(index):
                    await self._tell_result(channel)
                    return
                await self._fetch_signatures(channel, index, deadline)
                self._is_through.add(index)
        except (PeerError, DeadlineError, TimeoutError) as error:
            if isinstance(error, PeerRefusedError) and error.reason == GAVE_UP:
                exchange.note_gave_up(index, [])
            if index not in exchange.gave_up:
                exchange.lost[peer] = str(error) or "did not answer in time"
                if isinstance(error, PeerSilentError):
                    self._note_silent(peer)
                if isinstance(error, PeerLostError) and index not in exchange.arrived_at:
                    exchange.cut_short.add(peer)
            if isinstance(error, ProtocolError):
                exchange.rpc.count_refusal(peer, BAD_ANSWER)
        except CodecError as error:
            exchange.unencodable = str(error)
        self._ended.add(index)
        self._wake()
        exchange.changed()

    @contextlib.asynccontextmanager
    async def _open(self, peer: str, request: dict[str, Any], expected_bytes: int = 0) -> AsyncIterator[Channel]:
        """A stream to a member, which says several times in a grace period that it lives."""
        loop, exchange = asyncio.get_running_loop(), self._exchange
        began = loop.time()
        async with exchange.rpc.open(
            peer, "butterfly", request, OPEN_TIMEOUT_SECONDS, expected_bytes=expected_bytes
        ) as channel:
            seconds = silence_seconds(exchange.spec.grace_seconds, loop.time() - began)
            channel.expect_beats(seconds, partial(self._silent_at, peer, seconds))
            yield channel

    def _silent_at(self, peer: str, seconds: float, last_heard: float) -> float:
        """When a member counts as silent that was last heard then on the stream that this one opened.

        Where no majority would be left, it is rather this member that is cut off. Then it takes its time, because
        what the rest ends alone is another lineage.
        """
        members = self._exchange.attempt.roster.tickets
        left = len(members) - sum(self._is_quiet(ticket.peer, seconds) for ticket in members)
        if left < self._exchange.attempt.roster.majority:
            seconds = max(seconds, ChannelLimits().silence_seconds)
        return max(last_heard, self._heard_at(peer)) + seconds

    def _heard_at(self, peer: str) -> float:
        """When a member was last heard, in loop time: what it says on one stream may wait for data on the other."""
        channels = (self._channels.get(peer), self._exchange.served.get(peer))
        return max((channel.last_heard for channel in channels if channel is not None), default=-math.inf)

    def _is_quiet(self, peer: str, seconds: float) -> bool:
        """Whether a member is gone, or was not heard for about as long as counts as silence."""
        exchange, index = self._exchange, self._exchange.attempt.roster.index_of(peer)
        if index == exchange.index or index in self._is_through or index in exchange.gave_up:
            return False
        if peer in exchange.lost:  # Perhaps it cannot be reached, and opened a stream itself.
            served = exchange.served.get(peer)
            return peer in exchange.silent or served is None or served.lost.done()
        if peer not in self._channels:
            return False
        quiet = asyncio.get_running_loop().time() - self._heard_at(peer)
        return quiet >= seconds - beat_seconds(exchange.spec.grace_seconds)

    def _note_silent(self, peer: str) -> None:
        """Take down that a member fell silent, and those others that did so at the same time: about a beat ago or less.

        Members freeze together where they share a machine or a link, and each would otherwise break an attempt.
        """
        exchange, seconds = self._exchange, silence_seconds(self._exchange.spec.grace_seconds)
        exchange.note_silent(peer)
        for other in self._channels:
            if other not in exchange.lost and self._is_quiet(other, seconds):
                exchange.lost[other] = f"peer {other[-8:]} sent nothing any more"
                exchange.note_silent(other)

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
        reply = await channel.receive(deadline - loop.time())
        if "trace" in reply:
            await self._show_origin(channel, index, reply["trace"])
            reply = await channel.receive(deadline - loop.time())
        if self._notes_that_it_gave_up(index, reply):
            return False
        if reply.get("have") != len(part):
            raise ProtocolError(channel.remote, "does not say that the part is there")
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
        tree = await exchange.runtime.offload(SumTree, hashes.leaves)
        attempt.add_mean(index, mean, tree.root[0])
        return audit is None or await self._check_mean(audit, channel, index, tree, deadline)

    async def _show_origin(self, channel: Channel, index: int, chunks: Any) -> None:
        """Show an owner what chunks of the part that it received come from."""
        exchange, attempt = self._exchange, self._exchange.attempt
        if exchange.origin is None or not attempt.audited:
            raise ProtocolError(channel.remote, "asks where a part comes from that is not to be traced")
        count = attempt.num_chunks(index)
        if not isinstance(chunks, list) or not 0 < len(chunks) <= min(exchange.spec.spot_checks, MAX_CHUNKS):
            raise ProtocolError(channel.remote, "asks for an impossible number of chunks")
        if not all(type(chunk) is int and 0 <= chunk < count for chunk in chunks) or len(set(chunks)) < len(chunks):
            raise ProtocolError(channel.remote, "asks for chunks that are not there, or twice")
        spans = [attempt.span(index, chunk) for chunk in chunks]
        shown = await exchange.runtime.offload(exchange.origin.show, spans)
        await channel.send({"shown": len(shown)})
        await channel.send_bytes(shown)

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
            passed = await self._examine(index, chunks, channel)
        except PeerSilentError:
            raise
        except (PeerLostError, PeerRefusedError):
            await asyncio.sleep(RETRY_SECONDS)  # If it gave up, why is on its way.
            passed = await self.ask_again(index, chunks)
        if passed:
            exchange.checked.add(index)
        exchange.changed()
        return passed

    async def _examine(self, index: int, chunks: list[int], channel: Channel) -> bool:
        """See `Exchange.examine`; an owner that passes signatures on instead may hold another result."""
        exchange = self._exchange
        passed = await exchange.examine(index, chunks, channel)
        if index in exchange.outvoted:
            if exchange.audit is not None and exchange.certificate() is None:
                await self._compare_statements(exchange.audit, index)
            exchange.outvoted.discard(index)
            exchange.unshown[index] = chunks
            exchange.changed()
        return passed

    async def ask_again(self, index: int, chunks: list[int]) -> bool:
        """Check what an owner did not show, to this member or another one, on a new stream; whether it is right."""
        exchange = self._exchange
        request = {"group": exchange.attempt.roster.group_id, "check": chunks}
        peer = exchange.attempt.roster.owners[index]
        try:
            async with self._open(peer, request) as channel:
                return await self._examine(index, chunks, channel)
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
            if not same_result and len(attempt.roster.owners) == 2:  # Nobody else can have told them different things.
                exchange.contradicts[channel.remote] = f"peer {channel.remote[-8:]} signed {ANOTHER_RESULT}"
                exchange.changed()
            if exchange.audit is not None and not same_result:
                await self._compare_statements(exchange.audit, index)
        if attempt.certificate() is None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(FORWARD_SECONDS):
                    await exchange.certified.wait()
        if attempt.certificate() is None:
            exchange.note_signatures((await channel.receive(deadline - loop.time())).get("proofs"))

    async def _compare_statements(self, audit: Audit, index: int) -> None:
        """Find out whether an owner told a member, which signed another result, something else than this one."""
        exchange = self._exchange
        request = {"group": exchange.attempt.roster.group_id, "statements": True}
        owners = exchange.attempt.roster.owners
        peer, limit = owners[index], len(owners) * MAX_STATEMENT_BYTES
        try:
            async with self._open(peer, request) as channel:
                reply = await channel.receive(FORWARD_SECONDS + exchange.spec.grace_seconds, limit)
            await exchange.runtime.offload(audit.compare, reply.get("statements"))
        except FalseMeanError as error:
            exchange.find_guilty(error, [])
        except (PeerError, DeadlineError, IntegrityError) as error:
            logger.debug("peer %s does not say what was stated to it: %s", peer[-8:], error)

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
