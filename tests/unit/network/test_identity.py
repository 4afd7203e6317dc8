"""The identity's file, lock, id and signatures."""

import errno
import fcntl
import hashlib
import os
from pathlib import Path

import base58
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ed25519

from p2ptrain.errors import ConfigError, IdentityError, P2PTrainError, ResourceError
from p2ptrain.network import identity as module
from p2ptrain.network.identity import Identity, peer_id_of
from p2ptrain.network.link import is_peer_id


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "peer.key"


@pytest.fixture(scope="module")
def alice() -> Identity:
    return Identity.ephemeral()


@pytest.fixture(scope="module")
def bob() -> Identity:
    return Identity.ephemeral()


def test_reload_gives_the_same_peer(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "peer.key"
    with Identity.create_or_load(path) as first:
        peer_id = first.peer_id
    with Identity.create_or_load(path) as second:
        assert second.peer_id == peer_id
    assert is_peer_id(peer_id)


def test_key_file_is_private_even_with_a_lax_umask(path: Path) -> None:
    previous = os.umask(0)
    try:
        Identity.create_or_load(path).close()
    finally:
        os.umask(previous)
    assert path.stat().st_mode & 0o777 == 0o600


def test_readable_by_others_is_refused_with_the_command_to_run(path: Path) -> None:
    Identity.create_or_load(path).close()
    path.chmod(0o640)
    with pytest.raises(IdentityError, match=f"chmod 600 {path}"):
        Identity.create_or_load(path)


def test_second_user_in_this_process_is_refused(path: Path) -> None:
    with Identity.create_or_load(path), pytest.raises(IdentityError, match=f"in use by process {os.getpid()}"):
        Identity.create_or_load(path)
    Identity.create_or_load(path).close()


def test_nothing_but_the_key_stays_after_the_end(path: Path) -> None:
    Identity.create_or_load(path).close()
    assert list(path.parent.iterdir()) == [path]
    path.write_bytes(b"damaged")
    with pytest.raises(IdentityError):
        Identity.create_or_load(path)
    assert list(path.parent.iterdir()) == [path]


def test_a_lock_that_its_holder_removes_meanwhile_is_taken_anew(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    holder, flock = Identity.create_or_load(path), fcntl.flock

    def flock_after_the_holder(file: int, operation: int) -> None:
        holder.close()
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", flock_after_the_holder)
    with Identity.create_or_load(path), pytest.raises(IdentityError, match="in use"):
        Identity.create_or_load(path)


def test_forked_child_does_not_keep_the_identity_in_use(path: Path) -> None:
    identity = Identity.create_or_load(path)
    go_on, release = os.pipe()
    is_up, say_up = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(say_up, b"x")
        os.close(release)
        os.read(go_on, 1)  # until the parent closes its end
        os._exit(0)
    try:
        os.read(is_up, 1)
        identity.close()
        Identity.create_or_load(path).close()
    finally:
        for end in (go_on, release, is_up, say_up):
            os.close(end)
        os.waitpid(child, 0)


def test_forked_child_does_not_free_the_identity(path: Path) -> None:
    with Identity.create_or_load(path):
        child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
        with pytest.raises(IdentityError, match="in use"):
            Identity.create_or_load(path)


@pytest.mark.parametrize("cut", [0, 1, 5, 600, 1190])
def test_damaged_file_is_refused_with_a_way_out(path: Path, cut: int) -> None:
    Identity.create_or_load(path).close()
    path.write_bytes(path.read_bytes()[:cut])
    with pytest.raises(IdentityError, match=f"damaged.*remove {path}"):
        Identity.create_or_load(path)
    assert path.exists()


def test_ed25519_key_is_refused_by_name(path: Path) -> None:
    raw = ed25519.Ed25519PrivateKey.generate().private_bytes(
        serialization.Encoding.Raw, serialization.PrivateFormat.Raw, serialization.NoEncryption()
    )
    path.write_bytes(b"\x08\x01\x12\x20" + raw)
    path.chmod(0o600)
    with pytest.raises(IdentityError, match="Ed25519 key, but peers need RSA"):
        Identity.create_or_load(path)


def test_a_key_file_holds_what_the_daemon_is_given(path: Path) -> None:
    with Identity.create_or_load(path) as identity:
        assert identity.libp2p_key() == path.read_bytes()


def test_a_proof_verifies_for_its_message_and_peer_alone(alice: Identity, bob: Identity) -> None:
    proof, theirs = alice.sign(b"message"), bob.sign(b"message")
    assert len(proof) <= 2048
    assert bob.verify(alice.peer_id, b"message", proof)
    assert not bob.verify(alice.peer_id, b"massage", proof)
    assert not bob.verify(bob.peer_id, b"message", proof)
    assert not bob.verify("", b"message", proof)
    end = 2 + int.from_bytes(theirs[:2], "big")
    changed = [proof[:at] + bytes([proof[at] ^ 1]) + proof[at + 1 :] for at in range(0, len(proof), 7)]
    garbage = [b"", b"\0", b"\0\0", b"\xff\xff" + b"x" * 40, b"\0\x04abcd", b"x" * 4096]
    for wrong in (theirs, alice.sign(b"other")[:end] + theirs[end:], *changed, *garbage):
        assert not alice.verify(alice.peer_id, b"message", wrong)


def test_public_keys_are_parsed_once(alice: Identity) -> None:
    proof = alice.sign(b"message")
    alice.verify(alice.peer_id, b"message", proof)
    before = module._parsed_public_key.cache_info()
    assert alice.verify(alice.peer_id, b"message", proof)
    after = module._parsed_public_key.cache_info()
    assert (after.hits, after.misses) == (before.hits + 1, before.misses)


def test_peer_id_matches_the_specification() -> None:
    # https://github.com/libp2p/specs/blob/master/peer-ids/peer-ids.md: a multihash of the key in protobuf.
    data = b"d" * 300
    framed = b"\x08\x00\x12\xac\x02" + data
    assert peer_id_of(data) == base58.b58encode(b"\x12\x20" + hashlib.sha256(framed).digest()).decode()


@pytest.mark.parametrize(
    ("number", "kind", "code"),
    [(errno.ENOSPC, ResourceError, 7), (errno.ENOTDIR, ConfigError, 3), (errno.EACCES, IdentityError, 5)],
)
@pytest.mark.parametrize("function", ["os.open", "os.fsync", "os.replace"])
def test_a_full_disk_and_a_wrong_path_are_told_from_an_unusable_key(
    number: int, kind: type[P2PTrainError], code: int, function: str, path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(f"p2ptrain.network.identity.{function}", refuse)
    with pytest.raises(kind, match=os.strerror(number)) as raised:
        Identity.create_or_load(path)
    assert raised.value.exit_code == code
    assert list(path.parent.iterdir()) == []
