"""The index of public swarms: a JSON file that anybody can host, whose entries the swarms' organizers sign.

An entry holds a link, the signed manifest that the link's digest names, and the swarm's state at a given time. The
organizer that the manifest names signs all of it. So whoever hosts the file can leave entries out, and invent none of
another organizer. A host may sign the file, too: readers that pin the host's key then see the host's choice of entries.
docs/explanation/security.md tells what each signature promises.
"""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import httpx
import msgspec
from msgspec import Meta
from msgspec.structs import replace

from p2ptrain.errors import ConfigError, IntegrityError, LinkError, ManifestError, TemporaryError
from p2ptrain.manifest import MAX_MANIFEST_BYTES, Manifest, SignedManifest
from p2ptrain.network.link import MAX_LINK_CHARS, SwarmLink
from p2ptrain.network.schema import Count, Message, from_json, to_bytes
from p2ptrain.signing import Signer

MAX_INDEX_BYTES = 4 << 20
MAX_ENTRIES = 1000
MAX_LIFETIME_SECONDS = 30 * 86400
MAX_SKEW_SECONDS = 300
"""How far ahead of this clock an entry may be signed."""
FETCH_SECONDS = 20.0
MAX_REDIRECTS = 3

Proof = Annotated[bytes, Meta(max_length=2048)]
Name = Annotated[str, Meta(max_length=64)]
Second = Annotated[int, Meta(ge=0, le=1 << 40)]


class Entry(Message, frozen=True):
    """One swarm, as its organizer announced it.

    Attributes:
        manifest: The bytes of the signed manifest.
        announced: Wall-clock second of the signature; ``expires``: from when it is not used.
        health: As ``p2ptrain status`` showed it then, with the number of ``peers``, of those that train, and the round.
        proof: The organizer's signature of all of the above.
    """

    link: Annotated[str, Meta(max_length=MAX_LINK_CHARS)]
    manifest: Annotated[bytes, Meta(max_length=MAX_MANIFEST_BYTES)]
    announced: Second
    expires: Second
    health: Literal["healthy", "degraded", "stopped", "empty"]
    peers: Count
    training: Count
    round: Count
    proof: Proof = b""

    @property
    def signed(self) -> bytes:
        """The bytes that the organizer signs."""
        return b"p2ptrain index entry 1" + to_bytes(replace(self, proof=b""))


class Index(Message, frozen=True):
    """A file of entries; ``host`` and ``proof`` are empty unless its host signed it, at second ``issued``."""

    entries: Annotated[tuple[Entry, ...], Meta(max_length=MAX_ENTRIES)]
    issued: Second = 0
    host: Name = ""
    proof: Proof = b""
    format: Literal["p2ptrain index 1"] = "p2ptrain index 1"

    @property
    def signed(self) -> bytes:
        """The bytes that the host signs."""
        return b"p2ptrain index 1" + to_bytes(replace(self, proof=b""))


@dataclass(frozen=True)
class Listed:
    """An entry that was verified, with the plain link and the manifest in it."""

    entry: Entry
    link: SwarmLink
    manifest: Manifest


def sign_entry(entry: Entry, organizer: Signer) -> Entry:
    """Return the entry with the organizer's signature."""
    return replace(entry, proof=organizer.sign(entry.signed))


def verify_entry(entry: Entry, now: float, verifier: Signer) -> Listed:
    """Return an entry's swarm.

    Args:
        now: Wall-clock second.
        verifier: Any signer; only its ``verify`` is used.

    Raises:
        IntegrityError: The entry must not be used, for the reason that is told.
    """
    try:
        link = SwarmLink.parse(entry.link).plain
        manifest = SignedManifest.from_bytes(entry.manifest, link.digest, verifier).manifest
    except (LinkError, ManifestError) as error:
        raise IntegrityError(str(error)) from error
    if not verifier.verify(manifest.organizer, entry.signed, entry.proof):
        raise IntegrityError("it is not signed by the organizer that its manifest names")
    if entry.announced > now + MAX_SKEW_SECONDS:
        raise IntegrityError("it was signed in the future: see whether this machine's clock is right")
    if not entry.announced < entry.expires <= entry.announced + MAX_LIFETIME_SECONDS:
        raise IntegrityError(f"it counts for no time, or for more than {MAX_LIFETIME_SECONDS // 86400} days")
    if now >= entry.expires:
        raise IntegrityError("it has expired: its organizer did not renew it")
    return Listed(entry, link, manifest)


