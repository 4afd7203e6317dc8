"""One peer's averaging: find a group, reduce, certify; retry without who failed; typed errors for the rest."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from p2ptrain.averaging.attempt import Attempt, AttemptFailedError, LateError, UnencodableError
from p2ptrain.averaging.butterfly import Butterfly
from p2ptrain.averaging.certificate import Certificate, Roster, Ticket
from p2ptrain.averaging.head import Head
from p2ptrain.averaging.history import History, Result
from p2ptrain.averaging.matchmaking import Matchmaker
from p2ptrain.averaging.membership import Membership
from p2ptrain.averaging.patience import attempt_seconds
from p2ptrain.averaging.robust import feedback_scale
from p2ptrain.averaging.settle import Settlements
from p2ptrain.averaging.shares import share_weights, split_shares
from p2ptrain.averaging.speeds import Speeds, agreed_rates, owner_rates, part_codec
from p2ptrain.codecs import Codec, smaller_codecs
from p2ptrain.errors import PeerRefusedError
from p2ptrain.manifest import AveragingSpec
from p2ptrain.network.channel import Channel
from p2ptrain.network.rpc import Rpc
from p2ptrain.runtime import Runtime
from p2ptrain.signing import Signer

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

MAX_ATTEMPTS = 3
ROSTER_WAIT_SECONDS = 5.0
MIN_HISTORY_BYTES = 64 << 20
ROUNDS_REMEMBERED = 16


@dataclass(frozen=True)
class RoundOutcome:
    """A certified round, as one member takes it home.

    Attributes:
        result: The certificate and the encoded means.
        contributed: Whether this peer's contribution is in the mean.
        sent_parts: By share: this peer's encoded parts, for error feedback.
        part_codec: How they are encoded.
        own_index: Its place in the roster.
        own_mean_exact: The mean of its share before encoding; None when the result came from another member.
        own_mean_scale: What that mean's loss is multiplied by for error feedback.
        attempts: How many attempts it took.
        matchmaking_seconds: Time spent finding groups.
        transfer_seconds: Time spent reducing and signing.
        refusal: Why the group refused this peer's contribution for good; empty when it did not.
    """

    result: Result
    contributed: bool
    sent_parts: dict[int, bytearray]
    part_codec: Codec
    own_index: int
    own_mean_exact: torch.Tensor | None
    own_mean_scale: float
    attempts: int
    matchmaking_seconds: float
    transfer_seconds: float
    refusal: str


class Averager:
    """Averages contributions of one peer with those of the swarm, round by round.

    Attributes:
        phase: What it is doing: idle, matchmaking, scatter, reduce, gather or commit.
        on_phase: Called with each new phase and the round in progress, on the event loop.
        matchmaker: Finds groups; its ``head`` and ``participates`` are kept by `set_head` and the owner.
        history: The last results, for laggards.
        is_reachable: Whether others can open streams to this peer; otherwise it owns no share.
        gave_up_on: The lineage of the last head at which an attempt was given up that others may have completed.
    """

    def __init__(
        self,
        rpc: Rpc,
        runtime: Runtime,
        signer: Signer,
        swarm: bytes,
        spec: AveragingSpec,
        codec: Codec,
        membership: Membership,
        head: Head,
        num_values: int,
        layout: bytes,
        batch_target: int = 0,
    ) -> None:
        """
        Args:
            rpc: To reach other peers.
            runtime: Time, chance, arithmetic.
            signer: This peer's key.
            swarm: The manifest's digest, 32 bytes.
            spec: Quorum, grace, deadlines.
            codec: How tensors travel.
            membership: Who is there.
            head: Where this peer stands.
            num_values: Length of the longest vector to average.
            layout: Fingerprint of codec and parameter layout, 32 bytes; members must agree on it.
            batch_target: Samples that fill the global batch; 0 without one.
        """
        self._rpc = rpc
        self._runtime = runtime
        self._signer = signer
        self._swarm = swarm
        self._spec = spec
        self._membership = membership
        self._layout = layout
        history_bytes = max(MIN_HISTORY_BYTES, 2 * codec.encoded_bytes(num_values))
        self.history = History(rpc, runtime, signer, swarm, codec, spec.history_rounds, history_bytes)
        self.matchmaker = Matchmaker(rpc, runtime, signer, swarm, spec, membership, head, batch_target)
        self.gave_up_on = b""
        self.is_reachable: Callable[[], bool] = lambda: True
        self._speeds = Speeds()
        self._durations: deque[float] = deque(maxlen=ROUNDS_REMEMBERED)
        self.phase = "idle"
        self.on_phase: Callable[[str, int], None] = lambda phase, round_: None
        self._settlements = Settlements(rpc, signer, self.history)
        self._running: dict[bytes, Butterfly] = {}
        self._arrived = asyncio.Event()
        self._background: set[asyncio.Task[None]] = set()
        rpc.serve_channel("butterfly", self._serve_butterfly)

    @property
    def head(self) -> Head:
        """Where this peer stands."""
        return self.matchmaker.head

    def set_head(self, head: Head) -> None:
        """Tell matchmaking about a new head; rounds of the old one are answered with «behind» from now on."""
        self.matchmaker.move(head)

    async def close(self) -> None:
        """End everything that this averager started."""
        await self.matchmaker.close()
        for task in list(self._background):
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        for butterfly in list(self._running.values()):
            await butterfly.stop_sending()
            await butterfly.stop_serving(linger=False)

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
            AttemptFailedError: Every attempt broke.
            UnencodableError: ``vector`` does not fit the codec.
        """
        loop = asyncio.get_running_loop()
        matchmaking = transfer = 0.0
        failure = AttemptFailedError("no attempt was made")
        for attempt_number in range(1, MAX_ATTEMPTS + 1):
            started = loop.time()
            self._enter("matchmaking")
            try:
                roster = await self.matchmaker.find_group(self._ticket(tokens, samples, bandwidth))
                matched = loop.time()
                matchmaking += matched - started
                butterfly = self._prepare(roster, vector)
                self._enter("scatter")
                certificate, failure = await self._attempt_round(butterfly, failure)
                transfer += loop.time() - matched
            finally:
                self._enter("idle")
            if certificate is not None:
                return self._outcome(butterfly, certificate, attempt_number, matchmaking, transfer)
        raise failure

    def _outcome(
        self, butterfly: Butterfly, certificate: Certificate, attempts: int, matchmaking: float, transfer: float
    ) -> RoundOutcome:
        own_index = butterfly.attempt.roster.index_of(self._rpc.peer_id)
        indices = [index for index, *_ in certificate.body.contributors]
        tokens = [tokens for _, tokens, _ in certificate.body.contributors]
        contributed = own_index in indices
        return RoundOutcome(
            result=Result(certificate, [mean if mean is not None else b"" for mean in butterfly.attempt.means]),
            contributed=contributed,
            sent_parts=butterfly.sent_parts,
            part_codec=butterfly.part_codec,
            own_index=own_index,
            own_mean_exact=butterfly.own_mean_exact,
            own_mean_scale=feedback_scale(self._spec, tokens, indices.index(own_index)) if contributed else 0.0,
            attempts=attempts,
            matchmaking_seconds=matchmaking,
            transfer_seconds=transfer,
            refusal=butterfly.refusal,
        )

    def _enter(self, phase: str) -> None:
        self.phase = phase
        self.on_phase(phase, self.head.round)

    def _ticket(self, tokens: int, samples: int, bandwidth: int) -> Ticket:
        head = self.head
        ticket = Ticket(
            self._rpc.peer_id, head.round, head.lineage, head.digest, self._layout, tokens, samples, bandwidth,
            self.is_reachable(), self._speeds.told(), self._runtime.random.randbytes(16),
        )  # fmt: skip
        return ticket.signed(self._swarm, self._signer)

    def _prepare(self, roster: Roster, vector: torch.Tensor) -> Butterfly:
        tickets, spec, num_values = roster.tickets, self._spec, vector.numel()
        codec = self.history.codec_of(self.head.round)
        rates = agreed_rates(tickets)
        weights = share_weights(owner_rates(tickets, rates))
        shares = split_shares(num_values, weights, codec.block_size)
        bounds = (0, *(high for _, high in shares))
        part = part_codec(
            codec, smaller_codecs(codec, num_values), rates, weights, roster.index_of(self._rpc.peer_id), num_values,
            spec.grace_seconds,
        )  # fmt: skip
        attempt = Attempt(roster, self.head, bounds, codec, self._swarm)
        streams = len(tickets) - 1
        butterfly = Butterfly(
            attempt, vector, self._rpc, self._runtime, self._signer, spec, self._enter,
            attempt_seconds(self._durations, spec), part,
            lambda peer, num_bytes, seconds: self._speeds.observe(peer, num_bytes, seconds, streams),
        )  # fmt: skip
        self._settlements.remember(attempt)
        self._running[roster.group_id] = butterfly
        self._arrived.set()
        self._arrived = asyncio.Event()
        return butterfly

    async def _attempt_round(
        self, butterfly: Butterfly, failure: AttemptFailedError
    ) -> tuple[Certificate | None, AttemptFailedError]:
        """Run one attempt to a certificate, settling it when it breaks; (None, why) when it is given up."""
        attempt = butterfly.attempt
        group = attempt.roster.group_id
        certificate = None
        started = asyncio.get_running_loop().time()
        try:
            try:
                certificate = await butterfly.run()
                self._durations.append(asyncio.get_running_loop().time() - started)
            except AttemptFailedError as error:
                failure = error
                if isinstance(error, LateError):
                    self._durations.clear()  # Perhaps all have become slower: no deadline but the manifest's holds.
                logger.info("round %d: attempt failed: %s", attempt.head.round, error)
                for peer in error.suspects:
                    self.matchmaker.lost(peer)
                    if isinstance(error, LateError):
                        self._membership.suspect(peer, str(error))
                        if error.as_owners:  # How slowly it sends was measured.
                            self._speeds.was_late(peer)
                    else:
                        self._membership.broke_with(peer, str(error), self.matchmaker.last_leader)
                butterfly.give_up(error.suspects)
                await butterfly.stop_sending()
                certificate = await self._settlements.settle(attempt)
                if certificate is None:
                    if not attempt.withholds:
                        self.gave_up_on = attempt.head.lineage
                    self.matchmaker.group_broke()
                    if isinstance(error, UnencodableError):
                        raise
            self._judge(butterfly, certificate)
        finally:
            await asyncio.shield(butterfly.stop_sending())
            task = asyncio.create_task(self._linger(group, butterfly, certificate is not None), name="linger")
            self._background.add(task)
            task.add_done_callback(self._background.discard)
        return certificate, failure

    def _judge(self, butterfly: Butterfly, certificate: Certificate | None) -> None:
        """Remember with whom a round came to its end, and who sent what had to be refused."""
        for peer, reason in butterfly.refused.items():
            self._membership.broke_with(peer, reason)
        if certificate is not None:
            body = certificate.body
            for index, *_ in body.contributors:
                self._membership.finished_with(body.members[index])
                self._speeds.was_in_time(body.members[index])

    async def _linger(self, group: bytes, butterfly: Butterfly, committed: bool) -> None:
        try:
            await butterfly.stop_serving(linger=committed)
        finally:
            self._running.pop(group, None)

    async def _serve_butterfly(self, channel: Channel, request: dict[str, Any]) -> None:
        group = request.get("group")
        if type(group) is not bytes:
            raise PeerRefusedError(self._rpc.peer_id, "malformed group id")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(ROSTER_WAIT_SECONDS):
                while group not in self._running and not self._settlements.knows(group):
                    await self._arrived.wait()
        if group not in self._running:
            raise PeerRefusedError(self._rpc.peer_id, "this peer is not in that group")
        await self._running[group].serve(channel, request)
