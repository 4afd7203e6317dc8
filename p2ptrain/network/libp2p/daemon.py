"""Starts, watches and stops the libp2p daemon (p2pd, which hivemind ships).

The daemon must not outlive its owner, even if the owner is killed:

* ``setpriv --pdeathsig KILL`` makes the kernel kill the daemon with the *thread* that started it. So the caller starts
  it on the event loop's thread.
* The daemon exits when the last persistent control connection closes, or if none opens within `IDLE_SECONDS`.
* Forked children (data-loader workers) inherit sockets that would keep the daemon alive. A fork hook replaces the
  sockets of every `SocketDirectory` in the child; an exec closes them.

The daemon reads its key from a pipe, so that a kill leaves no key file behind.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import logging
import os
import re
import shutil
import socket
import tempfile
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

from p2ptrain.errors import ResourceError
from p2ptrain.network.libp2p.settings import Libp2pSettings
from p2ptrain.runtime import share_niceness
from p2ptrain.tasks import Tasks

logger = logging.getLogger(__name__)

IDLE_SECONDS = 30
END_SECONDS = 2.0
ASK_SECONDS = 0.5
"""Interval between polls of the daemon's exit status, in case asyncio misses SIGCHLD."""
SPAWN_PAUSE_SECONDS = 0.01
"""Interval between looks whether another event loop of this process has started its daemon."""
_spawning = threading.Lock()
START_ATTEMPTS = 3
KEY_SOURCE = "/proc/self/fd/0"
MAX_ROOT_BYTES = 68
"""Length of the folder for temporary files; the path of a socket in it has at most 107 bytes."""


