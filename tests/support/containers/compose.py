"""Swarms in containers for tests: the project's own image and compose file, on networks that lead nowhere.

Talks to whatever engine ``docker`` talks to, through Compose v2 and Debian's docker-compose 1.29. Every container,
network and volume of a swarm carries its project's label, which is how the end checks that nothing is left.
"""

import contextlib
import functools
import json
import os
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from tests.support.processes.commands import ROOT
from tests.support.tools import unavailable

IMAGE = "p2ptrain-test"
COMPOSE_V2 = ROOT / "build" / "compose-v2" / "docker-compose"
"""Where tests/docker/engine.sh puts it if there is none."""
BUILD_SECONDS = 1200.0
COMMAND_SECONDS = 180.0
PATIENCE_SECONDS = 240.0
"""How long to wait for what should take seconds: a machine of two cores runs all of it."""
SETTINGS = (
    "name=containers training.every=4 training.local_batch=4 averaging.history_rounds=64 averaging.min_peers=2 "
    "averaging.grace_seconds=2 averaging.matchmaking_seconds=10 averaging.round_seconds=20"
)
"""Short rounds and deadlines. One peer alone waits, so that no cable that is pulled makes two lineages."""


def run(
    *command: str,
    timeout_seconds: float = COMMAND_SECONDS,
    check: bool = True,
    variables: Mapping[str, str] | None = None,
) -> str:
    """Run a command, which must succeed if ``check``; its output."""
    done = subprocess.run(
        command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        timeout=timeout_seconds, env={**os.environ, **(variables or {})},
    )  # fmt: skip
    assert done.returncode == 0 or not check, f"{' '.join(command)}: {done.returncode}\n{done.stdout[-3000:]}"
    return done.stdout.strip()


def docker(*arguments: str, check: bool = True, timeout_seconds: float = COMMAND_SECONDS) -> str:
    return run("docker", *arguments, check=check, timeout_seconds=timeout_seconds)


def inspect(container: str, template: str) -> str:
    return docker("inspect", "--format", template, container)


@functools.cache
def compose_versions() -> dict[str, tuple[str, ...]]:
    """The commands of Compose that are there, by ``v2`` and ``1.29``, the one that most tests use first."""
    found: dict[str, tuple[str, ...]] = {}
    for command in (("docker", "compose"), (str(COMPOSE_V2),), ("docker-compose",)):
        if not shutil.which(command[0]):
            continue
        with contextlib.suppress(AssertionError, subprocess.TimeoutExpired):
            version = run(*command, "version", timeout_seconds=20)
            found.setdefault("1.29" if "docker-compose version 1." in version else "v2", command)
    return found


def compose_of(version: str) -> tuple[str, ...]:
    """The command of Compose ``v2`` or ``1.29``; the test is skipped where it is not there."""
    if version not in compose_versions():
        how = "as root, run: tests/docker/engine.sh install"
        unavailable(f"there is no Compose {version} here; {how}", f"compose-{version}")
    return compose_versions()[version]


@functools.cache
def why_unavailable() -> str:
    """Why there can be no containers here, and what to do; empty when there can."""
    how = "as root, run: tests/docker/engine.sh install, then: tests/docker/engine.sh run make test-docker"
    if not shutil.which("docker"):
        return f"docker is not found; {how}"
    try:
        run("docker", "version", timeout_seconds=20)
    except (AssertionError, subprocess.TimeoutExpired) as error:
        return f"no Docker engine answers ({str(error).splitlines()[-1][:160]}); {how}"
    return "" if compose_versions() else f"neither 'docker compose' nor docker-compose is found; {how}"


@functools.cache
def build_image() -> str:
    """Build the image from wheels that this machine's pip finds, without a network; its name."""
    run("deploy/container/wheels.sh", sys.executable, timeout_seconds=BUILD_SECONDS)
    docker(
        "build", "--network", "none", "--build-arg", "PIP_OPTIONS=--no-index", "--build-arg", "VERSION=test",
        "--tag", IMAGE, ".", timeout_seconds=BUILD_SECONDS,
    )  # fmt: skip
    return IMAGE


