"""Machine code that is made here: without fused operations or loose ends, kept, checked, and never required."""

from __future__ import annotations

import os
import platform
import struct
import subprocess
import sys
from pathlib import Path

import llvmlite.binding as llvm
import pytest

from p2ptrain.kernels import load, load_kernels
from p2ptrain.kernels.build import build_image, target_machine, try_all
from p2ptrain.kernels.code import kernels
from p2ptrain.kernels.emit import module_of
from p2ptrain.kernels.link import LinkError, link
from tests.support.tools import needed

pytestmark = needed("" if platform.machine() == "x86_64" else "there are kernels for x86-64 only", "kernels")

EVERY_CPU = pytest.mark.parametrize("cpu", [None, "x86-64-v3", "x86-64-v4", "znver3"])


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the image is kept during a test."""
    path = tmp_path / "cache" / "kernels.bin"
    monkeypatch.setattr(load, "image_path", lambda: path)
    return path


def compile_text(text: str) -> bytes:
    return bytes(target_machine().emit_object(llvm.parse_assembly(text)))


@EVERY_CPU
def test_no_multiplication_is_fused_with_an_addition(cpu: str | None) -> None:
    machine = target_machine(cpu)
    for name, kernel in kernels().items():
        assembly = machine.emit_assembly(llvm.parse_assembly(module_of(name, kernel)))
        assert "mulps" in assembly or "mulss" in assembly or not name.startswith(("accumulate", "encode_int"))
        for fused in ("vfma", "vfnma", "vfms", "vfnms"):
            assert fused not in assembly, name


@EVERY_CPU
def test_every_kernel_links(cpu: str | None) -> None:
    machine = target_machine(cpu)
    for name, kernel in kernels().items():
        assert len(link(machine.emit_object(llvm.parse_assembly(module_of(name, kernel))), name)) > 64


def test_a_cpu_without_half_precision_goes_without_those_kernels_only(caplog: pytest.LogCaptureFixture) -> None:
    image = build_image(target_machine("x86-64"))
    missing = kernels().keys() - load.unpack(image).keys()
    assert missing == {"encode_fp16", "decode_fp16", "accumulate_fp16"}
    assert "extendhfsf2" in caplog.text
    try_all(image)  # The oldest CPU's code runs on all.


def test_code_runs_wherever_it_lies() -> None:
    source = bytes(range(256)) * 2
    for offset in (0, 64, 4096 - 64):
        machine = target_machine()
        text = module_of("decode_bf16", kernels()["decode_bf16"])
        code = bytes(offset) + link(machine.emit_object(llvm.parse_assembly(text)), "decode_bf16")
        (kernel,) = load.unpack(load.pack({"decode_bf16": offset}, code)).values()
        target = bytearray(1024)
        assert not kernel(bytearray(source), target, 2, 1.0)
        expected = b"".join(b"\0\0" + source[at : at + 2] for at in range(0, 512, 2))
        assert bytes(target) == expected


def test_nothing_runs_for_no_blocks() -> None:
    target = bytearray(b"\xaa" * 64)
    for kernel in load_kernels().values():
        assert not kernel(bytearray(64), target, 0, 1.0)
    assert target == b"\xaa" * 64


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("declare i32 @puts(ptr)\ndefine i32 @f(ptr %p) {\n %r = call i32 @puts(ptr %p)\n ret i32 %r\n}", "puts"),
        ("@x = global i32 1\ndefine i32 @f() {\n %r = load i32, ptr @x\n ret i32 %r\n}", "variables"),
        ("define i32 @g() {\n ret i32 1\n}", "does not come first"),
        ("define i32 @g() {\n ret i32 1\n}\ndefine i32 @f() {\n ret i32 1\n}", "does not come first"),
    ],
)
def test_code_that_needs_more_than_itself_is_not_linked(text: str, reason: str) -> None:
    with pytest.raises(LinkError, match=reason):
        link(compile_text(text), "f")


def test_what_is_no_object_file_is_not_linked() -> None:
    whole = compile_text("define i32 @f() {\n ret i32 1\n}")
    assert link(whole, "f")
    other = bytearray(whole)
    struct.pack_into("<H", other, 18, 183)  # An object for AArch64.
    for data in (b"", b"\x7fELF", whole[:70], bytes(other)):
        with pytest.raises(LinkError):
            link(data, "f")


def test_an_image_is_made_once_and_then_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load_kernels().keys() == kernels().keys()
    monkeypatch.setattr(subprocess, "run", None)
    assert load_kernels().keys() == kernels().keys()
    assert [entry.name for entry in path.parent.iterdir()] == [path.name]


def test_a_damaged_image_is_made_anew(path: Path) -> None:
    load_kernels()
    good = path.read_bytes()
    for bad in (b"", good[:-1], good[:100] + bytes([good[100] ^ 1]) + good[101:]):
        with pytest.raises(ValueError, match="damaged"):
            load.unpack(bad)
    path.write_bytes(good[:-1])
    assert load_kernels()
    assert path.read_bytes() == good


def test_a_folder_that_cannot_be_written_only_costs_time(path: Path) -> None:
    path.parent.write_text("not a folder, so that this holds for root, too")
    assert load_kernels().keys() == kernels().keys()


def test_a_build_that_fails_leaves_the_caller_without_kernels(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert load_kernels() == {}
    assert "stay without kernels" in caplog.text
    assert not path.parent.exists()


def test_a_build_that_crashes_takes_nobody_with_it(
    path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def crash(*arguments: object, **options: object) -> subprocess.CompletedProcess[bytes]:
        code = "import os, signal; os.kill(os.getpid(), signal.SIGILL)"
        return subprocess.CompletedProcess([], subprocess.call([sys.executable, "-c", code]), b"", b"")

    call = subprocess.call
    monkeypatch.setattr(subprocess, "run", crash)
    monkeypatch.setattr(subprocess, "call", call)
    assert load_kernels() == {}
    assert "status -4" in caplog.text


def test_other_machines_go_without(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    assert load_kernels() == {}


def test_another_cpu_or_compiler_makes_an_image_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {load.image_path()}
    with monkeypatch.context() as patch:
        patch.setattr(load, "_cpu", lambda: "another")
        found.add(load.image_path())
    with monkeypatch.context() as patch:
        patch.setattr(load, "version", lambda name: "99")
        found.add(load.image_path())
    assert len(found) == 3


def test_codecs_with_kernels_bring_no_compiler_into_their_process() -> None:
    code = "import sys; from p2ptrain.codecs import warm_up; warm_up(); sys.exit('llvmlite' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": str(Path(load.__file__).parents[2])}
    assert subprocess.run([sys.executable, "-c", code], env=environment).returncode == 0


def test_the_building_process_needs_no_torch() -> None:
    code = "import sys, p2ptrain.kernels.build; sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    environment = {**os.environ, "PYTHONPATH": str(Path(load.__file__).parents[2])}
    assert subprocess.run([sys.executable, "-c", code], env=environment).returncode == 0
