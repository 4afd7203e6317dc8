"""A model in stages, hosted by real processes: they choose what to host, die, stop, and training goes on."""

import json
import os
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from p2ptrain.errors import UsageError
from tests.support.processes.daemons import wait_until
from tests.support.processes.files import LOOPBACK, QUICK, TINY, metrics, set_options
from tests.support.processes.swarmlet import background_command, init, nothing_left_behind, run_command, seeding
from tests.support.processes.tellers import PATIENCE_SECONDS, Teller

START_SECONDS = 2 * PATIENCE_SECONDS
"""For a command to start, join, and do its first round."""


class Stages:
    """A bootstrap peer of a swarm whose model is cut in two, and peers that join it."""

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        self.directory = directory
        self._stack = stack
        text = directory / "text"
        text.mkdir(parents=True)
        for number in range(60):
            (text / f"{number}.txt").write_text(f"the {number}th of many lines that say nearly the same\n" * 40)
        settings = set_options(
            name="stages", model={**TINY, "layers": 2}, data={"source": f"path:{text}"}, averaging=QUICK,
            training={"every": 1, "global_batch": 16, "local_batch": 4, "warmup_steps": 0, "learning_rate": 0.003},
            pipeline={"stages": 2},
        )  # fmt: skip
        self.link = stack.enter_context(seeding(init(directory / "swarm", *settings))).link

    def join(self, name: str, *options: str) -> tuple[int, Path]:
        """Let a peer join; its process and its log."""
        log = self.directory / f"{name}.log"
        process = self._stack.enter_context(background_command(log, *self._arguments(name), *options))
        return process.pid, log

    def watched_host(self, stage: int) -> Teller:
        """Let a peer join that hosts this stage: a process of `tests.support.processes.stage_host`."""
        name = f"host{stage}"
        command = [sys.executable, "-m", "tests.support.processes.stage_host", *self._arguments(name)]
        host = Teller(name, [*command, "--role", "stage", "--stage", str(stage)], self.directory / f"{name}.log")
        self._stack.callback(host.kill)
        return host

    def _arguments(self, name: str) -> list[str]:
        return [
            "join", self.link, "--yes", "--run-dir", str(self.directory / name), "--listen", LOOPBACK,
            "--threads", "1", "--allow-path", str(self.directory / "text"),
        ]  # fmt: skip


@pytest.fixture
def stages(tmp_path: Path) -> Iterator[Stages]:
    with nothing_left_behind(), ExitStack() as stack:
        yield Stages(tmp_path, stack)


def rounds(log: Path) -> list[int]:
    return [int(number) for number in re.findall(r"pipeline\.client\.trainer: round (\d+)", log.read_text())]


def hosts(log: Path) -> int | None:
    found = re.search(r"hosting .* as stage (\d+): (.*)", log.read_text())
    return int(found[1]) if found else None


def wait_for_rounds(log: Path, more: int, seconds: float = 90.0) -> None:
    before = len(rounds(log))
    wait_until(lambda: len(rounds(log)) >= before + more, seconds)


@pytest.mark.fault(27)
def test_joiners_share_out_the_stages_and_training_goes_on_when_hosts_are_killed_and_stopped(stages: Stages) -> None:
    peers = [stages.join(f"host{number}", "--role", "stage") for number in range(4)]
    _, trainer = stages.join("trainer", "--role", "trainer")
    wait_until(lambda: all(hosts(log) is not None for _, log in peers), PATIENCE_SECONDS)
    assert sorted(hosts(log) for _, log in peers) == [0, 0, 1, 1]  # type: ignore[type-var]
    wait_for_rounds(trainer, 3)
    first = [pid for pid, log in peers if hosts(log) == 0]
    second = [pid for pid, log in peers if hosts(log) == 1]
    os.kill(first[0], signal.SIGKILL)
    wait_for_rounds(trainer, 3)
    os.kill(second[0], signal.SIGSTOP)
    try:
        wait_for_rounds(trainer, 3)
    finally:
        os.kill(second[0], signal.SIGCONT)
    wait_for_rounds(trainer, 3)
    lines = metrics(stages.directory / "trainer")
    losses = [line["loss"] for line in lines if line["kind"] == "step" and line["loss"] is not None]
    assert losses[-1] < losses[0]


