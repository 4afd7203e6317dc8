"""How a session makes sure that means are right before it signs them: here, not at all.

`p2ptrain.averaging.allreduce.spot_checks` does.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING

from p2ptrain.averaging.allreduce.messages import Statements
from p2ptrain.averaging.vector.merkle_sum import SumTree
from p2ptrain.averaging.vector.reduce import PartCheck, RangeCheck, mean_root
from p2ptrain.buffers import Buffer
from p2ptrain.codecs import Codec
from p2ptrain.network.rpc.channel import Channel

if TYPE_CHECKING:
    from p2ptrain.averaging.allreduce.member import Member
    from p2ptrain.averaging.allreduce.outgoing import OutgoingStream
    from p2ptrain.averaging.allreduce.session import AllReduceSession

Complaint = tuple[int, int]
"""(owner, chunk) that the owner did not show."""


class Verifier:
    """Trusts the owners: the manifest says so, or means are lists of parts, or nobody else is there.

    Attributes:
        evidence: Against an owner that falsified its mean; empty without one.
    """

    def __init__(self, session: AllReduceSession) -> None:
        self._session = session
        self.evidence = b""

    # As a contributor, on an outgoing stream.

    def new_check(self, codec: Codec) -> RangeCheck:
        """Return what inspects a part of this member's while it is encoded in ``codec``."""
        return RangeCheck(codec, self._session.context.spec)

    async def part_sent(self, stream: OutgoingStream, check: RangeCheck) -> None:
        """Sign the part that ``check`` saw, if parts are signed."""

    async def mean_received(self, stream: OutgoingStream, tree: SumTree) -> bool:
        """Check an owner's mean, whose tree this is; return True if it passed."""
        return True

    # As an owner, on an incoming stream.

    async def part_received(self, channel: Channel, sender: Member, codec: str, check: PartCheck) -> SumTree | None:
        """Hold a part against what its sender signs; return the tree over its chunks, if there is one.

        Raises:
            IntegrityError: The sender signs something else.
        """
        return None

    async def state(self, mean: Buffer) -> bytes:
        """Return the hash that names the own share's mean, having signed it if means are."""
        attempt, own = self._session.attempt, self._session.own
        codec = attempt.mean_codec_of(own.index)
        return await self._session.context.runtime.offload(mean_root, codec, mean, own.size, attempt.chunk)

    async def mean_sent(self, channel: Channel) -> bool:
        """Answer a check; return False if a majority had signed, so that signatures answered it."""
        return True

    async def before_signature(self, channel: Channel) -> None:
        """Say that the own checks passed, once they have, if members wait for that."""

    async def open_chunks(self, channel: Channel, chunks: Sequence[int]) -> bool:
        """Answer a question for chunks of the own share; return False if signatures answered it."""
        return True

    def heard(self) -> Statements:
        """Return what owners stated to this member."""
        return Statements(())

    # The decision.

    async def may_sign(self) -> bool:
        """Return True once all checks passed; False if a majority signed before.

        Raises:
            AttemptFailedError: A check did not pass, or an owner was lost.
        """
        return True

    def fail_on_evidence(self) -> None:
        """Raise `AttemptFailedError` if there is evidence against an owner."""

    async def other_result(self, member: Member) -> None:
        """Look into why a member signed another result."""

    def faulty(self) -> Collection[Member]:
        """Return the owners whose shares did not pass."""
        return ()

    def note_clear(self, member: Member) -> None:
        """Take down that a member's checks passed."""

    def note_complaints(self, complaints: Sequence[Complaint]) -> None:
        """Take down what a member could not check that gave up."""

    def complaints(self) -> tuple[Complaint, ...]:
        """Return what this member could not check."""
        return ()

    async def stop(self) -> None:
        """Look into nothing more, and read this member's contribution no more: it may change from now on."""
