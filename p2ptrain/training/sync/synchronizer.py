"""One peer's side of synchronisation: contribute, apply the certified result, catch up when behind.

A local phase ends with `Synchronizer.synchronize`. The training thread waits for it, or lends it the model between
two steps when rounds run under compute (`Contribution.model_lock`).
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from dataclasses import dataclass, replace

import torch

from p2ptrain.averaging.averager import SPENT, RoundOutcome
from p2ptrain.averaging.commit.attempt import AttemptFailedError, PeerPart, SpentError, UnencodableError
from p2ptrain.averaging.grouping.matchmaker import BehindError, MismatchError, NoGroupError
from p2ptrain.averaging.protocol.certificate import Head
from p2ptrain.errors import TemporaryError
from p2ptrain.network.records.record import RoundReport
from p2ptrain.progress import Progress, no_progress
from p2ptrain.training.data.windows import Place, place_among
from p2ptrain.training.sync.catch_up import CatchUp
from p2ptrain.training.sync.replica import Contribution, Replica
from p2ptrain.training.worth import ClaimedWork

logger = logging.getLogger(__name__)

MAX_RETRIES = 12
MAX_REPORTS = 8
CAUGHT_UP = "caught up: this peer's work goes into the next round"
NOT_DRAWN = "not drawn for this round: this site follows the others"
SIT_OUT_SECONDS = 2.0
"""Longest wait for the end of a round that this peer is not drawn for, before it looks again."""
HAND_OVER_SECONDS, HAND_OVER_PAUSE = 20.0, 0.25
"""Longest wait for sites that sat out a round to fetch its result, before a site that has it leaves; and of a look."""
CONFLICT_SECONDS = 5.0
"""Pause of each synchronisation while two anchors contradict each other."""


@dataclass(frozen=True)
class RoundResult:
    """The outcome of one synchronisation. A failure is a value, not an exception.

    Attributes:
        committed: True if the shared state moved on: a certified result was applied, or this peer caught up.
        round: The round in progress afterwards.
        reason: Why it failed, or a remark.
        contributed: True if the result includes this peer's work.
        members: Size of the group, of which ``contributors`` contributed.
        paused: True if the swarm is below its minimum of peers, or two anchors contradict each other.
        seconds: Duration, which includes ``matchmaking_seconds``, and ``transfer_seconds`` to reduce and sign.
    """

    committed: bool
    round: int
    reason: str
    contributed: bool = False
    members: int = 0
    contributors: int = 0
    paused: bool = False
    seconds: float = 0.0
    matchmaking_seconds: float = 0.0
    transfer_seconds: float = 0.0


class Synchronizer:
    """Keeps one peer's shared state in step with the swarm.

    ``bandwidth`` limits its uploads, in bytes per second; 0 is no limit.

    Attributes:
        feedback: Compression error of this peer's contributions, for all fragments in order.
        rounds_committed: Synchronisations that applied a certified round.
        rounds_aborted: Synchronisations that did not.
        pacing: Reports local batches and steps, on the event loop.
        position: Tells whether the swarm closes the round; safe from any thread.
        reports: The last rounds, newest last.
        rested_since: End of the last synchronisation, on the event loop's clock; None before the first.
        last_round: First round that this peer does not contribute to; 0 for no limit.
        stays: True if this peer is a member after `last_round`, too; its tickets say if it leaves.
        is_paused: True if the last synchronisation found the swarm below its minimum of peers.
        claimed: Work of another peer in the last round, to be audited; None without any.
    """

    def __init__(self, replica: Replica, bandwidth: int = 0, jobs: Progress = no_progress) -> None:
        self._spec = replica.context.spec
        self._membership = replica.context.membership
        self._bandwidth = bandwidth
        self.replica = replica
        self.state = replica.state
        self.averager = replica.averager
        self.feedback = replica.feedback
        self.jobs = jobs
        self.catch_up = CatchUp(replica, jobs)
        self.pacing, self.position = replica.averager.matchmaker.pacing, replica.averager.matchmaker.position
        self._place: tuple[bytes, Place] | None = None
        self.rounds_committed = 0
        self.rounds_aborted = 0
        self.rested_since: float | None = None
        self.last_round = 0
        self.stays = False
        self.is_paused = False
        self.claimed: ClaimedWork | None = None
        self.reports: deque[RoundReport] = deque(maxlen=MAX_REPORTS)

    @property
    def head(self) -> Head:
        return self.state.head

    @property
    def place(self) -> Place | None:
        """This peer's place among the peers of the last round, which selects its samples; None if it was not there."""
        if self._place is not None and self._place[0] == self.head.lineage:
            return self._place[1]
        return place_among(self.head.members, self.replica.context.rpc.peer_id)

    def participate(self, trains: bool) -> None:
        """Set whether rounds wait for this peer, which then reports its steps."""
        self.averager.matchmaker.participate(trains, self.is_behind)

    def leave(self) -> None:
        """Announce in each ticket from now on that this peer leaves the swarm."""
        self.stays, self.position.leaves = False, True

    async def close(self) -> None:
        await self.catch_up.close()
        await self.averager.close()

    # --- the main path

    async def synchronize(self, work: Contribution) -> RoundResult:
        """Contribute ``work`` to the round in progress and apply the result; catch up first if the swarm is ahead."""
        started = asyncio.get_running_loop().time()
        computed = 0.0 if self.rested_since is None else started - self.rested_since
        try:
            with self.pacing.handing_in():
                result = await self._synchronize(work)
        except TemporaryError as error:
            result = RoundResult(False, self.head.round, str(error), paused=self._below_minimum(error))
        self.rested_since = asyncio.get_running_loop().time()
        seconds = self.rested_since - started
        result = replace(result, seconds=seconds)
        self.is_paused = result.paused
        if result.committed:
            self.rounds_committed += 1
        else:
            self.rounds_aborted += 1
            logger.debug("round %d was not committed: %s", self.head.round, result.reason)
        self.reports.append(
            RoundReport(
                max(0, result.round - 1) if result.committed else result.round,
                result.committed,
                result.reason[:120],
                seconds,
                result.members,
                result.contributors,
                result.contributed,
                self.head.digest if result.committed else bytes(32),
                computed,
                result.matchmaking_seconds,
                result.transfer_seconds,
            )
        )
        self.replica.context.owner.state_changed()
        return result

    def _below_minimum(self, error: TemporaryError) -> bool:
        present = len(self._membership.alive_trainers()) + 1
        pauses = self._spec.below_min == "pause"
        return pauses and isinstance(error, NoGroupError) and present < self._spec.min_peers

    async def _synchronize(self, work: Contribution) -> RoundResult:
        before = self.head
        if reason := self.replica.context.anchors.conflict:
            await asyncio.sleep(CONFLICT_SECONDS)
            return RoundResult(False, before.round, reason, paused=True)
        for _ in range(MAX_RETRIES):
            async with work.model_lock:
                ready = await self._prepare(work, before)
            if isinstance(ready, RoundResult):
                return ready
            if self.head != before:
                await self.pacing.refresh()
                if self.pacing.has_time:
                    return RoundResult(True, self.head.round, CAUGHT_UP)
            await self.pacing.until_closing()
            try:
                outcome = await self.averager.average(*ready, self._bandwidth)
            except SpentError as error:
                async with work.model_lock:
                    await self.replica.reset(work)
                raise AttemptFailedError(f"{error}; other sites may know a sum with this update: dropped") from error
            except (BehindError, MismatchError, UnencodableError) as error:
                async with work.model_lock:
                    result = await self._recover(error, work)
                if result is not None:
                    return result
                continue
            async with work.model_lock:
                return await self._apply_outcome(outcome, work)
        raise AttemptFailedError("the swarm moved on faster than this peer could follow")

    async def _prepare(self, work: Contribution, before: Head) -> tuple[torch.Tensor, int, int] | RoundResult:
        for _ in range(MAX_RETRIES):
            await self.follow_swarm(work)
            if self._sits_out():
                return RoundResult(self.head != before, self.head.round, f"{NOT_DRAWN}, and its work waits")
            self.position.leaves = not self.stays and 0 < self.last_round <= self.head.round + 1
            if 0 < self.last_round <= self.head.round:
                return RoundResult(self.head != before, self.head.round, "the last round is over")
            if await self.replica.is_intact():
                break
            await self.catch_up.repair(work, own_digest_is_right=True)
        else:
            raise AttemptFailedError("the state in memory was damaged again and again")
        fragment = self.state.fragments.of_round(self.head.round)
        tokens = work.tokens_of(fragment)
        if tokens <= 0:
            return RoundResult(False, self.head.round, "nothing to contribute yet")
        vector = await self.replica.collect(work, fragment)
        if vector is None:
            return await self._drop(work, "the local update is not finite")
        return vector, tokens, work.samples

    async def _recover(
        self, error: BehindError | MismatchError | UnencodableError, work: Contribution
    ) -> RoundResult | None:
        """Handle an error of an attempt; return None to retry, or the result that ends the synchronisation."""
        if isinstance(error, UnencodableError):
            return await self._drop(work, str(error))
        if isinstance(error, BehindError):
            if await self.follow_swarm(work):  # A nearer peer than the leader that said so may hold the head.
                return None
            if not await self.catch_up.follow(error.source, work):
                raise AttemptFailedError(f"{error}, but its source failed") from error
            return None
        if not self.catch_up.others_hold_another_state():
            raise AttemptFailedError(f"{error}, but nobody announces another: not believed") from error
        logger.warning("round %d: %s", self.head.round, error)
        await self.catch_up.repair(work, own_digest_is_right=False)
        return None

    async def _drop(self, work: Contribution, reason: str) -> RoundResult:
        return RoundResult(False, self.head.round, await self.replica.drop(work, reason))

    async def _apply_outcome(self, outcome: RoundOutcome, work: Contribution) -> RoundResult:
        body = outcome.result.certificate.body
        self.claimed = self._claimed(outcome.part)
        if outcome.contributed:
            await self.replica.update_feedback(body, outcome.encoded)
        reason = "" if outcome.contributed else "late: this peer's work waits for the next round"
        if outcome.refusal == SPENT and not outcome.contributed:  # No fault of this peer, in however many rounds.
            await self.replica.reset(work)
            reason = f"this peer {SPENT}: it was dropped"
        elif outcome.refusal and not outcome.contributed:
            # The group would refuse the same work again, with a longer backoff each time.
            reason = await self.replica.drop(work, f"this peer {outcome.refusal}")
        await self.replica.apply(outcome.result, work, outcome.contributed)
        self._place = (self.head.lineage, outcome.position)
        return RoundResult(
            committed=True,
            round=self.head.round,
            reason=reason,
            contributed=outcome.contributed,
            members=sum(body.peers),
            contributors=sum(body.peers[index] for index, *_ in body.contributors),
            matchmaking_seconds=outcome.matchmaking_seconds,
            transfer_seconds=outcome.transfer_seconds,
        )

    def _claimed(self, part: PeerPart | None) -> ClaimedWork | None:
        """Return which samples a part should be made of; None in a tree, where a head does not name all readers."""
        head = self.head
        if part is None or self.position.cells.num_levels(head.present) > 1:
            return None
        fragment, place = self.state.fragments.of_round(head.round), place_among(head.members, part.peer)
        return ClaimedWork(part, fragment, head.round, head.samples, place)

    # --- rounds of a part of the sites

    async def hand_over(self) -> None:
        """Before this peer leaves: wait until the others have the last result, which only those drawn held."""
        if self.replica.context.participation == 1:
            return
        for _ in range(int(HAND_OVER_SECONDS / HAND_OVER_PAUSE)):
            there = self._membership.alive_trainers()
            if all(each.round >= self.head.round for each in self._membership.records() if each.peer in there):
                return
            await asyncio.sleep(HAND_OVER_PAUSE)

    def _sits_out(self) -> bool:
        context = self.replica.context
        return context.rpc.peer_id in context.sitting_out(self.head)

    async def sit_out(self, work: Contribution) -> bool:
        """Follow the others for a while if this peer is not drawn for the round in progress; return False if it is."""
        if not self._sits_out():
            return False
        before = self.head
        if source := await self.averager.matchmaker.standby.sit_out(SIT_OUT_SECONDS):
            await self.catch_up.follow(source, work)
            if self.head != before:
                return True
            await asyncio.sleep(SIT_OUT_SECONDS)  # The peer is not ahead, whatever it says.
        await self.follow_swarm(work)
        return True

    # --- catching up

    def is_behind(self) -> bool:
        """True if a trusted peer announces a head that outranks this peer's."""
        return self._best_source() is not None

    async def follow_swarm(self, work: Contribution | None) -> bool:
        """Catch up with the best lineage that a trusted peer announces; return True if this peer's head moved.

        A peer on a lineage without the newest anchor follows those that showed the anchor.
        A doubted peer must prove its state in the background first. Else it could stall each round until a timeout.
        """
        before = self.head
        await self.catch_up.anchors.look()
        for _ in range(3):
            best = self._best_source()
            if best is None:
                break
            await self.catch_up.follow(best, work)
        return self.head != before

    def _best_source(self) -> str | None:
        best, source, records = self.head, None, self._membership.trusted_records()
        dials = self.replica.context.rpc.dial_seconds
        anchored = self.catch_up.anchors.better(records)
        if anchored:
            best = self.replica.context.genesis(self.head.digest)
        for record in sorted(anchored or records, key=lambda record: dials.get(record.peer, math.inf)):
            announced = Head(
                record.round, record.lineage, record.lineage_tokens, 0, record.digest,
                full=record.lineage_full, returned=record.lineage_returned,
            )  # fmt: skip
            if not announced.outranks(best):
                continue
            if not (anchored or self.position.follows(announced)):
                self.catch_up.find_who_left(record.peer, record.lineage)
                if self._sits_out():  # Else it would never follow a reduced lineage.
                    self.averager.matchmaker.start_clock()
            elif self._membership.is_doubted(record.peer):
                self.catch_up.check_soon(record.peer)
            else:
                best, source = announced, record.peer
        return source

    def is_alone(self) -> bool:
        """True if no other peer trains, and none ever contributed to this lineage; safe from any thread."""
        own, rows = self.replica.context.rpc.peer_id, self.head.table.rows
        return all(row.peer == own or row.is_witness for row in rows) and not self._membership.alive_trainers()

    def is_due(self, steps: int) -> bool:
        """True if a peer with this many steps in the round should contribute now; safe from any thread."""
        return self.position.is_closing or self.pacing.is_due(steps)
