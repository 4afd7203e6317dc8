"""Peers meet through the example's directory server, and average; they find each other again when it comes back."""

import contextlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import msgpack

from p2ptrain.network.link import SwarmLink
from p2ptrain.network.records.record import NUM_SHARDS, peers_key
from tests.support.processes.daemons import ROOT, free_port, wait_until
from tests.support.processes.swarmlet import Swarmlet, check_states, nothing_left_behind, wait_for_peace


@contextlib.contextmanager
def server(port: int) -> Iterator[str]:
    url = f"http://127.0.0.1:{port}"
    command = [sys.executable, "examples/loops/http_directory.py", "--port", str(port)]
    process = subprocess.Popen(command, cwd=ROOT, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: answers(url))
        yield url
    finally:
        process.kill()
        process.wait()


def answers(url: str) -> bool:
    with contextlib.suppress(httpx.HTTPError):
        return httpx.get(f"{url}/any").is_success
    return False


def peers_at(url: str, link: str) -> set[str]:
    swarm = SwarmLink.parse(link).digest
    keys = (peers_key(swarm, shard).replace("/", "%2F") for shard in range(NUM_SHARDS))
    answers = [msgpack.unpackb(httpx.get(f"{url}/{key}").content) for key in keys]
    return {msgpack.unpackb(msgpack.unpackb(value)[0])["peer"] for each in answers for value in each["records"]}


def test_peers_meet_through_a_web_server_and_average(tmp_path: Path) -> None:
    port = free_port()
    with nothing_left_behind(), Swarmlet(tmp_path) as swarm:
        with server(port) as url:
            first = swarm.start("a", directory=url)
            assert SwarmLink.parse(first.link).directory == url
            workers = [first, *(swarm.start(name, link=first.link) for name in "bc")]
            for worker in workers:
                worker.wait_for_commit(3)
            assert peers_at(url, first.link) == {str(worker.wait_for("joined")["peer"]) for worker in workers}
        # While it is away its records expire; those that average go on, and others cannot come.
        with server(port):
            wait_for_peace(*workers)
            check_states(*workers)
