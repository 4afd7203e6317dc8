"""Chaos for a swarm in containers: kills, pauses and cuts off peers at random, for a limited time, and mends it all.

It asks the Docker engine over its socket, and who may do that owns the machine. So this is one file, without
dependencies, to be read before it is used: `Engine` makes the few requests that there are, and what is harmed is chosen
by `targets` alone, from the containers of one Compose project that carry the label ``p2ptrain.chaos=yes``. At most half
of them are harmed at a time. Its end and SIGTERM mend what was harmed; after a SIGKILL the next start does.
"""

from __future__ import annotations

import argparse
import http.client
import json
import random
import signal
import socket
import sys
import time
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

LABEL = "p2ptrain.chaos"
NETWORK = "swarm"
REQUEST_SECONDS = 30.0
LONGEST_MINUTES = 24 * 60.0
KILLED = 137
"""The exit code of what SIGKILL ended. Others ended by themselves, or were stopped by somebody, and are left alone."""


class EngineError(Exception):
    """The engine said no."""


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("localhost", timeout=REQUEST_SECONDS)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


class Engine:
    """The requests that are made of a Docker engine, and no others."""

    def __init__(self, path: str) -> None:
        self._path = path

    def _ask(self, method: str, path: str, body: Any = None) -> Any:
        connection = _UnixConnection(self._path)
        try:
            data = None if body is None else json.dumps(body)
            connection.request(method, path, data, {"content-type": "application/json"})
            answer = connection.getresponse()
            text = answer.read().decode()
        finally:
            connection.close()
        if answer.status >= 400:
            raise EngineError(f"{method} {path}: {answer.status} {text.strip()[:200]}")
        return json.loads(text) if text else None

    def targets(self, project: str) -> list[str]:
        """Ids of the containers of a Compose project that may be harmed."""
        labels = [f"com.docker.compose.project={project}", f"{LABEL}=yes"]
        found = self._ask("GET", f"/containers/json?all=1&filters={quote(json.dumps({'label': labels}))}")
        return sorted(each["Id"] for each in found)

    def network(self, project: str) -> str:
        """The id of the network that the project's peers are on."""
        labels = [f"com.docker.compose.project={project}", f"com.docker.compose.network={NETWORK}"]
        found = self._ask("GET", f"/networks?filters={quote(json.dumps({'label': labels}))}")
        if len(found) != 1:
            raise EngineError(f"project {project!r} has {len(found)} networks {NETWORK!r}: start the swarm first")
        return str(found[0]["Id"])

    def inspect(self, container: str) -> dict[str, Any]:
        """What the engine knows of a container."""
        return dict(self._ask("GET", f"/containers/{container}/json"))

    def act(self, container: str, verb: str) -> None:
        """``kill``, ``start``, ``pause`` or ``unpause`` it."""
        self._ask("POST", f"/containers/{container}/{verb}")

    def disconnect(self, container: str, network: str) -> None:
        """Pull its cable."""
        self._ask("POST", f"/networks/{network}/disconnect", {"Container": container, "Force": True})

    def connect(self, container: str, network: str, alias: str) -> None:
        """Put it back."""
        self._ask(
            "POST", f"/networks/{network}/connect", {"Container": container, "EndpointConfig": {"Aliases": [alias]}}
        )


@dataclass(frozen=True)
class Harm:
    """One container that is harmed, and until when (monotonic seconds)."""

    container: str
    until: float


