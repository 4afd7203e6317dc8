"""One target under atheris; see `tests.fuzz`. With a file in place of a folder it runs that input once.

The process of a fuzzer ends without the interpreter's clean-up, so `tests.fuzz` removes its temporary files.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import atheris

with atheris.instrument_imports(include=["p2ptrain"]):
    from tests.fuzz.targets import TARGETS


def main() -> None:
    name, *options = sys.argv[1:]
    target = TARGETS[name]
    seeds = Path(tempfile.mkdtemp(prefix="p2ptrain-seeds-"))
    is_fuzzing = any(Path(each).is_dir() for each in options)
    for number, data in enumerate(target.seeds() if is_fuzzing else ()):
        target.run(data)  # A seed that fails is a defect of the target.
        (seeds / f"seed-{number}").write_bytes(data)
    atheris.Setup([sys.argv[0], *options, *([str(seeds)] if is_fuzzing else [])], target.run)
    atheris.Fuzz()  # It ends the process.


if __name__ == "__main__":
    main()
