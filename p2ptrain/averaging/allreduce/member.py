"""The members of a group in one attempt: their state, detection of silent ones, and the verifier that trusts them."""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from p2ptrain.averaging.allreduce.messages import Request
from p2ptrain.averaging.commit.votes import ask_voters
from p2ptrain.averaging.protocol.certificate import Ticket
from p2ptrain.averaging.timing.deadlines import keepalive_seconds, silence_seconds
from p2ptrain.averaging.vector.chunks import PartCheck, RangeCheck, SumTree
from p2ptrain.codecs import Codec
from p2ptrain.network.rpc.channel import SILENCE_SECONDS, Channel

if TYPE_CHECKING:
    from p2ptrain.averaging.allreduce.session import AllReduceSession
    from p2ptrain.averaging.allreduce.streams import OutgoingStream

ALLREDUCE = "allreduce"
OPEN_TIMEOUT_SECONDS = 10.0
Complaint = tuple[int, int]  # (owner, chunk) that the owner did not show


@dataclass(eq=False)
class Member:
    """One member of the roster, this peer included: its messages and the state of its two streams.

    Attributes:
        size: Number of values in its share.
        mask: As an owner: indices of the members whose parts it holds completely.
        arrived_at: As an owner: loop time at which it acknowledged this peer's part.
        refused_us: As an owner: why it refused this peer's part; empty if it did not.
        refusal: Why this peer refused its part; empty if it did not.
        outgoing: The stream that this peer opened to it; ``lost`` says why it broke.
        round_trip_seconds: Measured when this peer opened its stream, or before; 0 until it is open.
        has_mean: True once only signatures are pending on ``outgoing``.
        is_through: True once ``outgoing`` is complete.
        is_silent: True if its open stream hit the silence timeout.
        was_cut_short: True if ``outgoing`` broke before the part was acknowledged; the transfer may have been too slow.
        blames: Indices of the members that it blames; None unless it gave up.
        contradiction: That it signed another result; set only in a group of two.
        accusation: Fault of which evidence convicts it.
        is_checked: As an owner: True once its share passed this peer's checks.
        is_clear: True once it reported that its own checks passed.
    """

    index: int
    ticket: Ticket
    size: int
    mask: frozenset[int] | None = None
    arrived_at: float | None = None
    refused_us: str = ""
    refusal: str = ""
    outgoing: Channel | None = None
    incoming: Channel | None = None
    is_opening: bool = False
    round_trip_seconds: float = 0.0
    has_mean: bool = False
    is_through: bool = False
    lost: str = ""
    is_silent: bool = False
    was_cut_short: bool = False
    blames: frozenset[int] | None = None
    contradiction: str = ""
    accusation: str = ""
    is_checked: bool = False
    is_clear: bool = False

    @property
    def peer(self) -> str:
        return self.ticket.peer

    @property
    def gave_up(self) -> bool:
        return self.blames is not None

    @property
    def last_heard(self) -> float:
        """Loop time of its last message on either stream; one may be idle while data flow on the other."""
        channels = (each for each in (self.outgoing, self.incoming) if each is not None)
        return max((each.heartbeat.last_heard() for each in channels), default=-math.inf)


def first_to_give_up(blames: Mapping[int, frozenset[int]]) -> int:
    """Return a member that gave up for what it saw itself; the others name one that gave up before them.

    Args:
        blames: By index of each member that gave up, at least one: the members that it blames.
    """
    index, left = min(blames), set(blames)
    while named := blames[index] & (left := left - {index}):
        index = min(named)
    return index


