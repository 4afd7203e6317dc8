"""What commands and scripts say and exit with when they cannot go on: real processes, real daemons."""

import asyncio
import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import psutil
import pytest

from p2ptrain.errors import BootstrapError
from p2ptrain.network.identity import Identity
from p2ptrain.network.link import SwarmLink
from p2ptrain.node.observe import observing
from tests.support.processes.commands import HEAVY
from tests.support.processes.daemons import is_alive, peer_process, wait_until
from tests.support.processes.files import set_options, write_role
from tests.support.processes.swarmlet import (
    Seed,
    Swarmlet,
    background_command,
    init,
    nothing_left_behind,
    run_command,
    seeding,
)
from tests.support.processes.tellers import PATIENCE_SECONDS


@pytest.fixture(scope="module")
def seeded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seed]:
    settings = set_options(model={"layers": 1, "context": 32}, training={"every": 4})
    swarm = init(tmp_path_factory.mktemp("seeded") / "swarm", *settings)
    with nothing_left_behind(), seeding(swarm) as seed:
        yield seed


def expect(exit_code: int, says: str, *arguments: str | Path) -> None:
    """Run a command, which must end with this code and one error line that says this."""
    done = run_command(*arguments)
    errors = [line for line in done.stderr.splitlines() if line.startswith("p2ptrain: error: ")]
    assert done.returncode == exit_code, done.stderr
    assert len(errors) == 1, done.stderr
    assert re.search(says, errors[0]), errors[0]
    assert "Traceback" not in done.stderr


def test_a_misspelt_key_of_a_role_file_exits_with_3_and_names_the_right_one(tmp_path: Path, seeded: Seed) -> None:
    role = write_role(tmp_path / "peer.toml", "trainer", link=seeded.link, resources={"thread": 1})
    expect(3, "resources.thread.*did you mean 'threads'", "peer", role)


def test_a_cut_off_link_exits_with_3(seeded: Seed) -> None:
    expect(3, "cut off", "join", seeded.link.partition("?")[0], "--yes")


@pytest.mark.fault(37)
def test_a_link_with_another_digest_is_refused_by_the_peers_it_names(tmp_path: Path, seeded: Seed) -> None:
    tampered = str(SwarmLink(bytes(32), SwarmLink.parse(seeded.link).addresses))
    expect(3, "do not know its swarm.*new link", "join", tampered, "--yes", "--run-dir", tmp_path / "peer")