def with_entries(index: Index, entries: Sequence[Entry], now: float, verifier: Signer) -> tuple[Index, list[str]]:
    """Return the unsigned index with these entries in place of older ones, and a reason for each entry left out.

    Raises:
        IntegrityError: A new entry must not be used.
        ConfigError: The index would hold more than `MAX_ENTRIES`, or has a newer entry of the same swarm.
    """
    kept: dict[bytes, Listed] = {}
    reasons = []
    for entry in index.entries:
        try:
            listed = verify_entry(entry, now, verifier)
        except IntegrityError as error:
            reasons.append(f"left out {entry.link[:48]!a}…: {error}")
        else:
            kept[listed.link.digest] = listed
    for entry in entries:
        listed = verify_entry(entry, now, verifier)
        former = kept.get(listed.link.digest)
        if former is not None and former.entry.announced > entry.announced:
            raise ConfigError(f"the index has a newer entry of {listed.manifest.name!r}: announce it again")
        kept[listed.link.digest] = listed
    if len(kept) > MAX_ENTRIES:
        raise ConfigError(f"an index holds at most {MAX_ENTRIES} swarms: begin another file")
    ordered = sorted(kept.values(), key=lambda each: (each.manifest.name.casefold(), each.link.digest))
    return Index(tuple(each.entry for each in ordered)), reasons


def sign_index(index: Index, host: Signer, now: float) -> Index:
    """Return the index with its host's signature."""
    named = replace(index, issued=int(now), host=host.peer_id, proof=b"")
    return replace(named, proof=host.sign(named.signed))


def check_host(index: Index, wanted: str, verifier: Signer) -> None:
    """Check the signature of an index that has one.

    Args:
        wanted: The peer id of the host's key; empty accepts any host, and none.

    Raises:
        IntegrityError: The signature is false, or is not of the wanted key.
    """
    if wanted and index.host != wanted:
        by = f"by {index.host!a}" if index.host else "by nobody"
        raise IntegrityError(f"the index is signed {by}, not by {wanted}: ask its host for the right address or key")
    if (index.host or index.proof) and not verifier.verify(index.host, index.signed, index.proof):
        raise IntegrityError("the index was changed after its host signed it: fetch it again, or ask its host")


def to_text(index: Index) -> bytes:
    """Return the file's content; raise `ConfigError` if it is too large to be read."""
    data = msgspec.json.format(msgspec.json.encode(index), indent=1) + b"\n"
    if len(data) > MAX_INDEX_BYTES:
        raise ConfigError(f"an index has at most {MAX_INDEX_BYTES} bytes: begin another file")
    return data


async def read_index(source: str) -> Index:
    """Return the index in a file, or at an address, whose signatures are not verified yet.

    Raises:
        ConfigError: The file cannot be read, the address may not be used, or there is no index at it.
        TemporaryError: The server does not answer.
    """
    data = await _download(source) if "://" in source else _content(source)
    if len(data) > MAX_INDEX_BYTES:
        raise ConfigError(f"{source} has more than {MAX_INDEX_BYTES} bytes: it is no index of swarms")
    try:
        return from_json(Index, data)
    except IntegrityError as error:
        raise ConfigError(f"{source} is no index of swarms that this version can read: {error}") from error


def _content(source: str) -> bytes:
    path = Path(source).expanduser()
    try:
        with path.open("rb") as file:
            return file.read(MAX_INDEX_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}; give a file, or the https address of an index") from error


async def _download(address: str) -> bytes:
    try:
        url = httpx.URL(address)
        async with asyncio.timeout(FETCH_SECONDS), httpx.AsyncClient(timeout=FETCH_SECONDS) as client:
            for _ in range(MAX_REDIRECTS + 1):
                _check_address(url, from_https=address.startswith("https:"))
                # `MAX_INDEX_BYTES` bounds the raw body, so the server must not compress.
                async with client.stream("GET", url, headers={"Accept-Encoding": "identity"}) as response:
                    if response.next_request is not None:
                        url = response.next_request.url
                        continue
                    if response.is_client_error:
                        raise ConfigError(f"{address} has no index: HTTP {response.status_code}")
                    response.raise_for_status()
                    body = bytearray()
                    async for piece in response.aiter_raw():
                        body += piece
                        if len(body) > MAX_INDEX_BYTES:
                            break
                    return bytes(body)
    except httpx.InvalidURL as error:
        raise ConfigError(f"{address!a} is no address: {error}") from error
    except (httpx.HTTPError, TimeoutError) as error:
        raise TemporaryError(f"{address} does not answer ({error or type(error).__name__}): try again later") from error
    raise ConfigError(f"{address} leads on more than {MAX_REDIRECTS} times: give the address where it ends")


def _check_address(url: httpx.URL, from_https: bool) -> None:
    """Raise `ConfigError` unless the address is https, or http on loopback that no https address led to."""
    if url.scheme == "https" or (url.scheme == "http" and not from_https and _is_loopback(url.host)):
        return
    raise ConfigError(f"{str(url)[:200]!a}: an index is read over https, or from a file, because http can be changed")


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
