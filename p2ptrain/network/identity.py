"""This peer's identity: an RSA-2048 libp2p key, its file and its lock.

The file has libp2p's key format: a protobuf ``PrivateKey`` with the key type (RSA = 0) and PKCS#1 DER bytes.
The peer id is the base58 text of the SHA-256 multihash of the protobuf public key.
Source: https://github.com/libp2p/specs/blob/master/peer-ids/peer-ids.md
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import os
from functools import lru_cache
from pathlib import Path

import base58
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import padding, rsa
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from p2ptrain.disk import replace_file
from p2ptrain.errors import ConfigError, IdentityError, P2PTrainError, ResourceError
from p2ptrain.signing import Signer

IDENTITY_FILE = "identity.key"
"""Name of a peer's key in its run directory."""
KEY_BITS = 2048
MAX_KEY_BITS = 4096
MAX_PROOF_BYTES = 2048
_PUBLIC_EXPONENT = 65537
_SIGNING_CONTEXT = b"p2ptrain signature 1\0"
"""Prefix of every signed message: domain separation from libp2p's own signatures."""
_KEY_TYPES = {0: "RSA", 1: "Ed25519", 2: "Secp256k1", 3: "ECDSA"}
_MAX_KEY_FILE_BYTES = 16 * 1024


class Identity(Signer):
    """The RSA key of this peer and the lock on its file. Create one with `create_or_load` or `ephemeral`."""

    def __init__(self, key: rsa.RSAPrivateKey, where: str, lock_file: int | None) -> None:
        self.where = where
        self._key = key
        self._public_der = _public_der(key.public_key())
        self.peer_id = peer_id_of(self._public_der)
        self._lock_file = lock_file
        _open_identities.add(self)

    @classmethod
    def create_or_load(cls, path: Path | str) -> Identity:
        """Load the key at ``path``, or create one there (mode 0600), and lock it for this process.

        Raises:
            IdentityError: The file is in use by another process, readable by others, not writable, or not an RSA key.
            ConfigError: No file can be created at ``path``.
            ResourceError: The disk is full.
        """
        path = Path(path).expanduser()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            lock_file = _lock(path)
        except OSError as error:
            raise _unusable("use", path, error) from error
        try:
            if not path.exists():
                _write_key(path)
            return cls(_read_key(path), str(path), lock_file)
        except BaseException:
            _unlock(lock_file, path)
            raise

    @classmethod
    def ephemeral(cls) -> Identity:
        """Return an identity with a new key and no file."""
        return cls(_new_key(), "this process's memory", None)

    def sign(self, message: bytes) -> bytes:
        """Return a proof: a two-byte length, the DER public key, and the PSS-SHA256 signature."""
        signature = self._key.sign(_SIGNING_CONTEXT + message, _PSS, hashes.SHA256())
        return len(self._public_der).to_bytes(2, "big") + self._public_der + signature

    def verify(self, peer_id: str, message: bytes, proof: bytes) -> bool:
        if not isinstance(proof, bytes) or not 2 < len(proof) <= MAX_PROOF_BYTES:
            return False
        length = int.from_bytes(proof[:2], "big")
        public_der, signature = proof[2 : 2 + length], proof[2 + length :]
        named = _parsed_public_key(public_der)
        if named is None or named[0] != peer_id:
            return False
        try:
            named[1].verify(signature, _SIGNING_CONTEXT + message, _PSS, hashes.SHA256())
        except (InvalidSignature, ValueError):
            return False
        return True

    def derive(self, purpose: bytes) -> bytes:
        derived = HKDF(hashes.SHA256(), length=32, salt=None, info=_SIGNING_CONTEXT + purpose)
        return derived.derive(_protobuf_private_key(self._key))

    def libp2p_key(self) -> bytes:
        """Return the private key in libp2p's key format."""
        return _protobuf_private_key(self._key)

    def close(self) -> None:
        """Release the lock on the key file; idempotent."""
        _open_identities.discard(self)
        if self._lock_file is not None:
            _unlock(self._lock_file, Path(self.where))
            self._lock_file = None

    def close_inherited(self) -> None:
        """Close a forked child's copy of the lock, which the parent keeps."""
        if self._lock_file is not None:
            os.close(self._lock_file)
            self._lock_file = None

    def __enter__(self) -> Identity:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


_PSS = padding.PSS(mgf=padding.MGF1(hashes.SHA256()), salt_length=hashes.SHA256.digest_size)
_open_identities: set[Identity] = set()


def _after_fork() -> None:
    # A forked worker shares the lock's file description and would hold the lock after its parent has died.
    for identity in _open_identities:
        identity.close_inherited()
    _open_identities.clear()


os.register_at_fork(after_in_child=_after_fork)


def peer_id_of(public_der: bytes) -> str:
    """Return the base58 peer id of a DER SubjectPublicKeyInfo RSA key."""
    digest = hashlib.sha256(_protobuf_key(public_der)).digest()
    return base58.b58encode(b"\x12\x20" + digest).decode()


@lru_cache(maxsize=4096)
def _parsed_public_key(public_der: bytes) -> tuple[str, rsa.RSAPublicKey] | None:
    """Return peer id and key; None unless it is an RSA key of allowed size and canonical encoding."""
    try:
        key = serialization.load_der_public_key(public_der)
    except (ValueError, UnsupportedAlgorithm):
        return None
    if not isinstance(key, rsa.RSAPublicKey) or not KEY_BITS <= key.key_size <= MAX_KEY_BITS:
        return None
    if key.public_numbers().e != _PUBLIC_EXPONENT or _public_der(key) != public_der:
        return None
    return peer_id_of(public_der), key


