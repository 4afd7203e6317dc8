"""One peer's averaging: find a group, reduce, certify; retry without who failed; typed errors for the rest.

While the swarm fits in one group, that ends the round. In a larger one the group's result goes up the tree
(`p2ptrain.averaging.grouping.cells`): one delegate takes it to a group of delegates, in the same way, and the others
wait for what becomes of it (`p2ptrain.averaging.commit.broadcast`). If a delegate fails, the next one stands in.
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
from p2ptrain.averaging.commit.attempt import Attempt, AttemptFailedError
from p2ptrain.averaging.commit.broadcast import DecidedError, Path, ResultBroadcast, TreePath
from p2ptrain.averaging.commit.contribution_log import OwnWork
from p2ptrain.averaging.commit.encodings import decode_means
from p2ptrain.averaging.commit.provenance import Origin
from p2ptrain.averaging.commit.result_chunks import Means
from p2ptrain.averaging.commit.round_log import History, Result
from p2ptrain.averaging.context import PeerContext
from p2ptrain.averaging.grouping.cells import delegate_order
from p2ptrain.averaging.grouping.matchmaker import Matchmaker
from p2ptrain.averaging.grouping.membership import ANSWER_SECONDS, Membership
from p2ptrain.averaging.protocol.certificate import Body, Certificate, Ticket
from p2ptrain.averaging.protocol.head import Head
from p2ptrain.averaging.protocol.signed import MAX_PRESENT
from p2ptrain.averaging.timing.global_batch import NO_GOAL, Goal
from p2ptrain.averaging.timing.keepalive import first_result
from p2ptrain.averaging.vector.error_feedback import Encoded
from p2ptrain.averaging.vector.rules import feedback_scale
from p2ptrain.averaging.verification.evidence import EvidenceStore
from p2ptrain.codecs import Codec, dense_codec
from p2ptrain.errors import IntegrityError, TemporaryError

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

MAX_ATTEMPTS = 3
MAX_DELEGATES = 3
"""So many members of a group may stand for it, one after the other has failed or fallen quiet."""
MIN_HISTORY_BYTES = 64 << 20


@dataclass(frozen=True)
class RoundOutcome:
    """A certified round, as one member takes it home.

    Attributes:
        result: The certificate that ends the round, and the encoded means.
        contributed: Whether this peer's contribution is in the mean.
        place: Among all peers of the round, and their number: which samples it reads in the next.
        encoded: What this peer encoded on its way, for error feedback.
        attempts: How many attempts it took until this peer's group had a result.
        matchmaking_seconds: Time spent finding that group.
        transfer_seconds: Time spent reducing and signing, up and down the tree included.
        refusal: Why the group refused this peer's contribution for good; empty when it did not.
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
    """What this peer's ticket says on one level."""

    tokens: int
    samples: int
    bandwidth: int
    level: int = 0
    child: bytes = b""
    peers: int = 1


@dataclass(frozen=True)
class _LevelResult:
    """A group's result on one level, as one member came to it."""

    attempt: Attempt
    session: SessionResult
    certificate: Certificate
    attempts: int
    matchmaking_seconds: float
    transfer_seconds: float

    @property
    def means(self) -> Means:
        """The encoded means of all shares."""
        return [mean if mean is not None else b"" for mean in self.attempt.means]


class Averager:
    """Averages contributions of one peer with those of the swarm, round by round.

    Attributes:
        phase: What it is doing: idle, matchmaking, scatter, reduce, gather or commit.
        on_phase: Called with each new phase and the round in progress, on the event loop.
        matchmaker: Finds groups; its ``head`` and ``participates`` are kept by `set_head` and the owner.
        history: The last results, for laggards.
        own_work: In which results this peer's work is.
        is_reachable: Whether others can open streams to this peer; otherwise it owns no share.
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
            context: This peer.
            membership: Who is there.
            head: Where this peer stands.
            parts: Of the model, which rounds average in turn, round r part r mod P: codec and number of values of each.
            layout: Fingerprint of codec and parameter layout, 32 bytes; members must agree on it.
            goal: With what a round is due.
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
        """Where this peer stands."""
        return self.matchmaker.head

    def set_head(self, head: Head) -> None:
        """Tell matchmaking about a new head; rounds of the old one are answered with «behind» from now on."""
        self.matchmaker.move(head)

    @property
    def evidence(self) -> EvidenceStore:
        """Against owners that falsified a mean."""
        return self._attempts.evidence

    async def close(self) -> None:
        """End everything that this averager started."""
        await self.matchmaker.close()
        self._broadcast.close()
        await self._attempts.close()

    async def average(self, vector: torch.Tensor, tokens: int, samples: int, bandwidth: int = 0) -> RoundOutcome:
        """Average ``vector`` with the other peers' for the round of the current head.

        Args:
            vector: This peer's contribution, fp32, one-dimensional, of the length and in the codec that the round has
                for everybody (`History.codec_of`); must not change until this returns.
            tokens: Its weight, at least 1.
            samples: Samples read in this round.
            bandwidth: What this peer is willing to send in bytes per second; 0 for no limit.

        Raises:
            BehindError: The swarm is ahead, or on a lineage that wins.
            MismatchError: This peer's state is not that of the others.
            NoGroupError: No group within the deadline.
            AttemptFailedError: Every attempt broke, or nothing came of the group's result.
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
        """Find a group on one level of the tree, and average with it.

        Raises:
            See `average`.
        """
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
        """See a group's result through to the end of the round: stand for the group, or wait for who does.

        Those that wait for this peer hear of the certificates above as soon as it does (``on_path``), and fetch chunks
        of the last result while this peer does.

        Returns:
            What became of it, and this peer's results further up, the lowest first.

        Raises:
            AttemptFailedError: Nothing that this peer knows of.
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
        except DecidedError as error:  # Another delegate would end the round a second time.
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
        """What became of a group's result by way of one delegate, which may be this peer."""
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
        """Who stands for a group, in order: its contributors, those first that others can open streams to."""
        body, tickets = result.certificate.body, result.attempt.roster.tickets
        members = {tickets[index].peer: tickets[index].reachable for index, *_ in body.contributors}
        order = delegate_order(body.lineage, body.round, body.level, members)
        return sorted(order, key=lambda peer: not members[peer])

    def _seconds_above(self, body: Body) -> float:
        """How long the levels above a result may take."""
        spec, levels = self._spec, body.levels - 1 - body.level
        return levels * (spec.matchmaking_seconds + spec.round_seconds + (1 + body.levels) * spec.grace_seconds)

    async def _represent(
        self, head: Head, result: _LevelResult, wish: _Wish, on_path: Callable[[Path], None]
    ) -> tuple[TreePath, list[_LevelResult]]:
        """Take a group's result to the next level, and from there on up."""
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
        """What this peer encoded on each level; what was lost above weighs as much more as the result does."""
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
