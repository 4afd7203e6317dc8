"""The image: what is in it, what is not, and how it behaves as process 1."""

import json
import time
from collections.abc import Iterator

import pytest

from tests.support.containers.compose import docker, inspect

pytestmark = pytest.mark.timeout(1500)

MOST_BYTES = 1_600_000_000
"""torch alone is 0.6 GB of it; the CUDA libraries would be several GB."""
REMAPPED = ("tini", "-e", "2", "-e", "3", "-e", "6", "-e", "8", "-e", "9", "--", "p2ptrain-entrypoint")


@pytest.fixture
def container(image: str) -> Iterator[list[str]]:
    """Ids of containers that are removed at the end, with their volumes."""
    started: list[str] = []
    yield started
    for each in started:
        docker("rm", "--force", "--volumes", each)


def in_image(image: str, *command: str) -> str:
    """Return the output of a command in a container of its own."""
    return docker("run", "--rm", "--network", "none", "--entrypoint", command[0], image, *command[1:])


def test_it_is_small_labelled_and_runs_as_nobody_in_particular(image: str) -> None:
    about = json.loads(docker("image", "inspect", image))[0]
    config = about["Config"]
    assert about["Size"] < MOST_BYTES
    assert config["User"] == "p2ptrain"
    assert config["StopSignal"] == "SIGTERM"
    assert list(config["Volumes"]) == ["/data"]
    assert config["Healthcheck"]["Test"]
    assert config["Labels"]["org.opencontainers.image.title"] == "p2ptrain"
    assert config["Labels"]["org.opencontainers.image.version"] == "test"
    assert in_image(image, "id", "-u") == "10001"


def test_all_that_a_peer_needs_is_in_it(image: str) -> None:
    say = (
        "import importlib.resources as r, os, torch; from p2ptrain.network.libp2p.daemon import _binary; "
        "from p2ptrain.native.exact import load_kernels; "
        "from p2ptrain.native.load import INSTALLED, load_library; m = r.files('p2ptrain.monitor'); "
        "print(os.access(_binary(), os.X_OK), torch.version.cuda, (m / 'static/main.js').is_file(), "
        "(m / 'static/vendor').is_dir(), (m / 'templates/index.html').is_file(), load_library()[0] == INSTALLED, "
        "load_kernels() is not None)"
    )
    assert in_image(image, "python3", "-c", say) == "True None True True True True True"
    assert "p2ptrain" in docker("run", "--rm", "--network", "none", image, "--version")


def test_no_key_wheel_or_run_directory_is_in_any_layer(image: str) -> None:
    names = ("*.key", "torch*.whl", "p2ptrain*.whl", "run.toml", ".git", "*.sqlite")
    wanted = [part for name in names for part in ("-name", name, "-print", "-o")][:-1]
    look = ["--entrypoint", "find", image, "/", "-xdev", *wanted]
    found = docker("run", "--rm", "--network", "none", "--user", "0", *look)
    assert found == ""
    history = docker("history", "--no-trunc", "--format", "{{.CreatedBy}}", image)
    assert not any(word in history.lower() for word in ("password", "token", "secret"))


def test_it_stops_at_once_before_python_has_a_handler(image: str, container: list[str]) -> None:
    for command in (("linked-trainer",), ("monitor", "p2ptrain://x")):
        container.append(docker("run", "--detach", "--network", "none", image, *command))
        docker("stop", "--time", "120", container[-1])  # The engine kills it afterwards: its code were 137.
        assert inspect(container[-1], "{{.State.ExitCode}}") in ("143", "3"), docker("logs", container[-1])


def test_orphans_are_reaped(image: str, container: list[str]) -> None:
    container.append(docker("run", "--detach", "--network", "none", image, "linked-trainer"))
    # The child of a process that is gone belongs to process 1; unless that waits for it, it stays as a zombie.
    docker("exec", container[0], "sh", "-c", "dd if=/dev/zero of=/dev/null count=1 2>/dev/null & exec true")
    look = "import glob; print(*[open(path).read().strip() for path in glob.glob('/proc/[0-9]*/comm')])"
    deadline = time.monotonic() + 10.0
    while "dd" in docker("exec", container[0], "python3", "-I", "-c", look).split():
        assert time.monotonic() < deadline


def test_errors_that_stay_are_not_tried_for_ever(image: str, container: list[str]) -> None:
    plain = docker("run", "--detach", "--network", "none", image, "join", "no-link", "--yes")
    container.append(plain)
    assert docker("wait", plain) == "3"
    remapped = docker(
        "run", "--detach", "--network", "none", "--restart", "on-failure", "--entrypoint", REMAPPED[0], image,
        *REMAPPED[1:], "join", "no-link", "--yes",
    )  # fmt: skip
    container.append(remapped)
    assert docker("wait", remapped) == "0"
    assert inspect(remapped, "{{.RestartCount}} {{.State.Status}}") == "0 exited"
    assert "p2ptrain: error: " in docker("logs", remapped)
