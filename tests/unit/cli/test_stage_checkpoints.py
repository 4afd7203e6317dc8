"""Checkpoints of stages on the command line: those that belong together become a model, and nothing else does."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from p2ptrain.cli.main import main
from p2ptrain.manifest import SignedManifest
from p2ptrain.models import Family, build_model, build_stage
from p2ptrain.models.families.llama import Llama
from p2ptrain.network.identity import Identity
from p2ptrain.pipeline.checkpoints.saving import unit_folder
from p2ptrain.pipeline.plan import PipelinePlan
from p2ptrain.pipeline.stage.contribution import Part, unit_state
from p2ptrain.training.checkpoints.files import save_checkpoint
from p2ptrain.training.checkpoints.stage_list import STAGES_FILE, StageList, write_stage_list
from tests.support.sim.pipelines import make_manifest

with Identity.ephemeral() as organizer:
    SIGNED = SignedManifest.create(make_manifest(2, tied=True), organizer)
PLAN = PipelinePlan(SIGNED.manifest)


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    """The run directories of a host of each stage, with complete checkpoints of round 10 and newer ones of round 20."""
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "manifest.bin").write_bytes(SIGNED.to_bytes())
    digests = {10: save(tmp_path / "runs", 10, 0.5), 20: save(tmp_path / "runs", 20, 0.25)}
    for path in checkpoints(tmp_path / "runs", 10):
        write_stage_list(path, StageList(PLAN.manifest.digest, 10, digests[10]))
    return tmp_path / "runs"


def save(runs: Path, round: int, value: float, stages: tuple[int, ...] = (0, 1)) -> dict[str, bytes]:
    """Save what each host hosts at a round, with all parameters at one value; the digests by folder."""
    digests = {}
    for stage in stages:
        module = build_stage(PLAN.manifest.model, PLAN.spans[stage])
        with torch.no_grad():
            for parameter in module.parameters():
                parameter.fill_(value)
        for unit in PLAN.units(stage):
            swarm, name = PLAN.swarm_of(unit.number), unit_folder(unit.number, PLAN.num_stages)
            state = unit_state(Part(module, PLAN.local_names(stage, unit)), PLAN.manifest.training, swarm)
            head = replace(state.head, round=round)
            save_checkpoint(
                runs / f"host-{stage}" / "checkpoints" / name, head=head, tensors=state.tensors(), local={},
                extra={"stage": stage}, swarm=swarm, keep_last=9,
            )  # fmt: skip
            digests[name] = head.digest
    return digests


def checkpoints(runs: Path, round: int) -> list[Path]:
    return sorted(runs.glob(f"*/checkpoints/*/*-round-{round}"))


def export(runs: Path, *options: str) -> int:
    return main(["checkpoint", "export", str(runs), str(runs.parent / "model"), *options])


def values(runs: Path) -> set[float]:
    model = AutoModelForCausalLM.from_pretrained(runs.parent / "model")
    return {value for parameter in model.parameters() for value in parameter.detach().flatten().tolist()}


def test_a_family_that_transformers_does_not_have_becomes_tensors(runs: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Llama, "hugging_face", Family.hugging_face)
    assert export(runs) == 0
    found = load_file(runs.parent / "model" / "model.safetensors")
    assert found.keys() == build_model(PLAN.manifest.model).state_dict().keys()
    assert {value for tensor in found.values() for value in tensor.flatten().tolist()} == {0.5}
    assert "load_file('model.safetensors')" in (runs.parent / "model" / "README.md").read_text()


def test_the_newest_complete_round_becomes_the_model(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert export(runs) == 0
    assert "round 10 of 2 stages" in capsys.readouterr().out
    assert values(runs) == {0.5}
    card = (runs.parent / "model" / "README.md").read_text()
    assert all(f"| digest of {name} |" in card for name in ("stage-0", "stage-1", "tied"))
    assert export(runs, "--by-round") == 0
    assert "warning: only their round, 20," in capsys.readouterr().err
    assert values(runs) == {0.25}


def test_of_each_checkpoint_it_is_said_whether_it_is_complete(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for action in ("ls", "verify"):
        assert main(["checkpoint", action, str(runs)]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert [line.endswith("  complete") for line in lines if "round-10" in line] == [True] * 4
        assert ["  incomplete: " in line for line in lines if "round-20" in line] == [True] * 4
    assert main(["checkpoint", "ls", str(runs / "host-0")]) == 0
    assert "complete; not here: stage-1" in capsys.readouterr().out


def test_a_stage_of_another_part_of_a_split_swarm_is_refused(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in (runs / "host-1" / "checkpoints" / "stage-1").iterdir():
        path.rename(path.with_name(f".{path.name}"))
    save(runs, 10, 0.75, stages=(1,))
    assert export(runs) == 8
    said = capsys.readouterr().err
    assert "stage-1 of round 10 has the digest" in said
    assert "another host of stage-1" in said
    assert not (runs.parent / "model").exists()


def test_a_damaged_copy_is_passed_over_where_another_host_has_it_too(
    runs: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, _ = (path for path in checkpoints(runs, 10) if path.parent.name == "tied")  # Both hosts have it.
    (first / "shared.safetensors").write_bytes(b"torn")
    assert export(runs) == 0
    assert "skipped: " in capsys.readouterr().err
    assert values(runs) == {0.5}


def test_damaged_lists_are_told_and_any_intact_one_will_do(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    *others, last = checkpoints(runs, 10)
    for path in others:
        (path / STAGES_FILE).write_text("{}")
    assert export(runs) == 0
    assert "damaged" in capsys.readouterr().err
    (last / STAGES_FILE).write_text("{}")
    assert export(runs) == 8
    assert "--by-round joins round 20" in capsys.readouterr().err


def test_lists_of_another_swarm_count_as_none(runs: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in checkpoints(runs, 10):
        write_stage_list(path, StageList(b"x" * 32, 10, {}))
    assert export(runs) == 8
    assert "none of these checkpoints is complete" in capsys.readouterr().err
