"""Sites whose group learns the sum of their updates alone, while up to a third of them dies in any phase."""

import asyncio
import contextlib
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from p2ptrain.averaging.allreduce.unmasking import Unmasking
from p2ptrain.averaging.averager import SPENT, Averager
from p2ptrain.averaging.commit.attempt import SpentError
from p2ptrain.averaging.masking.keys import least_to_unmask
from p2ptrain.errors import TemporaryError
from p2ptrain.network.simulated import SimulatedNetwork
from p2ptrain.training.sync.replica import MAX_DROPS, Replica
from tests.support.coroutines import simulated
from tests.support.sim.averagers import AveragingPeer, start_averagers
from tests.support.sim.mask_schedules import PHASES, draw_mask_schedule, find_mask_problems, watched
from tests.support.sim.masking import SECURE, SPEC, plain_mean
from tests.support.sim.peers import until
from tests.support.sim.trainers import SimulatedSwarm, make_manifest

IS_FREE = ("sending", "shares", "parts", "sums")
"""Phases in which nobody has signed the sums: the others average the same updates again."""
CASES = [
    pytest.param(phase, seed, marks=[] if seed < 3 else pytest.mark.slow)
    for phase, (owner, *_) in PHASES.items() if owner is Unmasking for seed in range(12)
]  # fmt: skip


@contextlib.contextmanager
def _dying(network: SimulatedNetwork, victims: list[AveragingPeer], phase: str) -> Iterator[list[str]]:
    """Crash each victim in a phase of its first attempt; yield their names as they die."""
    peers, died = {each.peer.peer_id: each.peer for each in victims}, list[str]()

    def crash(peer_id: str, entered: str) -> None:
        peer = peers.get(peer_id)
        if entered == phase and peer is not None and peer.alive:
            died.append(peer.name)
            network.crash(peer)

    with watched(crash):
        yield died


async def _take_part(peer: AveragingPeer, spent: list[str]) -> None:
    """Average round after round; train anew if the group may know a sum with the update."""
    while True:
        try:
            await peer.round()
        except SpentError:
            spent.append(peer.peer.name)
            peer.vector = torch.randn_like(peer.vector)
        except TemporaryError:
            continue


async def _average_until(sites: list[AveragingPeer], survivors: list[AveragingPeer], spent: list[str]) -> None:
    """Run all sites until each survivor was in a committed round."""
    runs = [site.peer.spawn(_take_part(site, spent)) for site in sites]
    await until(lambda: all(site.outcomes for site in survivors), 400.0)
    for run in runs:
        run.cancel()
    await asyncio.gather(*runs, return_exceptions=True)


async def _start(network: SimulatedNetwork, count: int, num_values: int) -> list[AveragingPeer]:
    peers = [network.add_peer(f"site{index}") for index in range(count)]
    return await start_averagers(network, peers, SPEC.model_copy(update={"min_peers": 3}), num_values, secure=SECURE)


def _expect_exact(site: AveragingPeer, vectors: dict[str, torch.Tensor]) -> None:
    """The newest mean of a site is that of its contributors, to the bit."""
    body = site.outcomes[-1].result.certificate.body
    given = [vectors[peer] for peer in body.members]
    expected = plain_mean(given, [10] * len(given), [index for index, *_ in body.contributors])
    assert torch.equal(site.mean(), expected)


@pytest.mark.fault(57)
@pytest.mark.parametrize(("phase", "seed"), CASES)
@simulated()
async def test_the_sum_of_the_rest_is_exact_whichever_third_dies_in_whichever_phase(
    network: SimulatedNetwork, phase: str, seed: int
) -> None:
    count = 4 + seed % 7
    sites = await _start(network, count, 40 + 7 * seed)
    victims = network.random.sample(sites, count - least_to_unmask(count, SECURE.threshold))
    survivors = [site for site in sites if site not in victims]
    first, spent = {site.peer.peer_id: site.vector for site in sites}, list[str]()
    with _dying(network, victims, phase) as died:
        await _average_until(sites, survivors, spent)
    assert len(died) == len(victims)
    assert spent == [], "the sum that all hold is opened, whoever dies"
    for site in survivors:  # One that failed last may miss the others' next round, and average in the one after.
        _expect_exact(site, first)
    began = [site.outcomes[0] for site in survivors if site.outcomes[0].result.certificate.body.round == 0]
    assert len({outcome.result.certificate.body for outcome in began}) == 1
    counted = set(began[0].result.certificate.body.contributing)
    assert len(counted) >= 3
    if phase in IS_FREE:
        assert counted <= {site.peer.peer_id for site in survivors}
    else:
        assert len(counted) == count
        assert {outcome.attempts for outcome in began} == {1}
        assert len(began) == len(survivors)


