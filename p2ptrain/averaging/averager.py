"""One peer's averaging: find a group, all-reduce, certify; retry without the members at fault.

While the swarm fits in one group, its result ends the round. In a larger swarm the result goes up the tree
(`p2ptrain.averaging.grouping.cells`). One delegate averages it in a group of delegates, and the other members wait for
the outcome (`p2ptrain.averaging.commit.broadcast`). If a delegate fails, the next one takes over.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

from p2ptrain.averaging.allreduce.runner import Attempts
from p2ptrain.averaging.allreduce.session import SessionResult
from p2ptrain.averaging.commit.attempt import Attempt, AttemptFailedError, decode_means
from p2ptrain.averaging.commit.broadcast import DecidedError, Path, ResultBroadcast, TreePath
from p2ptrain.averaging.commit.provenance import Origin
from p2ptrain.averaging.commit.result_chunks import Means
from p2ptrain.averaging.commit.round_log import History, OwnWork, Result
from p2ptrain.averaging.context import PeerContext
from p2ptrain.averaging.grouping.cells import delegate_order
from p2ptrain.averaging.grouping.matchmaker import Matchmaker
from p2ptrain.averaging.grouping.membership import ANSWER_SECONDS, Membership
from p2ptrain.averaging.protocol.certificate import MAX_PRESENT, Body, Certificate, Head, Ticket
from p2ptrain.averaging.timing.deadlines import first_result
from p2ptrain.averaging.timing.goal import NO_GOAL, Goal
from p2ptrain.averaging.vector.error_feedback import Encoded
from p2ptrain.averaging.vector.rules import feedback_scale
from p2ptrain.averaging.verification.evidence import EvidenceStore
from p2ptrain.codecs import Codec, dense_codec
from p2ptrain.errors import IntegrityError, TemporaryError

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

MAX_ATTEMPTS = 3
MAX_DELEGATES = 3  # delegates of a group; each takes over after those before failed or fell quiet
MIN_HISTORY_BYTES = 64 << 20


@dataclass(frozen=True)
class RoundOutcome:
    """A certified round, as one member sees it.

    Attributes:
        result: The certificate that ends the round, and the encoded means.
        contributed: True if this peer's contribution is in the mean.
        place: This peer's position among all peers of the round, and their number; it selects the samples of the next.
        encoded: What this peer encoded on each level, for error feedback.
        attempts: Number of attempts until this peer's group had a result.
        transfer_seconds: Time spent reducing and signing, on all levels.
        refusal: Why the group refused this peer's contribution; empty if it did not.
    """

    result: Result
    contributed: bool
    place: tuple[int, int]
    encoded: tuple[Encoded, ...]
    attempts: int
    matchmaking_seconds: float
    transfer_seconds: float
    refusal: str


@dataclass(frozen=True)
class _Wish:
    """The variable fields of this peer's ticket on one level."""

    tokens: int
    samples: int
    bandwidth: int
    level: int = 0
    child: bytes = b""
    peers: int = 1


@dataclass(frozen=True)
class _LevelResult:
    """A group's result on one level, as one member obtained it."""

    attempt: Attempt
    session: SessionResult
    certificate: Certificate
    attempts: int
    matchmaking_seconds: float
    transfer_seconds: float

    @property
    def means(self) -> Means:
        return [mean if mean is not None else b"" for mean in self.attempt.means]


