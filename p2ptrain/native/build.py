"""Compile `codecs.c` and `exact.c`: ``python3 build.py FOLDER``.

Needs Python and a C compiler alone: the builds of wheel and image run it without p2ptrain's dependencies.
"""

from __future__ import annotations

import hashlib
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

SOURCE, EXACT_SOURCE = (Path(__file__).with_name(name) for name in ("codecs.c", "exact.c"))
COMPILERS = ("cc", "gcc", "clang")
FLAGS = (
    "-std=c11", "-O3", "-D_DEFAULT_SOURCE", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math",
    "-fvisibility=hidden", "-fPIC",
)  # fmt: skip
"""No flag changes a result: nothing is fused, reordered or flushed to zero."""
VARIANTS: tuple[tuple[str, ...], ...] = (("-DCLONES", "-Werror"), ())
"""Tried in turn, because some toolchains cannot build function clones for several CPUs."""
X86_BUILDS = {
    "v4": ("-march=x86-64-v4", "-Wno-psabi"),
    "v3": ("-march=x86-64-v3", "-Wno-psabi"),
}  # fmt: skip
"""Builds of `exact.c` for CPUs with AVX-512 and with AVX2: same bits, other speed."""
BUILD_SECONDS = 300.0
"""Timeout of one compilation: it takes 15 s on an idle core, and more than 90 s on two that much else runs on."""
DIGEST_BYTES = 32


class BuildError(OSError):
    """There is no compiler, it fails, or it takes too long."""


class CompilerError(BuildError):
    """The compiler refuses the source or a flag."""


def build_library() -> bytes:
    """Return the compiled `codecs.c`, followed by its SHA-256; raises `BuildError`."""
    reasons = []
    for variant in VARIANTS:
        try:
            return _build(SOURCE, {"codecs": variant})
        except CompilerError as error:
            reasons.append(error)
    raise reasons[-1]


def build_exact() -> bytes:
    """Return `exact.c`, compiled for each kind of this machine's CPUs, followed by its SHA-256; raises `BuildError`."""
    kinds = exact_builds(platform.machine())
    return _build(EXACT_SOURCE, {kind: (f"-DBUILD={kind}", *flags) for kind, flags in kinds.items()})


def exact_builds(machine: str) -> dict[str, tuple[str, ...]]:
    """Return the builds of `exact.c` for a machine, the fastest first, with their compiler flags."""
    return {**(X86_BUILDS if machine == "x86_64" else {}), "plain": ("-DCHOOSES",)}


def _build(source: Path, objects: Mapping[str, tuple[str, ...]]) -> bytes:
    """Compile a source once for each name, with the flags beside it, and link the objects to one library."""
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        raise BuildError(f"no C compiler found ({', '.join(COMPILERS)})")
    with tempfile.TemporaryDirectory(prefix="p2ptrain-build-") as folder:
        output = Path(folder, "library.so")
        for name, flags in objects.items():
            _run([compiler, *FLAGS, *flags, "-c", "-o", f"{folder}/{name}.o", str(source)])
        _run([compiler, *FLAGS, "-shared", "-o", str(output), *(f"{folder}/{name}.o" for name in objects), "-lm"])
        library = output.read_bytes()
    return library + hashlib.sha256(library).digest()


def _run(command: Sequence[str]) -> None:
    try:
        subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=True, timeout=BUILD_SECONDS)
    except subprocess.CalledProcessError as error:
        lines = error.stderr.decode(errors="replace").splitlines()
        reason = next((line for line in lines if "error" in line), "no message")
        raise CompilerError(f"{command[0]} failed: {reason[:200]}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(str(error)) from error


def write_libraries(folder: Path) -> list[Path]:
    """Write all libraries into a folder; return their paths. Raises `BuildError`.

    Python would import ``exact.so`` in place of ``exact.py``.
    """
    libraries = {"libcodecs.so": build_library, "libexact.so": build_exact}
    for name, build in libraries.items():
        (folder / name).write_bytes(build())
    return [folder / name for name in libraries]


if __name__ == "__main__":
    write_libraries(Path(sys.argv[1]))
