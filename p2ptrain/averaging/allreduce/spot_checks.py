"""Spot checks of means before a session signs them.

`p2ptrain.averaging.verification.audit` explains the checks. A member signs after its own checks passed, and after the
others' passed or timed out. The others check any chunk that an owner did not show to one member before they sign.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from p2ptrain.averaging.allreduce import messages
from p2ptrain.averaging.allreduce.member import Complaint, Member, Verifier
from p2ptrain.averaging.commit.attempt import AttemptFailedError, LateError
from p2ptrain.averaging.timing.deadlines import FORWARD_SECONDS, quorum_of_others
from p2ptrain.averaging.vector.chunks import PartCheck, RangeCheck, SumTree
from p2ptrain.averaging.verification.audit import Audit, FalseMeanError
from p2ptrain.codecs import Codec
from p2ptrain.errors import (
    DeadlineError,
    IntegrityError,
    PeerError,
    PeerLostError,
    PeerRefusedError,
    PeerSilentError,
    ProtocolError,
)  # fmt: skip
from p2ptrain.network.rpc.channel import Channel
from p2ptrain.tasks import Tasks

if TYPE_CHECKING:
    from p2ptrain.averaging.allreduce.session import AllReduceSession
    from p2ptrain.averaging.allreduce.streams import OutgoingStream

logger = logging.getLogger(__name__)

CLEAR_SHARE = 0.9  # fraction of the usual timeout for the others' checks; the rest is left for their signatures
ANSWER_SHARE = 0.75  # the same for an owner's answer; < `CLEAR_SHARE`: complaints arrive before the others sign
REASON_SECONDS = 1.0  # how long to wait for the reason why a needed owner gave up
RETRY_SECONDS = 0.3


class SpotChecks(Verifier):
    """Checks random chunks of the other shares, and answers for the own share."""

    def __init__(self, session: AllReduceSession, slow_checkers: set[str]) -> None:
        """``slow_checkers`` are peers whose checks timed out in an earlier attempt; they are not waited for."""
        super().__init__(session)
        context = session.context
        self.audit = Audit(session.attempt, session.share, context.runtime, context.signer)
        self._slow_checkers = slow_checkers
        self._unshown: dict[Member, Sequence[int]] = {}
        self._others_complaints: list[Complaint] = []
        self._is_clear = asyncio.Event()
        self._looking = Tasks(session.on_defect)
        self._num_looking = 0

    @property
    def _waits_for_clear(self) -> bool:
        """True if members wait for each other's checks; in a group of two both must sign anyway."""
        return len(self._session.members) > 2

    # --- as a contributor -----------------------------------------------------------------------------------------

    def new_check(self, codec: Codec) -> RangeCheck:
        return self.audit.new_check(codec)

    async def part_sent(self, stream: OutgoingStream, check: RangeCheck) -> None:
        assert isinstance(check, PartCheck)
        codec = self._session.contribution.codec.name
        await stream.channel.send(messages.Committed(await self.audit.commit(stream.member.index, codec, check)))

    async def mean_received(self, stream: OutgoingStream, tree: SumTree) -> bool:
        session, owner = self._session, stream.member
        stated = await stream.hear(messages.Stated)
        try:
            self.audit.hear(owner.index, stated.statement, tree)
        except IntegrityError as error:
            raise ProtocolError(owner.peer, str(error)) from error
        # Checks start after the last mean arrived, and do not share the link with it.
        await stream.until(lambda: session.attempt.body is not None)
        chunks = self.audit.draw(owner.index, self._num_checkers(owner))
        await stream.channel.send(messages.Check(tuple(chunks)))
        try:
            owner.is_checked = await self._examine(owner, chunks, stream.channel)
        except PeerSilentError:
            raise
        except (PeerLostError, PeerRefusedError):
            await asyncio.sleep(RETRY_SECONDS)  # If the owner gave up, its reason is in transit.
            owner.is_checked = await self._ask_again(owner, chunks)
        session.changed()
        return owner.is_checked

    async def _examine(self, owner: Member, chunks: Sequence[int], channel: Channel) -> bool:
        """Receive and judge an owner's answer; False if it is wrong, or the owner gave up or sent signatures."""
        if not chunks:
            return True
        session = self._session
        now = asyncio.get_running_loop().time()
        seconds = session.straggler_deadline(session.began, now) - now
        # In a group of two, no member signs before the other: a slow link may take longer.
        seconds = ANSWER_SHARE * seconds if self._waits_for_clear else seconds + now - session.began
        try:
            match await channel.receive(messages.FromOwner, seconds):
                case messages.GaveUp() as message:
                    session.note_gave_up(owner, message)
                case messages.Signatures() as message:
                    session.note_signatures(message)
                    if session.attempt.certificate() is None:
                        await self.other_result(owner)
                    self._unshown[owner] = chunks
                    session.changed()
                case messages.Opens(size) if 0 < size <= self.audit.max_answer_bytes(owner.index, len(chunks)):
                    answer = await channel.receive_bytes(size, seconds)
                    await self.audit.check(owner.index, chunks, answer)
                    return True
                case _:
                    raise IntegrityError("does not answer a check")
        except FalseMeanError as error:
            self._find_guilty(error, chunks)
        except DeadlineError as error:
            self._find_fault(owner, chunks, str(error), late=True)
        except (IntegrityError, ProtocolError) as error:
            self._find_fault(owner, chunks, str(error), late=False)
        return False

    async def _ask_again(self, owner: Member, chunks: Sequence[int]) -> bool:
        """Check, on a new stream, chunks that an owner did not show; return True if they passed."""
        request = messages.AskChunks(self._session.attempt.roster.group_id, tuple(chunks))
        try:
            async with self._session.liveness.open(owner, request) as channel:
                return await self._examine(owner, chunks, channel)
        except (PeerError, DeadlineError) as error:
            self._find_fault(owner, chunks, str(error), late=True)
            return False

    async def other_result(self, member: Member) -> None:
        """Compare statements with a member: an owner may have sent it another one."""
        context, limit = self._session.context, self.audit.max_statements_bytes
        try:
            async with self._session.liveness.open(
                member, messages.AskStatements(self._session.attempt.roster.group_id)
            ) as channel:
                heard = await channel.receive(messages.FromOwner, FORWARD_SECONDS + context.spec.grace_seconds, limit)
            if isinstance(heard, messages.Statements):
                await context.runtime.offload(self.audit.compare, heard.statements)
        except FalseMeanError as error:
            self._find_guilty(error, [])
        except (PeerError, DeadlineError, IntegrityError) as error:
            logger.debug("peer %s does not say what was stated to it: %s", member.peer[-8:], error)

    # --- as an owner ----------------------------------------------------------------------------------------------

    async def part_received(self, channel: Channel, sender: Member, codec: str, check: PartCheck) -> SumTree | None:
        committed = await channel.receive(messages.Committed, self._session.context.spec.round_seconds)
        return await self.audit.admit(sender.index, codec, check, committed.commitment)

    async def state(self, root: bytes) -> None:
        contributors = self._session.attempt.contributors
        assert contributors is not None
        await self.audit.state(contributors, root)

    async def mean_sent(self, channel: Channel) -> bool:
        """Answer a check; once a majority has signed, send the signatures instead: a slow member needs no more."""
        session = self._session
        await channel.send(messages.Stated(await asyncio.shield(self.audit.statement)))
        # It ends with the channel: cancelling it would end the channel before a `GaveUp`.
        asking = session.tasks.call(channel.receive(messages.Check, session.context.spec.round_seconds), "asking")
        asking.add_done_callback(lambda task: task.cancelled() or task.exception())
        async with Tasks() as tasks:
            certified = tasks.call(session.is_certified.wait(), "certified")
            await asyncio.wait({asking, certified}, return_when=asyncio.FIRST_COMPLETED)
        if asking.done():
            chunks = asking.result().chunks
            return not chunks or await self.open_chunks(channel, chunks)
        await channel.send(session.signatures())
        await asyncio.wait({asking})
        return False

    async def answer(self, channel: Channel, question: messages.Request) -> None:
        if isinstance(question, messages.AskChunks):
            await self.open_chunks(channel, question.chunks)
        elif isinstance(question, messages.AskStatements):
            await channel.send(messages.Statements(self.audit.heard_statements()))

    async def open_chunks(self, channel: Channel, chunks: Sequence[int]) -> bool:
        """Open chunks of the own share; return False if the answer was a majority's signatures."""
        if self._session.is_certified.is_set():
            await channel.send(self._session.signatures())
            return False
        answer = await self.audit.answer(chunks)
        await channel.send(messages.Opens(len(answer)))
        await channel.send_bytes(answer)
        return True

    async def before_signature(self, channel: Channel) -> None:
        if self._waits_for_clear:
            await self._is_clear.wait()
            await channel.send(messages.Clear())

    # --- findings -------------------------------------------------------------------------------------------------

    def _find_fault(self, owner: Member, chunks: Sequence[int], reason: str, *, late: bool) -> None:
        """Record that an owner's share failed; the others learn the chunks if the attempt fails."""
        self.faults.setdefault(owner, (reason, late))
        self.complaints += [(owner.index, chunk) for chunk in chunks][: self.audit.most_chunks - len(self.complaints)]
        self._session.changed()

    def _find_guilty(self, error: FalseMeanError, chunks: Sequence[int]) -> None:
        """Record evidence against an owner, and the chunks that proved it, if any."""
        if not self.evidence:
            self.evidence = error.evidence
            self._session.observer.evidence_found(error.evidence)
        owner = self._session.members[error.owner]
        self.faults.pop(owner, None)
        self._find_fault(owner, chunks, str(error), late=False)

    def note_clear(self, member: Member) -> None:
        member.is_clear = True
        self._slow_checkers.discard(member.peer)
        self._session.changed()

    def note_complaints(self, complaints: Sequence[Complaint]) -> None:
        members, own = self._session.members, self._session.own
        for owner, chunk in complaints[: self.audit.most_chunks]:
            if owner < len(members) and owner != own.index and chunk < self._session.attempt.num_chunks(owner):
                self._others_complaints.append((owner, chunk))

    # --- the decision ---------------------------------------------------------------------------------------------

    async def may_sign(self) -> bool:
        await self._pass_checks()
        if self._waits_for_clear:
            await self._wait_for_clear()
        return self._session.attempt.certificate() is None

    async def _pass_checks(self) -> None:
        """Wait until this member's checks passed, or a majority signed without it."""
        session, loop = self._session, asyncio.get_running_loop()
        owners, until = session.other_owners, math.inf
        while waiting := [owner for owner in owners if not owner.is_checked]:
            certified = session.attempt.certificate() is not None
            for owner, chunks in () if certified else self._unshown.items():
                self._find_fault(owner, chunks, "shows signatures of too few in place of a chunk", late=True)
            self._look_into_complaints()
            if certified:
                return
            session.fail_if_lost(waiting)
            if any(owner.gave_up for owner in waiting):  # Its reason may be in transit.
                until = min(until, loop.time() + REASON_SECONDS)
            elif until == math.inf:
                passed = len(owners) - len(waiting)
                if passed >= quorum_of_others(len(owners), session.context.spec.quorum):
                    until = session.straggler_deadline(session.began, loop.time())
            await session.wait_for(waiting, until)

    async def _wait_for_clear(self) -> None:
        """Wait for the other contributors' checks, with a timeout once half passed; check others' complaints, too."""
        session, loop = self._session, asyncio.get_running_loop()
        attempt, until = session.attempt, math.inf
        counted = [member for member in session.others if member.index in (attempt.contributors or ())]
        self._is_clear.set()
        while True:
            self._look_into_complaints()
            if attempt.certificate() is not None:
                return
            session.fail_if_lost([])
            looking = self._num_looking > 0  # A check after a complaint has its own timeout.
            waiting = [m for m in counted if not (m.is_clear or m.gave_up or self._is_excused(m))]
            if not waiting and not looking:
                return
            if until == math.inf and 2 * sum(member.is_clear for member in counted) >= len(counted):
                until = session.straggler_deadline(session.began, loop.time(), CLEAR_SHARE)
            if loop.time() >= until and not looking:
                self._slow_checkers.update(member.peer for member in waiting)
                return
            deadline = session.deadline if looking else until
            with contextlib.nullcontext() if deadline >= session.deadline else contextlib.suppress(LateError):
                await session.wait_for([], deadline)

    def _is_excused(self, member: Member) -> bool:
        """True if a member's checks are not waited for: lost, late the last time, or too slow to own a share."""
        is_slow = member.ticket.reachable and member.index in self._session.attempt.shareless
        return bool(member.lost) or member.peer in self._slow_checkers or is_slow

    def _num_checkers(self, owner: Member) -> int:
        """Return how many members can check an owner's share in time, this one included."""
        own, members = self._session.own, self._session.members
        return sum(each is own or (each is not owner and not self._is_excused(each)) for each in members)

    def _fail_on_faults(self) -> None:
        """Raise `AttemptFailedError` if a check failed; a timeout counts only until a majority has signed."""
        attempt = self._session.attempt
        for owner, (fault, late) in sorted(self.faults.items(), key=lambda found: (found[1][1], found[0].index)):
            if not (late and attempt.certificate() is not None):
                message = f"{attempt.phase}: peer {owner.peer[-8:]}'s share did not pass a check: {fault}"
                raise (LateError if late else AttemptFailedError)(message, (owner.peer,))

    def _look_into_complaints(self) -> None:
        """Start to check the chunks of others' complaints; fail like `_fail_on_faults`."""
        self._fail_on_faults()
        while self._others_complaints:
            index, chunk = self._others_complaints.pop()
            self._num_looking += 1
            self._looking.start(self._look_into(self._session.members[index], chunk), f"complaint-{index}")

    async def _look_into(self, owner: Member, chunk: int) -> None:
        passed = await self._ask_again(owner, [chunk])
        if not passed and owner not in self.faults and self._session.attempt.certificate() is None:
            self._find_fault(owner, [chunk], "it gave up instead of showing a chunk", late=True)
        self._num_looking -= 1
        self._session.changed()

    def fail_on_evidence(self) -> None:
        if self.evidence:
            self._fail_on_faults()

    async def stop(self) -> None:
        self.audit.stop_reading()
        await self._looking.close()