def test_a_link_with_another_peer_id_is_refused_naming_the_peer_at_that_address(
    seeded: Seed, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = SwarmLink.parse(seeded.link)
    (address,) = link.addresses
    route, _, holder = address.rpartition("/")
    with Identity.ephemeral() as nobody:
        wrong = SwarmLink(link.digest, (f"{route}/{nobody.peer_id}",))
    monkeypatch.setattr("p2ptrain.node.meeting.CONNECT_SECONDS", 3600.0)

    async def look() -> None:
        async with observing(wrong):
            pass

    with pytest.raises(BootstrapError, match=f"held by peer {holder}, and the link names {nobody.peer_id}"):
        asyncio.run(look())


def test_an_address_held_by_another_peer_is_no_reason_to_give_up_while_another_may_answer(seeded: Seed) -> None:
    link = SwarmLink.parse(seeded.link)
    (address,) = link.addresses
    with Identity.ephemeral() as nobody:
        wrong = f"{address.rpartition('/')[0]}/{nobody.peer_id}"
    done = run_command("status", str(SwarmLink(link.digest, (wrong, address))), "--json")
    assert json.loads(done.stdout)["digest"] == link.digest.hex()


@pytest.mark.fault(25)
def test_a_taken_port_exits_with_7_and_names_it(tmp_path: Path, seeded: Seed) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        manifest, network = str(seeded.directory / "manifest.bin"), {"listen": [f"/ip4/127.0.0.1/tcp/{port}"]}
        role = write_role(tmp_path / "peer.toml", "bootstrap", manifest=manifest, network=network)
        expect(7, f"port {port} is taken", "peer", role)


def test_an_identity_in_use_exits_with_5_and_names_the_process(seeded: Seed) -> None:
    role = write_role(seeded.directory / "bootstrap.toml", "bootstrap", manifest="manifest.bin")
    expect(5, r"in use by process \d+", "peer", role)


@pytest.mark.fault(25)
def test_a_peer_whose_daemon_is_killed_exits_with_75_and_says_so(tmp_path: Path, seeded: Seed) -> None:
    role, log = write_role(tmp_path / "peer.toml", "bootstrap", link=seeded.link), tmp_path / "peer.log"
    with nothing_left_behind(), background_command(log, "peer", role) as peer:
        wait_until((tmp_path / "peer" / "link.txt").exists, PATIENCE_SECONDS)
        (daemon,) = [child for child in psutil.Process(peer.pid).children(recursive=True) if "p2pd" in child.name()]
        os.kill(daemon.pid, signal.SIGKILL)
        assert peer.wait(PATIENCE_SECONDS) == 75
        assert "the network daemon ended (signal 9)" in log.read_text()
        assert not is_alive(daemon.pid)


SCRIPT = """
import json, sys
from p2ptrain import Swarm

swarm = Swarm.join(sys.argv[1], listen=("/ip4/127.0.0.1/tcp/0",))
print(json.dumps({"peer": swarm.peer_id}), flush=True)
sys.stdin.read()
"""


def test_a_killed_peer_without_a_folder_leaves_no_key_behind(
    tmp_path: Path, seeded: Seed, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "status.log"
    with tempfile.TemporaryDirectory() as temporary:  # The paths of sockets must be short.
        monkeypatch.setenv("TMPDIR", temporary)
        with background_command(log, "status", seeded.link, "--watch"):
            wait_until(lambda: "my-swarm" in log.read_text(), PATIENCE_SECONDS)
        with peer_process(SCRIPT, seeded.link) as (_, told):
            assert told["peer"]
        assert [path for path in Path(temporary).rglob("*") if path.is_file() and path.stat().st_size] == []


TELL_IMPORTS = """
import atexit, sys
from p2ptrain.cli.main import main
heavy = set(sys.argv[1].split(","))
atexit.register(lambda: print("loaded:", *sorted(heavy & sys.modules.keys()), file=sys.stderr))
sys.exit(main(sys.argv[2:]))
"""


@pytest.mark.parametrize("words", [["status"], ["status", "--json"], ["status", "--watch"], ["monitor", "--port", "0"]])
def test_commands_that_look_on_never_import_torch_while_they_run(seeded: Seed, words: list[str]) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", TELL_IMPORTS, ",".join(HEAVY), *words, seeded.link],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    with process:
        assert process.stdout.readline(), "it shows the swarm, or says where its page is"
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=PATIENCE_SECONDS)
    assert errors.splitlines()[-1].strip() == "loaded:", errors


def test_the_invitation_is_quoted_for_a_shell(seeded: Seed) -> None:
    (line,) = [line for line in (seeded.directory / "seed.log").read_text().splitlines() if "p2ptrain join" in line]
    assert shlex.split(line) == ["p2ptrain", "join", seeded.link]
    assert line != " ".join(shlex.split(line))  # a link with two addresses holds an ampersand


def test_a_bootstrap_peer_is_serving(seeded: Seed) -> None:
    own_id = SwarmLink.parse(seeded.link).addresses[0].rpartition("/p2p/")[2]
    states: dict[str, str] = {}

    def is_listed() -> bool:
        peers = json.loads(run_command("status", seeded.link, "--json").stdout)["peers"]
        states.update({peer["peer"]: peer["state"] for peer in peers})
        return states.get(own_id) not in (None, "starting")

    wait_until(is_listed, PATIENCE_SECONDS)
    assert states[own_id] == "serving"  # a peer that ended without a word may still be listed


def test_watching_without_a_terminal_prints_a_block_for_each_change(tmp_path: Path, seeded: Seed) -> None:
    role, log = write_role(tmp_path / "second.toml", "bootstrap", link=seeded.link), tmp_path / "watch.log"
    with nothing_left_behind(), background_command(log, "status", seeded.link, "--watch") as watch:
        wait_until(lambda: "serving" in log.read_text(), PATIENCE_SECONDS)
        # Another test's trainer may have been killed: its record outlives it.
        assert re.search("Empty: Nobody trains in this swarm yet|Stopped: No peer trains", log.read_text())
        with background_command(tmp_path / "peer.log", "peer", role) as peer:
            wait_until(lambda: re.search("second +serving", log.read_text()) is not None, PATIENCE_SECONDS)
            peer.send_signal(signal.SIGINT)
            assert peer.wait(PATIENCE_SECONDS) == 0
        watch.send_signal(signal.SIGINT)
        assert watch.wait(PATIENCE_SECONDS) == 130
    blocks = [block.partition("\n")[2] for block in log.read_text().split("\n\n")]
    blocks = [re.sub("traffic.*|[0-9.]+ [kM]?B", "", block) for block in blocks]
    assert all(one != other for one, other in pairwise(blocks))
    assert "\x1b" not in log.read_text()
    assert "Traceback" not in log.read_text()


def test_a_peer_that_had_only_a_link_trains_so_many_rounds_each_time_and_can_export(
    tmp_path: Path, seeded: Seed
) -> None:
    role = write_role(tmp_path / "peer.toml", "trainer", link=seeded.link, stop_after={"rounds": 1})
    for number in (1, 2):
        with nothing_left_behind():
            done = run_command("peer", role)
        assert done.returncode == 0, done.stderr
        assert json.loads((tmp_path / "peer" / "summary.json").read_text())["round"] == number
    assert (tmp_path / "peer" / "manifest.bin").read_bytes() == (seeded.directory / "manifest.bin").read_bytes()
    assert run_command("checkpoint", "export", tmp_path / "peer", tmp_path / "out").returncode == 0
    assert (tmp_path / "out" / "model.safetensors").exists()
    card = (tmp_path / "out" / "README.md").read_text()
    assert "these weights have a loss of " in card
    assert "name 1 member. " in card
    wrong = seeded.directory / "run.toml"
    expect(3, "is not the signed manifest", "checkpoint", "export", tmp_path / "peer", tmp_path, "--manifest", wrong)
    newest = sorted((tmp_path / "peer" / "checkpoints").iterdir())[-1]
    with (newest / "shared.safetensors").open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        last = file.read(1)
        file.seek(-1, os.SEEK_END)
        file.write(bytes([last[0] ^ 1]))
    expect(8, "changed after it was written: delete this checkpoint", "checkpoint", "verify", tmp_path / "peer")


@pytest.mark.fault(22)
def test_another_model_is_refused_with_6_and_does_no_harm(tmp_path: Path) -> None:
    with nothing_left_behind(), Swarmlet(tmp_path) as swarm:
        first = swarm.start("a")
        first.wait_for_commit()
        other = swarm.start("b", hidden=12)
        assert other.wait() == 6
        refusal = other.wait_for("error")
        assert refusal["kind"] == "IncompatibleError"
        assert "model" in refusal["message"]
        mark = len(first.events)
        assert first.wait_for_commit(1, since=mark)["intact"]
