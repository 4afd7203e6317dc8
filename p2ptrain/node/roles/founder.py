"""A founder that holds no state: it votes on the rounds of its swarm, so that the first peers can begin.

Later it is one voter among others. Of two peers and their seed, any one may vanish without a wait.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from p2ptrain.averaging.commit.votes import LightVotes
from p2ptrain.averaging.context import PeerContext, ballots_in, founding_of

if TYPE_CHECKING:
    from p2ptrain.node.peer import Peer

logger = logging.getLogger(__name__)


def vote_as_founder(peer: Peer) -> None:
    """Answer requests for votes from now on, if this peer is a founder; those of each stage in a pipeline.

    Raises:
        IntegrityError: The file of this peer's earlier votes is damaged.
    """
    manifest = peer.manifest
    if peer.identity.peer_id not in manifest.founders:
        return
    logger.info("this peer is a founder: it votes on the swarm's rounds")
    if not manifest.in_stages:
        LightVotes(peer.held.context)
        return
    from p2ptrain.pipeline.plan import PipelinePlan
    from p2ptrain.pipeline.view import PipelineView

    plan = PipelinePlan(manifest)
    view = PipelineView(plan, peer.identity.peer_id, peer.runtime)
    peer.presence.listeners.append(view.update)
    for number in range(plan.num_stages + 1):  # The last is that of tied embeddings.
        swarm = plan.swarm_of(number)
        LightVotes(
            PeerContext(
                peer.rpc.scoped(f"unit{number}"), peer.runtime, peer.identity, swarm, manifest.averaging,
                view.membership(number), founding=founding_of(manifest),
                ballots=ballots_in(peer.runtime.scratch, swarm),
            )
        )  # fmt: skip
