"""Heads of other peers' states, and their verification."""

from __future__ import annotations

from collections import Counter

from p2ptrain.averaging.context import PeerContext
from p2ptrain.averaging.grouping.membership import Membership
from p2ptrain.averaging.protocol.certificate import Certificate
from p2ptrain.averaging.protocol.head import Head, genesis
from p2ptrain.errors import IntegrityError
from p2ptrain.network.rpc.endpoint import Rpc
from p2ptrain.network.schema import Message, Nothing
from p2ptrain.network.transport import PeerId

STATE_HEAD = "state.head"
MAX_HEAD_BYTES = 4 << 20


class HeldHead(Message, frozen=True):
    """Reply with the head of a peer's state."""

    head: Head


async def fetch_head(rpc: Rpc, source: PeerId, timeout_seconds: float = 10.0) -> Head:
    """Return the head of a peer's state, unverified: see `check_head`.

    Raises:
        PeerError: The peer cannot be reached, refuses, or sends a malformed answer.
        DeadlineError: The peer did not answer in time.
    """
    held = await rpc.call(source, STATE_HEAD, Nothing(), HeldHead, timeout_seconds, max_reply_bytes=MAX_HEAD_BYTES)
    return held.head


def check_head(context: PeerContext, membership: Membership, head: Head) -> None:
    """Raise `IntegrityError` for a head that is not proved.

    Its certificate must prove it, and no other digest may have more votes at its lineage.
    """
    votes = Counter(record.digest for record in membership.records() if record.lineage == head.lineage)
    if votes and votes[head.digest] < max(votes.values()):
        raise IntegrityError("most peers announce another digest for this state")
    if head.round == 0:
        if head != genesis(context.swarm, head.digest):
            raise IntegrityError("a head at round 0 is not a beginning")
        return
    body = Certificate.from_bytes(head.certificate, context.swarm, context.signer).body
    if body.next_head(head.digest, head.certificate) != head:
        raise IntegrityError("a head does not follow from its certificate")
