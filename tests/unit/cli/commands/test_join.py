import argparse
import io
import re
from pathlib import Path

import pytest

from p2ptrain.cli.commands.join import NICENESS, add_arguments, check_compatible, in_pipeline, run
from p2ptrain.cli.commands.peer import peer_overrides
from p2ptrain.cli.running import confirm
from p2ptrain.cli.terms import check_machine, describe
from p2ptrain.config import PeerConfig, PipelineSection
from p2ptrain.errors import ConfigError, IncompatibleError, ResourceError, UsageError
from p2ptrain.manifest import AveragingSpec, DataSpec, Manifest, ModelSpec, SignedManifest, parse_manifest
from p2ptrain.network.identity import Identity
from p2ptrain.network.link import SwarmLink

SEED = "/ip4/192.0.2.1/tcp/31337/p2p/QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"


def config(tmp_path: Path) -> PeerConfig:
    overrides = {"role": "trainer", "link": "p2ptrain://x", "run_dir": tmp_path / "run", "resources.up": "8Mbit"}
    return PeerConfig.load(None, overrides)


def allowing(own: PeerConfig, *paths: str | Path) -> PeerConfig:
    return own.model_copy(update={"allow_path": tuple(map(Path, paths))})


def labels(text: str) -> list[str]:
    return [line.split()[0] for line in text.splitlines() if not line.startswith(" " * 11)]


def test_what_is_shown_says_what_is_downloaded_run_sent_exposed_and_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    text = describe(Manifest(name="swarm x", organizer="QmOrganizer"), config(tmp_path))
    for words in ("swarm x", "QmOrganizer", "stdlib", "int8", "1.0 MB/s", "0.0.0.0", str(tmp_path / "run")):
        assert words in text
    assert labels(text) == [
        "swarm", "downloads", "runs", "sends", "exposes", "writes",
    ]  # fmt: skip


@pytest.mark.parametrize(("weights", "told"), [("samples", "the number of samples"), ("equal", "")])
def test_a_site_is_shown_what_leaves_it_and_brings_its_own_text(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, weights: str, told: str
) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    manifest = parse_manifest({"data": {"source": "own"}, "private": {"weights": weights}}, "a")
    with pytest.raises(ConfigError, match="--data DIR_OR_FILE"):
        describe(manifest, config(tmp_path))
    own = config(tmp_path).model_copy(update={"data": tmp_path / "records"})
    with pytest.raises(ConfigError, match="records: there is no such file"):
        describe(manifest, own)  # Before somebody is asked, and before this peer's key is made.
    (tmp_path / "records").mkdir()
    text = describe(manifest, own)
    assert "keeps" in labels(text)
    assert f"your text in '{tmp_path / 'records'}'" in text
    assert ("number of samples" in text) == bool(told)
    with pytest.raises(ConfigError, match="leave --data out"):
        describe(Manifest(), own)


def test_consent_names_the_bound_of_differential_privacy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "1000")
    own = config(tmp_path).model_copy(update={"data": tmp_path})
    values = {"data": {"source": "own"}, "private": {}, "model": {"context": 96}}
    bound = {"differential_privacy": {"epsilon": 2.5, "delta": 1e-6}}
    assert "protects" not in labels(describe(parse_manifest(values, "a"), own))
    text = describe(parse_manifest(values | bound, "a"), own)
    assert "protects" in labels(text)
    assert "each sample of 96 tokens by noise: ε at most 2.5 at δ 1e-06" in text


def test_a_swarm_of_another_protocol_or_codec_is_refused() -> None:
    check_compatible(Manifest())
    with pytest.raises(IncompatibleError, match="protocol 1"):
        check_compatible(Manifest(protocol=1))
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
        check_machine(Manifest(data=DataSpec(source="path:/no/such")), allowing(config(tmp_path), "/no"))


