"""Compile `codecs.c`: ``python3 build.py FILE``.

Needs Python and a C compiler alone: the builds of wheel and image run it without p2ptrain's dependencies.
"""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

SOURCE = Path(__file__).with_name("codecs.c")
COMPILERS = ("cc", "gcc", "clang")
FLAGS = (
    "-std=c11", "-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-fvisibility=hidden", "-fPIC",
    "-shared",
)  # fmt: skip
"""No flag changes a result: nothing is fused, reordered or flushed to zero."""
VARIANTS: tuple[tuple[str, ...], ...] = (("-DCLONES", "-Werror"), ())
"""Tried in turn, because some toolchains cannot build function clones for several CPUs."""
BUILD_SECONDS = 90.0
"""Timeout of one compilation."""
DIGEST_BYTES = 32


class BuildError(OSError):
    """There is no compiler, it fails, or it takes too long."""


def build_library() -> bytes:
    """Return the compiled library, followed by its SHA-256; raises `BuildError`."""
    compiler = next(filter(None, map(shutil.which, COMPILERS)), None)
    if compiler is None:
        raise BuildError(f"no C compiler found ({', '.join(COMPILERS)})")
    with tempfile.TemporaryDirectory(prefix="p2ptrain-build-") as folder:
        output, reason = Path(folder, "codecs.so"), ""
        for variant in VARIANTS:
            command = [compiler, *FLAGS, *variant, "-o", str(output), str(SOURCE)]
            try:
                subprocess.run(
                    command, stdin=subprocess.DEVNULL, capture_output=True, check=True, timeout=BUILD_SECONDS
                )
            except subprocess.CalledProcessError as error:
                lines = error.stderr.decode(errors="replace").splitlines()
                reason = next((line for line in lines if "error" in line), "no message")
                continue
            except (OSError, subprocess.TimeoutExpired) as error:
                raise BuildError(str(error)) from error
            library = output.read_bytes()
            return library + hashlib.sha256(library).digest()
    raise BuildError(f"{compiler} failed: {reason[:200]}")


if __name__ == "__main__":
    Path(sys.argv[1]).write_bytes(build_library())
