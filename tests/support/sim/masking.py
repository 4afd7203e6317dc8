"""Members of one roster with secure aggregation, on a simulated network, below matchmaking."""

from collections.abc import Collection, Sequence

import numpy as np
import torch

from p2ptrain.averaging.allreduce.planning import AttemptPlanner
from p2ptrain.averaging.allreduce.unmasking import Unmasking
from p2ptrain.averaging.commit.round_log import RoundLog
from p2ptrain.averaging.grouping.cells import Cells
from p2ptrain.averaging.masking.codec import HEADROOM
from p2ptrain.averaging.protocol.certificate import Roster
from p2ptrain.codecs import get_codec
from p2ptrain.manifest import AveragingSpec, SecureAggregationSpec
from tests.support.sim.averaging import HEAD, RosterMember, begin, make_context, make_ticket
from tests.support.sim.peers import Member

SECURE = SecureAggregationSpec()
SPEC = AveragingSpec(aggregation="mean", codec="fp32", group_size=32, grace_seconds=1.0, round_seconds=10.0)


def make_vectors(count: int, num_values: int, seed: int = 5) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(num_values, generator=generator) for _ in range(count)]


def make_masked_roster(
    swarm: Sequence[Member],
    vectors: Sequence[torch.Tensor],
    tokens: Sequence[int],
    secure: SecureAggregationSpec = SECURE,
    spec: AveragingSpec = SPEC,
    unreachable: Collection[int] = (),
) -> list[RosterMember]:
    """Everybody's side of one attempt, in roster order; ``unreachable`` members own no share, and accept no streams."""
    order = sorted(range(len(swarm)), key=lambda i: swarm[i].rpc.peer_id)
    planners, histories, tickets = {}, {}, []
    for i in order:
        context = make_context(swarm[i], spec, secure)
        histories[i] = RoundLog(context, [(get_codec("fp32"), vectors[i].numel())], 1 << 20)
        planners[i] = AttemptPlanner(context, Cells(spec.group_size), histories[i])
        tickets.append(make_ticket(swarm[i], tokens[i], HEAD, planners[i].nonce(0), reachable=i not in unreachable))
    result = []
    for i in order:
        planner = planners[i]
        attempt, contribution = planner.plan(Roster(tuple(tickets)), HEAD, vectors[i], None)
        result.append(begin(swarm[i], planner._context, attempt, contribution, histories[i]))
    return result


def unmasking(member: RosterMember) -> Unmasking:
    verifier = member.session.verifier
    assert isinstance(verifier, Unmasking)
    return verifier


def plain_mean(
    vectors: Sequence[torch.Tensor], tokens: Sequence[int], contributors: Collection[int], limit: float = SECURE.range
) -> torch.Tensor:
    """The mean that follows from plain integers on the grid, in Python's integers: fp32, ``[num_values]``.

    Written apart from the product: ``tokens`` are those of the whole roster, whose members' order is that of
    ``vectors``; those that are no ``contributors`` count nothing.
    """
    total, scale = sum(tokens), 2.0**31 * HEADROOM / limit
    sums = [0] * vectors[0].numel()
    for index in contributors:
        factor = np.float32(tokens[index] / total * scale)
        for at, value in enumerate(vectors[index].numpy()):
            clipped = min(max(value, np.float32(-limit)), np.float32(limit))
            sums[at] += int(np.rint(clipped * factor))
    counted = sum(tokens[index] / total for index in sorted(contributors))
    factor = np.float32(1.0 / (scale * counted))
    return torch.from_numpy(np.array([np.float32(value) * factor for value in sums], np.float32))
