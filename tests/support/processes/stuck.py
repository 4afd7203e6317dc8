"""``p2ptrain`` with a trainer, or a host of the last stage, whose thirteenth batch never ends."""

import sys
import time
from collections.abc import Callable
from typing import Any

from p2ptrain.cli.main import main as command
from p2ptrain.pipeline.stage.compute import StageCompute
from p2ptrain.training import loop as trainer

SAYS = "stuck in a batch"
GOOD_BATCHES = 12


def _stuck(function: Callable[..., Any]) -> Callable[..., Any]:
    number = 0

    def call(*arguments: Any) -> Any:
        nonlocal number
        if number == GOOD_BATCHES:
            print(SAYS, flush=True)  # noqa: T201
            while True:
                time.sleep(1000)
        number += 1
        return function(*arguments)

    return call


def main() -> int:
    patched: Any = trainer, StageCompute
    patched[0].language_model_loss = _stuck(patched[0].language_model_loss)
    patched[1].loss = _stuck(patched[1].loss)
    return command()


if __name__ == "__main__":
    sys.exit(main())