@pytest.mark.fault(28)
def test_of_a_microbatch_whose_trainer_is_killed_half_way_no_stage_keeps_anything(stages: Stages) -> None:
    first, last = hosting = [stages.watched_host(stage) for stage in range(2)]
    victim, _ = stages.join("victim", "--role", "trainer")
    peer = first.wait_for("done", timeout_seconds=START_SECONDS)["ids"][0][0]
    stages.join("other", "--role", "trainer")
    first.wait_for("done", lambda event: any(id[0] != peer for id in event["ids"]), timeout_seconds=START_SECONDS)
    last.tell(f"hold {peer}")
    held = last.wait_for("held")["id"]
    os.kill(victim, signal.SIGKILL)
    marks = [len(host.events) for host in hosting]

    def is_free(host: Teller) -> bool:
        since = len(host.events)
        host.tell("ledger")
        ledger = host.wait_for("ledger", since=since)
        return not ledger["unsettled"].get(peer) and not ledger["bytes"].get(peer)

    for host, mark in zip(hosting, marks, strict=True):  # The other trainer goes on.
        host.wait_for("done", lambda event: event["round"] >= held[1] + 2, mark)
        wait_until(lambda: is_free(host), PATIENCE_SECONDS)  # noqa: B023
    done = [{event["round"]: event["ids"] for event in host.events if event["event"] == "done"} for host in hosting]
    for round in done[0].keys() & done[1].keys():
        ids = sorted(done[0][round])
        assert ids == sorted(done[1][round]), "a part of a microbatch counts"
        assert len(ids) == len({tuple(id) for id in ids}), "a microbatch counts twice"
    assert all(held not in ids for counted in done for ids in counted.values())


def test_a_script_trains_a_model_of_which_it_holds_nothing(stages: Stages) -> None:
    import torch
    from torch.nn.functional import cross_entropy

    from p2ptrain import Swarm

    for number in range(2):
        stages.join(f"host{number}", "--role", "stage", "--stage", str(number))
    tokens = torch.tensor(list(b"the 7th of many lines that say nearly the same\n" * 3)[:132]).view(4, 33)
    with Swarm.join(stages.link, listen=(LOOPBACK,)) as swarm:
        model, losses = swarm.pipeline(), []
        for _ in range(40):
            logits = model(tokens[:, :-1])
            loss = cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
            torch.autograd.backward(loss)
            losses.append(float(loss.detach()))
        assert model.round >= 8  # The global batch is 16 samples.
        assert losses[-1] < 0.9 * losses[0]
        with torch.no_grad():
            assert model(tokens[:, :-1]).shape == (4, 32, 256)
        with pytest.raises(UsageError, match="token ids"):
            model(torch.zeros(4, 64, dtype=torch.int64))


def test_a_run_goes_on_from_its_stages_checkpoints_which_are_exported_as_one_model(tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    run_dir, summary = tmp_path / "run", tmp_path / "run" / "summary.json"
    options = ["--stages", "2", "--peers", "2", "--threads", "1", "--set", "model.layers=2", "--no-monitor"]
    with nothing_left_behind():
        for rounds_before, rounds in ((0, 11), (11, 4)):
            done = run_command("up", *options, "--run-dir", run_dir, "--rounds", str(rounds), timeout_seconds=200)
            assert done.returncode == 0, done.stderr
            peer = json.loads((run_dir / "trainer-1" / "summary.json").read_text())
            assert peer["round"] == rounds_before + rounds
    values = json.loads(summary.read_text())
    listed = run_command("checkpoint", "ls", run_dir).stdout
    complete = re.findall(r"(stage-\d)/\d+-round-(\d+) .* complete\n", listed)
    assert {("stage-0", "15"), ("stage-1", "15")} <= set(complete), listed  # The last one, that nobody had to wait for.
    done = run_command("checkpoint", "export", run_dir, tmp_path / "model")
    assert done.returncode == 0, done.stderr
    assert "round 15 of 2 stages" in done.stdout
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")  # In evaluation mode.
    text = (Path(os.__file__).parent / "argparse.py").read_bytes()[: 16 * 129]
    tokens = torch.tensor(list(text)).view(16, 129)
    with torch.no_grad():
        logits = model(tokens[:, :-1]).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
    assert abs(float(loss) - values["heldout_loss_after"]) < 0.7  # Other text, but the same model.
    assert float(loss) < 5.0
    for file in run_dir.glob("*/checkpoints/*/*/stages.json"):
        file.unlink()
    done = run_command("checkpoint", "export", run_dir, tmp_path / "again")
    assert done.returncode == 8
    assert "--by-round joins round 15" in done.stderr
    done = run_command("checkpoint", "export", run_dir, tmp_path / "again", "--by-round")
    assert done.returncode == 0, done.stderr
    assert "warning: only their round, 15," in done.stderr
