import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from p2ptrain.cli.supervise import Child, Supervisor
from tests.support.coroutines import on_loop
from tests.support.processes.commands import ROOT
from tests.support.processes.daemons import is_alive, wait_until

SLEEPER = "import time; print('up', flush=True); time.sleep(600)"
STUBBORN = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN);" + SLEEPER
POLITE = "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(0));" + SLEEPER
PARENT = f"import subprocess, sys; print(subprocess.Popen([sys.executable, '-c', {SLEEPER!r}]).pid, flush=True);" + (
    "import time; time.sleep(600)"
)


async def started(supervisor: Supervisor, code: str, log: Path) -> Child:
    child = await supervisor.start(log.stem, [sys.executable, "-c", code], log)
    await asyncio.to_thread(wait_until, lambda: log.read_text() != "" or child.exit_code is not None)
    return child


@on_loop
async def test_drain_lets_the_polite_end_and_kills_the_stubborn_at_the_deadline(tmp_path: Path) -> None:
    async with Supervisor() as supervisor:
        polite = await started(supervisor, POLITE, tmp_path / "polite.log")
        stubborn = await started(supervisor, STUBBORN, tmp_path / "stubborn.log")
        begun = time.monotonic()
        await supervisor.drain([polite, stubborn], 0.5)
        await supervisor.wait_all([polite, stubborn])
    assert (polite.exit_code, stubborn.exit_code) == (0, -signal.SIGKILL)
    assert time.monotonic() - begun >= 0.5


@on_loop
async def test_an_error_in_the_owner_ends_children_and_grandchildren(tmp_path: Path) -> None:
    pids: list[int] = []

    async def fail() -> None:
        async with Supervisor() as supervisor:
            parent = await started(supervisor, PARENT, log := tmp_path / "parent.log")
            pids.extend([parent.process.pid, int((await asyncio.to_thread(log.read_text)).split()[0])])
            raise RuntimeError("the owner failed")

    with pytest.raises(RuntimeError, match="the owner failed"):
        await fail()
    assert len(pids) == 2
    await asyncio.to_thread(wait_until, lambda: not any(is_alive(pid) for pid in pids))


def test_children_die_when_their_owner_is_killed(tmp_path: Path) -> None:
    owner = f"""
import asyncio, sys
from pathlib import Path
from p2ptrain.cli.supervise import Supervisor
async def main():
    async with Supervisor() as supervisor:
        child = await supervisor.start("c", [sys.executable, "-c", {SLEEPER!r}], Path({str(tmp_path / "c.log")!r}))
        print(child.process.pid, flush=True)
        await asyncio.sleep(600)
asyncio.run(main())
"""
    with subprocess.Popen([sys.executable, "-c", owner], cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        assert is_alive(pid)
        process.kill()
    wait_until(lambda: not is_alive(pid))


@on_loop
async def test_children_do_not_get_the_terminals_signals(tmp_path: Path) -> None:
    async with Supervisor() as supervisor:
        child = await started(supervisor, SLEEPER, tmp_path / "c.log")
        assert os.getpgid(child.process.pid) != os.getpgid(0)


FAILING = "import sys; print('noise'); print('p2ptrain: error: port 1 is taken'); print('bye'); sys.exit(7)"
KILLED = "import os, signal; print('all is well', flush=True); os.kill(os.getpid(), signal.SIGKILL)"


@pytest.mark.parametrize(
    ("code", "words", "exit_code"),
    [
        (FAILING, "port 1 is taken", 7),
        (KILLED, "was ended by SIGKILL (log: ", 1),  # What it said before has nothing to do with it.
    ],
    ids=["failing", "killed"],
)
@on_loop
async def test_a_failure_carries_the_childs_last_error_and_its_exit_code(
    tmp_path: Path, code: str, words: str, exit_code: int
) -> None:
    async with Supervisor() as supervisor:
        child = await started(supervisor, code, tmp_path / "a.log")
        await supervisor.wait_all([child])
    failure = child.failure()
    assert words in str(failure)
    assert failure.exit_code == exit_code
