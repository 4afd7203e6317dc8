"""Plans of this peer's attempts, which follow from the rosters and from its earlier attempts."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import TYPE_CHECKING

from p2ptrain.averaging.allreduce.bandwidth import SendRates, plan_shares
from p2ptrain.averaging.commit.attempt import Attempt, AttemptFailedError, Contribution
from p2ptrain.averaging.commit.result_chunks import Origin
from p2ptrain.averaging.commit.round_log import RoundLog
from p2ptrain.averaging.context import PeerContext
from p2ptrain.averaging.grouping.cells import Cells
from p2ptrain.averaging.masking.keys import MaskError, Masking
from p2ptrain.averaging.masking.share import MaskedContribution
from p2ptrain.averaging.protocol.certificate import Head, Roster
from p2ptrain.averaging.timing.deadlines import attempt_seconds
from p2ptrain.averaging.vector.rules import get_rule
from p2ptrain.errors import IntegrityError

if TYPE_CHECKING:
    import torch

ROUNDS_REMEMBERED = 16
NONCE_BYTES = 16


class AttemptPlanner:
    """Plans attempts: shares, codecs, deadlines and masks.

    Attributes:
        rates: Send rates of the other peers.
    """

    def __init__(self, context: PeerContext, cells: Cells, round_log: RoundLog) -> None:
        self._context = context
        self._cells = cells
        self._round_log = round_log
        self.rates = SendRates()
        self._durations: dict[int, deque[float]] = {}

    def nonce(self, level: int) -> bytes:
        """Return the nonce of a new ticket; on level 0 of a swarm with secure aggregation, keys of new masks."""
        keys = self._context.mask_keys
        return keys.new_nonce() if keys and not level else self._context.runtime.random.randbytes(NONCE_BYTES)

    def durations_of(self, level: int) -> deque[float]:
        """Return the seconds of the last attempts on a level, for the caller to update."""
        return self._durations.setdefault(level, deque(maxlen=ROUNDS_REMEMBERED))

    def plan(
        self, roster: Roster, head: Head, vector: torch.Tensor, origin: Origin | None
    ) -> tuple[Attempt, Contribution]:
        """Return an attempt and this peer's contribution to it.

        Args:
            vector: fp32, as long as the round's vector.
            origin: Above level 0: the group result from which the vector was decoded.

        Raises:
            AttemptFailedError: Under secure aggregation: a roster is too small, or a member's keys are false.
        """
        context, spec, level = self._context, self._context.spec, roster.tickets[0].level
        codec, num_values = self._round_log.codec_of(head.round, level), vector.numel()
        plan = plan_shares(roster.tickets, num_values, codec.block_size)
        levels = self._cells.num_levels(head.present)
        seconds = attempt_seconds(self.durations_of(level), spec)
        attempt = Attempt(roster, head, plan.bounds, codec, context.swarm, spec, levels, seconds, plan.shareless)
        if context.mask_keys and not level:
            shares = get_rule(spec).shares(spec, attempt.claims(range(len(roster.tickets))))
            masking = self._masking(roster, shares)
            attempt.masked = masking.codec()
            return attempt, MaskedContribution(vector, attempt.masked, masking=masking)
        own = roster.index_of(context.rpc.peer_id)
        return attempt, Contribution(vector, plan.part_codec(attempt.part_codecs, own, spec.grace_seconds), origin)

    def _masking(self, roster: Roster, shares: Sequence[float]) -> Masking:
        assert self._context.mask_keys is not None
        try:
            return self._context.mask_keys.masking(roster, shares)
        except IntegrityError as error:
            if isinstance(error, MaskError):
                self._context.membership.suspect(error.peer, str(error))
            raise AttemptFailedError(str(error)) from error
