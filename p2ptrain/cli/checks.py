"""The checks of ``p2ptrain doctor``; each names its fix and changes nothing but caches."""

from __future__ import annotations

import contextlib
import ctypes
import importlib.util
import os
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from p2ptrain.status.formats import human_bytes

NO_GPU = "no GPU"
_MIN_PYTHON = (3, 11)
_MIN_DISK_BYTES, _GOOD_DISK_BYTES = 200_000_000, 5_000_000_000
_MIN_MEMORY_BYTES, _GOOD_MEMORY_BYTES = 700_000_000, 2_000_000_000
_MIN_FILES, _GOOD_FILES = 256, 1024
_EARLIEST_TIME = 1_767_225_600  # 2026-01-01, before the first release
_DAEMON_SECONDS = 15.0
_TORCH_SECONDS = 300.0  # A loaded machine with a cold disk takes minutes to import torch.
_TIME_ERROR = 5  # adjtimex(2) for an unsynchronized clock
_TIMEX_BYTES = 512  # > sizeof(struct timex)


@dataclass(frozen=True)
class Check:
    """The result of one check.

    Attributes:
        fix: The remedy for a failed check.
        required: True if a peer cannot run after a failure; False makes it a warning.
    """

    name: str
    passed: bool
    detail: str
    fix: str
    required: bool = True


def all_checks(run_dir: Path, port: int, direct_port: int) -> list[Check]:
    """Run every check; takes some seconds to import torch and start the daemon."""
    torch = check_torch()
    return [
        check_python(),
        torch,
        check_native(),
        check_exact(),
        check_gpu(has_gpu=torch.passed and not torch.detail.endswith(NO_GPU)),
        check_daemon(find_daemon()),
        check_setpriv(),
        *check_ports(port, direct_port),
        check_clock(time.time()),
        check_disk(run_dir),
        check_memory(),
        check_file_limit(resource.getrlimit(resource.RLIMIT_NOFILE)[0]),
    ]


def check_python() -> Check:
    version = ".".join(map(str, sys.version_info[:3]))
    passed = sys.version_info >= _MIN_PYTHON and sys.platform == "linux"
    return Check("Python", passed, f"{version} on {sys.platform}", "use Python 3.11 or later on Linux")


def check_torch() -> Check:
    """Check that torch can be imported and computes, in a child process, because a broken torch may crash."""
    code = (
        "import torch; assert float(torch.ones(8).sum()) == 8;"
        f"gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else '{NO_GPU}';"
        "print(torch.__version__, gpu, sep=', ')"
    )
    return Check("torch", *_run(code), "pip install -c constraints.txt torch")


def _run(code: str) -> tuple[bool, str]:
    """Return whether a child process runs some code, and the last line that it prints."""
    try:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=_TORCH_SECONDS)
    except subprocess.TimeoutExpired:
        return False, f"it did not end within {_TORCH_SECONDS:.0f} s"
    lines = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines() or ["it crashed"]
    return done.returncode == 0, lines[-1]


def check_native() -> Check:
    """Check that the codecs' native library loads; a checkout builds it first."""
    from p2ptrain.native.load import load_library

    try:
        path, _ = load_library()
    except OSError as error:
        detail = f"torch computes them, several times slower: {error}"
        return Check("codecs", False, detail, "install gcc and libc6-dev, or a wheel for this machine", required=False)
    return Check("codecs", True, f"native, {path}", "")


def check_exact() -> Check:
    """Check that the exact kernels of serving load; a checkout builds them first."""
    from p2ptrain.native.exact import all_kernels

    try:
        build = next(iter(all_kernels().values())).build
    except OSError as error:
        detail = f"a host computes with torch, and promises no equal answers: {error}"
        return Check("serving", False, detail, "install gcc and libc6-dev, or a wheel for this machine", required=False)
    return Check("serving", True, f"exact kernels, {build} build", "")


def check_gpu(*, has_gpu: bool) -> Check:
    """Check that the GPU computes the bits of the exact kernels, in a child process; a host without it uses its CPU."""
    if not has_gpu:
        return Check("GPU serving", True, f"{NO_GPU}: a host computes on its CPU", "")
    code = (
        "import torch; from p2ptrain.models.exact import self_check; from p2ptrain.models.exact.gpu import GpuKernels;"
        "self_check(GpuKernels(torch.device('cuda'))); print('exact kernels')"
    )
    passed, detail = _run(code)
    text = detail if passed else f"a host computes on its CPU: {detail}"
    fix = "update the NVIDIA driver, and install a CUDA build of torch that fits it"
    return Check("GPU serving", passed, text, fix, required=False)


def find_daemon() -> Path | None:
    """Return the path of hivemind's p2pd without an import of hivemind; None if it is not installed."""
    spec = importlib.util.find_spec("hivemind")
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations))) / "hivemind_cli" / "p2pd"


