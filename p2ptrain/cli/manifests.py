"""Manifest files: an organizer's ``run.toml``, and the signed ``manifest.bin``."""

from __future__ import annotations

import contextlib
import time
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from p2ptrain.config import put, read_toml
from p2ptrain.disk import replace_file
from p2ptrain.errors import IncompatibleError, IntegrityError, ManifestError, UsageError
from p2ptrain.manifest import (
    INVITE_FILE,
    ISSUER_FILE,
    PROTOCOL_VERSION,
    REVOCATIONS_FILE,
    Manifest,
    SignedManifest,
    former_manifest,
    parse_manifest,
)
from p2ptrain.network.admission import Admission, Revocations, entrance
from p2ptrain.network.identity import IDENTITY_FILE, Identity
from p2ptrain.network.schema import from_bytes

if TYPE_CHECKING:
    from p2ptrain.signing import Signer

RUN_FILE = "run.toml"
KEY_FILE = "organizer.key"
LINK_FILE = "link.txt"


def load_manifest(path: Path | None, overrides: Mapping[str, Any] | None = None) -> Manifest:
    """Return the manifest of a ``run.toml`` with overrides applied and its extensions' packages pinned.

    Args:
        path: None takes the defaults.
        overrides: Values by dotted key, such as ``{"training.every": 1}``; a value of None is ignored.

    Raises:
        ConfigError: The file cannot be read, or a key or value is invalid; the message names it.
        UsageError: An override addresses a value as a section.
        IncompatibleError: The manifest is for another protocol version, or names an extension missing here.
    """
    from p2ptrain.node.extensions import with_packages

    values = read_toml(path) if path is not None else {}
    given = {key: value for key, value in (overrides or {}).items() if value is not None}
    file_is_valid = parse_manifest(values, str(path)) if path is not None else Manifest()
    for key, value in given.items():
        if not put(values, key, value):
            section = key.rpartition(".")[0]
            raise UsageError(f"{key}: {section} is not a section; see '{RUN_FILE}' of 'p2ptrain init'")
    manifest = parse_manifest(values, "command line") if given else file_is_valid
    if manifest.protocol != PROTOCOL_VERSION:
        raise IncompatibleError(
            f"{path}: protocol = {manifest.protocol}, but this version speaks {PROTOCOL_VERSION}: remove the line"
        )
    return with_packages(manifest)


def of_pretrained(model: str, context: int) -> dict[str, Any]:
    """Return a manifest's settings, by dotted key, of a pretrained model; see `describe_pretrained`."""
    from p2ptrain.cli.screen.bars import bars
    from p2ptrain.models import get_family
    from p2ptrain.models.pretrained import describe_pretrained

    spec = describe_pretrained(model, context, bars)
    reads = {"data.tokenizer": spec.weights} if get_family(spec).reads_text else {}
    return {f"model.{key}": value for key, value in spec.model_dump().items()} | reads


def parse_settings(settings: Sequence[str]) -> dict[str, Any]:
    """Return the values of ``--set KEY=VALUE`` options by dotted key; a value is TOML, or else text."""
    values: dict[str, Any] = {}
    for setting in settings:
        key, separator, text = setting.partition("=")
        if not separator or not key.strip():
            raise UsageError(f"--set {setting!r}: write KEY=VALUE, such as training.local_batch=16")
        try:
            value = tomllib.loads(f"value = {text}")["value"]
        except tomllib.TOMLDecodeError:
            value = text.strip()
        values[key.strip()] = value
    return values


def named_paths(manifest: Manifest) -> dict[str, str]:
    """Return the local paths in the manifest by key, each after ``path:``."""
    values = {"data.source": manifest.data.source, "data.tokenizer": manifest.data.tokenizer}
    return {key: value for key, value in values.items() if value.startswith("path:")}


def public_paths(manifest: Manifest) -> list[str]:
    """Return a warning for each local path in the manifest, which everyone with the swarm's link can read."""
    return [
        f"{key} = {value!r} is public, and every peer needs a copy at that path, and --allow-path with it"
        for key, value in named_paths(manifest).items()
    ]


def sign_manifest(manifest: Manifest, organizer: Signer, path: Path, seed_dir: Path) -> SignedManifest:
    """Sign a manifest into ``path``, and write what its seed lets others in with beside it: an invite, or a key.

    The peer whose run directory is ``seed_dir`` founds the swarm. If ``path`` holds the same manifest already, its
    founder stays, so that a seed that lost its key goes on with the same swarm.
    """
    former = former_manifest(path, organizer)
    with Identity.create_or_load(seed_dir / IDENTITY_FILE) as seed:
        signed = SignedManifest.create(manifest, organizer, seed.peer_id)
    if former is not None and former == signed.manifest.model_copy(update={"founders": former.founders}):
        signed = SignedManifest.create(former, organizer)
    revocations = read_revocations(signed.manifest, path.with_name(REVOCATIONS_FILE))
    for name, secret in zip((INVITE_FILE, ISSUER_FILE), entrance(signed.manifest, organizer, revocations), strict=True):
        if secret:
            replace_file(path.with_name(name), secret, mode=0o600)
        else:
            path.with_name(name).unlink(missing_ok=True)
    replace_file(path, signed.to_bytes())
    return signed


def read_revocations(manifest: Manifest, path: Path) -> Revocations:
    """Return the organizer's newest list; an empty one without a file, or if the file is of another swarm.

    Raises `IntegrityError` if the file is damaged: a new list in its place would let everybody in again.
    """
    admission = Admission(manifest, time.time)
    if path.exists():
        data = path.read_bytes()
        try:
            from_bytes(Revocations, data)
        except IntegrityError as error:
            raise IntegrityError(
                f"{path}, the list of revocations and bans, is damaged: restore it, such as from another seed, or"
                " delete it to begin with an empty one"
            ) from error
        admission.learn(data)
    return admission.revocations


def first_signed(files: Sequence[Path], digest: bytes | None) -> Manifest | None:
    """Return the first valid signed manifest with ``digest``, if given; raise `OSError` if a file cannot be read."""
    with Identity.ephemeral() as verifier:
        for file in files:
            with contextlib.suppress(ManifestError):
                return SignedManifest.from_bytes(file.read_bytes(), digest, verifier).manifest
    return None
