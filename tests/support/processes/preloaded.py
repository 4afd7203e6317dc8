"""Peers without their seconds of imports: a process that has imported what they need forks each of them.

A peer takes 4.7 s of processor time until its first round, nearly all of it for imports. Its parent is the process
that asked for it: the server forks twice and, meanwhile, that process adopts what is orphaned below it
(``PR_SET_CHILD_SUBREAPER``). So signals, exit codes and the tree of processes are those of any child. Linux only.
"""

import atexit
import ctypes
import gc
import importlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

from tests.support.processes.commands import ROOT

WORKER = "tests.support.processes.worker"
COMMAND = "p2ptrain.cli.main"
STUCK = "tests.support.processes.stuck"
LYING = "tests.support.processes.lying"
HELD = "tests.support.processes.held"
TRAINING = (
    "torch._dynamo", "cid", "netaddr", "p2ptrain.node.roles.training", "p2ptrain.training.state.adamw",
    "p2ptrain.codecs.base",
)  # fmt: skip
IMPORTS = {
    WORKER: (WORKER, *TRAINING),
    COMMAND: (
        COMMAND, *TRAINING, "safetensors.torch", "p2ptrain.cli.commands.join", "p2ptrain.cli.commands.peer",
        "p2ptrain.models.families.llama_stage", "p2ptrain.models.pretrained", "p2ptrain.node.roles.pipeline",
        "p2ptrain.node.run", "p2ptrain.node.roles.trainer", "p2ptrain.pipeline.measure",
        "p2ptrain.pipeline.stage.hosted_stage", "p2ptrain.training.checkpoints.saving", "p2ptrain.training.data.corpus",
        "p2ptrain.training.loop",
    ),
}  # fmt: skip
IMPORTS |= {each: (each, *IMPORTS[COMMAND]) for each in (STUCK, LYING, HELD)}
"""What a program has imported when it ends its first round. Each has a function ``main`` without arguments."""
MAX_REQUEST_BYTES = 1 << 20
PR_SET_CHILD_SUBREAPER = 36


class ForkedProcess(subprocess.Popen[Any]):
    """A process that `Server` forked, to be used as what `subprocess.Popen` returns."""

    def __init__(self, arguments: list[str], pid: int, stdin: IO[str] | None, stdout: IO[str] | None) -> None:
        self.args = arguments
        self.pid = pid
        self.stdin, self.stdout, self.stderr = stdin, stdout, None
        self.returncode: int | None = None
        self._child_created = True
        self._waitpid_lock = threading.Lock()
        self._input: Any = None
        self._communication_started = False
        self.text_mode = True
        self.encoding = self.errors = None
        self.universal_newlines = True


class Server:
    """Starts the process that forks, at its first use, and talks with it. It ends when this process does."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        self.process_ids: set[int] = set()

    def fork(self, program: str, arguments: Sequence[str], log: IO[bytes]) -> ForkedProcess:
        """Start a program of `IMPORTS` that a test talks with, in lines of text, over standard input and output.

        Raises OSError when the server has ended.
        """
        stdin_read, stdin_write = os.pipe()
        stdout_read, stdout_write = os.pipe()
        try:
            pid = self._fork(program, arguments, [stdin_read, stdout_write, log.fileno()])
        finally:
            os.close(stdin_read)
            os.close(stdout_write)
        return ForkedProcess([program, *arguments], pid, os.fdopen(stdin_write, "w"), os.fdopen(stdout_read))

    def fork_silent(
        self, program: str, arguments: Sequence[str], stdout: IO[bytes], stderr: IO[bytes]
    ) -> ForkedProcess:
        """Start a program that reads nothing and writes to these files; arguments and errors as of `fork`."""
        with Path(os.devnull).open("rb") as nothing:
            pid = self._fork(program, arguments, [nothing.fileno(), stdout.fileno(), stderr.fileno()])
        return ForkedProcess([program, *arguments], pid, None, None)

    def _fork(self, program: str, arguments: Sequence[str], files: list[int]) -> int:
        request = {"program": program, "arguments": arguments, "environment": dict(os.environ), "parent": os.getpid()}
        with self._lock:
            server = self._start()
            _adopt_orphans(True)
            try:
                socket.send_fds(server, [json.dumps(request).encode()], files)
                answer = server.recv(64)
            finally:
                _adopt_orphans(False)
        if not answer:
            raise ConnectionResetError("the process that forks peers has ended")
        return int(answer)

    def _start(self) -> socket.socket:
        if self._socket is None:
            self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.processes.preloaded", str(theirs.fileno())],
                cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL, pass_fds=[theirs.fileno()],
            )  # fmt: skip
            theirs.close()
            atexit.register(self._socket.close)
            process.returncode = 0  # It outlives this object, and ends with this process: no warning about that.
            self.process_ids.add(process.pid)
        return self._socket


SERVER = Server()


def _adopt_orphans(yes: bool) -> None:
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, int(yes), 0, 0, 0)


# In the process that forks:


def serve(connection: socket.socket) -> Callable[[], int | None] | None:
    """Fork a process for each request.

    Returns, in that process, what it runs; in the server, when nobody can ask any more, None.
    """
    while True:
        try:
            message, files, *_ = socket.recv_fds(connection, MAX_REQUEST_BYTES, 3)
        except OSError:
            return None
        if not message:
            return None
        request = json.loads(message)
        for name in IMPORTS[request["program"]]:
            importlib.import_module(name)
        gc.freeze()  # Collections in a fork would copy every page of what is imported.
        reading, writing = os.pipe()
        between = os.fork()
        if between == 0:
            forked = os.fork()
            if forked:
                os.write(writing, str(forked).encode())
                os._exit(0)
            for each in (reading, writing):
                os.close(each)
            connection.close()
            return _become(request, files)
        os.waitpid(between, 0)
        connection.send(os.read(reading, 64))
        for each in (reading, writing, *files):
            os.close(each)


def _become(request: dict[str, Any], files: list[int]) -> Callable[[], int | None]:
    for number, each in enumerate(files):
        os.dup2(each, number)
        os.close(each)
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.argv = [request["program"], *request["arguments"]]
    while os.getppid() != request["parent"]:
        time.sleep(0.001)
    run: Callable[[], int | None] = importlib.import_module(request["program"]).main
    return run


if __name__ == "__main__":
    work = serve(socket.socket(fileno=int(sys.argv[1])))
    sys.exit(work() if work is not None else 0)
