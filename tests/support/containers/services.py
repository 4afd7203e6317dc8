"""A machine that systemd runs, for tests of units: this machine's files, copied on write, in a container.

It has no network but loopback. Python and the package are where the unit expects them, whatever folders they are in
here. Needs root, ``systemd-nspawn`` (Debian's systemd-container), and a kernel with overlayfs.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from pathlib import Path

from tests.support.processes.daemons import ROOT, wait_until

UNIT = ROOT / "deploy" / "systemd" / "p2ptrain@.service"
BOOT_SECONDS = 60.0
COMMAND_SECONDS = 120.0
SPACE = "2g"

PYTHON = "/opt/python"
SITE = "/opt/p2ptrain/site"
SOURCE = "/opt/p2ptrain/source"
PROGRAM = f"""#!{PYTHON}/bin/python3
import sys
from p2ptrain.cli.main import main
sys.exit(main())
"""
ENVIRONMENT = f"[Service]\nEnvironment=PYTHONPATH={SOURCE}:{SITE} LD_LIBRARY_PATH={PYTHON}/lib\n"
"""What a virtual environment does by where it lies."""


def why_unavailable() -> str:
    """Why no such machine can be started here; empty when one can."""
    if os.getuid() != 0:
        return "mounting needs root"
    missing = [name for name in ("systemd-nspawn", "systemctl", "nsenter") if shutil.which(name) is None]
    if missing:
        return f"{', '.join(missing)} not found: apt install systemd systemd-container"
    with tempfile.TemporaryDirectory() as folder:
        try:
            with _files(Path(folder)):
                return ""
        except subprocess.CalledProcessError as error:
            return f"this machine's files cannot be mounted a second time: {error.stderr.strip()}"


@contextlib.contextmanager
def _files(folder: Path) -> Iterator[Path]:
    _run("mount", "-t", "tmpfs", "-o", f"size={SPACE}", "tmpfs", str(folder))
    try:
        upper, work, root = (folder / name for name in ("upper", "work", "root"))
        for each in (upper, work, root):
            each.mkdir()
        _run("mount", "-t", "overlay", "-o", f"lowerdir=/,upperdir={upper},workdir={work}", "overlay", str(root))
        try:
            yield root
        finally:
            _run("umount", str(root))
    finally:
        _run("umount", str(folder))


class ServiceMachine(contextlib.ExitStack):
    """Such a machine, with the unit installed as its header says; a context manager that ends and removes it."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._folder = folder
        self._leader = 0

    def __enter__(self) -> "ServiceMachine":
        (self._folder / "files").mkdir()
        with contextlib.ExitStack() as stack:
            self.root = stack.enter_context(_files(self._folder / "files"))
            self._install()
            self._machine = self._power_on()
            stack.callback(self._power_off)
            wait_until(self._is_up, BOOT_SECONDS)
            self.push(stack.pop_all())
        return self

    def write(self, path: str, text: str) -> None:
        file = self.root / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)

    def run(self, *command: str, check: bool = True) -> str:
        """Run a command there, which must succeed if ``check``; its output."""
        done = subprocess.run(
            ["nsenter", "--target", str(self._leader), "--all", "--", *command], check=False, text=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=COMMAND_SECONDS,
        )  # fmt: skip
        assert done.returncode == 0 or not check, f"{' '.join(command)}: {done.returncode}\n{done.stdout[-3000:]}"
        return done.stdout.strip()

    def tells(self, service: str, *properties: str) -> list[str]:
        """Values of a service's properties, in that order."""
        lines = self.run("systemctl", "show", service, *(f"--property={name}" for name in properties)).splitlines()
        values = dict(line.split("=", 1) for line in lines)
        return [values[name] for name in properties]

    def journal(self, service: str) -> str:
        return self.run("journalctl", "--unit", service, "--output=cat", "--no-pager")

    def _install(self) -> None:
        # Services of this machine are not to be started a second time.
        shutil.rmtree(self.root / "etc/systemd/system")
        shutil.copytree(UNIT.parent, self.root / "etc/systemd/system")
        self.write("/etc/systemd/system/p2ptrain@.service.d/environment.conf", ENVIRONMENT)
        for place in (PYTHON, SITE, SOURCE):
            (self.root / place[1:]).mkdir(parents=True)
        self.write("/opt/p2ptrain/bin/p2ptrain", PROGRAM)
        (self.root / "opt/p2ptrain/bin/p2ptrain").chmod(0o755)
        command = (line[1:].strip() for line in UNIT.read_text().splitlines() if line.startswith("#   useradd"))
        _run("chroot", str(self.root), *next(command).split())

    def _power_on(self) -> subprocess.Popen[bytes]:
        binds = {sys.base_prefix: PYTHON, sysconfig.get_path("purelib"): SITE, str(ROOT): SOURCE}
        command = [
            "systemd-nspawn", "--quiet", "--register=no", "--keep-unit", "--private-network", "--console=pipe",
            f"--directory={self.root}", "--boot", "--machine=p2ptrain-test", "--link-journal=no",
            *(f"--bind-ro={here}:{there}" for here, there in binds.items()),
        ]  # fmt: skip
        with (self._folder / "console").open("wb") as console:
            return subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=console, stderr=console)

    def _is_up(self) -> bool:
        assert self._machine.poll() is None, (self._folder / "console").read_text()[-2000:]
        children = Path(f"/proc/{self._machine.pid}/task/{self._machine.pid}/children").read_text().split()
        if not children:
            return False
        self._leader = int(children[0])
        return self.run("systemctl", "is-system-running", check=False) in ("running", "degraded")

    def _power_off(self) -> None:
        """Have the machine shut down, or be gone."""
        self._machine.send_signal(signal.SIGTERM)  # which nspawn passes on as an order to shut down
        try:
            self._machine.wait(BOOT_SECONDS)
        except subprocess.TimeoutExpired:
            self._machine.kill()  # and what runs in it with it
            self._machine.wait()


def _run(*command: str) -> None:
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL, capture_output=True, text=True)
