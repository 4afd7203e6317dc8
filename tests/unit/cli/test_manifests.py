from pathlib import Path

import pytest

from p2ptrain.cli.manifests import load_manifest, parse_settings
from p2ptrain.errors import IncompatibleError, ManifestError, UsageError
from p2ptrain.manifest import Manifest


def test_settings_are_toml_values_or_else_text() -> None:
    settings = parse_settings(["a.b=3", "c=1e-3", 'd="x"', "e=fp16", "f=path:/a b", "g=a=b"])
    assert settings == {"a.b": 3, "c": 1e-3, "d": "x", "e": "fp16", "f": "path:/a b", "g": "a=b"}


def test_overrides_win_and_what_is_not_given_stays(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text('name = "x"\n[training]\nevery = 7\nlocal_batch = 4\n')
    manifest = load_manifest(path, {"training.every": 1, "averaging.codec": None})
    assert (manifest.name, manifest.training.every, manifest.training.local_batch) == ("x", 1, 4)
    assert manifest.averaging == Manifest().averaging


def test_an_error_names_the_file_or_the_command_line(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("[training]\nevery = 0\n")
    with pytest.raises(ManifestError, match=f"^{path}: training.every"):
        load_manifest(path, {"training.local_batch": 2})
    with pytest.raises(ManifestError, match=r"^command line: training\.every"):
        load_manifest(None, {"training.every": 0})
    with pytest.raises(UsageError, match="not a section"):
        load_manifest(None, {"name": "x", "name.first": 1})


def test_a_run_for_another_protocol_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("protocol = 99\n")
    with pytest.raises(IncompatibleError, match="99"):
        load_manifest(path)
