"""The signed log of departures: what is changed, moved, or cut off is found out."""

import json
import resource
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from p2ptrain.cli.main import main
from p2ptrain.errors import IntegrityError, ResourceError
from p2ptrain.network.identity import Identity
from p2ptrain.node.site.chain import Chain, read_chain
from p2ptrain.signing import Signer
from tests.support.signers import NamedSigner

Lines = list[bytes]


def written(path: Path, signer: Signer | None = None, rounds: int = 4) -> Chain:
    chain, _ = Chain.go_on(path, signer or NamedSigner("site"), lambda: 7.0)
    chain.append("joined", policy=None)
    for number in range(rounds):
        chain.append("sending", round=number, receivers=["other"])
        chain.append("sent", round=number, bytes=10)
    return chain


def _edited(lines: Lines) -> Lines:
    entry = json.loads(lines[3])
    entry["entry"]["receivers"] = []
    return [*lines[:3], json.dumps(entry, sort_keys=True, separators=(",", ":")).encode(), *lines[4:]]


@pytest.mark.parametrize(
    "change",
    [
        _edited,
        lambda lines: [*lines[:-1], lines[-1].replace(b'"bytes":10', b'"bytes":11')],
        lambda lines: lines[1:],
        lambda lines: [*lines[:3], *lines[4:]],
        lambda lines: [*lines[:3], lines[4], lines[3], *lines[5:]],
        lambda lines: [*lines, lines[-1]],
        lambda lines: lines[:-1],
        lambda lines: [],
        lambda lines: [*lines[:3], b"{}", *lines[4:]],
    ],
)
def test_a_changed_log_is_refused_and_not_continued(tmp_path: Path, change: Callable[[Lines], Lines]) -> None:
    path = tmp_path / "left.jsonl"
    written(path)
    path.write_bytes(b"".join(line + b"\n" for line in change(path.read_bytes().splitlines())))
    with pytest.raises(IntegrityError, match=r"left\.jsonl"):
        read_chain(path, NamedSigner("x"))
    with pytest.raises(IntegrityError):
        Chain.go_on(path, NamedSigner("site"), lambda: 7.0)


def test_a_log_verifies_while_its_peer_appends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, verify = tmp_path / "left.jsonl", NamedSigner.verify
    chain = written(path)

    def slow(signer: NamedSigner, peer: str, message: bytes, proof: bytes) -> bool:
        chain.append("sending", round=9, receivers=[])
        return verify(signer, peer, message, proof)

    monkeypatch.setattr(NamedSigner, "verify", slow)
    assert len(read_chain(path, NamedSigner("x")).entries) == 9
    assert chain.size == 18


def test_a_log_that_is_gone_is_not_begun_anew(tmp_path: Path) -> None:
    path = tmp_path / "left.jsonl"
    written(path)
    path.unlink()
    with pytest.raises(IntegrityError, match=r"left\.jsonl is gone"):
        Chain.go_on(path, NamedSigner("site"), lambda: 7.0)
    assert not path.exists()


def test_a_start_verifies_one_signature_however_long_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, verify, verified = tmp_path / "left.jsonl", NamedSigner.verify, list[str]()
    written(path, rounds=50)

    def counted(signer: NamedSigner, peer: str, message: bytes, proof: bytes) -> bool:
        verified.append(peer)
        return verify(signer, peer, message, proof)

    monkeypatch.setattr(NamedSigner, "verify", counted)
    assert len(Chain.go_on(path, NamedSigner("site"), lambda: 7.0)[1]) == 101
    assert verified == ["site"]
    read_chain(path, NamedSigner("x"))
    assert len(verified) == 1 + 101


def test_a_log_that_another_key_wrote_anew_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "left.jsonl"
    written(path, NamedSigner("forger"))
    with pytest.raises(IntegrityError, match="not signed by peer site"):
        Chain.go_on(path, NamedSigner("site"), lambda: 7.0)


@pytest.mark.parametrize("kept", [1, 40])
def test_a_line_that_a_crash_tore_is_cut_and_noted(tmp_path: Path, kept: int) -> None:
    path = tmp_path / "left.jsonl"
    written(path)
    whole = path.read_bytes()
    path.write_bytes(whole + whole.splitlines()[-1][:kept])
    assert read_chain(path, NamedSigner("x")).torn_bytes == kept
    chain, earlier = Chain.go_on(path, NamedSigner("site"), lambda: 8.0)
    assert path.read_bytes().startswith(whole)
    assert len(earlier) == 9
    last = read_chain(path, NamedSigner("x")).entries[-1]
    assert (last["what"], last["bytes"], chain.size) == ("cut", kept, 10)


def test_a_crash_between_the_line_and_the_head_leaves_a_good_log(tmp_path: Path) -> None:
    path = tmp_path / "left.jsonl"
    chain = written(path)
    before = path.with_suffix(".head").read_bytes()
    chain.append("closed")
    path.with_suffix(".head").write_bytes(before)
    assert Chain.go_on(path, NamedSigner("site"), lambda: 8.0)[0].head == chain.head


@pytest.mark.parametrize("room", [0, 40])
def test_nothing_is_noted_on_a_full_disk(room: int, tmp_path: Path) -> None:
    path = tmp_path / "left.jsonl"
    chain = written(path)
    limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + room, limits[1]))
        with pytest.raises(ResourceError, match="nothing leaves without"):
            chain.append("sending", round=9)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    chain.append("closed")  # There is room again: a part of the line before would spoil this one.
    assert [each["what"] for each in read_chain(path, NamedSigner("x")).entries[-2:]] == ["sent", "closed"]


def test_the_command_shows_what_left_and_finds_a_cut_by_an_earlier_head(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "left.jsonl"
    with Identity.ephemeral() as key:
        head = written(path, key).head
        assert main(["verify-log", str(tmp_path), "--head", head]) == 0
        shown = capsys.readouterr().out
        for words in ("9 entries verified", key.peer_id, "40 B of updates in 4 rounds", "seen by    other", head):
            assert words in shown
        lines = path.read_bytes().splitlines(keepends=True)
        path.write_bytes(b"".join(lines[:-2]))
        assert main(["verify-log", str(tmp_path)]) == IntegrityError.exit_code
        path.with_suffix(".head").unlink()
        assert main(["verify-log", str(tmp_path)]) == 0
        assert main(["verify-log", str(tmp_path), "--head", head]) == IntegrityError.exit_code
    assert main(["verify-log", str(tmp_path / "none")]) == 3
