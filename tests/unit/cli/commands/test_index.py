"""`list` shows an index, and `announce` writes into one; swarms of real processes are in tests/swarm."""

import json
import time
from pathlib import Path
from typing import Literal

import pytest
from msgspec.structs import replace

from p2ptrain.cli.main import main
from p2ptrain.cli.manifests import KEY_FILE, sign_manifest
from p2ptrain.cli.terms import BYTES_A_VALUE
from p2ptrain.codecs import CODECS
from p2ptrain.errors import BootstrapError
from p2ptrain.manifest import SIGNED_FILE, AdmissionSpec, DataSpec, Manifest, SignedManifest
from p2ptrain.network.identity import Identity
from p2ptrain.network.link import SwarmLink
from p2ptrain.network.schema import from_json
from p2ptrain.network.swarm_index import Entry, Index, sign_entry, sign_index, to_text

ORGANIZER, HOST = Identity.ephemeral(), Identity.ephemeral()
ADDRESS = f"/ip4/192.0.2.1/tcp/31337/p2p/{HOST.peer_id}"
OPEN = AdmissionSpec(mode="open")


def entry_of(manifest: Manifest, at: float | None = None) -> Entry:
    signed = SignedManifest.create(manifest, ORGANIZER, HOST.peer_id)
    link = SwarmLink(signed.manifest.digest, (ADDRESS,))
    now = int(time.time() if at is None else at)
    return sign_entry(Entry(str(link), signed.to_bytes(), now, now + 3600, "healthy", 3, 2, 7), ORGANIZER)


@pytest.fixture(autouse=True)
def _nobody_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(*_: object) -> None:
        raise BootstrapError("nobody is there")

    monkeypatch.setattr("p2ptrain.cli.screen.swarm_view.look_once", refuse)


def write(path: Path, *entries: Entry, host: Identity | None = None) -> str:
    index = Index(entries)
    path.write_bytes(to_text(sign_index(index, host, time.time()) if host is not None else index))
    return str(path)


def listed(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["list", *arguments]) == 0
    return capsys.readouterr().out


def test_a_swarm_is_shown_with_its_needs_and_how_to_join(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    entry = entry_of(Manifest(name="demo", admission=OPEN))
    path = write(tmp_path / "index.json", entry, host=HOST)
    text = listed(capsys, "--index", path, "--index-key", HOST.peer_id)
    for words in (
        f"1 swarm, signed by {HOST.peer_id}", "demo\n", "llama, 837k parameters; reads 'stdlib'",
        "healthy: 2 of 3 peers train, round 7", "of memory", "of disk", "no GPU", "each way every 32 steps",
        "open: everybody, after a puzzle", f"organizer  {ORGANIZER.peer_id}", f"p2ptrain join '{entry.link}'",
    ):  # fmt: skip
        assert words in text
    assert "now " not in text
    assert "now        nobody is there" in listed(capsys, "--index", path, "--live")


@pytest.mark.parametrize(("mode", "lines"), [("invite", 0), ("allowlist", 1)])
def test_a_line_to_join_with_is_shown_only_where_the_link_suffices(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], mode: Literal["invite", "allowlist"], lines: int
) -> None:
    manifest = Manifest(admission=AdmissionSpec(mode=mode))
    text = listed(capsys, "--index", write(tmp_path / "i.json", entry_of(manifest)))
    assert f"admission  {mode}: ask the organizer" in text
    assert text.count("p2ptrain join") == lines


