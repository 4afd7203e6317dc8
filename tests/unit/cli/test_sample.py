"""Text by a trained model after `p2ptrain up`, or the reason why there is none."""

import asyncio
from pathlib import Path

import pytest

from p2ptrain.cli.commands.serving.sample import sample
from p2ptrain.errors import CheckpointError, ResourceError, UsageError
from p2ptrain.manifest import Manifest, ModelSpec
from p2ptrain.pipeline import measure


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
