"""A real host that serves without training: it follows the trainers' rounds, in the memory of the served weights."""

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import msgspec
import pytest

from p2ptrain.network.link import SwarmLink
from p2ptrain.node.serving.client import SwarmModel
from p2ptrain.node.serving.thread import ModelThread
from p2ptrain.pipeline.plan import serving_bytes, stage_blocks
from p2ptrain.serving.client.routes import Host
from p2ptrain.serving.client.swarm import ServedModel, SwarmGenerator
from p2ptrain.serving.errors import GenerationFailedError
from p2ptrain.serving.sampling import Sampling
from tests.support.processes.daemons import wait_until
from tests.support.processes.files import LOOPBACK, QUICK, TINY, set_options, write_text
from tests.support.processes.swarmlet import background_command, init, nothing_left_behind, run_command, seeding
from tests.support.processes.tellers import PATIENCE_SECONDS

IDS = list(b"the quick brown fox")
DRAWN = Sampling(temperature=1.0, seed=3)
NUM_TOKENS = 40


class Swarmlet:
    """A bootstrap peer of a swarm that trains a whole model, and peers of it."""

    def __init__(self, directory: Path, stack: ExitStack, every: int = 2, **model: int) -> None:
        self.directory = directory
        self._stack = stack
        text = write_text(directory / "some.txt")
        settings = set_options(
            name="tiny", model={**TINY, "context": 64, **model}, data={"source": f"path:{text}"}, averaging=QUICK,
            training={"every": every, "local_batch": 2},
        )  # fmt: skip
        self.link = stack.enter_context(seeding(init(directory / "swarm", *settings))).link

    def join(self, name: str, *options: str) -> subprocess.Popen[bytes]:
        words = ["join", self.link, "--yes", "--name", name, "--run-dir", str(self.directory / name)]
        words += ["--listen", LOOPBACK, "--threads", "1", "--allow-path", str(self.directory), *options]
        return self._stack.enter_context(background_command(self.directory / f"{name}.log", *words))

    def log(self, name: str) -> str:
        return (self.directory / f"{name}.log").read_text()


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with nothing_left_behind(), ExitStack() as stack:
        yield stack


def versions(model: SwarmModel, name: str) -> set[tuple[int, bytes]]:
    """Return what a host serves, by its record."""
    return {each for host in model.hosts() if model.name_of(host.peer) == name for each in host.served.versions}


async def tokens_of(model: SwarmModel, name: str, version: tuple[int, bytes]) -> list[int]:
    """Return the tokens of one host at one version."""

    def hosts() -> list[Host]:
        served = [host for host in model.hosts() if model.name_of(host.peer) == name]
        return [host._replace(served=msgspec.structs.replace(host.served, versions=(version,))) for host in served]

    manifest = model.peer.manifest
    offered = ServedModel(manifest.name, manifest.model.vocabulary, manifest.model.hidden, stage_blocks(manifest))
    generator = SwarmGenerator(model.peer.rpc, model.peer.identity, offered, hosts, 5.0)
    async with generator.generate(IDS, DRAWN, max_tokens=NUM_TOKENS) as generation:
        return [token.id async for token in generation]


def resident_bytes(process: subprocess.Popen[bytes], kind: str) -> int:
    """Return a process's memory of a kind of ``/proc/PID/status``, its children's excluded."""
    status = Path(f"/proc/{process.pid}/status").read_text()
    return 1024 * int(status.partition(f"{kind}:")[2].split()[0])


def test_it_answers_as_the_trainers_and_follows_their_rounds(tmp_path: Path, stack: ExitStack) -> None:
    swarm = Swarmlet(tmp_path, stack, every=24)  # Rounds last longer than a host's interval of looks.
    swarm.join("trainer", "--serve")
    swarm.join("other")
    wait_until(lambda: "serving round" in swarm.log("trainer"), PATIENCE_SECONDS)
    server = swarm.join("server", "--serve-only")
    compared: set[int] = set()
    with ModelThread(SwarmLink.parse(swarm.link), PATIENCE_SECONDS) as thread:
        model = thread.model

        def common() -> set[tuple[int, bytes]]:
            return versions(model, "trainer") & versions(model, "server")

        while len(compared) < 2:
            wait_until(lambda: bool({number for number, _ in common()} - compared), 2 * PATIENCE_SECONDS)
            for version in common():
                with contextlib.suppress(GenerationFailedError):  # A host has dropped the version meanwhile.
                    answers = [thread.call(tokens_of(model, name, version)) for name in ("trainer", "server")]
                    assert answers[0] == answers[1]
                    assert len(answers[0]) == NUM_TOKENS
                    compared.add(version[0])
        record = next(held.record for held in model.peer.presence.book.held() if held.record.name == "server")
        (planned,) = serving_bytes(model.peer.manifest, "fp32", 512 * 10**6)
    assert (record.role, record.state, record.stages, record.last_rounds) == ("server", "serving", (), ())
    assert resident_bytes(server, "RssAnon") < planned - 400 * 10**6  # These sessions fill little of the cache.


def test_a_source_that_is_killed_while_it_sends_is_replaced(tmp_path: Path, stack: ExitStack) -> None:
    swarm = Swarmlet(tmp_path, stack, hidden=256, intermediate=1024, layers=2)
    trainers = {name: swarm.join(name, "--up", "300kB") for name in ("one", "two")}
    wait_until(lambda: all("round 2" in swarm.log(name) for name in trainers), 2 * PATIENCE_SECONDS)
    server = swarm.join("server", "--serve-only")
    with ModelThread(SwarmLink.parse(swarm.link), PATIENCE_SECONDS) as thread:
        wait_until(lambda: "downloading the weights" in swarm.log("server"), PATIENCE_SECONDS)
        source = swarm.log("server").partition("from peer ")[2].split()[0]
        records = [held.record for held in thread.model.peer.presence.book.held()]
        (victim,) = (record.name for record in records if record.peer.endswith(source))
        os.kill(trainers[victim].pid, signal.SIGKILL)
    assert "downloaded the weights" not in swarm.log("server")
    wait_until(lambda: "serving round" in swarm.log("server"), 2 * PATIENCE_SECONDS)
    assert server.poll() is None


def test_a_machine_without_the_memory_is_refused_with_both_amounts(tmp_path: Path, stack: ExitStack) -> None:
    swarm = Swarmlet(tmp_path, stack)
    options = ["--yes", "--run-dir", str(tmp_path / "small"), "--listen", LOOPBACK, "--allow-path", str(tmp_path)]
    refused = run_command("join", swarm.link, "--serve-only", "--max-memory", "300MB", *options)
    assert refused.returncode == 7
    assert "serving needs about" in refused.stderr
    assert "300 MB is free" in refused.stderr
