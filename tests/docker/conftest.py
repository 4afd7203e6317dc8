"""One image and one swarm for all tests of this folder: both take minutes to make."""

from collections.abc import Iterator

import pytest

from tests.support.containers.compose import Containers, build_image, why_unavailable
from tests.support.tools import unavailable


@pytest.fixture(scope="session")
def image() -> str:
    unavailable(why_unavailable(), "docker")
    return build_image()


@pytest.fixture(scope="session")
def swarm(image: str) -> Iterator[Containers]:
    """Three trainers and a slow one, which are taking part. A test leaves it as it was."""
    with Containers() as containers:
        containers.up(3)
        containers.wait_until("a bootstrap peer and four trainers", lambda: len(containers.peers()) == 5)
        containers.wait_until("a committed round", lambda: containers.round() > 0)
        yield containers
