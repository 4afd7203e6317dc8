"""Text by a trained model after `p2ptrain up`, or the reason why there is none."""

import asyncio
from pathlib import Path

import pytest

from p2ptrain.cli.commands.serving import sample as command
from p2ptrain.cli.commands.serving.sample import MAX_TOKENS, PROMPT, TEMPERATURE, sample
from p2ptrain.errors import CheckpointError, ResourceError, UsageError
from p2ptrain.manifest import Manifest, ModelSpec
from p2ptrain.models.exact import exact_stage
from p2ptrain.models.tokenizers import END_OF_TEXT
from p2ptrain.pipeline import measure
from p2ptrain.serving.sampling import Sampling
from tests.support.exact import kernels, lively_model, tokens_after
from tests.support.tools import needed


def draw(run_dir: Path, manifest: Manifest) -> str:
    return asyncio.run(sample(run_dir, "trainer-1", manifest, None))


def test_a_model_that_reads_no_text_gives_no_sample(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="does not learn from text"):
        draw(tmp_path, Manifest(name="images", model=ModelSpec(family="vit")))


def test_a_model_too_large_for_the_memory_gives_no_sample(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measure, "available_memory", lambda: 1 << 20)
    with pytest.raises(ResourceError, match="too large"):
        draw(tmp_path, Manifest(name="text"))


def test_without_a_checkpoint_there_is_no_sample(tmp_path: Path) -> None:
    (tmp_path / "trainer-1").mkdir()
    with pytest.raises(CheckpointError, match="no checkpoint"):
        draw(tmp_path, Manifest(name="text"))


@needed("" if kernels() else "there is no library of exact kernels", "kernels")
@pytest.mark.parametrize("context", [24, 400])
def test_a_sample_is_what_the_model_draws_up_to_an_end_or_its_context(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, context: int
) -> None:
    spec = ModelSpec(layers=1, hidden=32, heads=4, kv_heads=2, intermediate=48, vocabulary=256, context=context)
    model = lively_model(spec)
    monkeypatch.setattr(command, "_load", lambda *arguments: model)
    settings, most = Sampling(temperature=TEMPERATURE), min(MAX_TOKENS, context - len(PROMPT))
    tokens = [token.id for token in tokens_after(exact_stage(model, spec), PROMPT.encode(), settings, most)]
    before, end, _ = bytes(tokens).partition(bytes([END_OF_TEXT]))
    assert bool(end) == (context > MAX_TOKENS)
    assert draw(tmp_path, Manifest(name="text", model=spec)) == (before + end).decode(errors="replace")
