"""``p2ptrain draft train`` checks its options before it loads a model."""

import tempfile
from pathlib import Path

import pytest

from p2ptrain.cli.commands import draft
from p2ptrain.cli.main import Parser
from p2ptrain.errors import ConfigError


def train(out: Path) -> int:
    parser = Parser()
    draft.add_arguments(parser)
    return draft.run(parser.parse_args(["train", "no-such-model", "--out", str(out)]))


def test_an_unwritable_folder_is_refused_before_the_model_is_read(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"--out .*file/draft: .*: choose a folder that you may write to"):
        train(tmp_path / "file" / "draft")


def test_a_folder_that_does_not_take_the_weights_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "draft"
    out.mkdir()
    make = tempfile.TemporaryDirectory

    def refuse(dir: Path, prefix: str) -> tempfile.TemporaryDirectory[str]:  # A mode would not stop root.
        if dir == out:
            raise PermissionError(13, "Permission denied")
        return make(dir=dir, prefix=prefix)

    monkeypatch.setattr("tempfile.TemporaryDirectory", refuse)
    with pytest.raises(ConfigError, match="draft: Permission denied"):
        train(out)


def test_the_check_leaves_nothing_in_the_folder(tmp_path: Path) -> None:
    out = tmp_path / "drafts" / "draft"
    with pytest.raises(ConfigError, match="no-such-model"):
        train(out)
    assert list(out.parent.iterdir()) == []
