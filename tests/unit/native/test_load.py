"""The native library is built once, checked before it is loaded, and never required."""

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from p2ptrain.cli.checks import check_native
from p2ptrain.native import build, load
from p2ptrain.native.load import load_functions, load_library
from tests.support.processes.commands import printed
from tests.support.tools import needed

pytestmark = needed("" if load_functions() else "there is no native library", "kernels")


@pytest.fixture(scope="module")
def library() -> bytes:
    return load_library()[0].read_bytes()


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the library is kept during a test; none is installed."""
    path = tmp_path / "cache" / "libcodecs.so"
    monkeypatch.setattr(load, "cached_path", lambda: path)
    monkeypatch.setattr(load, "INSTALLED", tmp_path / "libcodecs.so")
    return path


@pytest.fixture
def builds(library: bytes, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """One entry for each build, which takes no time."""
    found: list[str] = []

    def build_library() -> bytes:
        found.append("built")
        return library

    monkeypatch.setattr(load, "build_library", build_library)
    return found


def refuse() -> bytes:
    raise build.BuildError("no C compiler found")


def test_a_library_is_built_once_and_kept_and_the_doctor_names_it(cached: Path, builds: list[str]) -> None:
    assert load_library()[0] == cached
    assert load_library()[0] == cached
    assert builds == ["built"]
    assert [path.name for path in cached.parent.iterdir()] == [cached.name]
    check = check_native()
    assert check.passed
    assert str(cached) in check.detail


def test_a_library_that_is_installed_is_used_first(cached: Path, library: bytes, builds: list[str]) -> None:
    cached.parent.mkdir()
    for path in (cached, load.INSTALLED):
        path.write_bytes(library)
    assert load_library()[0] == load.INSTALLED
    assert not builds


@pytest.mark.parametrize(
    "damage",
    [lambda data: data[:-100], lambda data: data[:5000], lambda data: b"", lambda data: data[:99] + b"?" + data[100:]],
    ids=["end missing", "most missing", "empty", "a byte changed"],
)
@pytest.mark.parametrize("installed", [False, True])
def test_a_damaged_library_is_replaced(
    cached: Path, library: bytes, builds: list[str], damage: Callable[[bytes], bytes], installed: bool,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    path = load.INSTALLED if installed else cached
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(damage(library))
    assert load_library()[0] == cached
    assert builds == ["built"]
    assert cached.read_bytes() == library
    assert "is damaged" in caplog.text


def test_a_damaged_library_is_not_used_where_none_can_be_built(
    cached: Path, library: bytes, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    load.INSTALLED.write_bytes(library[:-1])
    monkeypatch.setattr(load, "build_library", refuse)
    assert load_functions() == {}
    assert "no C compiler" in caplog.text


def test_a_library_without_a_function_or_of_another_machine_is_refused(
    tmp_path: Path, library: bytes, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, data in (("libcodecs.so", library), ("other.so", b"no ELF" + hashlib.sha256(b"no ELF").digest())):
        (tmp_path / name).write_bytes(data)
    monkeypatch.setattr(load, "CODEC_OPERATIONS", {"int8": ("encode", "transpose")})
    with pytest.raises(OSError, match="lacks transpose_int8"):
        load.open_library(tmp_path / "libcodecs.so")
    with pytest.raises(OSError, match=r"other\.so"):
        load.open_library(tmp_path / "other.so")


def test_a_library_that_cannot_be_kept_is_used_all_the_same(cached: Path, builds: list[str]) -> None:
    cached.parent.write_text("a file, where a folder is needed")
    path, functions = load_library()
    assert functions
    assert not path.exists()
    assert cached.parent.is_file()


def test_another_source_or_machine_has_a_library_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = {load.cached_path()}
    with monkeypatch.context() as patch:
        patch.setattr(platform, "machine", lambda: "riscv64")
        found.add(load.cached_path())
    for name in ("codecs.c", "build.py"):
        shutil.copy(build.SOURCE.with_name(name), tmp_path)
    with (tmp_path / "codecs.c").open("a") as file:
        file.write("\n")
    monkeypatch.setattr(load, "SOURCE", tmp_path / "codecs.c")
    found.add(load.cached_path())
    assert len(found) == 3


def compiler(folder: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a script the only compiler."""
    (folder / "cc").write_text(f"#!/bin/sh\n{text}\n")
    (folder / "cc").chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))


def test_without_a_compiler_the_doctor_warns_and_says_what_to_install(
    cached: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    check = check_native()
    assert not check.passed
    assert not check.required
    assert "no C compiler" in check.detail
    assert "install gcc" in check.fix
    assert load_functions() == {}


def test_a_compiler_that_fails_is_quoted(cached: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler(tmp_path, "echo 'codecs.c:9: fatal error: string.h: no such file' >&2; exit 1", monkeypatch)
    with pytest.raises(build.BuildError, match=r"fatal error: string\.h"):
        load_library()
    assert not cached.exists()


def test_a_compiler_that_hangs_is_given_up(cached: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler(tmp_path, "exec /bin/sleep 60", monkeypatch)
    monkeypatch.setattr(build, "BUILD_SECONDS", 0.2)
    with pytest.raises(build.BuildError, match="timed out"):
        load_library()


def test_a_compiler_that_knows_no_versions_for_several_cpus_builds_one(
    cached: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = next(filter(None, map(shutil.which, build.COMPILERS)), None)
    assert real is not None
    path = os.environ["PATH"]
    compiler(tmp_path, f'case "$*" in *-DCLONES*) exit 1;; esac; PATH={path} exec {real} "$@"', monkeypatch)
    assert load_library()[0] == cached


def test_building_needs_no_package_of_p2ptrain_and_loading_neither_torch_nor_numpy() -> None:
    code = "import runpy, sys; runpy.run_path(sys.argv[1]); sys.exit(any('p2ptrain' in name for name in sys.modules))"
    done = subprocess.run([sys.executable, "-I", "-S", "-c", code, str(build.SOURCE.with_name("build.py"))])
    assert done.returncode == 0
    loading = "import sys; from p2ptrain.native.load import load_library; load_library()"
    assert printed(f"{loading}; print({{'torch', 'numpy'}} & set(sys.modules))") == "set()\n"


def test_other_threads_run_meanwhile() -> None:
    """A call releases the interpreter's lock: this thread sees that the first block is written and the last is not."""
    encode = load_functions()["topk"]["encode"]
    blocks, encoded_bytes = 1000, 84
    source = bytearray(b"\0\0\x80\x3f" * 4096 * blocks)  # ones
    read_from = ctypes.addressof((ctypes.c_char * len(source)).from_buffer(source))

    def seen_halfway() -> bool:
        target = bytearray(encoded_bytes * blocks)
        write_to = ctypes.addressof((ctypes.c_char * len(target)).from_buffer(target))
        call = threading.Thread(target=encode, args=(read_from, write_to, blocks, 1.0), daemon=True)
        call.start()
        found = False
        while call.is_alive() and not found:
            found = target[0] != 0 and target[-encoded_bytes] == 0
        call.join()
        return found

    assert any(seen_halfway() for _ in range(200))