def _public_der(key: rsa.RSAPublicKey) -> bytes:
    return key.public_bytes(serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo)


def _protobuf_key(data: bytes) -> bytes:
    """Return the protobuf message ``{1: key type RSA (0), 2: data}``."""
    return b"\x08\x00\x12" + with_length(data)


def with_length(data: bytes) -> bytes:
    """Return ``data`` behind its length as protobuf's varint."""
    length, varint = len(data), bytearray()
    while length > 0x7F:
        varint.append(length & 0x7F | 0x80)
        length >>= 7
    varint.append(length)
    return bytes(varint) + data


def _new_key() -> rsa.RSAPrivateKey:
    return rsa.generate_private_key(public_exponent=_PUBLIC_EXPONENT, key_size=KEY_BITS)


def _protobuf_private_key(key: rsa.RSAPrivateKey) -> bytes:
    der = key.private_bytes(
        serialization.Encoding.DER, serialization.PrivateFormat.TraditionalOpenSSL, serialization.NoEncryption()
    )
    return _protobuf_key(der)


def _parse_protobuf_key(raw: bytes) -> tuple[int, bytes]:
    """Return the key type and data of a protobuf ``PrivateKey``; raise `ValueError` if it is malformed."""
    if len(raw) < 4 or raw[0] != 0x08 or raw[2] != 0x12:
        raise ValueError("not a protobuf key")
    length, shift, position = 0, 0, 3
    while True:
        if position >= len(raw) or shift > 21:
            raise ValueError("truncated")
        byte = raw[position]
        length |= (byte & 0x7F) << shift
        position, shift = position + 1, shift + 7
        if not byte & 0x80:
            break
    if len(raw) != position + length:
        raise ValueError("truncated")
    return raw[1], raw[position:]


def _lock(path: Path) -> int:
    """Lock the file beside ``path``; return its descriptor, which holds the lock while it is open."""
    while True:
        file = os.open(_lock_path(path), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(file, 32, 0).decode(errors="replace").strip() or "?"
            os.close(file)
            if error.errno not in (errno.EWOULDBLOCK, errno.EACCES):
                raise
            raise IdentityError(
                f"identity {path} is in use by process {holder}: stop it, or give this peer another identity file"
            ) from error
        if _is_lock_of(file, path):
            break
        os.close(file)  # Its holder removed it after this process had opened it.
    os.ftruncate(file, 0)
    os.pwrite(file, f"{os.getpid()}\n".encode(), 0)
    return file


def _unlock(file: int, path: Path) -> None:
    """Remove the lock file, while it is locked, and close it; a killed process leaves it."""
    with contextlib.suppress(OSError):
        if _is_lock_of(file, path):
            _lock_path(path).unlink()
    os.close(file)


def _is_lock_of(file: int, path: Path) -> bool:
    """True if an open lock file is still the one beside ``path``."""
    try:
        return os.path.samestat(os.fstat(file), _lock_path(path).stat())
    except FileNotFoundError:
        return False


def _lock_path(path: Path) -> Path:
    return path.with_name(path.name + ".lock")


def _write_key(path: Path) -> None:
    try:
        replace_file(path, _protobuf_private_key(_new_key()), synced=True, mode=0o600)
    except OSError as error:
        raise _unusable("write", path, error) from error


def _unusable(verb: str, path: Path, error: OSError) -> P2PTrainError:
    text = f"cannot {verb} {path}: {error.strerror}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return ResourceError(f"{text}; free some disk space, or choose another place for the key")
    if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EEXIST, errno.EROFS, errno.ENAMETOOLONG):
        return ConfigError(f"{text}; choose a path that exists and that you may write to")
    return IdentityError(f"{text}; choose a writable place for the key")


def _read_key(path: Path) -> rsa.RSAPrivateKey:
    try:
        mode = path.stat().st_mode
        raw = path.read_bytes()[:_MAX_KEY_FILE_BYTES]
    except OSError as error:
        raise IdentityError(f"cannot read {path}: {error.strerror}; check its owner and mode") from error
    if mode & 0o077:
        raise IdentityError(f"identity {path} can be read by other users: run 'chmod 600 {path}'")
    remove = f"remove {path} to get a new identity"
    try:
        key_type, der = _parse_protobuf_key(raw)
    except ValueError as error:
        raise IdentityError(
            f"{path} is not a libp2p key, or is damaged: restore it from a backup, or {remove}"
        ) from error
    if key_type != 0:
        name = _KEY_TYPES.get(key_type, f"type {key_type}")
        raise IdentityError(f"{path} holds an {name} key, but peers need RSA: {remove}")
    try:
        key = serialization.load_der_private_key(der, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise IdentityError(f"the RSA key in {path} is damaged: restore it from a backup, or {remove}") from error
    if not isinstance(key, rsa.RSAPrivateKey) or not KEY_BITS <= key.key_size <= MAX_KEY_BITS:
        raise IdentityError(f"{path} does not hold an RSA key of {KEY_BITS} to {MAX_KEY_BITS} bits: {remove}")
    if key.public_key().public_numbers().e != _PUBLIC_EXPONENT:
        raise IdentityError(f"the RSA key in {path} has an unusual exponent: {remove}")
    return key