class Chaos:
    """Harms the targets of one project, and mends them.

    Args:
        engine: Where they run.
        project: Their Compose project.
        rng: Chooses.
        seconds_between: Between two harms, on average.
        longest_seconds: That one lasts; the shortest is 5.
    """

    def __init__(
        self, engine: Engine, project: str, rng: random.Random, seconds_between: float, longest_seconds: float
    ) -> None:
        self._engine = engine
        self._project = project
        self._network = engine.network(project)
        self._rng = rng
        self._between = seconds_between
        self._longest = longest_seconds
        self._harmed: list[Harm] = []

    def run(self, seconds: float) -> None:
        """Harm and mend for so long; everything is mended at the end, however it comes."""
        end, next_at = time.monotonic() + seconds, 0.0
        try:
            self.mend_all()
            while (now := time.monotonic()) < end:
                for harm in [each for each in self._harmed if each.until <= now]:
                    self._harmed.remove(harm)
                    self._mend(harm.container)
                if now >= next_at:
                    self._strike(now, end)
                    next_at = now + self._rng.uniform(0.5, 1.5) * self._between
                time.sleep(0.5)
        finally:
            self.mend_all()

    def _strike(self, now: float, end: float) -> None:
        targets = self._engine.targets(self._project)
        whole = [each for each in targets if each not in {harm.container for harm in self._harmed}]
        if not whole or len(self._harmed) + 1 > len(targets) / 2:
            return
        container = self._rng.choice(whole)
        verb = self._rng.choice(("kill", "pause", "cut off"))
        seconds = min(self._rng.uniform(5.0, self._longest), end - now)
        self._harmed.append(Harm(container, now + seconds))
        try:
            if verb == "cut off":
                self._engine.disconnect(container, self._network)
            else:
                self._engine.act(container, verb)
            say(f"{verb} {self._engine.inspect(container)['Name'].lstrip('/')} for {seconds:.0f} s")
        except EngineError as error:  # It ended a moment ago, or could not be frozen.
            say(str(error))

    def mend_all(self) -> None:
        """Undo what was done to any target, by this process or one that was killed."""
        self._harmed.clear()
        for container in self._engine.targets(self._project):
            self._mend(container)

    def _mend(self, container: str) -> None:
        try:
            known = self._engine.inspect(container)
            state, labels = known["State"], known["Config"]["Labels"]
            networks = [each["NetworkID"] for each in known["NetworkSettings"]["Networks"].values()]
            if self._network not in networks:
                self._engine.connect(container, self._network, labels["com.docker.compose.service"])
            if state["Paused"]:
                self._engine.act(container, "unpause")
            elif not state["Running"] and state["ExitCode"] == KILLED:
                self._engine.act(container, "start")
        except EngineError as error:
            say(str(error))


def say(text: str) -> None:
    """For the container's log."""
    print(f"chaos: {text}", flush=True)


def own_project(engine: Engine) -> str:
    """The Compose project of the container that this runs in, whose hostname is its id."""
    return str(engine.inspect(socket.gethostname())["Config"]["Labels"]["com.docker.compose.project"])


def main() -> int:
    """Read the command line, and run."""
    parser = argparse.ArgumentParser(description="Kill, pause and cut off peers of a swarm in containers, at random.")
    parser.add_argument("--project", help="the Compose project (default: of the container that this runs in)")
    parser.add_argument("--socket", default="/var/run/docker.sock", help="of the engine")
    parser.add_argument("--minutes", type=float, default=10.0, help="when to stop (default 10)")
    parser.add_argument("--between", type=float, default=20.0, metavar="SECONDS", help="two harms, on average")
    parser.add_argument("--longest", type=float, default=40.0, metavar="SECONDS", help="that one lasts")
    parser.add_argument("--seed", type=int, help="choose the same again")
    asked = parser.parse_args()
    if not (0 < asked.minutes <= LONGEST_MINUTES and asked.between > 0 and asked.longest >= 5):
        parser.error(f"--minutes is up to {LONGEST_MINUTES:.0f}, --between above 0, --longest at least 5")
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(0))
    try:
        engine = Engine(asked.socket)
        project = asked.project or own_project(engine)
        chaos = Chaos(engine, project, random.Random(asked.seed), asked.between, asked.longest)
        say(f"{asked.minutes:g} minutes of it for project {project!r}")
        chaos.run(60 * asked.minutes)
    except (OSError, EngineError, KeyError) as error:
        say(f"cannot go on: {error!r}")
        return 1
    say("all is mended")
    return 0


if __name__ == "__main__":
    sys.exit(main())
