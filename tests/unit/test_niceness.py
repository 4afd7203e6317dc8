"""A nice process leaves the processor to others, of other sessions, too; and its session is as before at its end."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SECONDS = 3
BUSY = f"""
import os, sys, time
from p2ptrain.runtime import be_nice
os.sched_setaffinity(0, {{int(sys.argv[1])}})
be_nice(int(sys.argv[2]))
sys.stdin.readline()  # All are imported.
end = time.monotonic() + {SECONDS}
while time.monotonic() < end:
    pass
print(time.process_time())
"""
IN_A_SESSION = """
import os, subprocess, sys
before = open("/proc/self/autogroup").read()
subprocess.run([sys.executable, "-c", "from p2ptrain.runtime import be_nice; be_nice(7)\\n"
                "print(open('/proc/self/autogroup').read())"], check=True)
assert open("/proc/self/autogroup").read() == before, "the session is not as it was"
"""
sessions = pytest.mark.skipif(not Path("/proc/self/autogroup").exists(), reason="this kernel shares by niceness alone")


def start(program: str, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True)


def test_a_nice_process_yields_to_one_of_another_session() -> None:
    core = str(min(os.sched_getaffinity(0)))
    nice, other = processes = [start(BUSY, core, niceness) for niceness in ("15", "0")]
    for each in processes:
        assert each.stdin is not None
        each.stdin.write("\n")
        each.stdin.flush()
    given = [float(each.communicate(timeout=120)[0]) for each in (nice, other)]
    assert given[0] < given[1] / 2


@sessions
def test_a_session_that_was_there_before_is_nice_until_the_end_alone() -> None:
    process = start(IN_A_SESSION)
    told = process.communicate(timeout=60)[0]
    assert process.returncode == 0
    assert told.strip().endswith(f"nice {min(os.nice(0) + 7, 19)}")  # `make test-unit` is nice itself.
