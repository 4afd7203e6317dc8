"""Secure aggregation in a session: owners add masked parts, and the group unmasks the sums, never a single part.

After the session's phases, whose parts and means are masked here, an attempt ends in three more steps:

1. Each member that holds all masked sums signs them and the contributors, once in the attempt.
2. A member that holds `Masking.threshold` signatures of the same, its own included, reveals its shares of the masks.
3. With as many members' shares, each member recovers the masks of the sum, subtracts them, and signs the mean.

Until a member reveals, a retry with new masks may send the same contribution; afterwards it is spent (`SpentError`).
At least ``threshold`` members contribute to a sum, and as many reveal: an honest contributor is among those that do.
Its contribution is in this sum alone, which therefore tells nothing of those that others send again.

Members that are lost in these steps are not needed: everybody holds the sums. Owners forward signatures and shares
between members that cannot reach each other.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, TypeVar

from p2ptrain.averaging.allreduce import messages
from p2ptrain.averaging.allreduce.member import Member, Verifier
from p2ptrain.averaging.commit.attempt import AttemptFailedError
from p2ptrain.averaging.masking.codec import Stream
from p2ptrain.averaging.masking.keys import MaskError, Masking
from p2ptrain.averaging.vector.chunks import SumTree
from p2ptrain.buffers import Buffer
from p2ptrain.errors import ProtocolError
from p2ptrain.network.rpc.channel import Channel
from p2ptrain.tasks import together

if TYPE_CHECKING:
    from p2ptrain.averaging.allreduce.session import AllReduceSession
    from p2ptrain.averaging.allreduce.streams import OutgoingStream

logger = logging.getLogger(__name__)

T = TypeVar("T")
MAX_SHARES_BYTES = 1 << 18
AGREED, REVEALED = b"p2ptrain agreed", b"p2ptrain revealed"
"""Domains of signatures."""


class Unmasking(Verifier):
    """Exchanges key shares, agrees on the masked sums, and unmasks them."""

    def __init__(self, session: AllReduceSession, masking: Masking) -> None:
        super().__init__(session)
        self._masking = masking
        self._own_boxes = masking.boxes()
        self._bundles: dict[int, tuple[bytes, ...]] = {masking.own: self._own_boxes}
        self._boxes: dict[int, bytes] = {masking.own: self._own_boxes[masking.own]}
        self._forwarded: set[Member] = set()
        self._result = b""
        self._agreed: dict[int, bytes] = {}
        self._unverified: list[tuple[int, bytes]] = []
        self._revealed: dict[int, messages.Revealed] = {}
        self._has_agreed, self._all_agreed = asyncio.Event(), asyncio.Event()
        self._has_revealed, self._all_revealed = asyncio.Event(), asyncio.Event()

    # --- on streams -----------------------------------------------------------------------------------------------

    async def before_part(self, channel: Channel) -> None:
        await channel.send(messages.KeyShares(self._own_boxes))

    async def part_follows(self, channel: Channel, sender: Member) -> None:
        session = self._session
        boxes = (await channel.receive(messages.KeyShares, session.context.spec.round_seconds)).boxes
        if len(boxes) != self._masking.count:
            raise ProtocolError(channel.remote, f"sent key shares for {len(boxes)} members")
        self._bundles[sender.index] = boxes
        self._boxes[sender.index] = boxes[self._masking.own]
        session.changed()

    async def mean_received(self, stream: OutgoingStream, tree: SumTree) -> bool:
        """As a member, after an owner's masked sum: hand in signature and shares, and receive the others'."""
        session, channel, own = self._session, stream.channel, self._masking.own
        boxes = (await stream.hear(messages.ForwardedShares)).boxes[: self._masking.count]
        for dealer, box in (await session.context.runtime.offload(self._that_open, boxes)).items():
            self._boxes.setdefault(dealer, box)
        self._forwarded.add(stream.member)
        session.changed()
        await stream.until(self._has_agreed.is_set)
        await channel.send(messages.Agreed(self._agreed[own]))
        self._add_proofs((await stream.hear(messages.AllAgreed, max_bytes=MAX_SHARES_BYTES)).proofs)
        await stream.until(self._has_revealed.is_set)
        await channel.send(self._revealed[own])
        self._add_revealed(dict((await stream.hear(messages.AllRevealed, max_bytes=MAX_SHARES_BYTES)).revealed))
        return True

    def _that_open(self, boxes: tuple[bytes, ...]) -> dict[int, bytes]:
        """Return the forwarded boxes that open, by dealer: only the dealer can make them. Runs in a pool thread.

        Who falsified another one, its forwarder or its dealer, is unknown; a further owner may have the right one.
        """
        found = {}
        for dealer, box in enumerate(boxes):
            if not box:
                continue
            try:
                self._masking.open_box(dealer, box)
            except MaskError as error:
                logger.debug("a forwarded box is not kept: %s", error)
            else:
                found[dealer] = box
        return found

    async def mean_sent(self, channel: Channel) -> bool:
        """As an owner, after the own masked sum: forward what other members sent, as soon as it suffices."""
        roster, seconds = self._session.attempt.roster, self._session.context.spec.round_seconds
        index = roster.index_of(channel.remote)
        bundles = [self._bundles.get(dealer) for dealer in range(self._masking.count)]
        await channel.send(messages.ForwardedShares(tuple(bundle[index] if bundle else b"" for bundle in bundles)))
        agreed = await channel.receive(messages.Agreed, seconds)
        self._add_proofs([(index, agreed.proof)])
        await self._all_agreed.wait()
        await channel.send(messages.AllAgreed(self._untold(index, self._agreed)))
        self._add_revealed({index: await channel.receive(messages.Revealed, seconds, MAX_SHARES_BYTES)})
        await self._all_revealed.wait()
        await channel.send(messages.AllRevealed(self._untold(index, self._revealed)))
        return True

    def _untold(self, receiver: int, told: Mapping[int, T]) -> tuple[tuple[int, T], ...]:
        """Return what the receiver cannot have heard from the members themselves, who tell it all owners."""
        own = self._masking.own
        return ((own, told[own]),) if self._session.members[receiver].size else tuple(sorted(told.items()))

    def _add_proofs(self, proofs: Collection[tuple[int, bytes]]) -> None:
        """Keep the valid signatures of the result that this member signed, once it did."""
        self._unverified += [(index, proof) for index, proof in proofs if index < self._masking.count]
        if not self._result:
            return
        members, signer = self._masking.roster.members, self._session.context.signer
        for index, proof in self._unverified:
            if index not in self._agreed and signer.verify(members[index], AGREED + self._result, proof):
                self._agreed[index] = proof
        self._unverified.clear()
        self._session.changed()

    def _add_revealed(self, revealed: Mapping[int, messages.Revealed]) -> None:
        count, signer = self._masking.count, self._session.context.signer
        for index, each in revealed.items():
            if index >= count or index in self._revealed or len(each.shares) != count:
                continue
            if signer.verify(self._masking.roster.members[index], self._message(each.shares), each.proof):
                self._revealed[index] = each
        self._session.changed()

    def _message(self, shares: tuple[bytes, ...]) -> bytes:
        return REVEALED + self._result + b"".join(shares)

    # --- the decision ---------------------------------------------------------------------------------------------

    async def open_sums(self) -> None:
        """Agree on the masked sums, reveal the shares of their masks, and replace the sums by means.

        Raises:
            AttemptFailedError: Too few members contributed, agree, or are left.
        """
        session, masking, attempt = self._session, self._masking, self._session.attempt
        runtime, signer, own = session.context.runtime, session.context.signer, self._masking.own
        contributors = attempt.contributors
        assert contributors is not None
        if len(contributors) < (least := max(masking.spec.min_contributors, masking.threshold)):
            raise AttemptFailedError(f"{attempt.phase}: {len(contributors)} members contributed, and {least} must")
        self._warn_of_clipping()
        shares = await self._own_shares(contributors)
        self._result = masking.result_hash(contributors, attempt.hashes)
        self._agreed[own] = await runtime.offload(signer.sign, AGREED + self._result)
        self._has_agreed.set()
        self._add_proofs(())
        await self._wait_for(self._agreed, lambda: len(self._agreed) >= masking.threshold, "agree on the masked sums")
        self._all_agreed.set()
        attempt.is_spent = own in contributors
        proof = await runtime.offload(signer.sign, self._message(shares))
        self._revealed[own] = messages.Revealed(shares, proof)
        self._has_revealed.set()
        session.changed()
        streams: list[Stream] | None = None
        tried = 0

        def suffices() -> bool:
            nonlocal streams, tried
            if len(self._revealed) >= masking.threshold and len(self._revealed) > tried:
                tried = len(self._revealed)
                told = {index: each.shares for index, each in self._revealed.items()}
                streams = masking.recovered(contributors, told)
                self._all_revealed.set()
            return streams is not None

        await self._wait_for(self._revealed, suffices, "reveal right shares of the masks")
        assert streams is not None
        means = await together("unmask", (runtime.offload(self._mean, i, streams) for i in range(masking.count)))
        await runtime.offload(attempt.unmask, means)

    async def _own_shares(self, contributors: Collection[int]) -> tuple[bytes, ...]:
        """Return this member's share of one secret of each member, or fail before anything is revealed."""
        session, masking = self._session, self._masking
        while missing := [member for member in session.others if not self._boxes.get(member.index)]:
            left = [owner for owner in session.other_owners if owner not in self._forwarded and not owner.lost]
            if not left:
                raise AttemptFailedError("the masks of lost members cannot be recovered", session.ids(missing))
            session.fail_if_lost(())
            await session.wait_for(missing)
        shares = []
        for dealer in range(masking.count):
            try:
                pair, own = await session.context.runtime.offload(masking.open_box, dealer, self._boxes[dealer])
            except MaskError as error:
                raise AttemptFailedError(str(error), (error.peer,)) from error
            shares.append(own if dealer in contributors else pair)
        return tuple(shares)

    async def _wait_for(self, told: Collection[int], suffices: Callable[[], bool], what: str) -> None:
        """Wait until what enough members ``told`` suffices; fail once too few of them are left."""
        session, masking = self._session, self._masking
        while not suffices():
            gone = [m for m in session.others if m.index not in told and (m.gave_up or (m.ticket.reachable and m.lost))]
            left = masking.count - len(gone)
            if left < masking.threshold or left == len(told):
                reason = f"{session.attempt.phase}: fewer than {masking.threshold} of {masking.count} members {what}"
                raise AttemptFailedError(reason, session.ids(gone))
            session.fail_if_lost(())
            await session.wait_for([m for m in session.others if m.index not in told])

    def _mean(self, index: int, streams: list[Stream]) -> Buffer:
        """Return the encoded mean of a share; runs in a pool thread."""
        attempt, buffers = self._session.attempt, self._session.context.runtime.buffers
        masked, contributors = attempt.means[index], attempt.contributors
        assert masked is not None
        assert contributors is not None
        mean = memoryview(masked)
        if index == self._masking.own or mean.readonly:  # Others may still fetch the own masked sum.
            mean = buffers.lend(len(masked))
        self._masking.open_sum(masked, attempt.bounds[index], contributors, streams, mean)
        return mean

    def _warn_of_clipping(self) -> None:
        if clipped := self._masking.clipped.number:
            logger.warning(
                "round %d: %d values of this peer's update were beyond secure_aggregation.range = %g, and count as"
                " that: raise the range, or lower the learning rate",
                self._session.attempt.head.round, clipped, self._masking.spec.range,
            )  # fmt: skip
