"""A peer whose contributions cannot count says so, begins anew, and ends with a clear error if that does not help."""

import logging
import math
from collections.abc import Callable

import pytest
import torch

from p2ptrain.errors import DivergedError
from p2ptrain.network.simulated import SimulatedNetwork
from p2ptrain.training.sync.replica import MAX_DROPS
from tests.support.coroutines import simulated
from tests.support.sim.trainers import SimulatedSwarm, SimulatedTrainer, make_manifest

SECONDS = 300.0

Spoil = Callable[[torch.Tensor], object]


def spoil_updates(trainer: SimulatedTrainer, spoil: Spoil, while_: Callable[[], bool] = lambda: True) -> None:
    collect = trainer.work.collect

    def collect_spoiled(out: torch.Tensor, *rest: object) -> None:
        collect(out, *rest)  # type: ignore[arg-type]
        if while_():
            spoil(out)

    trainer.work.collect = collect_spoiled  # type: ignore[method-assign, assignment]


SPOILS: dict[str, Spoil] = {
    "not finite": lambda out: out[:1].fill_(math.nan),
    "too large": lambda out: out.fill_(1e7),  # Beyond `averaging.max_value`.
    "refused by the others": lambda out: out.mul_(1000),
}
each = pytest.mark.parametrize("spoil", SPOILS.values(), ids=SPOILS)


async def start(network: SimulatedNetwork) -> tuple[SimulatedSwarm, SimulatedTrainer]:
    swarm = SimulatedSwarm(network, make_manifest(codec="fp32"), 0)
    for index in range(3):
        swarm.start(f"sound{index}")
    broken = swarm.start("broken")
    await swarm.until(lambda: swarm.in_agreement(1), 90, "the swarm trains")
    return swarm, broken


@pytest.mark.fault(32)
@each
@simulated(seed=3)
async def test_a_peer_whose_contributions_never_count_ends_with_one_line_and_the_others_go_on(
    network: SimulatedNetwork, spoil: Spoil, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.WARNING, "p2ptrain.training.sync.synchronizer")
    swarm, broken = await start(network)
    task = swarm.tasks.pop("broken")
    spoil_updates(broken, spoil)
    await swarm.until(task.done, SECONDS, "the broken peer ends")
    error = task.exception()
    assert isinstance(error, DivergedError), error
    assert f"{MAX_DROPS} contributions of this peer in a row" in str(error)
    assert "\n" not in str(error)
    sound = [trainer for trainer in swarm.alive if trainer is not broken]
    front = max(trainer.sync.head.round for trainer in sound)
    await swarm.until(lambda: min(t.sync.head.round for t in sound) >= front + 3, SECONDS, "the others go on")
    assert all(bool(trainer.state.vector.isfinite().all()) for trainer in sound)
    told = [record for record in caplog.records if "it was dropped, and this peer begins anew" in record.message]
    assert len(told) == MAX_DROPS - 1


@pytest.mark.fault(32)
@each
@simulated(seed=4)
async def test_a_peer_whose_contributions_count_again_is_not_ended_by_those_before(
    network: SimulatedNetwork, spoil: Spoil
) -> None:
    swarm, broken = await start(network)
    begun: list[int] = []
    reset = broken.work.reset

    def watched() -> None:
        begun.append(broken.sync.head.round)
        reset()

    broken.work.reset = watched  # type: ignore[method-assign]
    for drops in (MAX_DROPS - 1, 2 * (MAX_DROPS - 1)):
        spoil_updates(broken, spoil, while_=lambda: len(begun) < drops)  # noqa: B023
        # The others leave a peer that breaks attempts out for longer each time.
        await swarm.until(lambda: len(begun) == drops, 4 * SECONDS, "its updates are dropped")  # noqa: B023
        seen = len(broken.results)
        await swarm.until(
            lambda: any(result.contributed for result in broken.results[seen:]),  # noqa: B023
            4 * SECONDS,
            "it takes part again",
        )
    assert len(begun) == 2 * (MAX_DROPS - 1)
    dropped = [result for result in broken.results if "was dropped" in result.reason]
    assert not any(result.contributed for result in dropped)
    if spoil is SPOILS["refused by the others"]:
        assert any(result.committed for result in dropped), "it keeps a share of the round of the others"
