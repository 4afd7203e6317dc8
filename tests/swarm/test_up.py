"""`p2ptrain up`: a whole swarm by one command, and no process left of it."""

import json
import shlex
import signal
import subprocess
from pathlib import Path
from typing import Any

import pytest

from p2ptrain import Swarm
from p2ptrain.manifest import ModelSpec
from p2ptrain.models import export_hugging_face
from p2ptrain.models.exact import exact_stage
from p2ptrain.serving.sampling import Sampling
from p2ptrain.serving.text import Text, TextStream
from tests.support.exact import lively_model, tokens_after
from tests.support.generators import tokenizer
from tests.support.processes.daemons import ROOT, wait_until
from tests.support.processes.files import LOOPBACK, TINY, committed, last_round, metrics, set_options, write_text
from tests.support.processes.swarmlet import background_command, command, nothing_left_behind, run_command
from tests.support.processes.tellers import PATIENCE_SECONDS

OPTIONS = (
    *set_options(model=TINY, training={"warmup_steps": 4}, averaging={"grace_seconds": 2}),
    "--no-monitor", "--device", "cpu", "--threads", "1",
)  # fmt: skip


def read_json(path: Path) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(path.read_text())
    return values


def test_two_trainers_learn_agree_and_leave_nothing_behind(tmp_path: Path) -> None:
    run_dir, summary_file, log = tmp_path / "run", tmp_path / "summary.json", tmp_path / "up.log"
    arguments: list[str | Path] = [
        "--rounds", "90", "--summary", summary_file, "--run-dir", run_dir, "--data", write_text(tmp_path / "text.txt"),
        "--set", "averaging.min_peers=2",  # Else one has done its rounds alone before the other is there.
    ]  # fmt: skip
    with nothing_left_behind(), background_command(log, "up", "--peers", "2", *arguments, *OPTIONS) as up:
        assert up.wait(180) == 0, log.read_text()
    each = [read_json(run_dir / f"trainer-{number}" / "summary.json") for number in (1, 2)]
    # Who came later measures first what the other has learned by then.
    at_first = max(summary["heldout_loss_before"] for summary in each)
    for summary in each:
        assert summary["heldout_loss_after"] < at_first - 1
        assert summary["rounds_committed"] > 0
        assert summary["exit_reason"] == "rounds"
        held_out = [m for m in metrics(run_dir / summary["name"]) if m["kind"] == "held_out"]
        assert held_out[0]["loss"] == summary["heldout_loss_before"]
        assert held_out[-1]["loss"] == summary["heldout_loss_after"]
        assert len(held_out) > 2
    told = [line for line in log.read_text().splitlines() if "peers  averaged in" in line]
    # The first may come before anybody has told a loss, the last when those who measured have ended.
    assert all(" loss " in line and " held-out " in line for line in told[1:-1])
    assert any(" loss " in line and " held-out " in line for line in told)
    assert any(" digest " in line for line in told)
    assert not any(" 0 tokens/s" in line for line in told)
    assert each[0]["peer"] != each[1]["peer"]
    # A trainer that began before it knew of the other may have closed rounds alone, on a lineage that it gave up.
    together = [[m for m in committed(run_dir / f"trainer-{n}") if m["members"] == 2] for n in (1, 2)]
    digests = [{m["round"]: m["digest"] for m in rounds} for rounds in together]
    common = set(digests[0]) & set(digests[1])
    assert common
    assert all(digests[0][number] == digests[1][number] for number in common)
    assert read_json(summary_file)
    assert "what it writes now:\n  | " in log.read_text()
    (export,) = [line.partition("p2ptrain ")[2] for line in log.read_text().splitlines() if "checkpoint export" in line]
    assert run_command(*shlex.split(export)[:-1], tmp_path / "model").returncode == 0
    assert (tmp_path / "model" / "model.safetensors").is_file()
    for name in ("trainer-1", "trainer-2"):
        assert list((run_dir / name / "checkpoints").glob("*-round-*"))


def test_sites_of_a_private_swarm_learn_from_what_each_has_alone(tmp_path: Path) -> None:
    run_dir, log = tmp_path / "run", tmp_path / "up.log"
    arguments: list[str | Path] = [
        "--rounds", "4", "--every", "4", "--set", "data.source=own", "--set", "private.weights=samples",
        "--run-dir", run_dir, "--data", write_text(tmp_path / "text.txt"), "--partition", "sizes:zipf",
        "--set", "averaging.min_peers=2",
    ]  # fmt: skip
    with nothing_left_behind(), background_command(log, "up", "--peers", "2", *arguments, *OPTIONS) as up:
        assert up.wait(180) == 0, log.read_text()
    sizes = [(run_dir / f"site-{number}.txt").stat().st_size for number in (1, 2)]
    assert sum(sizes) == (tmp_path / "text.txt").stat().st_size
    assert sizes[0] > 1.5 * sizes[1]
    for number in (1, 2):
        assert run_command("verify-log", run_dir / f"site-{number}").returncode == 0
        assert read_json(run_dir / f"site-{number}" / "summary.json")["rounds_committed"] > 0
    assert len(set(read_json(run_dir / "summary.json")["state_digests"].values())) == 1