class Liveness:
    """Opens streams to members, and detects silent ones."""

    def __init__(self, session: AllReduceSession) -> None:
        self._session = session
        self._grace_seconds = session.context.spec.grace_seconds

    @contextlib.asynccontextmanager
    async def open(self, member: Member, request: Request, expected_bytes: int = 0) -> AsyncIterator[Channel]:
        """Open a stream to a member, which must send several keepalives in a grace period; see `Rpc.open`."""
        loop, began, rpc = asyncio.get_running_loop(), asyncio.get_running_loop().time(), self._session.context.rpc
        async with rpc.open(
            member.peer, ALLREDUCE, request, OPEN_TIMEOUT_SECONDS, expected_bytes=expected_bytes
        ) as channel:
            member.round_trip_seconds = max(loop.time() - began, rpc.dial_seconds.get(member.peer, 0.0))
            seconds = self._silence_seconds(member)
            channel.heartbeat.expect(seconds, partial(self._silent_at, member, seconds))
            yield channel

    def _silence_seconds(self, member: Member) -> float:
        return silence_seconds(self._grace_seconds, member.round_trip_seconds)

    def _silent_at(self, member: Member, seconds: float, last_heard: float) -> float:
        """Return when a member counts as silent if it was last heard at ``last_heard`` on the outgoing stream.

        If the remaining members are no majority, this peer has probably lost its own link. It then waits for the
        channel's longer timeout: members that finish the round without the others fork the lineage.
        """
        members = self._session.members
        left = len(members) - sum(map(self._is_quiet, members))
        if left < self._session.attempt.roster.majority:
            seconds = max(seconds, SILENCE_SECONDS)
        return max(last_heard, member.last_heard) + seconds

    def _is_quiet(self, member: Member) -> bool:
        """Return True if a member is lost, or was silent for nearly its silence timeout."""
        if member is self._session.own or member.is_through or member.gave_up:
            return False
        if member.lost:  # It may be unreachable, but have opened a stream itself.
            return member.is_silent or member.incoming is None or member.incoming.lost.done()
        if member.outgoing is None:
            return False
        quiet = asyncio.get_running_loop().time() - member.last_heard
        return quiet >= self._silence_seconds(member) - keepalive_seconds(self._grace_seconds)

    def note_silent(self, member: Member) -> None:
        """Record that a member fell silent, and every other one that did so with it."""
        member.is_silent = True
        self.note_quiet()

    def note_quiet(self) -> None:
        """Record as silent every member that was quiet for about a keepalive interval less than its silence timeout.

        Members that share a machine or a link freeze together. Each of them would otherwise break a separate attempt.
        """
        for other in self._session.others:
            if other.outgoing is not None and not other.lost and self._is_quiet(other):
                other.lost = f"peer {other.peer[-8:]} sent nothing any more"
                other.is_silent = True
        self._session.changed()


class Verifier:
    """Trusts the owners: spot checks are off, the codec is sparse, or the group has one member.

    Attributes:
        evidence: Against an owner that falsified its mean; empty without one.
        faults: By owner whose share failed a check: how, and whether it was only late.
        complaints: Chunks that this member could not check.
    """

    def __init__(self, session: AllReduceSession) -> None:
        self._session = session
        self.evidence = b""
        self.faults: dict[Member, tuple[str, bool]] = {}
        self.complaints: list[Complaint] = []

    # As a contributor, on an outgoing stream.

    def new_check(self, codec: Codec) -> RangeCheck:
        """Return the check that a part passes through while this member encodes it in ``codec``."""
        return RangeCheck(codec, self._session.context.spec)

    async def before_part(self, channel: Channel) -> None:
        """Send an owner what it needs before the part: key shares, if parts are masked."""

    async def part_sent(self, stream: OutgoingStream, check: RangeCheck) -> None:
        """Send the commitment to the part that ``check`` saw, if parts are signed."""

    async def mean_received(self, stream: OutgoingStream, tree: SumTree) -> bool:
        """Check an owner's mean, whose chunks form ``tree``; return True if it passed."""
        return True

    # As an owner, on an incoming stream.

    async def part_follows(self, channel: Channel, sender: Member) -> None:
        """Receive a member's key shares, if parts are masked."""

    async def part_received(self, channel: Channel, sender: Member, codec: str, check: PartCheck) -> SumTree | None:
        """Return the tree of a part's chunks, if parts are signed; raise `IntegrityError` on a false commitment."""
        return None

    async def state(self, root: bytes) -> None:
        """Sign a statement about the own share's mean, which has this root, if means are signed."""

    async def mean_sent(self, channel: Channel) -> bool:
        """Answer a check; return False if the answer was a majority's signatures."""
        return True

    async def before_signature(self, channel: Channel) -> None:
        """Send `Clear` once the own checks passed, if members wait for it."""

    async def answer(self, channel: Channel, question: Request) -> None:
        """Answer a question beside the main stream: open chunks, or send the statements of owners."""

    # The decision.

    async def open_sums(self) -> None:
        """Turn masked sums into means, once all are here; raise `AttemptFailedError` if that is not safe."""

    async def may_sign(self) -> bool:
        """Return True once all checks passed; False if a majority signed before.

        Raises:
            AttemptFailedError: A check failed, or an owner was lost.
        """
        return True

    async def ask_voters(self) -> None:
        """Ask the voters beyond the roster to sign the result."""
        await ask_voters(self._session.context, self._session.attempt, self._session.own.index)

    def fail_on_evidence(self) -> None:
        """Raise `AttemptFailedError` if there is evidence against an owner."""

    async def other_result(self, member: Member) -> None:
        """Find out why a member signed another result."""

    def note_clear(self, member: Member) -> None:
        """Record that a member's checks passed."""

    def note_complaints(self, complaints: Sequence[Complaint]) -> None:
        """Record the chunks that a member could not check before it gave up."""

    async def stop(self) -> None:
        """Stop all checks, and stop reading the own contribution, which may change from now on."""