@pytest.mark.fault(57)
@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(2, 12))])
@simulated()
async def test_an_update_in_a_sum_that_others_may_know_is_not_averaged_again(
    network: SimulatedNetwork, seed: int
) -> None:
    """Too many die for the others to open the sum, or to know that nobody did."""
    sites = await _start(network, 6, 50)
    victims = network.random.sample(sites, 3)
    survivors = [site for site in sites if site not in victims]
    first, spent = {site.peer.peer_id: site.vector for site in sites}, list[str]()
    with _dying(network, victims, "agreed"):
        await _average_until(sites, survivors, spent)
    assert sorted(spent) == sorted(site.peer.name for site in survivors)
    now = {site.peer.peer_id: site.vector for site in survivors}
    assert not any(torch.equal(now[peer], first[peer]) for peer in now)
    for site in survivors:
        _expect_exact(site, now)


@pytest.mark.fault(57)
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    "seeds",
    [range(6), *(pytest.param(range(first, first + 50), marks=pytest.mark.slow) for first in range(0, 200, 50))],
)
def test_sums_are_exact_and_single_updates_hidden_whatever_befalls_sites_in_any_phase(seeds: range) -> None:
    assert [problem for seed in seeds for problem in find_mask_problems(draw_mask_schedule(seed))] == []


@simulated(seed=4)
async def test_trainers_average_masked_updates_and_drop_one_that_is_spent(
    network: SimulatedNetwork, monkeypatch: pytest.MonkeyPatch
) -> None:
    averaging = {"aggregation": "mean", "codec": "fp32", "group_size": 32, "min_peers": 3}
    manifest = make_manifest(**averaging).model_copy(update={"secure_aggregation": SECURE})
    swarm = SimulatedSwarm(network, manifest, 4)
    names = ["a", "b", "c", "d", "e"]
    for name in names:
        swarm.start(name)
    dropped, reset, masked = list[int](), Replica.reset, list[int]()
    average, open_sums = Averager.average, Unmasking.open_sums

    async def spent_once(averager: Averager, *given: Any) -> Any:
        outcome = await average(averager, *given)
        if averager is swarm.trainers["c"].sync.averager and outcome.result.certificate.body.round == 2 and not dropped:
            raise SpentError("the round was lost")
        return outcome

    async def counted(replica: Replica, work: Any) -> None:
        dropped.append(replica.state.head.round)
        await reset(replica, work)
        assert work.tokens == 0

    async def opened(verifier: Unmasking) -> None:
        await open_sums(verifier)
        masked.append(len(verifier._session.members))

    monkeypatch.setattr(Averager, "average", spent_once)
    monkeypatch.setattr(Replica, "reset", counted)
    monkeypatch.setattr(Unmasking, "open_sums", opened)
    await swarm.until(lambda: min(t.sync.head.round for t in swarm.alive) >= 5, 600, "five rounds")
    assert dropped == [2]
    assert len(masked) >= 4 * len(names)


@simulated(seed=5)
async def test_a_site_whose_cell_comes_too_late_again_and_again_trains_on(
    network: SimulatedNetwork, monkeypatch: pytest.MonkeyPatch
) -> None:
    averaging = {"aggregation": "mean", "codec": "fp32", "group_size": 32, "min_peers": 3}
    manifest = make_manifest(**averaging).model_copy(update={"secure_aggregation": SECURE})
    swarm = SimulatedSwarm(network, manifest, 4)
    average = Averager.average

    async def late(averager: Averager, *given: Any) -> Any:
        outcome = await average(averager, *given)
        is_late = averager is swarm.trainers["c"].sync.averager
        return replace(outcome, contributed=False, refusal=SPENT) if is_late else outcome

    monkeypatch.setattr(Averager, "average", late)
    for name in ("a", "b", "c", "d"):
        swarm.start(name)
    await swarm.until(lambda: min(t.sync.head.round for t in swarm.alive) > MAX_DROPS, 600, "some rounds")
    assert len(swarm.alive) == 4
    assert swarm.trainers["c"].sync.reports[-1].reason.endswith("dropped")
