"""A model in two stages, each hosted by containers that hold no more of it: it learns, and outlives one of them."""

import math
import re
from collections.abc import Iterator

import pytest

from tests.support.containers.compose import Containers, docker, inspect

pytestmark = pytest.mark.timeout(900)

SETTINGS = (
    "name=stages pipeline.stages=2 training.every=1 training.global_batch=16 training.warmup_steps=0 "
    "training.learning_rate=0.003 model.layers=2 model.hidden=64 model.intermediate=128 model.context=64 "
    "averaging.grace_seconds=2 averaging.matchmaking_seconds=10 averaging.round_seconds=20"
)
"""A small model and small batches: seven containers share two cores."""
RECORD_SECONDS = 30.0


@pytest.fixture
def stages(image: str) -> Iterator[Containers]:
    """Four hosts and two trainers, on their way."""
    files = ("compose.yaml", "compose.stages.yaml")
    with Containers(*files, kind="stages", P2PTRAIN_SETTINGS=SETTINGS) as containers:
        containers.up(2, "--scale", "stage=4", "--scale", "slow-trainer=0")
        yield containers


def hosts(swarm: Containers) -> list[int]:
    return [len(stage["hosts"]) for stage in swarm.api("stages")["stages"]]


def loss(swarm: Containers) -> float:
    """What the status page shows; chance before there is any."""
    return float(swarm.api("headline")["loss"] or math.log(256))


@pytest.mark.fault(27)
def test_stages_are_covered_learn_and_outlive_a_killed_host(stages: Containers) -> None:
    stages.wait_until("two hosts of each stage", lambda: hosts(stages) == [2, 2])
    stages.wait_for_rounds(3)
    # Nobody holds the model: a trainer has no state, and a host that of one stage.
    peers = stages.peers()
    assert [peers[f"trainer-{number}"]["stages"] for number in (1, 2)] == [[], []]
    assert sorted(peers[f"stage-{number}"]["stages"] for number in (1, 2, 3, 4)) == [[0], [0], [1], [1]]

    name = next(name for name in sorted(peers) if peers[name]["stages"] == [0])
    victim, before = stages.names("stage")[name], loss(stages)
    docker("kill", victim)
    stages.wait_for_rounds(3)
    stages.wait_until("a stage with one host", lambda: 1 in hosts(stages), RECORD_SECONDS + 30)
    assert 0 not in hosts(stages)
    stages.wait_until("a loss well below chance", lambda: loss(stages) < min(before, 0.75 * math.log(256)))
    docker("start", victim)
    stages.wait_until("it hosts again", lambda: hosts(stages) == [2, 2])
    stages.check_states()

    # Checkpoints of all hosts are in one volume, as an export takes them.
    listed = docker("exec", victim, "p2ptrain", "checkpoint", "ls", "/data")
    complete = re.findall(r"(stage-\d)/\d+-round-(\d+) .* complete\n", listed + "\n")
    assert {"stage-0", "stage-1"} <= {stage for stage, _ in complete}, listed

    stages.compose("stop")
    for container in stages.ids():
        log = docker("logs", container)
        assert inspect(container, "{{.State.ExitCode}}") == "0", log[-2000:]
        assert "Traceback" not in log, log[-4000:]