class Averager:
    """Averages one peer's contributions with those of the swarm, round by round.

    Attributes:
        phase: idle, matchmaking, scatter, reduce, gather or commit.
        on_phase: Called on the event loop with each new phase and the round in progress.
        matchmaker: Finds groups. `set_head` updates its ``head``; the owner of this averager sets ``participates``.
        is_reachable: Returns True if others can open streams to this peer; otherwise it owns no share.
    """

    def __init__(
        self,
        context: PeerContext,
        membership: Membership,
        head: Head,
        parts: Sequence[tuple[Codec, int]],
        layout: bytes,
        goal: Goal = NO_GOAL,
    ) -> None:
        """
        Args:
            parts: Codec and number of values of each of the model's P parts; round r averages part r mod P.
            layout: Fingerprint of codec and parameter layout, 32 bytes; members must agree on it.
            goal: The condition on which a round is due.
        """
        self._context = context
        self._spec = spec = context.spec
        self._membership = membership
        self._layout = layout
        codecs = [codec for codec, _ in parts]
        dense_bytes = sum(dense_codec(codec).encoded_bytes(num_values) for codec, num_values in parts)
        self.history = History(
            context.rpc, context.runtime, context.signer, context.swarm, codecs[0], spec,
            max(MIN_HISTORY_BYTES, 2 * dense_bytes),
        )  # fmt: skip
        self.history.codec_of = lambda round_: codecs[round_ % len(codecs)]
        self.history.max_rounds = spec.history_rounds * len(codecs)
        self.matchmaker = Matchmaker(context, membership, head, goal)
        self.is_reachable: Callable[[], bool] = lambda: True
        self.phase = "idle"
        self.on_phase: Callable[[str, int], None] = lambda phase, round_: None
        self.own_work = OwnWork(context.peer_id, self.matchmaker)
        self.own_work.num_parts = len(parts)
        sizes = [num_values for _, num_values in parts]
        self._attempts = Attempts(context, membership, self.matchmaker, self.history, self.own_work, sizes)
        self._attempts.on_phase = self._enter
        self._broadcast = ResultBroadcast(context.rpc, context.runtime, self.history, spec.grace_seconds)

    @property
    def head(self) -> Head:
        return self.matchmaker.head

    def set_head(self, head: Head) -> None:
        """Give matchmaking a new head; it answers requests for older rounds with «behind» from now on."""
        self.matchmaker.move(head)

    @property
    def evidence(self) -> EvidenceStore:
        """Evidence against owners that falsified a mean."""
        return self._attempts.evidence

    async def close(self) -> None:
        await self.matchmaker.close()
        self._broadcast.close()
        await self._attempts.close()

    async def average(self, vector: torch.Tensor, tokens: int, samples: int, bandwidth: int = 0) -> RoundOutcome:
        """Average ``vector`` with the other peers' in the round of the current head.

        Args:
            vector: This peer's contribution, fp32, one-dimensional, with the round's length and codec
                (`History.codec_of`); must not change until this returns.
            tokens: Its weight, at least 1.
            samples: Samples read in this round.
            bandwidth: Limit on the send rate in bytes per second; 0 for none.

        Raises:
            BehindError: The swarm is ahead, or on a lineage that wins.
            MismatchError: This peer's state differs from the others'.
            NoGroupError: No group formed before the deadline.
            AttemptFailedError: Every attempt failed, or no delegate brought the group's result to the end of the round.
            UnencodableError: ``vector`` does not fit the codec.
        """
        loop, head = asyncio.get_running_loop(), self.head
        wish = _Wish(tokens, samples, bandwidth)
        above: list[_LevelResult] = []
        try:
            ground = await self._average_level(head, vector, wish)
            risen = loop.time()
            if ground.certificate.body.is_last:
                ascent = TreePath((), ground.means)
            else:
                ascent, above = await self._rise(head, ground, wish)
        finally:
            self._enter("idle")
        return self._outcome(ground, ascent, above, loop.time() - risen)

    async def _average_level(
        self, head: Head, vector: torch.Tensor, wish: _Wish, origin: Origin | None = None
    ) -> _LevelResult:
        """Find a group on one level of the tree, and average with it; raises like `average`."""
        loop = asyncio.get_running_loop()
        matchmaking = transfer = 0.0
        failure = AttemptFailedError("no attempt was made")
        for attempt_number in range(1, MAX_ATTEMPTS + 1):
            started = loop.time()
            self._enter("matchmaking")
            self._broadcast.stands(joined=False)
            roster = await self.matchmaker.find_group(self._ticket(head, wish))
            self._broadcast.stands(joined=wish.level > 0)
            matched = loop.time()
            matchmaking += matched - started
            session = self._attempts.prepare(roster, head, vector, origin)
            self._enter("scatter")
            certificate, result = await self._attempts.run(session)
            failure = result.failure or failure
            transfer += loop.time() - matched
            if certificate is not None:
                if len(roster.members) == 1 and wish.level == 0 and loop.time() - matched > ANSWER_SECONDS:
                    await self.matchmaker.check_alone()
                return _LevelResult(session.attempt, result, certificate, attempt_number, matchmaking, transfer)
        raise failure

    async def _rise(
        self, head: Head, result: _LevelResult, wish: _Wish, on_path: Callable[[Path], None] = lambda path: None
    ) -> tuple[TreePath, list[_LevelResult]]:
        """Take a group's result to the end of the round, as its delegate or through another one.

        Peers that wait for this one receive the certificates above (``on_path``) as soon as it does, and fetch chunks
        of the last result while it does. Returns the path to the last result, and this peer's results above, the lowest
        first.

        Raises:
            AttemptFailedError: No delegate succeeded, or the round ended with a result that was not available.
        """
        body = result.certificate.body
        if body.level == 0:
            self.own_work.add_result(body)
        self._broadcast.expect(body)

        def tell(path: Path) -> None:
            self._broadcast.tell(body, path)
            on_path((result.certificate, *path))

        brought: tuple[TreePath, list[_LevelResult]] | None = None
        delegates = self._delegates(result)[:MAX_DELEGATES]
        try:
            brought = await first_result(
                [partial(self._bring, head, result, wish, delegate, tell) for delegate in delegates],
                lambda error: isinstance(error, (TemporaryError, IntegrityError)) and type(error) is not DecidedError,
            )
        except DecidedError as error:  # The round has ended: no other delegate may end it again.
            self.own_work.give_up_on(head)
            raise AttemptFailedError(str(error)) from error
        finally:
            self._broadcast.conclude(body, brought[0] if brought else None)
        if brought is None:
            self.own_work.give_up_on(head)
            raise AttemptFailedError("no delegate brought the group's result to the others")
        return brought

    async def _bring(
        self,
        head: Head,
        result: _LevelResult,
        wish: _Wish,
        delegate: str,
        on_path: Callable[[Path], None],
        on_quiet: Callable[[], None],
    ) -> tuple[TreePath, list[_LevelResult]]:
        """Take a group's result to the end of the round through one delegate, which may be this peer."""
        body, own = result.certificate.body, delegate == self._context.peer_id
        try:
            if own:
                return await self._represent(head, result, wish, on_path)
            self._enter("gather")
            seconds = self._seconds_above(body)
            return await self._broadcast.fetch(delegate, body, seconds, on_path, on_quiet), []
        except (TemporaryError, IntegrityError) as error:
            logger.info("round %d: delegate %s failed: %s", body.round, delegate[-8:], error)
            if own:
                self._broadcast.conclude(body, None)
            raise

    def _delegates(self, result: _LevelResult) -> list[str]:
        """Return a group's delegates in order: its contributors, reachable ones first."""
        body, tickets = result.certificate.body, result.attempt.roster.tickets
        members = {tickets[index].peer: tickets[index].reachable for index, *_ in body.contributors}
        order = delegate_order(body.lineage, body.round, body.level, members)
        return sorted(order, key=lambda peer: not members[peer])

    def _seconds_above(self, body: Body) -> float:
        """Return the timeout for the levels above a result."""
        spec, levels = self._spec, body.levels - 1 - body.level
        return levels * (spec.matchmaking_seconds + spec.round_seconds + (1 + body.levels) * spec.grace_seconds)

    async def _represent(
        self, head: Head, result: _LevelResult, wish: _Wish, on_path: Callable[[Path], None]
    ) -> tuple[TreePath, list[_LevelResult]]:
        """As a delegate: average a group's result on the next level, and continue from there."""
        body = result.certificate.body
        vector = await self._context.runtime.compute(self._decoded, body, result.means)
        brought = replace(
            wish, tokens=body.tokens, samples=body.most_samples, level=body.level + 1, child=body.body_hash,
            peers=sum(body.peers),
        )  # fmt: skip
        source = self.history.source_of(self._context.peer_id, body, len(vector))
        origin = Origin(result.certificate, result.means, source)
        upper = await self._average_level(head, vector, brought, origin)
        if upper.certificate.body.is_last:
            return TreePath((upper.certificate,), upper.means), [upper]
        ascent, above = await self._rise(head, upper, brought, on_path)
        return TreePath((upper.certificate, *ascent.path), ascent.means), [upper, *above]

    def _decoded(self, body: Body, means: Means) -> torch.Tensor:
        import torch

        vector = torch.empty(body.bounds[-1], dtype=torch.float32)
        decode_means(self._spec, self.history.codec_of(body.round), body, means, vector)
        return vector

    def _outcome(
        self, ground: _LevelResult, ascent: TreePath, above: list[_LevelResult], seconds_above: float
    ) -> RoundOutcome:
        body, own_index = ground.certificate.body, ground.attempt.roster.index_of(self._context.peer_id)
        last = ascent.path[-1] if ascent.path else ground.certificate
        contributed = ascent.counts(body) and own_index in [index for index, *_ in body.contributors]
        encoded = self._encoded([ground, *above]) if contributed else ()
        for result in [ground, *above]:
            if result.certificate is not last:
                result.attempt.means = []
        return RoundOutcome(
            result=Result(last, ascent.means),
            contributed=contributed,
            place=ascent.place_of(body, own_index),
            encoded=encoded,
            attempts=ground.attempts,
            matchmaking_seconds=ground.matchmaking_seconds,
            transfer_seconds=ground.transfer_seconds + seconds_above,
            refusal=ground.session.refusal,
        )

    def _encoded(self, results: list[_LevelResult]) -> tuple[Encoded, ...]:
        """Return what this peer encoded on each level; the scale multiplies by each level's `feedback_scale`."""
        encoded, scale = [], 1.0
        for result in results:
            body, session = result.certificate.body, result.session
            own_index = result.attempt.roster.index_of(self._context.peer_id)
            indices = [index for index, *_ in body.contributors]
            if own_index not in indices:
                break
            tokens = [tokens for _, tokens, _ in body.contributors]
            mean_scale = scale * feedback_scale(self._spec, tokens, indices.index(own_index))
            encoded.append(
                Encoded(
                    session.contribution.vector,
                    body.bounds,
                    session.sent_parts,
                    session.contribution.codec,
                    scale,
                    own_index,
                    session.exact_mean,
                    result.means[own_index],
                    dense_codec(result.attempt.codec),
                    mean_scale,
                )
            )
            scale = mean_scale
        return tuple(encoded)

    def _enter(self, phase: str) -> None:
        self.phase = phase
        self.on_phase(phase, self.head.round)

    def _ticket(self, head: Head, wish: _Wish) -> Ticket:
        context = self._context
        ticket = Ticket(
            context.peer_id, head.round, head.lineage, head.digest, self._layout, wish.tokens, wish.samples,
            wish.bandwidth, self.is_reachable(), self._attempts.speeds.told(), context.runtime.random.randbytes(16),
            min(MAX_PRESENT, 1 + len(self._membership.alive_trainers())), head.present, wish.level, wish.child,
            wish.peers,
        )  # fmt: skip
        return ticket.signed(context.swarm, context.signer)
