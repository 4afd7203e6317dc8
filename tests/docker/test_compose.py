"""The compose files with Compose v2 and with 1.29: valid in both, and 1.29 starts, scales and ends a swarm.

All other tests of this folder use v2 where there is one.
"""

import pytest

from tests.support.containers.compose import Containers, compose_of

pytestmark = pytest.mark.timeout(1500)  # the first test that runs makes the image

VERSIONS = ("v2", "1.29")
PEERS = {"bootstrap", "trainer", "slow-trainer", "monitor"}
FILES = {
    ("compose.yaml",): PEERS,
    ("compose.yaml", "compose.stages.yaml"): {*PEERS, "stage"},
    ("deploy/public/compose.yaml",): {"seed", "monitor"},
    ("deploy/public/compose.yaml", "tests/docker/internal.yaml"): {"seed", "monitor"},
}
"""Sets of files that go together, and their services."""
HOST = {"P2PTRAIN_HOST": "swarm.test"}


@pytest.mark.parametrize("files", FILES)
@pytest.mark.parametrize("version", VERSIONS)
def test_every_file_is_valid_and_nothing_in_it_is_ignored(image: str, version: str, files: tuple[str, ...]) -> None:
    project = Containers(*files, kind="valid", compose=compose_of(version), **HOST)
    assert project.compose("config", "--quiet") == "", "no warning either"
    named = set(project.compose("config", "--services").split())
    assert named - {"chaos"} == FILES[files], "1.29 names those of other profiles, too"
    if files[0] == "compose.yaml":
        assert set(project.compose("--profile", "chaos", "config", "--services").split()) == {*FILES[files], "chaos"}


@pytest.mark.parametrize("version", VERSIONS)
def test_a_name_that_must_be_given_is_asked_for(image: str, version: str) -> None:
    project = Containers("deploy/public/compose.yaml", compose=compose_of(version), P2PTRAIN_HOST="")
    with pytest.raises(AssertionError, match=r"set it in \.env"):
        project.compose("config", "--quiet")


def test_the_older_version_starts_scales_and_ends_a_swarm(image: str) -> None:
    with Containers(kind="older", compose=compose_of("1.29")) as swarm:
        swarm.up(2, "--scale", "slow-trainer=0")
        swarm.wait_until("both trainers in a round", lambda: swarm.round() > 0 and len(swarm.counted()) == 2)
        assert len(swarm.ids("slow-trainer")) == 0
        swarm.up(1, "--no-recreate", "--scale", "slow-trainer=0")
        assert len(swarm.ids("trainer")) == 1
