"""The wheel that `pipx install` and `uv tool install` make of a checkout works without the checkout."""

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.support.processes.commands import ROOT
from tests.support.tools import unavailable

LOOK = (
    "from p2ptrain.native import exact, load; import p2ptrain; exact.load_kernels();"
    "print(p2ptrain.__file__, load.load_library()[0], *load.SOURCE.parent.glob('*.so'), sep='\\n')"
)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the package as the wheel has it; what the package needs comes from this environment."""
    unavailable("" if find_spec("hatchling") else "hatchling is not there: make venv", "hatchling")
    wheels, folder = tmp_path_factory.mktemp("wheels"), tmp_path_factory.mktemp("installed")
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    offline = ["--no-deps", "--no-index"]
    subprocess.run([*pip, "wheel", *offline, "--no-build-isolation", "--wheel-dir", wheels, ROOT], check=True)
    subprocess.run([*pip, "install", *offline, "--target", folder, *wheels.glob("*.whl")], check=True)
    return folder


def run(folder: Path, *command: str | Path) -> str:
    environment = {"PYTHONPATH": str(folder), "PATH": "/nowhere", "HOME": str(folder)}
    return subprocess.run(
        [sys.executable, *command], cwd=folder, env=environment, check=True, capture_output=True, text=True
    ).stdout


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("--help", "usage: p2ptrain COMMAND"),
        ("completion bash", "_p2ptrain() {"),
        ("completion zsh", "_p2ptrain"),
        ("completion fish", "complete -c p2ptrain"),
        ("completion man", ".TH P2PTRAIN 1"),
    ],
)
def test_its_command_has_help_completions_and_a_manual_page(installed: Path, arguments: str, said: str) -> None:
    assert said in run(installed, installed / "bin" / "p2ptrain", *arguments.split())


def test_it_brings_its_kernels(installed: Path) -> None:
    """There is no compiler on the path, and no checkout whose byte code has them."""
    unavailable("" if list(installed.glob("p2ptrain/native/*.so")) else "no C compiler", "kernels")
    package, codecs, *libraries = run(installed, "-c", LOOK).splitlines()
    assert Path(package).is_relative_to(installed)
    assert Path(codecs).is_relative_to(installed / "p2ptrain" / "native")
    assert sorted(Path(each).name for each in libraries) == ["libcodecs.so", "libexact.so"]