class SocketDirectory:
    """A private, locked folder for the daemon's sockets; forked children lose their connections.

    The constructor removes unlocked folders of killed owners.
    """

    def __init__(self) -> None:
        root = Path(tempfile.gettempdir())
        if len(os.fsencode(root)) > MAX_ROOT_BYTES:
            reason = f"{root} is longer than {MAX_ROOT_BYTES} bytes: set TMPDIR to a shorter path"
            raise OSError(errno.ENAMETOOLONG, reason)
        for left in root.glob(f"{_DIRECTORY_PREFIX}*"):
            _remove_if_unused(left)
        self.path = Path(tempfile.mkdtemp(prefix=_DIRECTORY_PREFIX, dir=root))
        self._lock: int | None = os.open(self.path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        _directories.add(self)

    def remove(self) -> None:
        """Remove the folder; idempotent."""
        _directories.discard(self)
        shutil.rmtree(self.path, ignore_errors=True)
        self.forget_lock()

    def forget_lock(self) -> None:
        """Close the lock file without removing the folder."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def _remove_if_unused(directory: Path) -> None:
    with contextlib.suppress(OSError):  # in use, another user's, or just removed
        if directory.stat().st_uid != os.getuid():
            return
        lock = os.open(directory / "lock", os.O_RDWR | os.O_CLOEXEC)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(directory, ignore_errors=True)
        finally:
            os.close(lock)


_DIRECTORY_PREFIX = "p2ptrain-sockets-"
_directories: set[SocketDirectory] = set()


def _after_fork() -> None:
    """Replace every inherited descriptor of a daemon socket by ``/dev/null``.

    Closing it would free its number: an inherited socket object could later close an unrelated file of that number.
    """
    if not _directories:
        return
    folders = tuple(f"{directory.path}/" for directory in _directories)
    for directory in _directories:
        directory.forget_lock()
    _directories.clear()
    null = os.open(os.devnull, os.O_RDWR | os.O_CLOEXEC)
    for name in os.listdir("/proc/self/fd"):
        try:
            with socket.socket(fileno=os.dup(int(name))) as copy:
                ours = any(str(end).startswith(folders) for end in (copy.getsockname(), _peer_name(copy)))
        except OSError:  # not a socket, or already closed
            continue
        if ours:
            os.dup2(null, int(name), inheritable=False)
    os.close(null)


def _peer_name(sock: socket.socket) -> object:
    try:
        return sock.getpeername()
    except OSError:
        return ""


os.register_at_fork(after_in_child=_after_fork)


class Daemon:
    """A running p2pd. Create one with `start`."""

    def __init__(self, process: asyncio.subprocess.Process, directory: SocketDirectory, log: _Output) -> None:
        self.process_id = process.pid
        self.control_socket = directory.path / "p2pd.sock"
        self.own_socket = directory.path / "streams.sock"
        self.directory = directory.path
        self._process = process
        self._directory = directory
        self._log = log
        self._stopping = False
        self._tasks = Tasks()

    @classmethod
    async def start(cls, settings: Libp2pSettings, key: bytes) -> Daemon:
        """Start a daemon, with retries, and wait until it is ready; ``key`` is the private key in libp2p's format.

        Raises `ResourceError` if the daemon is missing, a port is taken, or `START_ATTEMPTS` attempts failed.
        """
        check_ports_free(settings.listen)
        binary, reason = _binary(), ""
        for attempt in range(1, START_ATTEMPTS + 1):
            try:
                return await cls._start_once(binary, settings, key)
            except _StartFailed as error:
                reason = str(error)
                logger.warning("network daemon did not start (attempt %d of %d): %s", attempt, START_ATTEMPTS, reason)
                if taken := re.search(r"(\S+): bind: address already in use", reason):
                    raise ResourceError(_port_taken(taken[1].rpartition(":")[2])) from error
                if error.is_final:
                    break
        raise ResourceError(f"the network daemon (p2pd) did not start: {reason}; run 'p2ptrain doctor'")

    @classmethod
    async def _start_once(cls, binary: str, settings: Libp2pSettings, key: bytes) -> Daemon:
        try:
            directory = SocketDirectory()
        except OSError as error:
            raise _StartFailed(f"no folder for its sockets can be made: {error.strerror}", is_final=True) from error
        sockets = [f"-listen=/unix{directory.path}/p2pd.sock", f"-idleTimeout={IDLE_SECONDS}s"]
        command = [binary, *sockets, f"-id={KEY_SOURCE}", *settings.daemon_arguments()]
        if (setpriv := shutil.which("setpriv")) is not None:
            command = [setpriv, "--pdeathsig", "KILL", *command]
        else:
            logger.warning("setpriv (util-linux) is missing: a killed peer's daemon may live on for some seconds")
        log, process = _Output(), None
        key_pipe = _pipe_with(key)
        try:
            async with asyncio.timeout(settings.startup_timeout_seconds):
                async with _alone():
                    process = await asyncio.create_subprocess_exec(
                        *command,
                        stdin=key_pipe,
                        stdout=asyncio.subprocess.PIPE,
                        stderr=asyncio.subprocess.STDOUT,
                        env={**os.environ, **settings.daemon_environment()},
                        limit=1 << 16,
                        start_new_session=True,  # Ctrl-C must not reach the daemon, which the peer needs to drain
                    )
                assert process.stdout is not None
                log.follow(process.stdout)
                await asyncio.to_thread(share_niceness, process.pid)
                await log.ready.wait()
            if not log.is_up:
                raise _StartFailed(log.last_words() or f"it ended with status {await _ended(process)}")
            return cls(process, directory, log)
        except BaseException as error:
            await _end(process, log)
            directory.remove()
            if isinstance(error, TimeoutError):
                words = log.last_words()
                said = f"; its last words: {words}" if words else ""
                raise _StartFailed(f"no answer in {settings.startup_timeout_seconds:.0f} seconds{said}") from error
            if isinstance(error, OSError):
                raise _StartFailed(f"{binary} cannot be run: {error.strerror}", is_final=True) from error
            raise
        finally:
            os.close(key_pipe)

    def watch(self, on_lost: Callable[[str], None]) -> None:
        """Call ``on_lost(reason)`` once if the daemon ends before `stop`."""

        async def wait() -> None:
            status = await _ended(self._process)
            if not self._stopping:
                words = self._log.last_words()
                how = f"signal {-status}" if status < 0 else f"status {status}"
                on_lost(f"the network daemon ended ({how}){': ' + words if words else ''}")

        self._tasks.start(wait(), "p2pd-watcher")

    def expect_end(self) -> None:
        """Stop reporting the daemon's exit as a loss."""
        self._stopping = True

    async def stop(self) -> None:
        """Stop the daemon, wait for its exit, and remove its sockets; idempotent."""
        self.expect_end()
        await _end(self._process, self._log)
        await self._tasks.join()
        self._directory.remove()


@contextlib.asynccontextmanager
async def _alone() -> AsyncIterator[None]:
    """Wait while another event loop of this process starts a daemon: uvloop starts one process at a time."""
    while not _spawning.acquire(blocking=False):  # noqa: ASYNC110 (the other loop's thread cannot set an event of this one)
        await asyncio.sleep(SPAWN_PAUSE_SECONDS)
    try:
        yield
    finally:
        _spawning.release()


def _pipe_with(data: bytes) -> int:
    """Return the read end of a pipe that holds ``data``, at most 64 KiB (a pipe's buffer)."""
    source, sink = os.pipe()
    try:
        os.write(sink, data)
    finally:
        os.close(sink)
    return source


class _StartFailed(Exception):
    def __init__(self, message: str, is_final: bool = False) -> None:
        super().__init__(message)
        self.is_final = is_final


class _Output:
    """Reads the daemon's output: its ready line, and its last lines for error messages."""

    def __init__(self) -> None:
        self.ready = asyncio.Event()
        self.is_up = False
        self._lines: deque[str] = deque(maxlen=5)
        self._tasks = Tasks()

    def follow(self, stdout: asyncio.StreamReader) -> None:
        self._tasks.start(self._read(stdout), "p2pd-output")

    def last_words(self) -> str:
        return self._lines[-1][-300:] if self._lines else ""

    async def end(self) -> None:
        await self._tasks.close(grace_seconds=1)

    async def _read(self, stdout: asyncio.StreamReader) -> None:
        while True:
            try:
                line = await stdout.readline()
            except ValueError:  # a line longer than the buffer: readline dropped it
                continue
            if not line:
                break
            text = line.decode(errors="replace").strip()
            logger.debug("p2pd: %s", text)
            if text.startswith("Peer ID:"):
                self.is_up = True
                self.ready.set()
            elif not text.startswith(("Control socket:", "Peer Addrs:", "/")):
                self._lines.append(text)
        self.ready.set()


async def _end(process: asyncio.subprocess.Process | None, log: _Output) -> None:
    if process is None:
        return
    if process.returncode is None:
        with contextlib.suppress(ProcessLookupError):  # It ended meanwhile, also between the timeout and the kill.
            process.terminate()
            try:
                async with asyncio.timeout(END_SECONDS):
                    await _ended(process)
            except TimeoutError:
                process.kill()
        await _ended(process)
    await log.end()


async def _ended(process: asyncio.subprocess.Process) -> int:
    """Wait for the end of a process; return its exit status, or minus the signal that ended it.

    asyncio relies on SIGCHLD, whose handler other libraries may replace (Lightning does). So this polls the kernel too.
    """
    async with Tasks() as tasks:
        waiting = tasks.call(process.wait(), "p2pd-end")
        while not waiting.done():
            await asyncio.wait({waiting}, timeout=ASK_SECONDS)
            if not waiting.done() and (status := _status_of(process.pid)) is not None:
                return status
        return waiting.result()


def _status_of(process_id: int) -> int | None:
    """Return the exit status of an ended child without reaping it; None while it runs."""
    try:
        ended = os.waitid(os.P_PID, process_id, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # already reaped
        return 0
    if ended is None:
        return None
    return ended.si_status if ended.si_code == os.CLD_EXITED else -ended.si_status


def _binary() -> str:
    import hivemind.hivemind_cli as package

    path = Path(package.__path__[0]) / "p2pd"
    if not path.is_file():
        raise ResourceError(f"the network daemon is missing at {path}: reinstall hivemind from its binary wheel")
    return str(path)


def check_ports_free(listen: Sequence[str]) -> None:
    """Raise `ResourceError` if a fixed port of the multiaddrs is taken, or not allowed.

    The daemon listens with SO_REUSEPORT, so two daemons of one user would share a port and its connections.
    """
    for address in listen:
        found = re.match(r"/ip([46])/([^/]+)/(tcp|udp)/(\d+)(/|$)", address)
        if found is None or found[4] == "0":
            continue
        family = socket.AF_INET if found[1] == "4" else socket.AF_INET6
        kind = socket.SOCK_STREAM if found[3] == "tcp" else socket.SOCK_DGRAM
        try:
            with socket.socket(family, kind) as probe:
                if found[3] == "tcp":
                    probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((found[2], int(found[4])))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise ResourceError(_port_taken(found[4])) from error
            raise ResourceError(f"cannot listen at {address}: {error.strerror}; choose another address") from error


def _port_taken(port: str) -> str:
    return f"port {port} is taken by another program: stop it, or choose another port (0 takes any free one)"
