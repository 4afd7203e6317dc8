"""Distillation makes drafts of real models: by the command, from text or samples, also if it is interrupted."""

from __future__ import annotations

import signal
from pathlib import Path

import numpy as np
import pytest
import torch

from p2ptrain.cli.main import main
from p2ptrain.errors import ConfigError
from p2ptrain.manifest import ModelSpec
from p2ptrain.models import build_model, export_hugging_face
from p2ptrain.models.exact import exact_stage
from p2ptrain.models.stage import Stage
from p2ptrain.models.tokenizers import load_pretrained_tokenizer
from p2ptrain.serving.client.draft import Draft, Guesses, load_draft
from p2ptrain.serving.sampling import Sampling
from p2ptrain.training import distill
from p2ptrain.training.distill import Distillation, draft_spec, freeze_ends, initial_draft, likeliest, write
from p2ptrain.training.evaluate import language_model_loss
from tests.support.exact import kernels, lively_model
from tests.support.processes.daemons import wait_until
from tests.support.processes.swarmlet import background_command

SPEC = ModelSpec(layers=6, hidden=48, heads=4, kv_heads=2, intermediate=96, vocabulary=256, context=128)
WORDS = [f"{first}{middle}{last}" for first in "bdfgklmnprst" for middle in "aeiou" for last in "lmnrs "]