def test_scripts_get_the_same(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    entry, old = entry_of(Manifest(name="demo", admission=OPEN)), entry_of(Manifest(name="old"), at=1_700_000_000)
    found = json.loads(listed(capsys, "--index", write(tmp_path / "i.json", entry, old), "--json", "--live"))
    (swarm,) = found["swarms"]
    assert (swarm["name"], swarm["link"], swarm["admission"]) == ("demo", entry.link, "open")
    needs = swarm["needs"]
    assert needs["memory"] > needs["download"] > needs["round_bytes"] > needs["parameters"] > 800_000
    assert swarm["announced"] == {
        "at": entry.announced, "expires": entry.expires, "health": "healthy", "peers": 3, "training": 2, "round": 7,
    }  # fmt: skip
    assert swarm["live"] == {"error": "nobody is there"}
    (refused,) = found["refused"]
    assert refused["entry"] == 2
    assert "expired" in refused["reason"]


def test_a_refused_entry_is_shown_with_its_reason_and_gives_no_link(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good, other = (entry_of(Manifest(name=name, admission=OPEN)) for name in ("good", "other"))
    false = replace(other, peers=999)
    text = listed(capsys, "--index", write(tmp_path / "i.json", false, good, replace(good, link=other.link)))
    assert "refused: entry 1: it is not signed by the organizer" in text
    assert "refused: entry 3: the manifest does not match the link's digest" in text
    assert text.count("p2ptrain join") == 1
    assert "999" not in text


def test_a_hostile_text_neither_moves_the_cursor_nor_fills_the_screen(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = "path:/data'; rm -rf ~ \u200b\u202e " + "x" * 100_000
    with pytest.raises(ValueError, match="does not print"):
        Manifest(data=DataSpec(source=source))
    hostile = Manifest(data=DataSpec(source=source.replace("\u200b\u202e", "é")), admission=OPEN)
    text = listed(capsys, "--index", write(tmp_path / "i.json", entry_of(hostile)))
    assert "é" not in text
    assert max(map(len, text.splitlines())) < 500
    assert all(line.isprintable() for line in text.splitlines())


def test_swarms_that_this_version_cannot_join_are_shown_with_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    custom = Manifest.model_validate({"model": {"family": "custom"}, "data": {"source": "custom"}})
    newer = Manifest(name="newer", protocol=99)
    text = listed(capsys, "--index", write(tmp_path / "i.json", entry_of(custom), entry_of(newer)))
    assert "needs      this swarm's model is custom" in text
    assert "needs      the swarm speaks protocol 99" in text


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["list"], 2, "--index"),
        (["list", "--index", "none.json"], 3, "none.json: No such file or directory; give a file, or"),
        (["list", "--index", "README.md"], 3, "no index of swarms"),
        (["list", "--index", "http://192.0.2.1/i.json"], 3, "over https"),
        (["list", "--index", "README.md", "--index-key", "nonsense"], 2, "whole peer id"),
        (["announce", "p2ptrain://abc"], 2, "a link cannot sign"),
        (["announce", "tests"], 3, "p2ptrain init"),
        (["announce", "README.md"], 3, "no index of swarms"),
        (["announce", "tests", "--key", "host.key"], 2, "--into"),
        (["announce", "tests", "--expires", "31d"], 2, "at most 30d"),
        (["announce", "tests", "--expires", "soon"], 2, "--expires"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_mistake_gives_one_line_and_its_exit_code(
    capsys: pytest.CaptureFixture[str], arguments: list[str], code: int, words: str
) -> None:
    assert main(arguments) == code
    (line,) = capsys.readouterr().err.splitlines()
    assert words in line


def test_another_hosts_index_is_refused_with_8(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "i.json", entry_of(Manifest()), host=HOST)
    assert main(["list", "--index", path, "--index-key", ORGANIZER.peer_id]) == 8
    assert capsys.readouterr().out == ""


def test_a_host_collects_entries_and_signs_them_with_one_key(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    index, key = tmp_path / "public" / "index.json", tmp_path / "host.key"
    for name in ("one", "two"):
        entry = write(tmp_path / f"{name}.json", entry_of(Manifest(name=name)))
        assert main(["announce", entry, "--into", str(index), "--key", str(key)]) == 0
        assert main(["announce", entry, "--expires", "1d"]) == main(["announce", entry, "--link", "x"]) == 2
    said = capsys.readouterr().out
    assert f"wrote {index}: 2 swarms" in said
    found = from_json(Index, index.read_bytes())
    assert f"--index-key {found.host}" in said
    assert len(json.loads(listed(capsys, "--index", str(index), "--index-key", found.host, "--json"))["swarms"]) == 2
    assert main(["announce", entry, "--into", str(index)]) == 3
    assert "signed by" in capsys.readouterr().err
    assert main(["announce", entry, "--into", str(index), "--key", str(tmp_path / "other.key")]) == 3
    index.write_bytes(to_text(replace(found, issued=1)))
    assert main(["announce", entry, "--into", str(index), "--key", str(key)]) == 8


@pytest.mark.parametrize("into", [[], ["--into", "index.json"]])
def test_an_entry_that_must_not_be_used_is_not_passed_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, into: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    good = entry_of(Manifest())
    for false in (replace(good, peers=999), entry_of(Manifest(), at=1_700_000_000)):
        assert main(["announce", write(tmp_path / "entry.json", false), *into]) == 8
        assert capsys.readouterr().out == ""
    assert main(["announce", write(tmp_path / "entry.json", good), *into]) == 0


def test_a_swarm_that_does_not_answer_is_not_announced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Identity.create_or_load(tmp_path / KEY_FILE) as key:
        manifest = sign_manifest(Manifest(), key, tmp_path / SIGNED_FILE, tmp_path / "bootstrap").manifest
    link = str(SwarmLink(manifest.digest, (ADDRESS,)))
    assert main(["announce", str(tmp_path), "--link", link, "--into", str(tmp_path / "i.json")]) == 4
    assert "nobody is there" in capsys.readouterr().err
    assert not (tmp_path / "i.json").exists()


@pytest.mark.parametrize("codec", BYTES_A_VALUE)
def test_the_size_of_updates_is_that_of_the_codec(codec: str) -> None:
    assert CODECS.get(codec).encoded_bytes(10**6) == pytest.approx(BYTES_A_VALUE[codec] * 10**6, rel=0.02)
