"""How a session combines parts, and how its members come to trust the means: plainly, with spot checks, or masked."""

from __future__ import annotations

from typing import TYPE_CHECKING

from p2ptrain.averaging.allreduce.member import Verifier
from p2ptrain.averaging.allreduce.spot_checks import SpotChecks
from p2ptrain.averaging.allreduce.unmasking import Unmasking
from p2ptrain.averaging.commit.attempt import Attempt, Contribution
from p2ptrain.averaging.masking.codec import MASKED
from p2ptrain.averaging.masking.share import MaskedContribution, MaskedShare
from p2ptrain.averaging.vector.reduce import OwnShare

if TYPE_CHECKING:
    from p2ptrain.averaging.allreduce.session import AllReduceSession


def new_share(attempt: Attempt, contribution: Contribution, own: int) -> OwnShare:
    """Return the share of member ``own`` in an attempt, without parts."""
    low, high = attempt.bounds[own : own + 2]
    values, count = contribution.vector[low:high], len(attempt.roster.tickets)
    if attempt.masked is not None:
        codec = contribution.codec.part(low, high)
        return MaskedShare(MASKED, attempt.spec, values, own, count, codec, chunk=attempt.chunk)
    own_codec = attempt.codec.part(low, high) if attempt.codec.sparse else None
    return OwnShare(
        attempt.dense_codec.part(low, high), attempt.spec, values, own, count, own_codec, attempt.lists_parts,
        chunk=attempt.chunk, audited=attempt.audited,
    )  # fmt: skip


def new_verifier(session: AllReduceSession, slow_checkers: set[str]) -> Verifier:
    """Return the verifier of a session, whose share is there; for ``slow_checkers`` see `SpotChecks`."""
    if isinstance(session.contribution, MaskedContribution):
        return Unmasking(session, session.contribution.masking)
    return SpotChecks(session, slow_checkers) if session.attempt.audited else Verifier(session)
