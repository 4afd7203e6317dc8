"""Adapters over the frozen int8 stages of a pretrained model, trained by real processes and used with peft."""

import json
import re
import shutil
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn.functional import cross_entropy

from p2ptrain import LoraSpec, Swarm
from p2ptrain.errors import UsageError
from p2ptrain.manifest import ModelSpec
from p2ptrain.models import build_model, export_hugging_face
from p2ptrain.models.weights import SINGLE
from tests.support.processes.daemons import wait_until
from tests.support.processes.files import LOOPBACK, set_options
from tests.support.processes.swarmlet import background_command, init, nothing_left_behind, run_command, seeding
from tests.support.processes.tellers import PATIENCE_SECONDS

LINE = b"the 7th of many lines that say nearly the same\n"
MODEL = ModelSpec(layers=2, hidden=32, heads=2, kv_heads=2, intermediate=64, context=64, tied_embeddings=False)
SETTINGS: dict[str, Any] = {
    "name": "adapters", "pipeline": {"stages": 2, "quant": "int8"}, "lora": {"rank": 4},
    "training": {"global_batch": 8, "local_batch": 4, "learning_rate": 0.01, "warmup_steps": 0},
}  # fmt: skip


def tokens() -> torch.Tensor:
    """A batch: ``[4, 33]``."""
    return torch.tensor(list(LINE * 3)[:132]).view(4, 33)


def loss_of(model: torch.nn.Module) -> float:
    with torch.no_grad():
        logits = model(tokens()[:, :-1]).logits
    return float(cross_entropy(logits.flatten(0, 1), tokens()[:, 1:].flatten()))


def pretrained(directory: Path) -> Path:
    """A swarm's folder, whose model begins with one in ``directory / "model"``."""
    export_hugging_face(build_model(MODEL), MODEL, directory / "model")
    text = directory / "text"
    text.mkdir()
    for number in range(60):
        (text / f"{number}.txt").write_bytes(LINE * 40)
    options: list[str | Path] = [
        "--model",
        directory / "model",
        "--context",
        "32",
        "--lora",
        "q_proj,down_proj,lm_head",
    ]
    swarm = init(directory / "swarm", *options, *set_options(**SETTINGS, data={"source": f"path:{text}"}))
    run_file = (swarm / "run.toml").read_text()
    assert 'weights = "local:model"' in run_file
    assert str(directory / "model") not in run_file, "a manifest is public"
    return swarm


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # peft 0.21 asks transformers for it
def test_a_swarm_trains_adapters_which_peft_puts_on_the_pretrained_model(tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    swarm, run_dir = pretrained(tmp_path), tmp_path / "run"
    options: list[str | Path] = ["--manifest", swarm / "run.toml", "--peers", "2", "--threads", "1", "--no-monitor"]
    options += ["--weights", tmp_path / "model"]
    with nothing_left_behind():
        done = run_command("up", *options, "--run-dir", run_dir, "--rounds", "30", timeout_seconds=250)
    assert done.returncode == 0, done.stderr
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["heldout_loss_after"] < 0.8 * summary["heldout_loss_before"]
    done = run_command("checkpoint", "export", run_dir, tmp_path / "adapters")
    assert done.returncode == 0, done.stderr
    assert "PeftModel.from_pretrained" in done.stdout
    assert "Adapters of `" in (tmp_path / "adapters" / "README.md").read_text()
    values = load_file(tmp_path / "adapters" / "adapter_model.safetensors")
    held = [path.stat().st_size for path in run_dir.glob("*/checkpoints/stage-*/*/*")]
    assert max(held) < 2 * 4 * 3 * sum(value.numel() for value in values.values()), "more is saved than adapters"
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    before = loss_of(model)
    after = loss_of(PeftModel.from_pretrained(model, str(tmp_path / "adapters")))
    assert abs(after - summary["heldout_loss_after"]) < 0.3  # Nearly the same text, and the model in fp32.
    assert after < 0.8 * before


def test_a_script_trains_adapters_and_a_host_with_another_model_is_refused(tmp_path: Path) -> None:
    swarm = pretrained(tmp_path)
    shutil.copytree(tmp_path / "model", tmp_path / "other")
    values = load_file(tmp_path / "other" / SINGLE)
    values["model.layers.1.mlp.up_proj.weight"] += 1e-3
    save_file(values, tmp_path / "other" / SINGLE, metadata={"format": "pt"})
    with nothing_left_behind(), ExitStack() as stack:
        link = stack.enter_context(seeding(swarm)).link
        join = ["join", link, "--yes", "--role", "stage", "--listen", LOOPBACK, "--threads", "1"]
        logs = [tmp_path / f"host{number}.log" for number in range(2)]
        for number, log in enumerate(logs):
            stage: list[str | Path] = ["--stage", str(number), "--run-dir", tmp_path / log.stem]
            stage += ["--weights", tmp_path / "model"]
            stack.enter_context(background_command(log, *join, *stage))
        refused = run_command(*join, "--stage", "1", "--weights", tmp_path / "other", "--run-dir", tmp_path / "refused")
        assert refused.returncode == 3, refused.stderr
        assert re.search(r"error: the parameters of layer 1 in .* are not those", refused.stderr)
        wait_until(lambda: all("hosting blocks" in log.read_text() for log in logs), PATIENCE_SECONDS)
        with Swarm.join(link, listen=(LOOPBACK,)) as member:
            with pytest.raises(UsageError, match="what is trained is in its manifest"):
                member.pipeline(lora=LoraSpec(targets=("q_proj",)))
            model = member.pipeline(lora=LoraSpec(targets=("q_proj", "down_proj", "lm_head"), rank=4))
            losses = []
            for _ in range(30):
                logits = model(tokens()[:, :-1])
                loss = cross_entropy(logits.flatten(0, 1), tokens()[:, 1:].flatten())
                torch.autograd.backward(loss)
                losses.append(float(loss.detach()))
        assert model.round >= 10
        assert losses[-1] < 0.9 * losses[0]
