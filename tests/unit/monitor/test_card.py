"""The model card of an export: facts of manifest, checkpoint and metrics, nothing else, and code that runs."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from huggingface_hub import ModelCard

from p2ptrain._version import __version__
from p2ptrain.averaging.protocol.certificate import Head
from p2ptrain.averaging.protocol.table import Row, Table
from p2ptrain.manifest import DataSpec, LoraSpec, Manifest, ModelSpec, PrivacySpec, PrivateSpec, TrainingSpec
from p2ptrain.models import build_model, export_hugging_face
from p2ptrain.models.adapters import adapter_shapes, export_adapters
from p2ptrain.monitor.card import CARD_FILE, MAX_NAMED_PEERS, Exported, card, write_card
from p2ptrain.monitor.report import METRICS
from p2ptrain.node.site.site_reports import SITES_FILE
from p2ptrain.training.checkpoints.files import CheckpointInfo

SMALL = ModelSpec(layers=1, hidden=16, heads=2, intermediate=32, context=32)
MANIFEST = Manifest(name="tales", organizer="QmOrganizer", model=SMALL)
ROWS = (Row("QmSeed", is_witness=True), Row("QmOne", counted=41), Row("QmTwo", counted=7))
HEAD = Head(42, bytes(32), 123_456, 99, bytes(range(32)), ("QmOne",), table=Table(ROWS))


def exported(**changes: Any) -> Exported:
    return Exported(MANIFEST.model_copy(update=changes), {"": HEAD})


def write(folder: Path, *run_dirs: Path, **changes: Any) -> str:
    """Write the card of a manifest with these changes, and return it."""
    info = CheckpointInfo(folder, HEAD, MANIFEST.digest, {}, 0, {})
    write_card(folder, MANIFEST.model_copy(update=changes), {"": info}, [folder / "none"], run_dirs)
    return (folder / CARD_FILE).read_text()


def row(text: str, key: str) -> str:
    (found,) = [line for line in text.splitlines() if line.startswith(f"| {key} |")]
    return found.split("|")[2].strip().strip("`")


def metadata(text: str) -> dict[str, Any]:
    """Return the metadata as Hugging Face reads it."""
    found: Any = ModelCard(text)
    return dict(found.data.to_dict())


def snippet(text: str) -> str:
    return text.partition("```python\n")[2].partition("```")[0]


def write_metrics(folder: Path, *lines: dict[str, Any], name: str = METRICS) -> None:
    folder.mkdir(exist_ok=True)
    text = "".join(json.dumps({"time": number, "kind": "held_out", **line}) + "\n" for number, line in enumerate(lines))
    (folder / name).write_text(text)


def test_it_tells_the_limit_of_rounds() -> None:
    assert row(card(exported(training=TrainingSpec(rounds=50)), None), "rounds") == "50"


def test_it_tells_what_manifest_and_checkpoint_hold() -> None:
    text = card(exported(), None)
    assert row(text, "parameters") == f"{sum(each.numel() for each in build_model(SMALL).parameters()):,}"
    assert row(text, "text") == "stdlib"
    assert row(text, "tokenizer") == "bytes"
    assert row(text, "rounds done") == "42"
    assert row(text, "tokens read") == "123,456"
    assert row(text, "digest of the state") == bytes(range(32)).hex()
    assert row(text, "swarm") == MANIFEST.digest.hex()
    assert row(text, "organizer's key") == "QmOrganizer"
    assert row(text, "learning_rate") == "0.0015"
    assert row(text, "rounds") == "no limit"
    assert row(text, "codec") == "int8"
    assert row(text, "rule") == "norm_clip"
    assert row(text, "`QmOne`") == "41"
    assert row(text, "`QmTwo`") == "7"
    assert "QmSeed" not in text
    assert "name 2 members" in text
    assert f"p2ptrain {__version__}" in text
    assert "decides on the licence" in text


def test_what_is_unknown_is_left_out() -> None:
    text = card(Exported(MANIFEST, {"": replace(HEAD, table=Table(), members=())}), None)
    assert "## Evaluation" not in text
    assert "| packages |" not in text
    assert "| began with |" not in text
    assert "| peer | rounds |" not in text
    assert "names no members" in text
    assert "license" not in metadata(text)


def test_a_member_that_left_is_found_in_an_earlier_checkpoint() -> None:
    left = replace(HEAD, table=Table(ROWS[:1]))
    text = card(Exported(MANIFEST, {"": left}, [replace(HEAD, round=40)]), None)
    assert row(text, "`QmTwo`") == "7"


def test_a_large_swarm_names_those_that_contributed_most() -> None:
    rows = tuple(Row(f"Qm{number}", counted=number) for number in range(1, MAX_NAMED_PEERS + 51))
    text = card(Exported(MANIFEST, {"": replace(HEAD, table=Table(rows), members=())}), None)
    assert "And 50 more." in text
    assert f"`Qm{MAX_NAMED_PEERS + 50}`" in text
    assert "`Qm50`" not in text


def test_stages_are_named_each_with_its_digest_and_the_fewest_tokens_count() -> None:
    heads = {"stage-0": HEAD, "stage-1": replace(HEAD, tokens=99, digest=b"1" * 32)}
    text = card(Exported(MANIFEST, heads), None)
    assert row(text, "tokens read") == "99"
    assert row(text, "digest of stage-1") == (b"1" * 32).hex()


@pytest.mark.parametrize(
    ("lines", "says"),
    [
        ([], ""),
        ([{"round": 0, "loss": 5.0, "windows": 128, "state": "shared"}], ""),
        ([{"round": 43, "loss": 5.0, "windows": 128, "state": "shared"}], ""),
        ([{"round": 42, "loss": None, "windows": 128, "state": "shared"}], ""),
        (
            [
                {"round": 42, "loss": 9.0, "windows": 16, "state": "own"},
                {"round": 42, "loss": 1.5, "windows": 128, "standard_error": 0.1, "state": "shared"},
                {"round": 42, "loss": 9.0, "windows": 64, "state": "shared"},
            ],
            "these weights have a loss of 1.500 ± 0.196",
        ),
        (
            [{"round": 40, "loss": 9.0, "windows": 64}, {"round": 41, "loss": 2.0, "windows": 16, "state": "own"}],
            "one peer's copy had in round 41 a loss of 2.000 nats a token, over 16 samples of 32 tokens",
        ),
    ],
    ids=["none", "before training", "later", "not finite", "of these weights", "of a peer's own"],
)
def test_the_evaluation_is_that_of_the_round_as_the_run_measured_it(
    tmp_path: Path, lines: list[dict[str, Any]], says: str
) -> None:
    write_metrics(tmp_path / "peer", *lines)
    text = write(tmp_path, tmp_path, tmp_path / "peer")
    assert says in text
    assert ("## Evaluation" in text) == bool(says)


def test_hugging_face_reads_its_metadata() -> None:
    data = DataSpec(source="datasets:owner/name:config")
    model = SMALL.model_copy(update={"weights": "hub:some/model@main", "weight_digests": ("0" * 64,)})
    of_lora = Manifest(
        model=model, data=data, lora=LoraSpec(targets=("q_proj",)), training=TrainingSpec(every=1, local_batch=4)
    )
    assert metadata(card(Exported(of_lora, {"": HEAD}), None)) == {
        "library_name": "peft", "tags": ["p2ptrain"], "pipeline_tag": "text-generation", "datasets": ["owner/name"],
        "base_model": "some/model",
    }  # fmt: skip
    assert metadata(card(exported(), None))["library_name"] == "transformers"


def test_a_hostile_text_stays_within_its_cell() -> None:
    data = DataSpec(source="path:/a`|<img src=x>|`[x](http://192.0.2.1) é")
    text = card(exported(data=data), None)
    assert row(text, "text") == "path:/a'/<img src=x>/'[x](http://192.0.2.1) \\xe9"


def test_the_card_of_a_private_swarm_names_no_text_no_tokens_and_no_metrics_of_a_site(tmp_path: Path) -> None:
    write_metrics(tmp_path / "peer", {"round": 42, "loss": 1.5, "windows": 100, "state": "shared"})
    text = write(tmp_path, tmp_path / "peer", private=PrivateSpec(), data=DataSpec(source="own"))
    assert row(text, "text") == "each peer's own"
    assert row(text, "sites") == "2"
    assert "tokens read" not in text
    assert "1.5" not in text
    assert "Evaluation" not in text
    assert "| privacy |" not in text


def report(peer: str, round: int, mean: object, metric: str = "loss", **values: Any) -> dict[str, Any]:
    evaluation = {"metric": metric, "round": round, "mean": mean, "error": 0.1, "samples": 4, **values}
    return {"kind": "site", "peer": peer, "round": round, "evaluation": evaluation, "privacy": None}


def write_sites(folder: Path, *lines: dict[str, Any]) -> list[str]:
    """Return the rows of measurements, and those of privacy, in the card of a private swarm whose sites told these."""
    write_metrics(folder / "peer", *lines, name=SITES_FILE)
    text = write(folder, folder / "peer", private=PrivateSpec(), data=DataSpec(source="own"))
    told = text.partition("## Load it")[2].partition("## Training")[0]
    return [line for line in told.splitlines() if line.startswith(("| `", "| 2 sites"))]


def test_sites_are_listed_below_what_they_measured_together_up_to_the_round(tmp_path: Path) -> None:
    assert write_sites(
        tmp_path, report("QmOne", 40, 3.0), report("QmOne", 41, 1.0), report("QmOne", 43, 9.0),
        report("QmTwo", 42, 2.0, samples=12, error=None), report("QmStranger", 42, 7.0),
        report("QmTwo", 42, 0.5, "a|b`\n", samples=2), report("QmTwo", 42, "x"), {"kind": "site", "peer": 1},
    ) == [
        "| 2 sites | `loss` | 1.750 | 16 | 41 |",
        "| `QmOne` | `loss` | 1.000 ± 0.196 | 4 | 41 |",
        "| `QmTwo` | `loss` | 2.000 | 12 | 42 |",
        "| `QmTwo` | `a/b'\\n` | 0.500 ± 0.196 | 2 | 42 |",
    ]  # fmt: skip


def test_what_a_site_no_longer_tells_is_not_told(tmp_path: Path) -> None:
    kept = {"kind": "site", "peer": "QmOne", "round": 43, "evaluation": None, "privacy": None}
    assert write_sites(tmp_path, with_privacy(report("QmOne", 41, 1.0)), report("QmTwo", 41, 2.0), kept) == [
        "| `QmTwo` | `loss` | 2.000 ± 0.196 | 4 | 41 |"
    ]


def with_privacy(line: dict[str, Any], epsilon: float = 1.5) -> dict[str, Any]:
    return {**line, "privacy": {"epsilon": epsilon, "limit": 8.0, "delta": 1e-5}}


def test_each_site_s_epsilon_is_that_by_the_round(tmp_path: Path) -> None:
    lines = [with_privacy(report("QmOne", each, 1.0), each / 10) for each in (40, 41, 43)]
    assert "| `QmOne` | ε 4.10 of 8, δ 1e-05 | 41 |" in write_sites(tmp_path, *lines)


def test_the_card_names_the_bound_of_differential_privacy() -> None:
    privacy = PrivacySpec(epsilon=2.5, delta=1e-6)
    text = card(exported(private=PrivateSpec(), data=DataSpec(source="own"), differential_privacy=privacy), None)
    assert row(text, "privacy") == "differential privacy of each sample at each site: ε at most 2.5, δ 1e-06"


@pytest.mark.parametrize("spec", [SMALL, SMALL.model_copy(update={"family": "gpt2"})], ids=lambda spec: spec.family)
def test_the_code_that_it_shows_loads_the_export_and_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], spec: ModelSpec
) -> None:
    model = build_model(spec)
    export_hugging_face(model, spec, tmp_path)
    text = write(tmp_path, model=spec)
    monkeypatch.chdir(tmp_path)
    values: dict[str, Any] = {}
    exec(snippet(text), values)
    tokens = torch.tensor([[1, 2, 3]])
    assert torch.allclose(values["model"](tokens).logits, model.eval()(tokens), atol=1e-5)
    assert capsys.readouterr().out.startswith("Once upon")


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # peft 0.21 asks transformers for it
def test_the_code_of_adapters_puts_them_on_their_base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lora = LoraSpec(targets=("q_proj", "v_proj"))
    spec = SMALL.model_copy(update={"weights": "local:base", "weight_digests": ("0" * 64,)})
    export_hugging_face(build_model(SMALL), SMALL, tmp_path / "base")
    export_adapters(
        {name: torch.ones(shape) for name, shape in adapter_shapes(spec, lora).items()}, spec, lora, tmp_path
    )
    text = write(tmp_path, model=spec, lora=lora)
    monkeypatch.chdir(tmp_path)
    values: dict[str, Any] = {}
    exec(snippet(text), values)
    assert sum("lora_" in name for name, _ in values["model"].named_parameters()) == 4


def test_the_code_of_a_model_without_text_loads_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = ModelSpec(family="vit", layers=1, hidden=16, heads=2, intermediate=32, image_size=8, patch_size=4)
    export_hugging_face(build_model(spec), spec, tmp_path)
    text = write(tmp_path, model=spec, data=DataSpec(source="custom"))
    monkeypatch.chdir(tmp_path)
    values: dict[str, Any] = {}
    exec(snippet(text), values)
    assert values["model"].config.image_size == 8
    assert "| tokenizer |" not in text
    assert "| held out |" not in text
    assert "pipeline_tag" not in text
