"""A verdict on a peer follows from the manifest, the list of revocations, a credential and the time."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from p2ptrain.errors import ConfigError
from p2ptrain.manifest import AdmissionSpec, Manifest, SignedManifest
from p2ptrain.network.admission import (
    BANNED,
    MAX_CREDENTIAL_BYTES,
    MAX_GRANTS,
    Admission,
    Invite,
    Issuer,
    Pass,
    Revocations,
    Solution,
    mark,
    solve,
)
from p2ptrain.network.schema import from_bytes, to_bytes
from p2ptrain.signing import issuing_key
from tests.support.signers import NamedSigner

ORGANIZER, ISSUER, MALLORY = NamedSigner("organizer"), NamedSigner("issuer"), NamedSigner("mallory")
ISSUER_KEY = issuing_key(ISSUER).public_key().public_bytes_raw().hex()
NOW = 1000.0


def manifest_of(**admission: Any) -> Manifest:
    spec = AdmissionSpec.model_validate({"issuers": [ISSUER_KEY], **admission})
    return SignedManifest.create(Manifest(admission=spec), ORGANIZER, "seed").manifest


SWARM = manifest_of()
OTHER = SWARM.model_copy(update={"name": "other"})


def admission_of(manifest: Manifest = SWARM, now: float = NOW) -> Admission:
    return Admission(manifest, lambda: now)


def invited(peer: str = "bob", invite: Invite | None = None, manifest: Manifest = SWARM) -> bytes:
    """The credential that a peer makes with an invite, by default the seed's."""
    return to_bytes(admission_of(manifest).use(invite or Issuer(manifest, ORGANIZER).standing_invite(), peer))


def passed(peer: str = "bob", signer: NamedSigner = ORGANIZER, *limits: int, manifest: Manifest = SWARM) -> bytes:
    return to_bytes(Issuer(manifest, signer).pass_for(peer, *limits))


@pytest.mark.parametrize("mode", ["open", "invite", "allowlist"])
def test_organizer_founders_and_peers_with_a_pass_are_admitted_in_each_mode(mode: str) -> None:
    manifest = manifest_of(mode=mode)
    admission = admission_of(manifest)
    assert [admission.admitted(peer) for peer in ("organizer", "seed")] == ["", ""]
    for peer, signer in (("bob", ORGANIZER), ("carol", ISSUER)):
        assert admission.admitted(peer) != ""
        assert admission.admitted(peer, passed(peer, signer, manifest=manifest)) == ""
        assert admission.admitted(peer) == ""  # The last credential counts.


def test_an_invite_admits_each_peer_that_holds_it_and_a_credential_fits_into_a_header() -> None:
    admission = admission_of()
    for peer, invite in (("bob", None), ("carol", Issuer(SWARM, ISSUER).invite(b"s" * 32, 1 << 40, 1 << 40))):
        credential = invited(peer, invite)
        assert len(credential) < MAX_CREDENTIAL_BYTES / 2
        assert admission.admitted(peer, credential) == ""
        assert admission.way_in(peer).startswith("invite ")


def forged(credential: Pass, **changes: Any) -> bytes:
    assert credential.voucher is not None
    return to_bytes(replace(credential, voucher=replace(credential.voucher, **changes)))


@pytest.mark.fault(37)
def test_forged_passes_are_refused() -> None:
    good = from_bytes(Pass, invited())
    own = Issuer(SignedManifest.create(Manifest(), MALLORY).manifest, MALLORY)
    own._swarm, own.is_organizer = SWARM.digest, False  # It signs for this swarm.
    stolen = {
        "of another peer": passed("carol"),
        "an invited peer's": invited("carol"),
        "of another swarm": passed(manifest=OTHER),
        "invited to another swarm": invited(manifest=OTHER),
        "by another key": to_bytes(own.pass_for("bob")),
        "by another's invite": to_bytes(admission_of().use(own.invite(b"m" * 32), "bob")),
        "under another's name": to_bytes(replace(own.pass_for("bob"), issuer=good.issuer)),
        "a later end": forged(good, expires=1 << 40),
        "a higher cap": forged(good, cap=1 << 40),
        "a larger pass": to_bytes(replace(from_bytes(Pass, passed("bob", ORGANIZER, 5000, 7)), cap=8)),
        "a longer pass": to_bytes(replace(from_bytes(Pass, passed("bob", ORGANIZER, 5000, 7)), expires=5001)),
        "the invite itself": to_bytes(Issuer(SWARM, ORGANIZER).standing_invite()),
        "garbage": b"\xc1",
        "cut off": invited()[:-1],
        "a puzzle": to_bytes(Solution(1)),
    }
    admission = admission_of()
    for name, credential in stolen.items():
        assert admission.admitted("bob", credential), name
    assert admission.admitted("bob")


@pytest.mark.fault(37)
def test_a_pass_ends_when_it_or_its_invite_expires() -> None:
    issuer = Issuer(SWARM, ORGANIZER)
    for credential in (passed("bob", ORGANIZER, 1001), invited("bob", issuer.invite(b"s" * 32, 1001))):
        assert admission_of(now=1000.5).admitted("bob", credential) == ""
        assert "expired" in admission_of(now=1001.5).admitted("bob", credential)


def test_the_cap_of_a_pass_or_an_invite_is_known_once_it_is_shown() -> None:
    admission = admission_of()
    assert admission.admitted("bob", passed("bob", ORGANIZER, 0, 500)) == ""
    assert admission.admitted("carol", invited("carol", Issuer(SWARM, ORGANIZER).invite(b"s" * 32, cap=70))) == ""
    assert admission.admitted("dave", invited("dave")) == ""
    assert [grant.cap if (grant := admission.grant(peer)) else None for peer in ("bob", "carol", "dave", "eve")] == [
        500, 70, 0, None,
    ]  # fmt: skip