@pytest.mark.parametrize(("signals", "exit_code"), [(1, 0), (2, 130)], ids=["drains", "ends at once when told twice"])
def test_an_interrupted_swarm(tmp_path: Path, signals: int, exit_code: int) -> None:
    run_dir, log = tmp_path / "run", tmp_path / "up.log"
    arguments: list[str | Path] = ["--minutes", "5", "--run-dir", run_dir, "--data", write_text(tmp_path / "text.txt")]
    with nothing_left_behind(), background_command(log, "up", "--peers", "1", *arguments, *OPTIONS) as up:
        wait_until(lambda: up.poll() is not None or last_round(run_dir / "trainer-1") >= 0, 90)
        assert up.poll() is None, log.read_text()
        for number in range(signals):
            up.send_signal(signal.SIGINT)
            if number + 1 < signals:
                wait_until(lambda: "draining" in log.read_text())
        assert up.wait(60) == exit_code, log.read_text()
    if exit_code == 0:
        assert read_json(run_dir / "trainer-1" / "summary.json")["exit_reason"] == "signal"
        assert read_json(run_dir / "summary.json")


def test_an_interruption_while_trainers_start_is_no_failure(tmp_path: Path) -> None:
    log = tmp_path / "up.log"
    with nothing_left_behind(), background_command(log, "up", "--run-dir", tmp_path / "run", *OPTIONS) as up:
        wait_until(lambda: "starting 3 trainers" in log.read_text())
        up.send_signal(signal.SIGINT)
        assert up.wait(60) == 0, log.read_text()
    assert "error" not in log.read_text()


def test_what_no_trainer_can_do_is_said_once(tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("too little")
    with nothing_left_behind():
        done = run_command("up", "--peers", "2", "--run-dir", tmp_path / "run", "--data", text, *OPTIONS)
    assert done.returncode == 3, done.stderr
    assert done.stderr.startswith("p2ptrain: error: trainer-")
    assert len(done.stderr.splitlines()) == 1


def test_a_served_model_is_talked_with_in_its_own_manner(tmp_path: Path) -> None:
    """Of its settings, ``top_k = 1`` leaves one answer at any temperature."""
    spec = ModelSpec(**{**TINY, "layers": 2, "context": 512, "vocabulary": 257})
    folder, log, model, made = tmp_path / "model", tmp_path / "up.log", lively_model(spec), tokenizer()
    export_hugging_face(model, spec, folder)
    made.save_pretrained(folder)
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 1.5, "top_k": 1}))
    text = Text(made)
    prompt = text.encode_chat([{"role": "user", "content": "hi"}])
    drawn = [token.id for token in tokens_after(exact_stage(model, spec), prompt, Sampling(temperature=0.0), 256)]
    drawn = drawn[: drawn.index(256)] if 256 in drawn else drawn
    stream = TextStream(text, prompt)
    answer = "".join(map(stream.push, drawn))
    options: list[str | Path] = [
        "--serve",
        "--model",
        folder,
        "--peers",
        "2",
        "--run-dir",
        tmp_path / "run",
        *OPTIONS[-5:],
    ]
    with nothing_left_behind(), log.open("wb") as output:
        process = subprocess.Popen(
            command("up", *options), cwd=ROOT, stdin=subprocess.PIPE, stdout=output, stderr=output
        )
        try:
            assert process.stdin is not None
            process.stdin.write(b"hi\n")
            process.stdin.flush()
            wait_until(lambda: "first after" in log.read_text(errors="replace"), 2 * PATIENCE_SECONDS)
            (line,) = [line for line in log.read_text().splitlines() if line.startswith("  p2ptrain chat ")]
            told = subprocess.run(
                command(*shlex.split(line)[1:]), cwd=ROOT, input="hi\n/reset\nhi\n", capture_output=True,
                encoding="utf-8", timeout=PATIENCE_SECONDS,
            )  # fmt: skip
            assert (told.returncode, told.stdout) == (0, f"{answer}\n{answer}\n"), told.stderr
            with Swarm.join(shlex.split(line)[2], listen=(LOOPBACK,)) as swarm:
                asked = swarm.language_model(weights=folder).stream(prompt, do_sample=True, max_new_tokens=len(drawn))
                assert list(asked) == drawn
            process.stdin.close()
            assert process.wait(PATIENCE_SECONDS) == 0
        finally:
            process.kill()
            process.wait()
    assert f"{answer}\n[" in log.read_text()
    assert "by host-1 → host-2]" in log.read_text()