def story(seed: int, num_words: int) -> str:
    """Return text in which each word depends on the one before: a bigram's chain, with chance."""
    random = np.random.default_rng(seed)
    at, words = 0, []
    for _ in range(num_words):
        at = (31 * at + int(random.integers(3))) % len(WORDS)
        words.append(WORDS[at])
    return " ".join(words)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> tuple[Stage, Path, Path]:
    """A model that has learnt to write such text, its folder, and a file of such text."""
    torch.manual_seed(0)
    model = build_model(SPEC)
    tokens = torch.tensor(list(story(0, 30_000).encode()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    for _ in range(150):
        starts = torch.randint(len(tokens) - 97, (16,))
        optimizer.zero_grad()
        language_model_loss(model, torch.stack([tokens[at : at + 97] for at in starts])).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    folder = tmp_path_factory.mktemp("served")
    export_hugging_face(model, SPEC, folder)
    text = folder.with_name("story.txt")
    text.write_text(story(1, 20_000))
    return model.eval(), folder, text


@pytest.mark.parametrize("family", ["llama", "gpt2"])
@pytest.mark.parametrize("layers", [2, 3, 4])
def test_a_draft_begins_with_the_ends_of_the_served_model(family: str, layers: int) -> None:
    spec = ModelSpec(family=family, layers=6, hidden=32, heads=4, intermediate=128, vocabulary=99, context=64)
    model = lively_model(spec)
    theirs = dict(model.named_parameters())
    draft = initial_draft(model, spec, layers)
    freeze_ends(draft, draft_spec(spec, layers))
    for name, value in draft.named_parameters():
        parts = name.split(".")
        number = next((at for at, part in enumerate(parts) if part.isdigit()), None)
        if number is not None and int(parts[number]) >= layers - layers // 2:
            parts[number] = str(int(parts[number]) + 6 - layers)
        assert torch.equal(value, theirs[".".join(parts)])
        assert value.requires_grad == (number is not None or value.dim() == 1)


def test_training_raises_acceptance_and_leaves_the_ends(served: tuple[Stage, Path, Path]) -> None:
    model, _, _ = served
    draft = initial_draft(model, SPEC, 2)
    freeze_ends(draft, draft_spec(SPEC, 2))
    before = {name: value.clone() for name, value in draft.named_parameters()}
    read, held_out = distill.read_samples(model, 256, 0), distill.read_samples(model, 256, 1)(16)
    found = list(Distillation(model, draft, 60).run(read, held_out, 4, 0.0, 1000.0))
    assert [each.step for each in found] == [0, 60]
    assert found[-1].acceptance > found[0].acceptance + 0.2
    wanted = likeliest(model, held_out)
    assert found[-1].acceptance == float((likeliest(draft, held_out) == wanted).float().mean())
    for name, value in draft.named_parameters():
        assert torch.equal(value, before[name]) != value.requires_grad


def test_samples_are_drawn_from_the_model(served: tuple[Stage, Path, Path]) -> None:
    """Its likeliest tokens are the ones that it draws most of the time."""
    model, _, _ = served
    ids = write(model, torch.tensor([[32]] * 8), 64, torch.Generator().manual_seed(0))
    assert ids.shape == (8, 64)
    assert len({tuple(row) for row in ids.tolist()}) == 8
    assert float((likeliest(model, ids)[:, :-1] == ids[:, 1:]).float().mean()) > 0.4


@pytest.mark.skipif(not kernels(), reason="there is no library of exact kernels")
def test_the_command_makes_a_draft_and_goes_on_with_it(
    served: tuple[Stage, Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, folder, text = served
    order = ["draft", "train", str(folder), "--out", str(tmp_path / "draft"), "--layers", "2", "--device", "cpu"]
    assert main([*order, "--text", str(text), "--steps", "60", "--batch", "4"]) == 0
    said = capsys.readouterr().out
    shares = [float(line.partition("acceptance ")[2].partition("%")[0]) for line in said.splitlines() if "acc" in line]
    assert shares[-1] > shares[0] + 20
    assert f"p2ptrain chat LINK --draft {tmp_path / 'draft'}" in said

    tokenizer = load_pretrained_tokenizer(f"path:{folder}")
    draft = load_draft(tmp_path / "draft", 256, tokenizer)
    ids = list(story(2, 15).encode())
    guessed = Guesses(draft, Sampling(temperature=0.0), len(ids), 128).follow(ids, 1)[0]
    assert 0 <= guessed < 256

    assert main([*order, "--steps", "2", "--batch", "2"]) == 0
    said = capsys.readouterr().out
    assert "going on with the draft" in said
    assert "the model writes the text" in said


def test_what_cannot_work_is_refused(
    served: tuple[Stage, Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, folder, _ = served
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("mine")
    small = ModelSpec(layers=2, hidden=32, heads=2, kv_heads=2, intermediate=64, vocabulary=256, context=64)
    export_hugging_face(build_model(small), small, tmp_path / "small")
    out = ["--out", str(tmp_path / "new")]
    for model, options, message in (
        (folder, [*out, "--steps", "0"], "--steps 0"),
        (folder, [*out, "--max-minutes", "0"], "--max-minutes 0"),
        (folder, [*out, "--text", str(tmp_path / "none")], "no such file"),
        (folder, ["--out", str(tmp_path / "other")], "something else"),
        (folder, ["--out", str(tmp_path / "small")], "no draft of 3 layers of this model"),
        (folder, ["--out", str(folder)], "that is the model itself"),
        (tmp_path / "small", out, "the model has 2 layers"),
        (tmp_path / "none", out, "cannot be read"),
        (folder, [*out, "--device", "tpu"], "auto, cpu or cuda"),
    ):
        assert main(["draft", "train", str(model), *options]) in (2, 3)
        assert message in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_a_draft_of_other_tokens_is_refused(served: tuple[Stage, Path, Path], tmp_path: Path) -> None:
    _, folder, _ = served
    tokenizer = load_pretrained_tokenizer(f"path:{folder}")
    with pytest.raises(ConfigError, match="a vocabulary of 256, and the swarm's model one of 300"):
        load_draft(folder, 300, tokenizer)
    tokenizer.add_tokens(["another"])
    with pytest.raises(ConfigError, match="its tokenizer has other tokens"):
        load_draft(folder, 256, tokenizer)
    with pytest.raises(ConfigError, match="is it the folder of a Hugging Face model"):
        load_draft(tmp_path, 256, tokenizer)


@pytest.mark.skipif(not kernels(), reason="there is no library of exact kernels")
def test_an_interrupted_training_leaves_a_usable_draft(served: tuple[Stage, Path, Path], tmp_path: Path) -> None:
    _, folder, text = served
    log, out = tmp_path / "log", tmp_path / "draft"
    order = ["draft", "train", str(folder), "--out", str(out), "--text", str(text), "--steps", "100000"]
    with background_command(log, *order) as process:
        wait_until(lambda: (out / "model.safetensors").exists(), 150)
        process.send_signal(signal.SIGINT)
        assert process.wait(90) == 130
    assert "interrupted: the same command goes on" in log.read_text()
    assert "p2ptrain chat LINK --draft" in log.read_text()
    load_draft(out, 256, load_pretrained_tokenizer(f"path:{folder}"))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["draft", "log"]


@pytest.mark.skipif(not kernels(), reason="there is no library of exact kernels")
@pytest.mark.parametrize("settings", [Sampling(temperature=0.0), Sampling(seed=4, frequency_penalty=0.5)])
def test_guesses_are_those_of_the_model_however_they_are_asked_for(settings: Sampling) -> None:
    draft = Draft(exact_stage(lively_model(SPEC), SPEC), SPEC.context)
    ids = list(story(5, 10).encode())

    def fresh(known: list[int], count: int) -> list[int]:
        return Guesses(draft, settings, len(ids), 128).follow(known, count)

    wanted, kept = fresh(ids, 20), Guesses(draft, settings, len(ids), 128)
    assert len(wanted) == 20
    kept.follow(ids, 0)
    assert kept.follow(ids, 5) == wanted[:5]
    other = [*ids, *wanted[:2], 7, *wanted[3:8]]
    assert kept.follow(other, 9) == fresh(other, 9)
    assert kept.follow([*ids, *wanted[:6]], 14) == wanted[6:]
    assert kept.follow(ids, 3) == wanted[:3]
    assert len(fresh(ids, 300)) == 128 - len(ids)
    assert fresh([1] * 128, 3) == fresh([1] * 200, 3) == []