class Containers:
    """A project of a compose file; a context manager that removes it and checks that nothing is left.

    ``kind`` tells its project from others of this process. ``compose`` is the command, the first version that is there
    by default.
    """

    def __init__(self, *files: str, kind: str = "", compose: tuple[str, ...] = (), **variables: str) -> None:
        self._compose = compose or next(iter(compose_versions().values()))
        self.files = files or ("compose.yaml",)
        self.project = f"p2ptrain-test-{os.getpid()}-{kind or Path(self.files[0]).parent.name or 'swarm'}"
        self.network = f"{self.project}_swarm"
        self._variables = {
            "P2PTRAIN_IMAGE": IMAGE,
            "P2PTRAIN_PAGE_PORT": "0",
            "P2PTRAIN_SETTINGS": SETTINGS,
            "P2PTRAIN_CHAOS_MINUTES": "1",
            "P2PTRAIN_DOCKER_SOCKET": _socket(),
            **variables,
        }

    def compose(self, *arguments: str, timeout_seconds: float = COMMAND_SECONDS) -> str:
        files = [part for file in self.files for part in ("--file", file)]
        command = (*self._compose, "--project-name", self.project, *files, *arguments)
        return run(*command, timeout_seconds=timeout_seconds, variables=self._variables)

    def up(self, trainers: int, *options: str) -> None:
        """Start what is not running."""
        self.compose("up", "-d", "--no-build", "--scale", f"trainer={trainers}", *options)

    def ids(self, service: str = "") -> list[str]:
        """Its containers, in whatever state, of one service or of all, oldest first."""
        filters = [f"label=com.docker.compose.project={self.project}"]
        if service:
            filters.append(f"label=com.docker.compose.service={service}")
        options = [part for each in filters for part in ("--filter", each)]
        return docker("ps", "--all", "--quiet", "--no-trunc", *options).split()[::-1]

    def only(self, service: str) -> str:
        (container,) = self.ids(service)
        return container

    def names(self, *services: str) -> dict[str, str]:
        """Containers by the name of the peer in them: those of some services, or of all trainers."""
        containers = [each for service in services or ("trainer", "slow-trainer") for each in self.ids(service)]
        return {docker("logs", each).rpartition("this container is ")[2].split()[0]: each for each in containers}

    # What the status page says, asked from this machine

    def api(self, path: str) -> Any:
        """An answer of the status page's JSON API; OSError while the page is not there."""
        address = docker("port", self.only("monitor"), "8080/tcp", check=False).splitlines()
        if not address or address[0].startswith("Error"):
            raise ConnectionError("the status page has no port")
        with urllib.request.urlopen(f"http://{address[0]}/api/v1/{path}", timeout=10) as answer:
            return json.load(answer)

    def peers(self) -> dict[str, dict[str, Any]]:
        return {peer["name"]: {**peer["record"], **peer} for peer in self.api("peers")["peers"]}

    def round(self) -> int:
        return int(self.api("headline")["round"])

    def counted(self) -> set[str]:
        """Ids of the peers whose work is in the last round."""
        return {peer for group in self.api("groups")["groups"] for peer, how in group["members"] if how == "counted"}

    def check_states(self) -> None:
        """All who applied a round hold the same state."""
        rounds = self.api("rounds?limit=500")["rounds"]
        assert rounds
        assert not [each for each in rounds if each["agrees"] is False]
        assert not [peer["name"] for peer in self.peers().values() if peer["agrees"] is False]

    def pause(self, container: str) -> None:
        """Freeze a container. On a busy machine with cgroups of version 1, runc gives up now and then."""

        def is_paused() -> bool:
            docker("pause", container, check=False)
            return inspect(container, "{{.State.Status}}") == "paused"

        self.wait_until("it is paused", is_paused)

    # Waiting

    def wait_until(self, what: str, condition: Callable[[], bool], timeout_seconds: float = PATIENCE_SECONDS) -> None:
        """Poll until ``condition()`` holds. That a page does not answer, or shows no such peer, is no answer yet."""
        deadline = time.monotonic() + timeout_seconds
        while True:
            with contextlib.suppress(OSError, KeyError):
                if condition():
                    return
            if time.monotonic() >= deadline:
                raise AssertionError(f"not so within {timeout_seconds:.0f} s: {what}\n{self.describe()}")
            time.sleep(0.5)

    def wait_for_rounds(self, more: int, timeout_seconds: float = PATIENCE_SECONDS) -> None:
        wanted = self.round() + more
        self.wait_until(f"{more} more rounds", lambda: self.round() >= wanted, timeout_seconds)

    def wait_for_work_of(self, *names: str) -> None:
        """Wait until a later round has the work of all these peers: one of them may have died after the last."""
        seen: list[int] = []

        def is_in() -> bool:
            seen.append(self.round())
            peers = self.peers()
            return seen[-1] > seen[0] + 1 and {peers[name]["peer"] for name in names} <= self.counted()

        self.wait_until(f"a round with {', '.join(names)}", is_in)

    def describe(self) -> str:
        parts = [docker("ps", "--all", "--filter", f"name={self.project}", "--format", "{{.Names}} {{.Status}}")]
        for path in ("headline", "peers"):
            try:
                parts.append(json.dumps(self.api(path))[:3000])
            except OSError as error:
                parts.append(f"{path}: {error}")
        parts += [f"{inspect(each, '{{.Name}}')}\n{docker('logs', '--tail', '8', each)}" for each in self.ids()]
        return "\n".join(parts)

    # The end

    def left_over(self) -> list[str]:
        label = f"label=com.docker.compose.project={self.project}"
        return [
            *self.ids(),
            *docker("network", "ls", "--quiet", "--filter", label).split(),
            *docker("volume", "ls", "--quiet", "--filter", label).split(),
        ]

    def __enter__(self) -> "Containers":
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        for container in self.ids():  # One that a failed test left paused could not be stopped.
            docker("unpause", container, check=False)
        self.compose("--profile", "chaos", "down", "--volumes", "--timeout", "30")
        assert self.left_over() == []


def _socket() -> str:
    host = os.environ.get("DOCKER_HOST", "unix:///var/run/docker.sock")
    return str(Path(host.removeprefix("unix://")))
