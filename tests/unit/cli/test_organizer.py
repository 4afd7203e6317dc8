"""The organizer's files: what `seed` signs, and what `invite`, `revoke` and `ban` find and write."""

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from p2ptrain.cli.commands.admission.invite import seconds
from p2ptrain.cli.commands.admission.organizer import change, mark_of
from p2ptrain.cli.main import main
from p2ptrain.cli.manifests import KEY_FILE, read_revocations, sign_manifest
from p2ptrain.errors import IntegrityError, UsageError
from p2ptrain.manifest import INVITE_FILE, REVOCATIONS_FILE, SIGNED_FILE, AdmissionSpec, Manifest
from p2ptrain.network.admission import Invite, mark
from p2ptrain.network.identity import IDENTITY_FILE, Identity
from p2ptrain.network.link import SwarmLink
from p2ptrain.network.records.record import PeerRecord
from p2ptrain.network.schema import from_bytes
from tests.support.records import record_of


def sign(folder: Path, manifest: Manifest) -> Manifest:
    with Identity.create_or_load(folder / KEY_FILE) as organizer:
        return sign_manifest(manifest, organizer, folder / SIGNED_FILE, folder / "bootstrap").manifest


def standing_link(folder: Path, manifest: Manifest) -> SwarmLink:
    with Identity.ephemeral() as peer:
        address = f"/ip4/127.0.0.1/tcp/1/p2p/{peer.peer_id}"
    return SwarmLink(manifest.digest, (address,), invite=(folder / INVITE_FILE).read_bytes())


def test_a_seed_that_lost_its_key_goes_on_with_its_swarm_and_another_manifest_is_another_swarm(tmp_path: Path) -> None:
    first = sign(tmp_path, Manifest())
    invite = (tmp_path / INVITE_FILE).read_bytes()
    assert (tmp_path / INVITE_FILE).stat().st_mode & 0o777 == 0o600
    (tmp_path / "bootstrap" / IDENTITY_FILE).unlink()
    assert sign(tmp_path, Manifest()) == first
    assert (tmp_path / INVITE_FILE).read_bytes() == invite
    other = sign(tmp_path, Manifest(name="other"))
    assert other.founders != first.founders
    assert (tmp_path / INVITE_FILE).read_bytes() != invite
    sign(tmp_path, Manifest(admission=AdmissionSpec(mode="open")))
    assert not (tmp_path / INVITE_FILE).exists()


def test_revoking_the_seeds_invite_gives_its_next_start_another_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = sign(tmp_path, Manifest())
    link = standing_link(tmp_path, manifest)
    own = from_bytes(Invite, link.invite)
    assert main(["revoke", str(tmp_path), str(link), "--nobody-stays"]) == 0
    sign(tmp_path, Manifest())
    assert from_bytes(Invite, (tmp_path / INVITE_FILE).read_bytes()).key != own.key
    peer = link.addresses[0].rpartition("/p2p/")[2]
    assert main(["ban", str(tmp_path), peer]) == 0
    found = read_revocations(manifest, tmp_path / REVOCATIONS_FILE)
    assert (found.revoked, found.banned) == ((mark(own.key),), (mark(peer),))
    assert main(["revoke", str(tmp_path), mark(own.key).hex(), "--undo"]) == 0
    assert main(["ban", str(tmp_path), peer, "--undo"]) == 0
    assert read_revocations(manifest, tmp_path / REVOCATIONS_FILE).banned == ()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("kept", [0, 20])
def test_a_damaged_list_of_bans_is_not_replaced_by_one_without_them(
    kept: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    link = standing_link(tmp_path, sign(tmp_path, Manifest()))
    peer = link.addresses[0].rpartition("/p2p/")[2]
    assert main(["ban", str(tmp_path), peer]) == 0
    path = tmp_path / REVOCATIONS_FILE
    damaged = path.read_bytes()[:kept]
    path.write_bytes(damaged)
    for command in (["ban", str(tmp_path), peer], ["invite", str(tmp_path), "--link", str(link)]):
        assert main(command) == 8
        assert "restore it" in capsys.readouterr().err
    with pytest.raises(IntegrityError):
        sign(tmp_path, Manifest())
    assert path.read_bytes() == damaged


def test_an_invite_is_another_each_time_and_a_pass_is_for_the_peer_that_it_names(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    link = standing_link(tmp_path, sign(tmp_path, Manifest()))
    command = ["invite", str(tmp_path), "--link", str(link.plain), "--cap", "7", "--expires", "2h"]
    keys = set()
    for _ in range(2):
        assert main(command) == 0
        said = capsys.readouterr().out
        invite = from_bytes(Invite, SwarmLink.parse(said.split()[-1]).invite)
        assert (invite.cap, invite.expires > 0) == (7, True)
        assert re.match(f"invite {mark(invite.key).hex()} admits", said)
        keys.add(invite.key)
    assert len(keys) == 2
    assert main([*command, "--peer", "Qm"]) == 2
    assert main(["invite", str(tmp_path)]) == 3
    assert "link.txt is not there: start 'p2ptrain seed" in capsys.readouterr().err


def test_a_peer_that_makes_up_its_start_does_not_end_the_list_of_members(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    link = standing_link(tmp_path, sign(tmp_path, Manifest()))
    liar, stranger = record_of("liar", started_at=1e18), record_of("stranger", started_at=1e18)

    async def peers() -> list[PeerRecord]:
        return [liar]

    @asynccontextmanager
    async def observing(link: SwarmLink) -> AsyncIterator[SimpleNamespace]:
        book = SimpleNamespace(strangers={"stranger": (stranger, "no pass")})
        admission = SimpleNamespace(way_in=lambda peer: "puzzle")
        yield SimpleNamespace(
            peers=peers, peer=SimpleNamespace(admission=admission, presence=SimpleNamespace(book=book))
        )

    monkeypatch.setattr("p2ptrain.node.observe.observing", observing)
    assert main(["members", str(link)]) == 0
    assert "not admitted: no pass" in capsys.readouterr().out


def test_what_names_no_invite_no_peer_and_no_time_is_refused() -> None:
    for target in ("", "zz", "ab" * 15):
        with pytest.raises(UsageError, match="give an invite link"):
            mark_of(target)
    for text in ("7", "d", "0d", "-1d", "7y", "1.5h"):
        with pytest.raises(UsageError, match="give a time"):
            seconds(text)
    assert [seconds(text) for text in ("30m", "12h", "7d", "4w")] == [1800, 43200, 604800, 2419200]
    assert change((b"a", b"b"), (b"b", b"c"), undo=False) == (b"a", b"b", b"c")
    assert change((b"a", b"b"), (b"b", b"c"), undo=True) == (b"a",)