def check_daemon(path: Path | None) -> Check:
    fix = "pip install --force-reinstall --no-deps hivemind (its wheel for Linux ships p2pd)"
    if path is None or not path.is_file():
        return Check("daemon", False, "hivemind's p2pd is not installed", fix)
    if not os.access(path, os.X_OK):
        return Check("daemon", False, f"{path} may not be executed", f"chmod +x {path}")
    with tempfile.TemporaryDirectory(prefix="p2ptrain-doctor-") as folder:
        arguments = [f"-listen=/unix{folder}/control.sock", "-hostAddrs=/ip4/127.0.0.1/tcp/0", "-idleTimeout=5s"]
        started = time.monotonic()
        error = _start_daemon(path, arguments)
    if error is not None:
        fix += f"; check that {tempfile.gettempdir()} can be written to, and is not a long path"
        return Check("daemon", False, error, fix)
    return Check("daemon", True, f"p2pd starts in {time.monotonic() - started:.2f} s", "")


def _start_daemon(path: Path, arguments: list[str]) -> str | None:
    """Start the daemon, and kill it once it prints its id; return the error, if any."""
    import selectors

    try:
        process = subprocess.Popen([path, *arguments], stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    except OSError as error:
        return f"p2pd does not start: {error.strerror}"
    assert process.stdout is not None
    output, deadline = b"", time.monotonic() + _DAEMON_SECONDS
    with process, contextlib.ExitStack() as stack:
        stack.callback(process.kill)
        selector = stack.enter_context(selectors.DefaultSelector())
        selector.register(process.stdout, selectors.EVENT_READ)
        while b"Peer ID" not in output:
            if not selector.select(max(0.0, deadline - time.monotonic())):
                return f"p2pd did not answer within {_DAEMON_SECONDS:.0f} s"
            chunk = os.read(process.stdout.fileno(), 65536)
            if not chunk:
                last = output.decode(errors="replace").strip().splitlines() or ["nothing"]
                return f"p2pd ended at once and said: {last[-1]}"
            output += chunk
    return None


def check_setpriv() -> Check:
    """Check for setpriv, by which a daemon dies with its owner even during its start."""
    path = shutil.which("setpriv")
    fix = "install util-linux; without it a daemon may outlive a killed peer by 30 s"
    return Check("setpriv", path is not None, path or "not found", fix, required=False)


def check_ports(port: int, direct_port: int) -> list[Check]:
    """Check TCP on loopback, the daemon's port, and the port of direct connections unless it is 0 (any free one)."""
    loopback, wanted = _bind_error("127.0.0.1", 0), _bind_error("0.0.0.0", port)
    fix = f"choose another with seed --listen /ip4/0.0.0.0/tcp/{port + 1}"
    checks = [
        Check("listening", loopback is None, loopback or "TCP on loopback works", "allow this user to open TCP ports"),
        Check("port", wanted is None, wanted or f"{port} is free", fix, required=False),
    ]
    if direct_port:
        same = f"{direct_port} is the daemon's port" if direct_port == port else None
        error = same or _bind_error("0.0.0.0", direct_port)
        fix = "choose another network.direct_port in the role file; 0 takes any free one"
        checks.append(Check("direct port", error is None, error or f"{direct_port} is free", fix, required=False))
    return checks


def _bind_error(host: str, port: int) -> str | None:
    try:
        with socket.create_server((host, port)):
            return None
    except (OSError, OverflowError) as error:
        number = error.errno if isinstance(error, OSError) else None
        return f"cannot listen at {host}:{port}: {os.strerror(number) if number else error}"


def check_clock(now: float) -> Check:
    """Check that the clock is plausible and synchronized; ``now`` is in seconds since the epoch."""
    shown = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(now))
    fix = "switch on time synchronisation: timedatectl set-ntp true"
    if now < _EARLIEST_TIME:
        return Check("clock", False, f"{shown} cannot be right", fix)
    state = ctypes.CDLL(None).adjtimex(ctypes.create_string_buffer(_TIMEX_BYTES))
    kept = state != _TIME_ERROR
    return Check("clock", kept, shown if kept else f"{shown}, kept in step by nothing", fix, required=False)


def check_disk(folder: Path) -> Check:
    """Check the free space for checkpoints in ``folder`` or its nearest existing parent."""
    existing = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.is_dir())
    free = shutil.disk_usage(existing).free
    detail, fix = f"{human_bytes(free)} free in {existing}", "free some space, or choose another --run-dir"
    if not os.access(existing, os.W_OK):
        return Check("disk", False, f"{existing} may not be written to", "choose another --run-dir")
    return Check("disk", free >= _GOOD_DISK_BYTES, detail, fix, required=free < _MIN_DISK_BYTES)


def check_memory() -> Check:
    from p2ptrain.pipeline.measure import available_memory

    free = available_memory()
    detail = f"{human_bytes(free)} available"
    fix = "close other programs; a trainer takes 0.5 GB and 32 bytes per parameter"
    return Check("memory", free >= _GOOD_MEMORY_BYTES, detail, fix, required=free < _MIN_MEMORY_BYTES)


def check_file_limit(limit: int) -> Check:
    """Check the soft limit of open files; -1 for none."""
    passed = limit < 0 or limit >= _GOOD_FILES
    detail = "no limit" if limit < 0 else f"{limit} open files"
    return Check("file limit", passed, detail, "ulimit -n 4096", required=0 <= limit < _MIN_FILES)
