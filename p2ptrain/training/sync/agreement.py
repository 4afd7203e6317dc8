"""Comparison of model and step rule with other peers, before a peer takes their state."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Annotated

from msgspec import Meta

from p2ptrain.errors import DeadlineError, IncompatibleError, PeerError
from p2ptrain.network.rpc.endpoint import Rpc
from p2ptrain.network.schema import Hash, Message, Nothing
from p2ptrain.tasks import together
from p2ptrain.training.optimizer_checks import differences
from p2ptrain.training.state.layout import Layout

logger = logging.getLogger(__name__)

LAYOUT = "layout.compare"
CALL_SECONDS = 5.0
MAX_ASKED = 4
MAX_REPLY_BYTES = 2 << 20


class Trained(Message, frozen=True):
    """The fingerprint of a peer's layout, and its step rule (see `step_rule`)."""

    fingerprint: Hash
    rule: Annotated[str, Meta(max_length=1 << 20)]


def serve_agreement(rpc: Rpc, layout: Layout) -> None:
    """Serve this peer's layout fingerprint and step rule."""

    async def compare(peer: str, request: Nothing) -> Trained:
        return Trained(layout.fingerprint, layout.rule)

    rpc.serve(LAYOUT, Nothing, compare)


async def check_agreement(rpc: Rpc, layout: Layout, trainers: Sequence[str]) -> None:
    """Ask up to `MAX_ASKED` trainers; raise `IncompatibleError` if all that answer differ in layout or step rule."""

    async def ask(peer: str) -> Trained | None:
        try:
            return await rpc.call(peer, LAYOUT, Nothing(), Trained, CALL_SECONDS, max_reply_bytes=MAX_REPLY_BYTES)
        except (PeerError, DeadlineError) as error:
            logger.debug("peer %s does not say what it trains: %s", peer[-8:], error)
            return None

    asked = await together("compare", map(ask, trainers[:MAX_ASKED]))
    answers = [answer for answer in asked if answer is not None]
    if not answers or any(answer.fingerprint == layout.fingerprint for answer in answers):
        return
    rule = answers[0].rule
    if rule != layout.rule:
        raise IncompatibleError(
            f"with every = 1 all peers take the same step, and this one would take another: "
            f"{differences(layout.rule, rule)}; give Swarm.optimizer the optimizer and clip_norm of the others"
        )
    raise IncompatibleError(
        f"peer {trainers[0][-8:]} trains a model of another shape: build the model that the swarm's manifest describes"
    )
