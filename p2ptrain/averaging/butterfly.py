"""Butterfly all-reduce of one roster: scatter, agree on contributors, reduce once, gather, sign.

Every member i owns the share ``[bounds[i], bounds[i+1])`` of the vector and opens one stream to every other member j:

====================  ==================================================================================
i → j                 the group's id, then i's encoded part of j's share, and i's signature of it
j → i, i → j          above level 0: which chunks of it j wants traced, and what they come from (see `origins`)
j → i                 a word that the part is there (what was written may still be on its way for long)
j → i                 the set of members whose part j holds completely (its *mask*)
j → i                 a word that the mean comes, the encoded mean of j's share, and j's signature of it
i → j, j → i          which chunks of the share i wants to check, and what others sent for them (see `audit`); or all
                      signatures, if a majority has signed before i asks
j → i                 a word that all checks of j's passed, once they have
j → i                 j's signature of the body, once j holds the mean of every share; later all that j has
====================  ==================================================================================

The contributors are the intersection of all owners' masks: incomplete at one owner counts nowhere. An owner closes its
mask when every part is there, or when a quorum is and the rest had time enough (`p2ptrain.averaging.patience`); by the
same rule members wait for masks and means. The owner encodes its mean once and decodes those bytes like everybody else.
(Moshpit SGD, arXiv 2103.03239, section 3; the certificate is ours.) Sparse parts are not encoded again: their list is
the mean. A member that is slow may encode its own parts with another codec than the mean's
(`p2ptrain.averaging.encodings`).

Members that no stream can be opened to own no share. What two of them cannot tell each other, owners pass on.

A failure of any kind ends an attempt with `AttemptFailedError`, which names the peers at fault. What a member holds at
that point stays in its `Attempt`, from which other members can still complete theirs (`p2ptrain.averaging.settle`).
Whoever gives up says so in place of what it owes, and why; the others come to their own conclusion, or blame it.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from p2ptrain.averaging.attempt import Attempt, AttemptFailedError, LateError, UnencodableError
from p2ptrain.averaging.certificate import Certificate, vote
from p2ptrain.averaging.exchange import Exchange
from p2ptrain.averaging.opened_streams import OpenedStreams
from p2ptrain.averaging.origins import Origin, Source
from p2ptrain.averaging.patience import least_mask, patience_seconds, quorum_of_others
from p2ptrain.averaging.pieces import Growing
from p2ptrain.averaging.reduction import ExactMean, chunk_values, mean_root, mean_tree
from p2ptrain.averaging.served_streams import ServedStreams
from p2ptrain.averaging.vouching import Vouching
from p2ptrain.codecs import Codec, CodecError
from p2ptrain.manifest import AveragingSpec
from p2ptrain.network.channel import Channel
from p2ptrain.network.rpc import Rpc
from p2ptrain.runtime import Runtime
from p2ptrain.signing import Signer
from p2ptrain.tasks import until_ended

if TYPE_CHECKING:
    import torch

FIRST_STREAM_SECONDS = 15.0
"""How long an auxiliary waits for the first member."""
OUT_OF_PROPORTION = "out of proportion"
"""What a refusal at the closing of a mask is counted as."""


class Butterfly:
    """One member's part in one attempt. Use once: `run`, `stop_sending`, `stop_serving`.

    Attributes:
        attempt: The roster and what was learnt.
        exchange: What the streams and this state machine share.
        own_mean_exact: The mean of the own share before encoding, for error feedback; None if that lost nothing.
    """

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
        origin: Origin | None = None,
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
            origin: Above level 0: what ``vector`` comes from.
        """
        self.attempt = attempt
        self.exchange = Exchange(attempt, vector, rpc, runtime, signer, spec, part_codec, on_part, origin)
        self._served = ServedStreams(self.exchange)
        self._opened = OpenedStreams(self.exchange)
        self._rpc = rpc
        self._runtime = runtime
        self._signer = signer
        self._spec = spec
        self._on_phase = on_phase
        self._seconds = seconds or spec.round_seconds
        self._began = asyncio.get_running_loop().time()
        self._mask_closed_at: float | None = None
        self._index = self.exchange.index
        self._share = self.exchange.share
        self._closing: asyncio.Task[None] | None = None
        self._vouching = Vouching(self.exchange, self._opened)
        self.own_mean_exact: ExactMean | None = None

    async def serve(self, channel: Channel, request: dict[str, Any], source: Source | None = None) -> None:
        """Handle another member's stream for this attempt; see `ServedStreams.serve`."""
        await self._served.serve(channel, request, source)

    # --- the owner: close the mask, agree, reduce -----------------------------------------------------------------

    async def _close_mask(self, deadline: float) -> None:
        """Decide which parts of the own share count: all, or those of a quorum and whoever came soon after it."""
        try:
            await self._runtime.offload(self._share.measure_own)
        except CodecError as error:
            self.exchange.unencodable = str(error)
            self.exchange.agreed.set()
            return
        if self._share.own_part:
            self.exchange.sent_parts[self._index] = self._share.own_part
        loop, members = asyncio.get_running_loop(), len(self.attempt.roster.tickets)
        others, quorum_at = members - (not self.exchange.lends), None
        quorum = quorum_of_others(others, self._spec.quorum)
        if self.exchange.lends:  # The others would not believe it less.
            quorum = max(quorum, least_mask(members, self._spec.quorum))
        while len(self._share.parts.keys() | self._not_to_come()) < others:
            now = loop.time()
            if quorum_at is None and len(self._share.parts) >= quorum:
                quorum_at = now
            until = deadline if quorum_at is None else min(deadline, self._patience_ends(self._began, quorum_at))
            if now >= until:
                break
            self.exchange.part_changed.clear()
            try:
                async with asyncio.timeout_at(until):
                    await self.exchange.part_changed.wait()
            except TimeoutError:
                continue
        mask = self._share.judge()
        self._note_refusals()
        self.exchange.masks[self._index] = mask
        self._mask_closed_at = loop.time()
        self.exchange.own_mask.set_result(mask)
        self.exchange.agreed.set()

    def _note_refusals(self) -> None:
        """Tell of parts that are well-formed but were left out of the own mask."""
        for index, reason in self._share.refused.items():
            peer = self.attempt.roster.members[index]
            if index == self._index:
                self.exchange.refused_by[index] = reason
            else:
                self.exchange.refused[peer] = f"peer {peer[-8:]} {reason}"
                self._rpc.count_refusal(peer, OUT_OF_PROPORTION)

    def _patience_ends(self, since: float, quorum_at: float) -> float:
        return quorum_at + patience_seconds(quorum_at - since, self._spec.grace_seconds)

    def _not_to_come(self) -> set[int]:
        """The other members whose part was refused, or that fell silent."""
        exchange = self.exchange
        return {self.attempt.roster.index_of(peer) for peer in exchange.refused.keys() | exchange.silent}

    async def _reduce(self, deadline: float) -> None:
        """Wait for all owners' masks, then average the own share and encode the mean once."""
        attempt = self.attempt
        owners = [i for i in range(len(attempt.means)) if attempt.size(i)]
        while any(owner not in self.exchange.masks for owner in owners):
            self._fail_if_lost([attempt.roster.owners[i] for i in owners if i not in self.exchange.masks])
            self.exchange.agreed.clear()
            missing = [owner for owner in owners if owner not in self.exchange.masks]
            if self._index in self.exchange.masks:
                in_time = self.exchange.masks[self._index] | self._share.refused.keys()
                late = [owner for owner in missing if owner not in in_time and attempt.roster.has_member(owner)]
                if late:  # Who was late with its part will not be in time with its share's mean.
                    raise LateError("scatter: a part did not come in time", self._peers(late), as_owners=False)
            async with asyncio.timeout_at(min(deadline, *(self._mask_is_due(owner) for owner in missing))):
                await self.exchange.agreed.wait()
        agreed = frozenset.intersection(*(self.exchange.masks[owner] for owner in owners))
        if not agreed:
            raise AttemptFailedError("no contribution was complete at every owner")
        attempt.contributors = tuple(sorted(agreed))
        self.exchange.agreed_on.set()
        attempt.changed.set()
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

        It needs this member's part, which should be there soon after a quorum of owners like it has its own, and closes
        about when this member's mask does; that of an auxiliary as much later as more is sent by then.
        """
        closed, alike = self._mask_closed_at, self._others_like(owner)
        arrivals = sorted(at for i, at in self.exchange.arrived_at.items() if i in alike)
        needed = quorum_of_others(len(alike), self._spec.quorum)
        if closed is None or len(arrivals) < needed:
            return math.inf
        arrived = self.exchange.arrived_at.get(owner, arrivals[needed - 1])
        if not self.attempt.roster.has_member(owner):  # It gets its parts when the members have theirs.
            begun = sum(self.attempt.size(i) for i in self._others_like(self._index))
            whole = self.attempt.bounds[-1] - self.attempt.size(self._index)
            closed = self._began + (closed - self._began) * whole / begun if begun else math.inf
            # And it may have to wait for somebody who was in time elsewhere.
            closed = self._patience_ends(self._began, max(closed, arrived))
        return self._patience_ends(self._began, max(closed, arrived))

    def _others_like(self, owner: int) -> set[int]:
        """The other owners that are members as this one is, or auxiliaries as it is: their shares are alike."""
        roster, indices = self.attempt.roster, range(len(self.attempt.means))
        others = {i for i in indices if self.attempt.size(i) and i != self._index}
        return {i for i in others if roster.has_member(i) == roster.has_member(owner)}

    async def _reduce_own_share(self) -> None:
        """Reduce the own share and encode the result, piece by piece; the streams send each piece once it is there."""
        attempt = self.attempt
        assert attempt.contributors is not None
        codec, size = attempt.mean_codec_of(self._index), attempt.size(self._index)
        mean = Growing(self._runtime.buffers.lend(codec.encoded_bytes(size)))
        self.exchange.own_mean.set_result(mean)
        tokens = [attempt.roster.tickets[i].tokens for i in attempt.contributors]
        self.own_mean_exact = await self._share.reduce(self._runtime, attempt.contributors, tokens, mean)
        chunk = chunk_values(attempt.codec)
        if self.exchange.audit is None:
            root = await self._runtime.offload(mean_root, codec, mean.data, size, chunk)
        else:
            tree = await self._runtime.offload(mean_tree, codec, mean.data, size, chunk)
            await self.exchange.audit.state(attempt.contributors, tree)
            root = tree.root[0]
        attempt.add_mean(self._index, mean.data, root)

    def _enter(self, phase: str) -> None:
        self.attempt.phase = phase
        self._on_phase(phase)

    def _fail_if_lost(self, needed: list[str]) -> None:
        if self.exchange.unencodable:
            raise UnencodableError(f"the local update cannot be encoded: {self.exchange.unencodable}")
        if self.exchange.broken:
            raise AttemptFailedError(f"{self.attempt.phase}: {self.exchange.broken}")
        if self.exchange.accused:
            peer, fault = next(iter(self.exchange.accused.items()))
            raise AttemptFailedError(f"{self.attempt.phase}: peer {peer[-8:]}: {fault}", (peer,))
        lost = tuple(peer for peer in needed if peer in self.exchange.lost)
        if lost:
            raise AttemptFailedError(f"{self.attempt.phase}: lost {self.exchange.lost[lost[0]]}", lost)
        gave_up = {i: blamed for i, blamed in self.exchange.gave_up.items() if self.attempt.roster.has_member(i)}
        if len(self.attempt.roster.tickets) - len(gave_up) < self.attempt.roster.majority:
            blamed = frozenset.union(*gave_up.values())
            late = [i for i in blamed if self.attempt.roster.owners[i] in needed]
            raise LateError(f"{self.attempt.phase}: most others gave up", self._peers(late))
        if self.attempt.body is None and any(self.attempt.roster.owners[i] in needed for i in gave_up):
            blamed = frozenset.union(*gave_up.values())
            late = [i for i in blamed if self.attempt.roster.owners[i] in needed]
            raise LateError(f"{self.attempt.phase}: another member gave up", self._peers(late))

    @property
    def refusal(self) -> str:
        """Why this member's contribution was refused, by itself or by more than half of the members that own shares.

        Empty otherwise. One hostile owner, or any number of auxiliaries, may say so of anybody: that keeps a
        contribution out of one round, but is not believed.
        """
        members = len(self.attempt.roster.tickets)
        owners = sum(self.attempt.size(i) > 0 for i in range(members))
        refused_by = sum(i < members for i in self.exchange.refused_by)
        if self._index in self.exchange.refused_by or 2 * refused_by > owners:
            return next(iter(self.exchange.refused_by.values()))
        return ""

    # --- the whole ------------------------------------------------------------------------------------------------

    async def run(self) -> Certificate:
        """Take part until a majority signed.

        Raises:
            AttemptFailedError: A member was lost or late, or the deadline passed; ``attempt`` keeps what is held.
        """
        deadline = asyncio.get_running_loop().time() + self._seconds
        self._opened.start(deadline)
        self._closing = self.exchange.tasks.start(self._close_mask(deadline), "mask")
        try:
            await self._reduce(deadline)
            await self._gather(deadline)
            certificate = await self._collect_signatures(deadline)
            await self._opened.tell_result()
            return certificate
        except TimeoutError as error:
            message = f"{self.attempt.phase}: others took too long"
            raise LateError(message, self._awaited()) from error

    async def lend(self) -> Certificate | None:
        """As an auxiliary: reduce the own share of what members count, and serve it until they are through.

        Returns:
            The certificate of the result, if a member told.

        Raises:
            AttemptFailedError: Not enough members sent their part, or said whom they count, before the deadline.
        """
        loop, exchange = asyncio.get_running_loop(), self.exchange
        deadline = loop.time() + self._seconds
        self._closing = exchange.tasks.start(self._close_mask(deadline), "mask")
        try:
            while not (agreed := exchange.agreed_contributors()):
                if exchange.broken:
                    raise AttemptFailedError(f"scatter: {exchange.broken}")
                if self._served.all_are_gone:
                    raise AttemptFailedError("scatter: the members are gone")
                until = deadline if self._served.anybody_came else min(deadline, self._began + FIRST_STREAM_SECONDS)
                exchange.agreed.clear()
                async with asyncio.timeout_at(until):
                    await exchange.agreed.wait()
            self.attempt.contributors = agreed
            self._enter("reduce")
            await self._reduce_own_share()
            self._enter("gather")
            async with asyncio.timeout_at(deadline):
                await self._served.until_told()
        except CodecError as error:
            raise AttemptFailedError(f"the mean cannot be encoded: {error}") from error
        except TimeoutError as error:
            raise LateError(f"{self.attempt.phase}: others took too long") from error
        return exchange.result

    def _awaited(self) -> tuple[str, ...]:
        """The other members whose mask, mean or signature is missing, whichever this member waits for."""
        attempt, members = self.attempt, self.attempt.roster.members
        if attempt.contributors is None:
            missing = [i for i in range(len(attempt.means)) if attempt.size(i) and i not in self.exchange.masks]
        elif not attempt.is_complete():
            missing = [i for i, mean in enumerate(attempt.means) if mean is None]
        elif self._rpc.peer_id not in attempt.proofs:
            missing = [i for i in range(len(attempt.means)) if attempt.size(i) and i not in self.exchange.checked]
        else:
            missing = [i for i, member in enumerate(members) if member not in attempt.proofs]
        silent = [i for i in missing if i not in self.exchange.gave_up]
        return self._peers(silent or missing)

    def _peers(self, indices: Iterable[int]) -> tuple[str, ...]:
        return tuple(self.attempt.roster.owners[i] for i in sorted(indices) if i != self._index)

    async def _gather(self, deadline: float) -> None:
        attempt, loop = self.attempt, asyncio.get_running_loop()
        members, lenders = self._others_like(self._index), self._others_like(len(attempt.means))
        began, until = loop.time(), deadline
        while not attempt.is_complete():
            missing = [i for i, mean in enumerate(attempt.means) if mean is None]
            self._fail_if_lost([attempt.roster.owners[i] for i in missing])
            here = [(len(each), len(each.difference(missing))) for each in (members, lenders)]
            if until == deadline and all(came >= quorum_of_others(all_, self._spec.quorum) for all_, came in here):
                usual = loop.time() - began  # For the longest share that is here; a longer one takes longer.
                theirs = (members | lenders).difference(missing)
                usual *= max(1.0, max(map(attempt.size, missing)) / max(map(attempt.size, theirs), default=1))
                until = min(deadline, self._patience_ends(began, began + usual))
            attempt.changed.clear()
            async with asyncio.timeout_at(until):
                await attempt.changed.wait()
        self._enter("commit")
        body = attempt.make_body()
        attempt.body = body
        attempt.changed.set()
        if self.exchange.audit is not None:
            await self._vouching.pass_checks(deadline, self._fail_if_lost)
        if self.exchange.clears:
            await self._vouching.wait_for_clears(deadline, self._fail_if_lost)
        if self.exchange.audit is None or self.exchange.certificate() is None:  # Nobody signs what it did not check.
            attempt.proofs[self._rpc.peer_id] = self._signer.sign(vote(body.body_hash))
        self.exchange.own_proof.set()
        attempt.changed.set()

    def accuse(self, peer: str, fault: str) -> None:
        """Give up if it is not too late: ``peer`` was proved to have falsified a mean."""
        if peer in self.attempt.roster.owners:
            self.exchange.accused[peer] = fault
            self.attempt.disputed = True
            self.exchange.changed()

    async def _collect_signatures(self, deadline: float) -> Certificate:
        attempt = self.attempt
        while (certificate := self.exchange.certificate()) is None:
            if self.exchange.evidence:
                self._vouching.fail_on_faults()
            for fault in self.exchange.contradicts.values():
                raise AttemptFailedError(f"{attempt.phase}: {fault}")
            # Whoever cannot be reached may still give its signature to somebody that can.
            gave_up, lost = self.exchange.gave_up, self.exchange.lost
            gone = [
                t.peer
                for index, t in enumerate(attempt.roster.tickets)
                if t.peer not in attempt.proofs and (index in gave_up or (t.reachable and t.peer in lost))
            ]
            if len(attempt.roster.tickets) - len(gone) < attempt.roster.majority:
                self._fail_if_lost(gone)
            attempt.changed.clear()
            async with asyncio.timeout_at(deadline):
                await attempt.changed.wait()
        self.exchange.certified.set()
        return certificate

    def give_up(self, suspects: tuple[str, ...]) -> None:
        """Tell the other members that this one has given up, and whom it blames."""
        self.attempt.withholds = self.attempt.size(self._index) > 0 and not self.exchange.own_mean.done()
        if not self.exchange.given_up.done():
            self.exchange.given_up.set_result([self.attempt.roster.index_of(peer) for peer in suspects])

    def release(self) -> None:
        """Let go of what may be large, without waiting for the garbage collector."""
        self.exchange.sent_parts = {}
        self.exchange.origin = None
        self.own_mean_exact = None

    async def stop_sending(self) -> None:
        """End the streams that this member opened; the vector is not read any more when this returns."""
        if self.exchange.audit is not None:
            self.exchange.audit.stop_reading()
        if self._closing is not None:
            self._closing.cancel()
            await until_ended(self._closing)
        await self._vouching.stop()
        await self._opened.stop()

    async def stop_serving(self, linger: bool) -> None:
        """End the others' streams; with ``linger``, first let them fetch mean and signature for a bounded time."""
        await self._served.stop(linger)
        await self._opened.end()
