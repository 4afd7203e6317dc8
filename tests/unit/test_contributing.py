"""The message and the command that CONTRIBUTING.md shows work as the page says."""

import importlib
import re
import sys
from pathlib import Path

import pytest

from p2ptrain.cli.main import COMMANDS, main
from p2ptrain.errors import PeerRefusedError
from p2ptrain.network.link import SwarmLink
from tests.support.coroutines import simulated
from tests.support.packages import install
from tests.support.sim.peers import Member, members

PAGE = (Path(__file__).resolve().parents[2] / "CONTRIBUTING.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```python\n# (\w+)\.py\n(.*?)^```$", PAGE, flags=re.MULTILINE | re.DOTALL)
MODULES = dict(BLOCKS)


@pytest.fixture(autouse=True)
def _installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(tmp_path, monkeypatch, "shown", MODULES, {})


@simulated(members, 2)
async def test_the_message_is_asked_answered_and_bounded(swarm: list[Member]) -> None:
    memory, (one, other) = importlib.import_module("memory"), swarm
    memory.serve_memory(one.rpc, 5000)
    assert await memory.ask_memory(other.rpc, one.rpc.peer_id, 1000) == 5
    with pytest.raises(PeerRefusedError, match="unit"):
        await memory.ask_memory(other.rpc, one.rpc.peer_id, 0)


def test_the_test_of_the_message_passes(tmp_path: Path) -> None:
    assert pytest.main(["-q", "-p", "no:cacheprovider", "-n", "0", str(tmp_path / "test_memory.py")]) == 0


def test_the_command_runs_and_explains_bad_input(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(COMMANDS, "bootstrap", "print the addresses that a link holds")
    monkeypatch.setitem(sys.modules, "p2ptrain.cli.commands.bootstrap", importlib.import_module("bootstrap"))
    address = "/ip4/10.0.0.1/tcp/4001/p2p/QmPYjds81MC7m6NxHwkerM9SWVbs1KiGSTdwdiNNSSNxst"
    assert main(["bootstrap", str(SwarmLink(bytes(32), (address,)))]) == 0
    assert capsys.readouterr().out == f"{address}\n"
    assert main(["bootstrap", "p2ptrain://nonsense"]) == 3
    assert main(["--help"]) == 0
    assert "print the addresses that a link holds" in capsys.readouterr().out
