"""Hosts that lie about their speed: trainers measure them, and they get no more than their fair share."""

import asyncio
from dataclasses import dataclass, replace

import pytest
from msgspec.structs import replace as with_fields

from p2ptrain.network.records.record import PeerRecord
from p2ptrain.network.simulated import LinkModel, SimulatedNetwork, SimulatedPeer
from p2ptrain.pipeline.messages import MicrobatchId, Times
from p2ptrain.pipeline.plan import PipelinePlan
from tests.support.coroutines import simulated
from tests.support.sim.peers import until
from tests.support.sim.pipelines import SAMPLES, Pipeline, PipelinePeer, make_manifest

FIRST, MEASURED, AT_ONCE = 50, 100, 6
"""Microbatches before those that are counted, those, and those in flight."""
PASS_SECONDS = 0.25
LINKS = LinkModel((0.005, 0.02))


@dataclass(frozen=True)
class Lie:
    """What a host says: times its speed in its record, and its times to trainers."""

    claim: float
    times: Times | None = None


class Liar(PipelinePeer):
    """A host whose speed is not what it says."""

    def __init__(
        self, lie: Lie, peer: SimulatedPeer, plan: PipelinePlan, stage: int | None, pass_seconds: float
    ) -> None:
        super().__init__(peer, plan, stage, pass_seconds)
        self.lie = lie
        assert self.hosted is not None
        host, settle = self.hosted.host, self.hosted.host.settle

        def settle_with_a_lie(id: MicrobatchId) -> Times | None:
            times = settle(id)
            return times and (lie.times or times)

        host.settle = settle_with_a_lie  # type: ignore[method-assign]

    def describe(self) -> PeerRecord:
        claimed = self.lie.claim / self.pass_seconds
        told = super().describe()
        stages = tuple(with_fields(report, tokens_per_second=claimed) for report in told.stages)
        return replace(told, stages=stages)


async def share(network: SimulatedNetwork, lie: Lie, stage: int, slower: float = 1.0) -> float:
    """The liar's microbatches after the first 50, relative to its fair share.

    The stage has two honest hosts and the liar, which takes ``slower`` times as long.
    """
    number = FIRST + MEASURED
    manifest = make_manifest(3, global_batch=2 * SAMPLES * number)
    pipeline = Pipeline(network, manifest)
    for each in (0, 1, 2, stage):
        await pipeline.add(f"host{len(pipeline.peers)}", each, PASS_SECONDS)
    pipeline.make = lambda peer, *others: Liar(lie, peer, PipelinePlan(pipeline.manifest), *others)
    liar = await pipeline.add("liar", stage, slower * PASS_SECONDS)
    pipeline.make = None
    await until(lambda: all(host.status == "training" for host in pipeline.hosts))
    trainer = await pipeline.add("trainer", None)
    await asyncio.sleep(5.0)  # Records arrive.
    accepted = (await pipeline.feed(trainer, range(number), AT_ONCE)).values()
    hosts = [each.legs[stage].host for each in accepted if each is not None]
    assert len(hosts) == number
    assert liar.peer.peer_id in hosts, "else it tells nobody anything"
    fair = MEASURED / slower / (2.0 + 1.0 / slower)
    return hosts[FIRST:].count(liar.peer.peer_id) / fair


LIES = {
    "record": Lie(1e3),
    "no time": Lie(1e12, Times(0.0, 0.0, 0.0)),
    "a slow next host": Lie(1e3, Times(0.0, 3600.0, 0.0)),
    "slow neighbours": Lie(1e3, Times(3600.0, 3600.0, 1e-6)),
    "all time": Lie(1e3, Times(0.0, 3600.0, 3600.0)),
}
CASES = [(lie, 1, slower) for lie in LIES for slower in (1.0, 4.0)] + [("no time", stage, 4.0) for stage in (0, 2)]
ENOUGH = {("record", 1, 4.0), ("a slow next host", 1, 1.0), ("slow neighbours", 1, 4.0), ("all time", 1, 1.0)}
"""With these each lie, each speed and each stage is in a case that is not slow: those at the ends are, too."""


@pytest.mark.parametrize(
    ("lie", "stage", "slower"),
    [pytest.param(*case, marks=[] if case in ENOUGH or case[1] != 1 else pytest.mark.slow) for case in CASES],
)
@simulated(seed=1, model=LINKS)
async def test_a_host_that_lies_about_its_speed_gets_little_more_than_its_fair_share(
    network: SimulatedNetwork, lie: str, stage: int, slower: float
) -> None:
    assert await share(network, LIES[lie], stage, slower) <= 1.3


@pytest.mark.parametrize("claim", [0.0, 1e-9])
@simulated(seed=2, model=LINKS)
async def test_a_host_that_claims_nothing_gets_its_fair_share(network: SimulatedNetwork, claim: float) -> None:
    assert await share(network, Lie(claim), 1) >= 0.7
