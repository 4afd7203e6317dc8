import stat
import tomllib
from pathlib import Path

import pytest

from p2ptrain.cli.commands.init import COMMON
from p2ptrain.cli.manifests import load_manifest
from p2ptrain.manifest import Manifest
from tests.support.processes.commands import assert_one_line_error, p2ptrain


def test_init_writes_a_run_that_is_valid_and_a_private_key(tmp_path: Path) -> None:
    done = p2ptrain("init", str(tmp_path / "run"), "--name", "kitchen table")
    assert done.returncode == 0, done.stderr
    manifest = Manifest.model_validate({"name": "kitchen table", "averaging": {"spot_checks": 4}})
    assert load_manifest(tmp_path / "run" / "run.toml") == manifest
    key = tmp_path / "run" / "organizer.key"
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert f"p2ptrain seed {tmp_path / 'run'}" in done.stdout


def test_init_takes_any_value(tmp_path: Path) -> None:
    done = p2ptrain("init", str(tmp_path / "run"), "--set", "training.every=1", "--set", "averaging.spot_checks=0")
    assert done.returncode == 0, done.stderr
    assert load_manifest(tmp_path / "run" / "run.toml") == Manifest.model_validate({"training": {"every": 1}})
    assert_one_line_error(p2ptrain("init", str(tmp_path / "other"), "--set", "training.evry=1"), 3, "every")
    assert not (tmp_path / "other").exists()


def test_init_leaves_checks_out_where_updates_are_masked(tmp_path: Path) -> None:
    done = p2ptrain(
        "init",
        str(tmp_path / "run"),
        "--set",
        "secure_aggregation.min_contributors=4",
        "--set",
        "averaging.min_peers=4",
    )
    assert done.returncode == 0, done.stderr
    manifest = load_manifest(tmp_path / "run" / "run.toml")
    assert manifest.secure_aggregation is not None
    assert (manifest.secure_aggregation.min_contributors, manifest.averaging.spot_checks) == (4, 0)


def test_init_says_which_paths_become_public(tmp_path: Path) -> None:
    done = p2ptrain("init", str(tmp_path / "run"), "--set", "data.source=path:/home/me/diary.txt")
    assert done.returncode == 0, done.stderr
    assert "data.source = 'path:/home/me/diary.txt' is public, and every peer needs a copy" in done.stdout
    assert "public" not in p2ptrain("init", str(tmp_path / "other")).stdout


def test_init_overwrites_nothing(tmp_path: Path) -> None:
    for name in ("run.toml", "organizer.key"):
        folder = tmp_path / name.partition(".")[0]
        folder.mkdir()
        (folder / name).write_text("precious")
        assert_one_line_error(p2ptrain("init", str(folder)), 2, "not overwritten")
        assert [path.name for path in folder.iterdir()] == [name]
        assert (folder / name).read_text() == "precious"


def test_seed_refuses_a_run_with_a_wrong_key_and_names_it(tmp_path: Path) -> None:
    assert p2ptrain("init", str(tmp_path)).returncode == 0
    run_file = tmp_path / "run.toml"
    run_file.write_text(run_file.read_text().replace("local_batch", "locl_batch"))
    assert "locl_batch" in tomllib.loads(run_file.read_text())["training"]
    assert_one_line_error(p2ptrain("seed", str(tmp_path)), 3, "locl_batch", "did you mean 'local_batch'")


@pytest.mark.parametrize("words", [(), ("--set", "model.family=vit"), ("--set", "training.every=1")])
def test_init_writes_what_is_often_changed_and_with_all_everything(words: tuple[str, ...], tmp_path: Path) -> None:
    few, everything = tmp_path / "few", tmp_path / "everything"
    changed = ["--set", "training.warmup_steps=7"]
    if "model.family=vit" not in words:
        changed += ["--set", "model.kv_heads=2"]
    for folder, more in ((few, ()), (everything, ("--all",))):
        done = p2ptrain("init", str(folder), *words, *changed, *more)
        assert done.returncode == 0, done.stderr
    keys = [line for line in (few / "run.toml").read_text().splitlines() if " = " in line and line[0] != "#"]
    assert 14 <= len(keys) <= 21
    assert "warmup_steps = 7" in keys, "what is not the default is written in any case"
    manifest = load_manifest(few / "run.toml")
    assert manifest == load_manifest(everything / "run.toml")
    values = manifest.model_dump(exclude_none=True)
    written = tomllib.loads((everything / "run.toml").read_text())
    assert {name: section.keys() for name, section in values.items() if isinstance(section, dict)} == {
        name: section.keys() for name, section in written.items() if isinstance(section, dict)
    }


def test_every_setting_that_is_often_changed_exists() -> None:
    known = {f"{name}.{key}" for name, spec in Manifest() if hasattr(spec, "needs") for key in type(spec).model_fields}
    assert {"name", *known} >= COMMON