@pytest.mark.fault(37)
def test_a_revoked_invite_admits_nobody_new_and_its_peers_stay() -> None:
    issuer, admission = Issuer(SWARM, ORGANIZER), admission_of()
    invite = issuer.standing_invite()
    found = Revocations(5, revoked=(mark(invite.key),), stay=(mark("bob"),))
    assert admission.admitted("carol", invited("carol")) == ""
    assert admission.learn(issuer.sign(found))
    assert admission.admitted("bob", invited("bob")) == ""
    assert "invite was revoked" in admission.admitted("carol", invited("carol"))
    assert admission.admitted("carol", passed("carol")) == ""
    another = issuer.standing_invite(found)
    assert another.key != invite.key
    assert admission.admitted("dave", invited("dave", another)) == ""


def test_a_pass_can_be_revoked_and_given_back_and_a_banned_peer_is_out() -> None:
    issuer, admission = Issuer(SWARM, ORGANIZER), admission_of()
    credential = passed("bob")
    assert admission.learn(issuer.sign(Revocations(1, revoked=(mark("bob"),))))
    assert "revoked" in admission.admitted("bob", credential)
    assert admission.learn(issuer.sign(Revocations(2, banned=(mark("bob"), mark("seed"), mark("organizer")))))
    assert [admission.admitted(peer, credential) for peer in ("bob", "seed", "organizer")] == [BANNED, BANNED, ""]
    assert admission.learn(issuer.sign(Revocations(3)))
    assert admission.admitted("bob") == ""


@pytest.mark.fault(37)
def test_only_a_newer_list_that_the_organizer_signed_counts() -> None:
    admission, issuer = admission_of(), Issuer(SWARM, ORGANIZER)
    new, old = (issuer.sign(Revocations(number, banned=(mark(str(number)),))) for number in (7, 6))
    assert admission.learn(new)
    with pytest.raises(ConfigError, match="only the organizer"):
        Issuer(SWARM, ISSUER).sign(Revocations(9))
    other = Issuer(OTHER, ORGANIZER).sign(Revocations(9))
    forged = to_bytes(replace(from_bytes(Revocations, new), sequence=9))
    for data in (b"", b"\xc1", new, old, other, forged):
        assert not admission.learn(data)
    assert admission.revocations.banned == (mark("7"),)


@pytest.mark.fault(50)
def test_a_stolen_issuers_key_neither_revokes_nor_bans_and_those_that_it_lets_in_can_be_banned() -> None:
    admission, found = admission_of(), Revocations(1, banned=(mark("bob"),))
    assert admission.admitted("eve", passed("eve", ISSUER)) == ""
    signature = issuing_key(ISSUER).sign(found.message(SWARM.digest))
    assert not admission.learn(to_bytes(replace(found, signature=signature)))
    assert admission.learn(Issuer(SWARM, ORGANIZER).sign(Revocations(1, banned=(mark("eve"),))))
    for credential in (b"", passed("eve", ISSUER), passed("eve", ISSUER, 0, 9)):
        assert admission.admitted("eve", credential) == BANNED
    assert admission.admitted("carol", passed("carol", ISSUER)) == "", "others that the issuer let in stay"


def test_a_list_that_is_too_long_for_a_record_is_not_signed() -> None:
    marks = tuple(mark(str(number)) for number in range(200))
    with pytest.raises(ConfigError, match="start a new swarm"):
        Issuer(SWARM, ORGANIZER).sign(Revocations(1, banned=marks))


def test_an_allowlist_admits_its_members_and_no_invited_peer() -> None:
    manifest = manifest_of(mode="allowlist", members=["ann"])
    admission = admission_of(manifest)
    assert admission.admitted("ann") == ""
    assert "not among" in admission.admitted("bob")
    assert "no invites" in admission.admitted("bob", invited("bob", manifest=manifest))


def test_a_puzzle_admits_the_peer_that_solved_it_for_this_swarm() -> None:
    manifest = manifest_of(mode="open", puzzle_bits=10)
    peers = [f"peer{number}" for number in range(4)]
    solutions = [to_bytes(solve(manifest.digest, peer, 10)) for peer in peers]
    for peer, own in zip(peers, solutions, strict=True):
        assert "puzzle" in admission_of(manifest).admitted(peer)
        assert [each for each in solutions if not admission_of(manifest).admitted(peer, each)] == [own]
        other = manifest.model_copy(update={"name": "other"})
        assert "wrong" in admission_of(other).admitted(peer, own)


def test_a_swarm_without_a_puzzle_is_open_to_all() -> None:
    assert admission_of(manifest_of(mode="open", puzzle_bits=0)).admitted("anybody") == ""


def test_what_is_remembered_of_peers_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    assert MAX_GRANTS <= 1 << 16
    monkeypatch.setattr("p2ptrain.network.admission.MAX_GRANTS", 3)
    admission = admission_of()
    for number in range(5):
        assert admission.admitted(f"peer{number}", passed(f"peer{number}")) == ""
    assert [admission.grant(f"peer{number}") is not None for number in range(5)] == [False, False, True, True, True]


def test_a_key_that_the_manifest_does_not_name_issues_nothing() -> None:
    with pytest.raises(ConfigError, match="another organizer"):
        Issuer(SWARM, MALLORY)


@given(st.binary(max_size=MAX_CREDENTIAL_BYTES))
def test_no_bytes_but_the_right_ones_admit_a_peer(data: bytes) -> None:
    admission = admission_of()
    assert admission.admitted("bob", data)
    assert not admission.learn(data)
