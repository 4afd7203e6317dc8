"""Real hosts that serve a tiny model in stages, and what one process computes with it."""

import subprocess
from contextlib import ExitStack
from pathlib import Path

from p2ptrain.manifest import ModelSpec
from p2ptrain.models import build_stage, model_blocks
from p2ptrain.models.blocks import Span
from p2ptrain.models.exact import ExactStage, exact_stage
from p2ptrain.serving.sampling import Sampling
from tests.support.exact import tokens_after
from tests.support.processes.daemons import wait_until
from tests.support.processes.files import LOOPBACK, QUICK, TINY, set_options
from tests.support.processes.preloaded import COMMAND
from tests.support.processes.swarmlet import background_command, init, seeding
from tests.support.processes.tellers import PATIENCE_SECONDS

PROMPT = "the quick brown fox"
CONTEXT = 1024


class Hosts:
    """A bootstrap peer of a swarm whose model is cut in two or more stages, and peers that serve it."""

    def __init__(self, directory: Path, stack: ExitStack, num_stages: int = 2, **training: object) -> None:
        self.directory = directory
        self._stack = stack
        text = directory / "text"
        text.mkdir(parents=True)
        (text / "some.txt").write_text("the quick brown fox jumps over the lazy dog. " * 2000)
        settings = set_options(
            name="tiny", model={**TINY, "layers": 4, "context": CONTEXT}, data={"source": f"path:{text}"},
            averaging=QUICK, training={"every": 1, "global_batch": 4, "local_batch": 2, **training},
            pipeline={"stages": num_stages},
        )  # fmt: skip
        self.link = stack.enter_context(seeding(init(directory / "swarm", *settings))).link

    def start(self, name: str, *options: str, program: str = COMMAND) -> subprocess.Popen[bytes]:
        log = self.directory / f"{name}.log"
        return self._stack.enter_context(
            background_command(
                log,
                "join",
                self.link,
                "--yes",
                "--serve",
                "--name",
                name,
                "--run-dir",
                str(self.directory / name),
                "--listen",
                LOOPBACK,
                "--threads",
                "1",
                "--allow-path",
                str(self.directory / "text"),
                *options,
                program=program,
            )
        )

    def start_all(self, *stages: int, program: str = COMMAND) -> dict[str, subprocess.Popen[bytes]]:
        """Start a host for each of these stages, called ``host0`` and so on, and wait until all serve."""
        found = {
            f"host{number}": self.start(f"host{number}", "--role", "stage", "--stage", str(stage), program=program)
            for number, stage in enumerate(stages)
        }
        for name in found:
            self.wait_until_serving(name)
        return found

    def wait_until_serving(self, name: str, round_: int = 0) -> None:
        log = self.directory / f"{name}.log"
        wait_until(lambda: f"serving round {round_}\n" in log.read_text(), PATIENCE_SECONDS)


def whole_model() -> ExactStage:
    """Return the model with its initial weights."""
    spec = ModelSpec(**{**TINY, "layers": 4, "context": CONTEXT})
    return exact_stage(build_stage(spec, Span(0, len(model_blocks(spec)))), spec)


def golden(num_tokens: int, sampling: Sampling, prompt: str = PROMPT) -> list[int]:
    """Return the tokens that this process computes with the model's initial weights."""
    return [token.id for token in tokens_after(whole_model(), list(prompt.encode()), sampling, num_tokens)]
