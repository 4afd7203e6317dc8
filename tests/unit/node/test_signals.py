import asyncio
import os
import signal
import subprocess
import sys
import threading

import pytest

from p2ptrain.node.process import FORCED_EXIT_CODE, SigtermExit, StopSignals
from tests.support.coroutines import on_loop
from tests.support.processes.commands import ROOT


@on_loop
async def test_the_first_signal_asks_to_drain_and_the_second_ends_after_the_terminal_was_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: list[object] = []
    ended = asyncio.Event()

    def end(code: int) -> None:
        done.append(code)
        ended.set()

    monkeypatch.setattr(os, "_exit", end)
    signals = StopSignals(lambda: done.append("left the terminal"))
    signals.install()
    os.kill(os.getpid(), signal.SIGINT)
    async with asyncio.timeout(10):
        await signals.requested.wait()
    assert done == []
    os.kill(os.getpid(), signal.SIGINT)
    async with asyncio.timeout(10):
        await ended.wait()
    assert done == ["left the terminal", FORCED_EXIT_CODE]


SCRIPT = """
import os, signal, sys
from p2ptrain.node.process import SigtermExit
def close():
    for _ in range(int(sys.argv[2])):
        os.kill(os.getpid(), signal.SIGTERM)
    print("closed", flush=True)
sigterm = SigtermExit()
sigterm.install()
try:
    if sys.argv[1] == "block":
        os.kill(os.getpid(), signal.SIGTERM)
        print("unreachable")
finally:
    with sigterm.closing():
        close()
assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
print("went on")
"""


def run_script(where: str, signals_in_close: int) -> tuple[str, int]:
    """Run `SCRIPT`; its output and exit code."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, where, str(signals_in_close)], cwd=ROOT, check=False, text=True,
        stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=60,
    )  # fmt: skip
    return done.stdout, done.returncode


def test_sigterm_ends_a_block_which_closes_and_a_second_one_ends_the_process() -> None:
    assert run_script("nowhere", 0) == ("closed\nwent on\n", 0)
    assert run_script("block", 0) == ("closed\n", 128 + signal.SIGTERM)
    assert run_script("nowhere", 1) == ("closed\n", 128 + signal.SIGTERM), "it takes effect once all is closed"
    assert run_script("block", 1) == ("", -signal.SIGTERM)


def test_a_handler_of_the_scripts_own_and_other_threads_are_left_alone() -> None:
    def own(number: int, frame: object) -> None: ...

    before = signal.signal(signal.SIGTERM, own)
    try:
        sigterm = SigtermExit()
        sigterm.install()
        with sigterm.closing():
            assert signal.getsignal(signal.SIGTERM) is own
        assert signal.getsignal(signal.SIGTERM) is own
    finally:
        signal.signal(signal.SIGTERM, before)
    thread = threading.Thread(target=SigtermExit().install)
    thread.start()
    thread.join()
    assert signal.getsignal(signal.SIGTERM) is before