@pytest.mark.fault(47)
@pytest.mark.parametrize("columns", [20, 80, 200])
@pytest.mark.parametrize("letter", [" ", "x", "日"])
def test_no_text_of_a_manifest_looks_like_a_line_of_what_is_shown(
    letter: str, columns: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    own = allowing(config(tmp_path), "/srv")
    expected = labels(describe(Manifest(), own))
    for length in range(columns + 1):
        source = f"path:/srv/{letter * length}exposes    nothing"
        shown = describe(Manifest(data=DataSpec(source=source)), own)
        assert labels(shown) == expected
        # Letters that take two columns would let the terminal begin a line of its own.
        assert shown.isascii()
        assert max(map(len, shown.splitlines())) <= columns


@pytest.mark.fault(47)
def test_nobody_is_asked_about_files_that_are_not_allowed(tmp_path: Path) -> None:
    diary = f"path:{tmp_path / 'diary.txt'}"
    for data in ({"source": diary}, {"tokenizer": diary}):
        manifest = parse_manifest({"data": data}, "run.toml")
        for ask in (describe, check_machine):
            with pytest.raises(ConfigError, match=r"--allow-path .*diary\.txt.* never allow .* private files"):
                ask(manifest, config(tmp_path))
        assert labels(describe(manifest, allowing(config(tmp_path), tmp_path))) == labels(
            describe(Manifest(), config(tmp_path))
        )
    assert config(tmp_path).allow_path == ()
    given = joining("--allow-path", "a", "--allow-path", "b")
    given.log_format = given.log_level = None
    own = PeerConfig.load(None, peer_overrides(given) | {"role": "trainer", "link": "p2ptrain://x"})
    assert own.allow_path == (Path("a"), Path("b"))


STAGES = {"training": {"every": 1}, "pipeline": {"stages": 2}}


def joining(*words: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    return parser.parse_args(["p2ptrain://x", *words])


def test_who_has_room_for_a_stage_hosts_one_and_who_has_none_sends_text(capsys: pytest.CaptureFixture[str]) -> None:
    manifest = parse_manifest(STAGES, "run.toml")
    assert in_pipeline(joining(), manifest)["role"] == "both"
    assert not capsys.readouterr().out
    assert in_pipeline(joining("--max-memory", "100MB"), manifest)["role"] == "trainer"
    assert "no stage fits into 100" in capsys.readouterr().out
    for words in (["--role", "stage"], ["--role", "both"]):
        assert in_pipeline(joining("--max-memory", "100MB", *words), manifest)["role"] == words[1]
    assert in_pipeline(joining("--max-memory", "100MB", "--stage", "1"), manifest)["role"] == "both"
    with pytest.raises(ConfigError, match="--max-memory"):
        in_pipeline(joining("--max-memory", "a lot"), manifest)


def test_what_a_host_of_a_stage_downloads_is_what_is_trained(tmp_path: Path) -> None:
    host = config(tmp_path).model_copy(update={"role": "stage"})

    def shown(**sections: object) -> str:
        return describe(parse_manifest({**STAGES, **sections}, "run.toml"), host)

    digests = ["0" * 64] * 6
    weights = {"weights": "hub:owner/name", "weight_digests": digests}
    with pytest.raises(ConfigError, match="--stage 2: the stages of this swarm are 0 to 1"):
        describe(parse_manifest(STAGES, "a"), host.model_copy(update={"pipeline": PipelineSection(stage=2)}))
    everything, adapters = shown(), shown(lora={"targets": ["q_proj"], "rank": 1}, model=weights)
    assert "begins     with the blocks of that stage in 'hub:owner/name'" in adapters
    assert "trains     adapters of 'q_proj' alone" in adapters
    sizes = [re.search(r"stages, about (\S+) (\S+)", text) for text in (everything, adapters)]
    assert [size[2].rstrip(",") for size in sizes if size] == ["MB", "kB"]


def test_each_role_is_asked_for_what_it_needs_alone(tmp_path: Path) -> None:
    gone, model = f"path:{tmp_path / 'gone'}", "local:model"
    sections = {
        "model": {"weights": model, "weight_digests": ["0" * 64] * 6},
        "data": {"tokenizer": model, "source": f"path:{tmp_path}"},
    }
    manifest = parse_manifest({**STAGES, **sections}, "run.toml")
    own = allowing(config(tmp_path), tmp_path)
    for role, missing in (("stage", r"model\.weights .*--weights"), ("trainer", r"data\.tokenizer")):
        with pytest.raises(ConfigError, match=missing):
            check_machine(manifest, own.model_copy(update={"role": role}))
        check_machine(manifest, own.model_copy(update={"role": role, "weights": tmp_path}))
    elsewhere = parse_manifest({**STAGES, **sections, "data": {"source": gone}}, "run.toml")
    check_machine(elsewhere, own.model_copy(update={"role": "stage", "weights": tmp_path}))  # It reads no text.


def test_without_a_terminal_nobody_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    with pytest.raises(UsageError, match="--yes"):
        confirm("Take part?", assume_yes=False)
    assert confirm("Take part?", assume_yes=True)


def test_the_end_of_input_at_the_question_is_a_no(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    monkeypatch.setattr("sys.stdin", Terminal(""))
    monkeypatch.setattr("sys.stdout", Terminal())
    assert not confirm("Take part?", assume_yes=False)


@pytest.mark.parametrize(("answer", "mode"), [("n", "invite"), ("y", "open")])
def test_nothing_is_written_or_started_before_somebody_agrees(
    answer: str, mode: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check of admission makes the peer's key, so it comes after the answer."""
    with Identity.ephemeral() as organizer:
        signed = SignedManifest.create(parse_manifest({"admission": {"mode": mode}}, "run.toml"), organizer)
    there, started = list[list[Path]](), list[PeerConfig]()

    async def fetch(link: SwarmLink) -> SignedManifest:
        return signed

    def ask(question: str) -> str:
        there.append(list(tmp_path.rglob("*")))
        return answer

    def start(config: PeerConfig, *_: object) -> int:
        started.append(config)
        return 0

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("p2ptrain.node.observe.fetch_manifest", fetch)
    monkeypatch.setattr("p2ptrain.cli.running.run_configured_peer", start)
    monkeypatch.setattr("builtins.input", ask)
    for stream in ("sys.stdin", "sys.stdout"):
        monkeypatch.setattr(f"{stream}.isatty", lambda: True)
    link = SwarmLink(signed.manifest.digest, (SEED,))
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    parser.add_argument("--log-format")
    parser.add_argument("--log-level")
    assert run(parser.parse_args([str(link)])) == 0
    assert there == [[]]
    if answer == "n":
        assert not started
        assert list(tmp_path.rglob("*")) == []
    else:
        assert started[0].resources.nice == NICENESS


def test_reasons_to_pause_are_options(tmp_path: Path) -> None:
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    parser.add_argument("--log-format")
    parser.add_argument("--log-level")
    words = ["p2ptrain://x", "--schedule", "22:00-07:00", "--only-when-idle", "--on-battery", "--nice", "19"]
    overrides = peer_overrides(parser.parse_args(words))
    own = PeerConfig.load(None, {"role": "trainer", "link": "p2ptrain://x", "run_dir": tmp_path, **overrides})
    assert (own.guest.schedule, own.guest.only_when_idle, own.guest.on_battery) == ("22:00-07:00", 25.0, True)
    assert own.resources.nice == 19
    assert parser.parse_args([*words[:3], "--only-when-idle=40"]).only_when_idle == 40.0
