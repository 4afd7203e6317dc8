from __future__ import annotations

import io
from pathlib import Path

import pytest

from p2ptrain.cli.join import check_compatible, check_machine, describe, describe_lending
from p2ptrain.cli.running import confirm
from p2ptrain.config import PeerConfig
from p2ptrain.errors import ConfigError, IncompatibleError, ManifestError, ResourceError, UsageError
from p2ptrain.manifest import AveragingSpec, DataSpec, Manifest, ModelSpec, SignedManifest


def config(tmp_path: Path) -> PeerConfig:
    overrides = {"role": "trainer", "link": "p2ptrain://x", "run_dir": tmp_path / "run", "resources.up": "8Mbit"}
    return PeerConfig.load(None, overrides)


def test_what_is_shown_says_what_is_downloaded_run_sent_exposed_and_written(tmp_path: Path) -> None:
    text = describe(SignedManifest(Manifest(name="swarm x"), "QmOrganizer", b""), config(tmp_path))
    for words in ("swarm x", "QmOrganizer", "stdlib", "int8", "1.0 MB/s", "0.0.0.0", str(tmp_path / "run")):
        assert words in text
    assert [line.split()[0] for line in text.splitlines()] == [
        "swarm", "downloads", "runs", "sends", "exposes", "writes",
    ]  # fmt: skip


def test_a_swarm_of_another_protocol_or_codec_is_refused() -> None:
    check_compatible(Manifest())
    with pytest.raises(IncompatibleError, match="protocol 2"):
        check_compatible(Manifest(protocol=2))
    with pytest.raises(IncompatibleError, match="zip"):
        check_compatible(Manifest(averaging=AveragingSpec(codec="zip")))
    with pytest.raises(IncompatibleError):
        check_compatible(Manifest(model=ModelSpec(family="unheard-of")))
    with pytest.raises(UsageError):
        check_compatible(Manifest(model=ModelSpec(family="custom")))


def test_a_model_that_is_too_large_for_this_machine_is_refused(tmp_path: Path) -> None:
    huge = ModelSpec(layers=1024, hidden=65536, heads=1024, kv_heads=1024, intermediate=1 << 20)
    with pytest.raises(ResourceError, match="memory"):
        check_machine(Manifest(model=huge), config(tmp_path))
    check_machine(Manifest(), config(tmp_path))


def test_text_that_is_not_here_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="/no/such"):
        check_machine(Manifest(data=DataSpec(source="path:/no/such")), config(tmp_path))


def test_without_a_terminal_nobody_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    with pytest.raises(UsageError, match="--yes"):
        confirm("Take part?", assume_yes=False)
    assert confirm("Take part?", assume_yes=True)


def test_who_lends_bandwidth_needs_no_model_but_a_swarm_that_takes_auxiliaries(tmp_path: Path) -> None:
    manifest = Manifest(model=ModelSpec(family="custom"), averaging=AveragingSpec(auxiliaries=1))
    check_compatible(manifest, lends=True)
    with pytest.raises(ManifestError, match="takes no auxiliaries"):
        check_compatible(Manifest(), lends=True)
    text = describe_lending(SignedManifest(manifest, "QmOrganizer", b""), config(tmp_path))
    assert "no model" in text
    assert "QmOrganizer" in text
