"""Butterfly all-reduce of one roster: scatter, agree on contributors, reduce once, gather, sign.

Every member i owns the share ``[bounds[i], bounds[i+1])`` of the vector and opens one stream to every other member j:

====================  ==================================================================================
i → j                 the group's id, then i's encoded part of j's share
j → i                 a word that the part is there (what was written may still be on its way for long)
j → i                 the set of members whose part j holds completely (its *mask*)
j → i                 a word that the mean comes, and the encoded mean of j's share
j → i                 j's signature of the body, once j holds the mean of every share; later all that j has
====================  ==================================================================================

The contributors are the intersection of all owners' masks: incomplete at one owner counts nowhere. An owner closes its
mask when every part is there, or when a quorum is and the rest had time enough (`p2ptrain.averaging.patience`); by the
same rule members wait for masks and means. The owner encodes its mean once and decodes those bytes like everybody else.
(Moshpit SGD, arXiv 2103.03239, section 3; the certificate is ours.) A member may encode its own parts with another
codec than the mean's, when it is slow.

Members that no stream can be opened to own no share. What two of them cannot tell each other, owners pass on.

A failure of any kind ends an attempt with `AttemptFailedError`, which names the peers at fault. What a member holds at
that point stays in its `Attempt`, from which other members can still complete theirs (`p2ptrain.averaging.settle`).
Whoever gives up says so in place of what it owes, and why; the others come to their own conclusion, or blame it.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from p2ptrain.averaging.attempt import Attempt, AttemptFailedError, LateError, UnencodableError
from p2ptrain.averaging.certificate import Certificate, vote
from p2ptrain.averaging.patience import patience_seconds, quorum_of_others
from p2ptrain.averaging.pieces import Growing, new_buffer, receive_checked, send_encoded
from p2ptrain.averaging.reduction import OwnShare, PartCheck, RangeCheck
from p2ptrain.codecs import Codec, CodecError, smaller_codecs
from p2ptrain.errors import DeadlineError, PeerError, ProtocolError
from p2ptrain.hashing import bulk_hash
from p2ptrain.manifest import AveragingSpec
from p2ptrain.network.channel import Channel
from p2ptrain.network.rpc import Rpc
from p2ptrain.runtime import Runtime
from p2ptrain.signing import Signer

if TYPE_CHECKING:
    import torch

OPEN_TIMEOUT_SECONDS = 10.0
LINGER_SECONDS = 2.0
FORWARD_SECONDS = 0.5
MAX_REFUSAL_LENGTH = 120
OUT_OF_PROPORTION = "out of proportion"
"""What a refusal at the closing of a mask is counted as."""


class Butterfly:
    """One member's part in one attempt. Use once: `run`, `stop_sending`, `stop_serving`."""

    def __init__(
        self,
        attempt: Attempt,
        vector: torch.Tensor,
        rpc: Rpc,
        runtime: Runtime,
        signer: Signer,
        spec: AveragingSpec,
        on_phase: Callable[[str], None] = lambda phase: None,
        seconds: float = 0.0,
        part_codec: Codec | None = None,
        on_part: Callable[[str, int, float], None] = lambda peer, num_bytes, seconds: None,
    ) -> None:
        """
        Args:
            attempt: The roster and where to leave what is learnt.
            vector: This member's contribution, fp32, shape ``[bounds[-1]]``; not changed.
            rpc: To reach the others.
            runtime: For arithmetic.
            signer: Signs the body.
            spec: Quorum, grace, deadline, and the rule by which shares are reduced.
            on_phase: Called as each phase begins: reduce, gather, commit.
            seconds: Deadline of the attempt; 0 for that of ``spec``.
            part_codec: How this member encodes its parts; None for the codec of the mean.
            on_part: Told of each part that came, as a whole or not: from whom, bytes, seconds.
        """
        self.attempt = attempt
        self._vector = vector
        self._rpc = rpc
        self._runtime = runtime
        self._signer = signer
        self._spec = spec
        self._on_phase = on_phase
        self._seconds = seconds or spec.round_seconds
        self._on_part = on_part
        self.part_codec = part_codec or attempt.codec
        """How this member's own parts are encoded."""
        self._began = asyncio.get_running_loop().time()
        self._mask_closed_at: float | None = None
        self._arrived_at: dict[int, float] = {}
        self._index = attempt.roster.index_of(rpc.peer_id)
        own = vector[attempt.bounds[self._index] : attempt.bounds[self._index + 1]]
        codec = attempt.codec_of(self._index)
        self._share = OwnShare(codec, spec, own, self._index, len(attempt.roster.tickets))
        self._part_changed = asyncio.Event()
        self._masks: dict[int, frozenset[int]] = {}
        self._agreed = asyncio.Event()
        self._own_mask: asyncio.Future[frozenset[int]] = asyncio.get_running_loop().create_future()
        self._own_mean: asyncio.Future[Growing] = asyncio.get_running_loop().create_future()
        self._own_proof = asyncio.Event()
        self._certified = asyncio.Event()
        self._given_up: asyncio.Future[list[int]] = asyncio.get_running_loop().create_future()
        self._gave_up: dict[int, frozenset[int]] = {}
        self._served: dict[int, asyncio.Task[Any]] = {}
        self._stream_came = asyncio.Event()
        self._tasks: list[asyncio.Task[None]] = []
        self._lost: dict[str, str] = {}
        self._unencodable = ""
        self.refused: dict[str, str] = {}
        """By other member: why its part was refused. The round goes on without it."""
        self.refused_by: dict[int, str] = {}
        """By owner, this member included: why this member's own part was refused."""
        self.sent_parts: dict[int, bytearray] = {}
        """By share: the encoded parts that this member sent, kept for error feedback."""
        self.own_mean_exact: torch.Tensor | None = None
        """The mean of the own share before encoding, fp32, kept for error feedback."""

    # --- the serving side: other members' parts come in, this owner's mean goes out ------------------------------

    async def serve(self, channel: Channel, request: dict[str, Any]) -> None:
        """Handle another member's stream for this attempt; ``request`` is what it was opened with."""
        sender = self.attempt.roster.index_of(channel.remote)
        if sender in (-1, self._index) or sender in self._served:
            raise ProtocolError(channel.remote, "is not expected on this roster")
        task = asyncio.current_task()
        assert task is not None
        self._served[sender] = task
        self._stream_came.set()
        work = asyncio.create_task(self._serve_member(channel, sender, request), name=f"serve-{sender}")
        try:
            waiting: set[asyncio.Future[Any]] = {work, self._given_up}
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if work.done():
                work.result()
            elif not self._given_up.cancelled():
                work.cancel()
                await asyncio.gather(work, return_exceptions=True)
                await channel.send({"gave up": self._given_up.result()})
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)

    async def _serve_member(self, channel: Channel, sender: int, request: dict[str, Any]) -> None:
        attempt, size = self.attempt, self.attempt.size(self._index)
        if size:
            check = self._share.new_check(self._codec_of_part(channel.remote, request.get("codec")))
            part = await self._receive_part(channel, check, size)
            await channel.send({"have": size})
            if not self._own_mask.done():
                self._share.add(sender, part, check)
                self._part_changed.set()
            mask = await asyncio.shield(self._own_mask)
            refusal = self._share.refused.get(sender, "")
            await channel.send({"mask": sorted(mask), **({"refused": refusal} if refusal else {})})
            mean = await asyncio.shield(self._own_mean)
            await channel.send({"mean": size})  # So that it can say in its place that it gave up.
            await mean.send(channel)
        await self._own_proof.wait()
        assert attempt.body is not None
        await channel.send({"body": attempt.body.body_hash, "proof": attempt.proofs[self._rpc.peer_id]})
        await self._certified.wait()
        await asyncio.wait({channel.lost}, timeout=FORWARD_SECONDS)
        if not channel.lost.done():  # It waits for signatures still: perhaps it cannot reach those that gave theirs.
            await channel.send({"proofs": [[peer, proof] for peer, proof in sorted(attempt.proofs.items())]})

    def _codec_of_part(self, peer: str, name: Any) -> Codec:
        own, low, high = self.attempt.codec, *self.attempt.bounds[self._index : self._index + 2]
        for codec in (own, *smaller_codecs(own, self.attempt.bounds[-1])):
            if codec.name == name:
                return codec.part(low, high)
        self.refused[peer] = f"encodes its part in a way that is not allowed beside {own.name}"
        self._part_changed.set()
        raise ProtocolError(peer, self.refused[peer])

    async def _receive_part(self, channel: Channel, check: PartCheck, size: int) -> bytearray:
        loop, arrived = asyncio.get_running_loop(), 0
        began = loop.time()

        def watch(filled: int) -> None:
            nonlocal arrived
            arrived = filled

        try:
            part, _ = await receive_checked(
                channel, self._runtime, check.codec, size, self._spec.round_seconds, check, hashed=False,
                on_progress=watch,
            )  # fmt: skip
        except ProtocolError as error:
            self.refused[channel.remote] = str(error)
            self._part_changed.set()
            raise
        finally:
            self._on_part(channel.remote, arrived, loop.time() - began)
        return part

    # --- the opening side: own parts go out, means and signatures come back --------------------------------------

    async def _exchange(self, index: int, deadline: float) -> None:
        """The stream that this member opens to member ``index``."""
        attempt, loop = self.attempt, asyncio.get_running_loop()
        peer, size, codec = attempt.roster.members[index], attempt.size(index), attempt.codec_of(index)
        try:
            low, high = attempt.bounds[index], attempt.bounds[index + 1]
            parts = self.part_codec.part(low, high)
            header = {"group": attempt.roster.group_id, "codec": self.part_codec.name}
            total = parts.encoded_bytes(size) + codec.encoded_bytes(size)
            async with self._rpc.open(peer, "butterfly", header, OPEN_TIMEOUT_SECONDS, expected_bytes=total) as channel:
                if size:
                    sent = RangeCheck(parts, self._spec)
                    part = await send_encoded(channel, self._runtime, parts, self._vector[low:high], sent)
                    self.sent_parts[index] = part
                    if self._notes_that_it_gave_up(index, await channel.receive(deadline - loop.time())):
                        return
                    self._arrived_at[index] = loop.time()
                    self._agreed.set()
                    reply = await channel.receive(deadline - loop.time())
                    if self._notes_that_it_gave_up(index, reply):
                        return
                    self._masks[index] = self._check_mask(peer, reply.get("mask"))
                    if reply.get("refused"):
                        self.refused_by[index] = str(reply["refused"])[:MAX_REFUSAL_LENGTH]
                    self._agreed.set()
                    if self._notes_that_it_gave_up(index, await channel.receive(deadline - loop.time())):
                        return
                    mean, digest = await receive_checked(
                        channel, self._runtime, codec, size, deadline - loop.time(), RangeCheck(codec, self._spec)
                    )
                    attempt.add_mean(index, mean, digest)
                reply = await channel.receive(deadline - loop.time())
                if self._notes_that_it_gave_up(index, reply):
                    return
                while attempt.body is None:
                    attempt.changed.clear()
                    async with asyncio.timeout_at(deadline):
                        await attempt.changed.wait()
                if reply.get("body") == attempt.body.body_hash:
                    attempt.add_proof(peer, reply.get("proof"), self._signer)
                if attempt.certificate() is None:
                    self._add_proofs((await channel.receive(deadline - loop.time())).get("proofs"))
        except (PeerError, DeadlineError, TimeoutError) as error:
            self._lost[peer] = str(error) or "did not answer in time"
        except CodecError as error:
            self._unencodable = str(error)
        attempt.changed.set()
        self._agreed.set()

    def _notes_that_it_gave_up(self, index: int, reply: dict[str, Any]) -> bool:
        blamed = reply.get("gave up")
        if not isinstance(blamed, list):
            return False
        size = len(self.attempt.means)
        self._gave_up[index] = frozenset(i for i in blamed[:size] if type(i) is int and 0 <= i < size)
        self.attempt.changed.set()
        self._agreed.set()
        return True

    def _add_proofs(self, proofs: Any) -> None:
        """Take in signatures that another member passes on; those that are none are left out."""
        for entry in proofs[: len(self.attempt.roster.tickets)] if isinstance(proofs, list) else []:
            if isinstance(entry, list) and len(entry) == 2 and type(entry[0]) is str:
                self.attempt.add_proof(entry[0], entry[1], self._signer)

    def _check_mask(self, peer: str, mask: Any) -> frozenset[int]:
        size = len(self.attempt.roster.tickets)
        if not isinstance(mask, list) or not all(type(i) is int and 0 <= i < size for i in mask):
            raise ProtocolError(peer, "sent a malformed list of contributors")
        return frozenset(mask)

    # --- the owner: close the mask, agree, reduce -----------------------------------------------------------------

    async def _close_mask(self, deadline: float) -> None:
        """Decide which parts of the own share count: all, or those of a quorum and whoever came soon after it."""
        try:
            await self._runtime.compute(self._share.measure_own)
        except CodecError as error:
            self._unencodable = str(error)
            self._agreed.set()
            return
        loop, others = asyncio.get_running_loop(), len(self.attempt.roster.tickets) - 1
        quorum_at: float | None = None
        while len(self._share.parts.keys() | self._refused_indices()) < others:
            now = loop.time()
            if quorum_at is None and len(self._share.parts) >= quorum_of_others(others, self._spec.quorum):
                quorum_at = now
            until = deadline if quorum_at is None else min(deadline, self._patience_ends(self._began, quorum_at))
            if now >= until:
                break
            self._part_changed.clear()
            try:
                async with asyncio.timeout_at(until):
                    await self._part_changed.wait()
            except TimeoutError:
                continue
        mask = self._share.judge()
        self._note_refusals()
        self._masks[self._index] = mask
        self._mask_closed_at = loop.time()
        self._own_mask.set_result(mask)
        self._agreed.set()

    def _note_refusals(self) -> None:
        """Tell of parts that are well-formed but were left out of the own mask."""
        for index, reason in self._share.refused.items():
            peer = self.attempt.roster.members[index]
            if index == self._index:
                self.refused_by[index] = reason
            else:
                self.refused[peer] = f"peer {peer[-8:]} {reason}"
                self._rpc.count_refusal(peer, OUT_OF_PROPORTION)

    def _patience_ends(self, since: float, quorum_at: float) -> float:
        return quorum_at + patience_seconds(quorum_at - since, self._spec.grace_seconds)

    def _refused_indices(self) -> set[int]:
        return {self.attempt.roster.index_of(peer) for peer in self.refused}

    async def _reduce(self, deadline: float) -> None:
        """Wait for all owners' masks, then average the own share and encode the mean once."""
        attempt = self.attempt
        owners = [i for i in range(len(attempt.roster.tickets)) if attempt.size(i)]
        while any(owner not in self._masks for owner in owners):
            self._fail_if_lost([attempt.roster.members[i] for i in owners if i not in self._masks])
            self._agreed.clear()
            missing = [owner for owner in owners if owner not in self._masks]
            if self._index in self._masks:
                in_time = self._masks[self._index] | self._share.refused.keys()
                late = [owner for owner in missing if owner not in in_time]
                if late:  # Who was late with its part will not be in time with its share's mean.
                    raise LateError("scatter: a part did not come in time", self._peers(late), as_owners=False)
            async with asyncio.timeout_at(min(deadline, *(self._mask_is_due(owner) for owner in missing))):
                await self._agreed.wait()
        agreed = frozenset.intersection(*(self._masks[owner] for owner in owners))
        if not agreed:
            raise AttemptFailedError("no contribution was complete at every owner")
        attempt.contributors = tuple(sorted(agreed))
        self._enter("reduce")
        if attempt.size(self._index):
            try:
                await self._reduce_own_share()
            except CodecError as error:
                raise AttemptFailedError(f"the mean cannot be encoded: {error}") from error
        self._enter("gather")
        attempt.changed.set()

    def _mask_is_due(self, owner: int) -> float:
        """Until when another owner's mask may take.

        It needs this member's part, which should be there soon after a quorum of the owners has its own, and closes
        about when this member's mask does.
        """
        closed, arrivals = self._mask_closed_at, sorted(self._arrived_at.values())
        others = sum(self.attempt.size(i) > 0 for i in range(len(self.attempt.means)) if i != self._index)
        needed = quorum_of_others(others, self._spec.quorum)
        if closed is None or len(arrivals) < needed:
            return math.inf
        return self._patience_ends(self._began, max(closed, self._arrived_at.get(owner, arrivals[needed - 1])))

    async def _reduce_own_share(self) -> None:
        """Reduce the own share and encode the result, piece by piece; the streams send each piece once it is there."""
        attempt = self.attempt
        assert attempt.contributors is not None
        codec, size = attempt.codec_of(self._index), attempt.size(self._index)
        mean = Growing(await new_buffer(self._runtime, codec, size))
        self._own_mean.set_result(mean)
        tokens = [attempt.roster.tickets[i].tokens for i in attempt.contributors]
        self.own_mean_exact = await self._share.reduce(self._runtime, attempt.contributors, tokens, mean)
        digest = await self._runtime.compute(bulk_hash, mean.data)
        attempt.add_mean(self._index, mean.data, digest)

    def _enter(self, phase: str) -> None:
        self.attempt.phase = phase
        self._on_phase(phase)

    def _fail_if_lost(self, needed: list[str]) -> None:
        if self._unencodable:
            raise UnencodableError(f"the local update cannot be encoded: {self._unencodable}")
        lost = tuple(peer for peer in needed if peer in self._lost)
        if lost:
            raise AttemptFailedError(f"{self.attempt.phase}: lost {self._lost[lost[0]]}", lost)
        if len(self.attempt.means) - len(self._gave_up) < self.attempt.roster.majority:
            blamed = frozenset.union(*self._gave_up.values())
            late = [i for i in blamed if self.attempt.roster.members[i] in needed]
            raise LateError(f"{self.attempt.phase}: most others gave up", self._peers(late))

    @property
    def refusal(self) -> str:
        """Why this member's contribution was refused, by itself or by more than half of the owners; empty otherwise.

        One hostile owner may say so of anybody: that keeps a contribution out of one round, but is not believed.
        """
        owners = sum(self.attempt.size(i) > 0 for i in range(len(self.attempt.roster.tickets)))
        if self._index in self.refused_by or 2 * len(self.refused_by) > owners:
            return next(iter(self.refused_by.values()))
        return ""

    # --- the whole ------------------------------------------------------------------------------------------------

    async def run(self) -> Certificate:
        """Take part until a majority signed.

        Raises:
            AttemptFailedError: A member was lost or late, or the deadline passed; ``attempt`` keeps what is held.
        """
        deadline = asyncio.get_running_loop().time() + self._seconds
        others = [i for i in range(len(self.attempt.roster.tickets)) if i != self._index]
        order = [i for i in others if i > self._index] + [i for i in others if i < self._index]
        tasks = [asyncio.create_task(self._exchange(i, deadline), name=f"exchange-{i}") for i in order]
        tasks.append(asyncio.create_task(self._close_mask(deadline), name="mask"))
        self._tasks = tasks
        try:
            await self._reduce(deadline)
            await self._gather(deadline)
            return await self._collect_signatures(deadline)
        except TimeoutError as error:
            message = f"{self.attempt.phase}: others took too long"
            raise LateError(message, self._awaited()) from error

    def _awaited(self) -> tuple[str, ...]:
        """The other members whose mask, mean or signature is missing, whichever this member waits for."""
        attempt, members = self.attempt, self.attempt.roster.members
        if attempt.contributors is None:
            missing = [i for i in range(len(members)) if attempt.size(i) and i not in self._masks]
        elif not attempt.is_complete():
            missing = [i for i, mean in enumerate(attempt.means) if mean is None]
        else:
            missing = [i for i, member in enumerate(members) if member not in attempt.proofs]
        silent = [i for i in missing if i not in self._gave_up]
        return self._peers(silent or missing)

    def _peers(self, indices: Iterable[int]) -> tuple[str, ...]:
        return tuple(self.attempt.roster.members[i] for i in sorted(indices) if i != self._index)

    async def _gather(self, deadline: float) -> None:
        attempt, loop = self.attempt, asyncio.get_running_loop()
        others = sum(attempt.size(i) > 0 for i in range(len(attempt.means)) if i != self._index)
        began, until = loop.time(), deadline
        while not attempt.is_complete():
            missing = [i for i, mean in enumerate(attempt.means) if mean is None]
            self._fail_if_lost([attempt.roster.members[i] for i in missing])
            theirs = others - sum(i != self._index for i in missing)
            if until == deadline and theirs >= quorum_of_others(others, self._spec.quorum):
                until = min(deadline, self._patience_ends(began, loop.time()))
            attempt.changed.clear()
            async with asyncio.timeout_at(until):
                await attempt.changed.wait()
        self._enter("commit")
        body = attempt.make_body()
        attempt.body = body
        attempt.proofs[self._rpc.peer_id] = self._signer.sign(vote(body.body_hash))
        self._own_proof.set()
        attempt.changed.set()

    async def _collect_signatures(self, deadline: float) -> Certificate:
        attempt = self.attempt
        while (certificate := attempt.certificate()) is None:
            # Whoever cannot be reached may still give its signature to somebody that can.
            gone = [
                t.peer for t in attempt.roster.tickets if t.reachable and t.peer in self._lost.keys() - attempt.proofs
            ]
            if len(attempt.roster.tickets) - len(gone) < attempt.roster.majority:
                self._fail_if_lost(gone)
            attempt.changed.clear()
            async with asyncio.timeout_at(deadline):
                await attempt.changed.wait()
        self._certified.set()
        return certificate

    def give_up(self, suspects: tuple[str, ...]) -> None:
        """Tell the other members that this one has given up, and whom it blames."""
        self.attempt.withholds = self.attempt.size(self._index) > 0 and not self._own_mean.done()
        if not self._given_up.done():
            self._given_up.set_result([self.attempt.roster.index_of(peer) for peer in suspects])

    async def stop_sending(self) -> None:
        """End the streams that this member opened; the vector is not read any more when this returns."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def stop_serving(self, linger: bool) -> None:
        """End the others' streams; with ``linger``, first let them fetch mean and signature for a bounded time."""
        if linger:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LINGER_SECONDS):
                    await self._serve_everybody()
        elif self._given_up.done() and self._served:
            await asyncio.wait(list(self._served.values()), timeout=FORWARD_SECONDS)
        self._own_mask.cancel()
        self._own_mean.cancel()
        self._given_up.cancel()
        for task in self._served.values():
            task.cancel()

    async def _serve_everybody(self) -> None:
        """Wait until all others came and went; who owns nothing may be done before a stream of another is there."""
        others = [
            i for i, peer in enumerate(self.attempt.roster.members) if i != self._index and peer not in self._lost
        ]
        while any(i not in self._served for i in others):
            self._stream_came.clear()
            await self._stream_came.wait()
        if self._served:
            await asyncio.wait(list(self._served.values()))
