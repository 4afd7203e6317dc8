"""Whatever a stranger sends to form a group, it is answered or refused with a reason, and nothing breaks."""

import asyncio
import contextlib

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from p2ptrain.averaging.grouping import messages
from p2ptrain.averaging.grouping.coordinator import MAX_PENDING_GROUPS
from p2ptrain.averaging.timing.goal import Goal
from p2ptrain.errors import PeerRefusedError
from p2ptrain.manifest import AveragingSpec
from tests.support.coroutines import simulated
from tests.support.fuzz import fitting, malformed
from tests.support.sim.averagers import make_matchmaker
from tests.support.sim.averaging import HEAD
from tests.support.sim.peers import Member, members

SERVED = {
    messages.JOIN: messages.Join,
    messages.PROBE: messages.Probe,
    messages.REPORT: messages.BatchReport,
    messages.TAKE_ON: messages.TakeOn,
    messages.STEPS: messages.StepsReport,
    messages.PASS: messages.Pass,
    messages.MOVED: messages.AwaitMove,
}
SLOW = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much]


@settings(max_examples=30, suppress_health_check=SLOW)
@given(data=st.data(), goal=st.sampled_from([Goal(samples=12), Goal(steps=8)]))
def test_a_leader_answers_or_refuses_whatever_is_asked_of_it(data: st.DataObject, goal: Goal) -> None:
    names = st.sampled_from(sorted(SERVED))
    asked = [(name, data.draw(fitting(SERVED[name]) | malformed(SERVED[name]))) for name in data.draw(st.lists(names))]

    @simulated(members, 2, seed=1)
    async def ask(swarm: list[Member]) -> None:
        matchmaker, _ = make_matchmaker(swarm[0], swarm, AveragingSpec(group_size=8), HEAD, goal)
        matchmaker.participate(True)
        for name, request in asked:
            with contextlib.suppress(PeerRefusedError, ValueError):  # msgpack cannot hold some integers.
                await swarm[1].rpc.call(swarm[0].rpc.peer_id, name, request, dict, 150.0)
        assert not any(cause == "internal error" for _, cause in swarm[0].rpc.refusals)
        assert len(matchmaker._coordinator._groups) <= MAX_PENDING_GROUPS
        await matchmaker.close()
        await asyncio.sleep(0)

    ask()
