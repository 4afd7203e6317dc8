"""``p2ptrain`` with a serving host that waits in the middle of a prompt while the file $HELD names its stage."""

import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from p2ptrain.cli.main import main as command
from p2ptrain.models.exact import ExactStage, Part

SAYS = "held before row {}\n"
ROW = 256
POLL_SECONDS = 0.01


def main() -> int:
    patched: Any = ExactStage
    step, file = patched.step, Path(os.environ["HELD"])

    def held_step(stage: ExactStage, parts: Sequence[Part], *rest: Any) -> Any:
        name = "first" if stage.is_first else "last" if stage.is_last else "middle"
        first = max(part.first for part in parts)
        if first >= ROW and file.exists() and file.read_text() == name:
            print(SAYS.format(first), end="", flush=True)  # noqa: T201
            while file.exists():
                time.sleep(POLL_SECONDS)
        return step(stage, parts, *rest)

    patched.step = held_step
    return command()


if __name__ == "__main__":
    sys.exit(main())
