"""Butterfly all-reduce of one roster: scatter, agree on contributors, reduce once, gather, sign.

Every member i owns the share ``[bounds[i], bounds[i+1])`` of the vector and opens one stream to every other member j:

====================  ==================================================================================
i → j                 the group's id, then i's encoded part of j's share
j → i                 the set of members whose part j holds completely (its *mask*)
j → i                 the encoded mean of j's share
j → i                 j's signature of the body, once j holds the mean of every share
====================  ==================================================================================

The contributors are the intersection of all owners' masks: incomplete at one owner counts nowhere. An owner closes its
mask when every part is there, or when a quorum is and the grace period is over. The owner encodes its mean once and
decodes those bytes like everybody else. (Moshpit SGD, arXiv 2103.03239, section 3; the certificate is ours.)

A failure of any kind ends an attempt with `AttemptFailedError`, which names the peers at fault. What a member holds at
that point stays in its `Attempt`, from which other members can still complete theirs (`p2ptrain.averaging.settle`).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from p2ptrain.averaging.attempt import Attempt, AttemptFailedError, UnencodableError
from p2ptrain.averaging.certificate import Certificate, vote
from p2ptrain.averaging.pieces import Growing, new_buffer, receive_checked, send_encoded
from p2ptrain.averaging.reduction import OwnShare, RangeCheck
from p2ptrain.codecs import CodecError
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
        """
        self.attempt = attempt
        self._vector = vector
        self._rpc = rpc
        self._runtime = runtime
        self._signer = signer
        self._spec = spec
        self._on_phase = on_phase
        self._index = attempt.roster.index_of(rpc.peer_id)
        own = vector[attempt.bounds[self._index] : attempt.bounds[self._index + 1]]
        self._share = OwnShare(attempt.codec, spec, own, self._index, len(attempt.roster.tickets))
        self._part_changed = asyncio.Event()
        self._masks: dict[int, frozenset[int]] = {}
        self._agreed = asyncio.Event()
        self._own_mask: asyncio.Future[frozenset[int]] = asyncio.get_running_loop().create_future()
        self._own_mean: asyncio.Future[Growing] = asyncio.get_running_loop().create_future()
        self._own_proof = asyncio.Event()
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

    async def serve(self, channel: Channel) -> None:
        """Handle another member's stream for this attempt."""
        attempt, sender = self.attempt, self.attempt.roster.index_of(channel.remote)
        if sender in (-1, self._index) or sender in self._served:
            raise ProtocolError(channel.remote, "is not expected on this roster")
        task = asyncio.current_task()
        assert task is not None
        self._served[sender] = task
        self._stream_came.set()
        size = attempt.size(self._index)
        if size:
            part, norm = await self._receive_part(channel, size)
            if not self._own_mask.done():
                self._share.add(sender, part, norm)
                self._part_changed.set()
            mask = await asyncio.shield(self._own_mask)
            refusal = self._share.refused.get(sender, "")
            await channel.send({"mask": sorted(mask), **({"refused": refusal} if refusal else {})})
            await (await asyncio.shield(self._own_mean)).send(channel)
        await self._own_proof.wait()
        assert attempt.body is not None
        await channel.send({"body": attempt.body.body_hash, "proof": attempt.proofs[self._rpc.peer_id]})

    async def _receive_part(self, channel: Channel, size: int) -> tuple[bytearray, float]:
        """A member's part of the own share, and its norm."""
        codec, seconds, check = self.attempt.codec, self._spec.round_seconds, self._share.new_check()
        try:
            part, _ = await receive_checked(channel, self._runtime, codec, size, seconds, check, hashed=False)
        except ProtocolError as error:
            self.refused[channel.remote] = str(error)
            self._part_changed.set()
            raise
        return part, check.norm

    # --- the opening side: own parts go out, means and signatures come back --------------------------------------

    async def _exchange(self, index: int, deadline: float) -> None:
        """The stream that this member opens to member ``index``."""
        attempt, loop = self.attempt, asyncio.get_running_loop()
        peer, size, check = attempt.roster.members[index], attempt.size(index), RangeCheck(attempt.codec, self._spec)
        try:
            header = {"group": attempt.roster.group_id}
            async with self._rpc.open(peer, "butterfly", header, OPEN_TIMEOUT_SECONDS) as channel:
                if size:
                    low, high = attempt.bounds[index], attempt.bounds[index + 1]
                    part = await send_encoded(channel, self._runtime, attempt.codec, self._vector[low:high], check)
                    self.sent_parts[index] = part
                    reply = await channel.receive(deadline - loop.time())
                    self._masks[index] = self._check_mask(peer, reply.get("mask"))
                    if reply.get("refused"):
                        self.refused_by[index] = str(reply["refused"])[:MAX_REFUSAL_LENGTH]
                    self._agreed.set()
                    mean, digest = await receive_checked(
                        channel, self._runtime, attempt.codec, size, deadline - loop.time(), check
                    )
                    attempt.add_mean(index, mean, digest)
                reply = await channel.receive(deadline - loop.time())
                while attempt.body is None:
                    attempt.changed.clear()
                    async with asyncio.timeout_at(deadline):
                        await attempt.changed.wait()
                if reply.get("body") == attempt.body.body_hash:
                    attempt.add_proof(peer, reply.get("proof"), self._signer)
        except (PeerError, DeadlineError, TimeoutError) as error:
            self._lost[peer] = str(error) or "did not answer in time"
        except CodecError as error:
            self._unencodable = str(error)
        attempt.changed.set()
        self._agreed.set()

    def _check_mask(self, peer: str, mask: Any) -> frozenset[int]:
        size = len(self.attempt.roster.tickets)
        if not isinstance(mask, list) or not all(type(i) is int and 0 <= i < size for i in mask):
            raise ProtocolError(peer, "sent a malformed list of contributors")
        return frozenset(mask)

    # --- the owner: close the mask, agree, reduce -----------------------------------------------------------------

    async def _close_mask(self, deadline: float) -> None:
        """Decide which parts of the own share count: all, or who is there a grace period after the quorum."""
        try:
            await self._runtime.compute(self._share.measure_own)
        except CodecError as error:
            self._unencodable = str(error)
            self._agreed.set()
            return
        loop, total = asyncio.get_running_loop(), len(self.attempt.roster.tickets)
        quorum_at: float | None = None
        while len(self._share.parts.keys() | self._refused_indices()) + 1 < total:
            now = loop.time()
            if quorum_at is None and len(self._share.parts) + 1 >= self._spec.quorum * total:
                quorum_at = now
            until = deadline if quorum_at is None else min(deadline, quorum_at + self._spec.grace_seconds)
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

    def _refused_indices(self) -> set[int]:
        return {self.attempt.roster.index_of(peer) for peer in self.refused}

    async def _reduce(self, deadline: float) -> None:
        """Wait for all owners' masks, then average the own share and encode the mean once."""
        attempt = self.attempt
        owners = [i for i in range(len(attempt.roster.tickets)) if attempt.size(i)]
        while any(owner not in self._masks for owner in owners):
            self._fail_if_lost([attempt.roster.members[i] for i in owners if i not in self._masks])
            self._agreed.clear()
            async with asyncio.timeout_at(deadline):
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

    async def _reduce_own_share(self) -> None:
        """Reduce the own share and encode the result, piece by piece; the streams send each piece once it is there."""
        attempt = self.attempt
        assert attempt.contributors is not None
        mean = Growing(await new_buffer(self._runtime, attempt.codec, attempt.size(self._index)))
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
        deadline = asyncio.get_running_loop().time() + self._spec.round_seconds
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
            message = f"{self.attempt.phase}: the round's deadline passed"
            raise AttemptFailedError(message, self._awaited()) from error

    def _awaited(self) -> tuple[str, ...]:
        """The other members whose mask, mean or signature is missing, whichever this member waits for."""
        attempt, members = self.attempt, self.attempt.roster.members
        if attempt.contributors is None:
            missing = [i for i in range(len(members)) if attempt.size(i) and i not in self._masks]
        elif not attempt.is_complete():
            missing = [i for i, mean in enumerate(attempt.means) if mean is None]
        else:
            missing = [i for i, member in enumerate(members) if member not in attempt.proofs]
        return tuple(members[i] for i in missing if i != self._index)

    async def _gather(self, deadline: float) -> None:
        attempt = self.attempt
        while not attempt.is_complete():
            self._fail_if_lost([attempt.roster.members[i] for i, mean in enumerate(attempt.means) if mean is None])
            attempt.changed.clear()
            async with asyncio.timeout_at(deadline):
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
            unlost = [p for p in attempt.roster.members if p not in self._lost or p in attempt.proofs]
            if len(unlost) < attempt.roster.majority:
                self._fail_if_lost(list(self._lost))
            attempt.changed.clear()
            async with asyncio.timeout_at(deadline):
                await attempt.changed.wait()
        return certificate

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
        self._own_mask.cancel()
        self._own_mean.cancel()
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
