"""The swarm link: the text from which a new peer finds and verifies a swarm.

``p2ptrain://<digest>?d=<directory>&invite=<invite>&b=<multiaddr>&b=<multiaddr>…`` holds the manifest's digest in
base58, the directory unless it is the DHT, an invite or a pass in base58 if the link has one, and bootstrap peers'
addresses. The digest pins the manifest and its organizer's id, so bootstrap peers can forge neither.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import base58

from p2ptrain.config import KIND_PATTERN, check_multiaddr
from p2ptrain.errors import LinkError

SCHEME = "p2ptrain://"
DIGEST_BYTES = 32
MAX_ADDRESSES = 32
MAX_LINK_CHARS = 8192
MAX_INVITE_BYTES = 600
_FIX = "copy the whole link that 'p2ptrain seed' prints"


@dataclass(frozen=True)
class SwarmLink:
    """The manifest's SHA-256 digest (`Manifest.digest`) and the bootstrap peers' addresses.

    Attributes:
        addresses: Multiaddrs that each end in ``/p2p/<peer id>``, 1 to `MAX_ADDRESSES`.
        directory: As in ``network.directory``; empty for the DHT.
        invite: A `p2ptrain.network.admission.Credential`; empty for a link that shows the swarm and admits nobody.
    """

    digest: bytes
    addresses: tuple[str, ...]
    directory: str = ""
    invite: bytes = b""

    def __post_init__(self) -> None:
        if len(self.digest) != DIGEST_BYTES:
            raise LinkError(f"a swarm link holds a digest of {DIGEST_BYTES} bytes, not {len(self.digest)}: {_FIX}")
        if not 1 <= len(self.addresses) <= MAX_ADDRESSES:
            raise LinkError(
                f"a swarm link holds 1 to {MAX_ADDRESSES} bootstrap addresses, not {len(self.addresses)}: {_FIX}"
            )
        for address in self.addresses:
            check_peer_address(address)
        if self.directory and not re.fullmatch(KIND_PATTERN, self.directory):
            raise LinkError(f"the link names a directory {self.directory[:80]!r}, which is no URL: {_FIX}")

    def __str__(self) -> str:
        parts = [f"d={self.directory}"] if self.directory else []
        if self.invite:
            parts.append(f"invite={base58.b58encode(self.invite).decode()}")
        # The bootstrap addresses come last, so that `parse` notices a truncated link.
        query = "&".join([*parts, *(f"b={address}" for address in self.addresses)])
        return f"{SCHEME}{base58.b58encode(self.digest).decode()}?{query}"

    @property
    def plain(self) -> SwarmLink:
        """The link without its invite, for all to see."""
        return replace(self, invite=b"")

    @classmethod
    def parse(cls, text: str) -> SwarmLink:
        """Return the link in ``text``; raise `LinkError` if it is truncated or malformed."""
        text = text.strip()
        if len(text) > MAX_LINK_CHARS:
            raise LinkError(f"the link is longer than {MAX_LINK_CHARS} characters: {_FIX}")
        if not text.startswith(SCHEME):
            raise LinkError(f"{text[:24]!r} does not start with {SCHEME}: {_FIX}")
        encoded, separator, query = text.removeprefix(SCHEME).partition("?")
        try:
            digest = base58.b58decode(encoded)
        except ValueError as error:
            raise LinkError(f"the link's digest {encoded[:48]!r} is not base58: {_FIX}") from error
        if len(digest) != DIGEST_BYTES:
            raise LinkError(f"the link's digest has {len(digest)} bytes instead of {DIGEST_BYTES}: {_FIX}")
        if not separator or not query:
            raise LinkError(f"the link names no bootstrap peer, so it is cut off: {_FIX}")
        values: dict[str, list[str]] = {"b": [], "d": [], "invite": []}
        for part in query.split("&"):
            name, _, value = part.partition("=")
            if name not in values or (name != "b" and values[name]):
                raise LinkError(f"the link has an unknown part {part[:40]!r}: {_FIX}")
            values[name].append(value)
        try:
            invite = base58.b58decode("".join(values["invite"]))
        except ValueError as error:
            raise LinkError(f"the link's invite is not base58: {_FIX}") from error
        if len(invite) > MAX_INVITE_BYTES:
            raise LinkError(f"the link's invite is longer than {MAX_INVITE_BYTES} bytes: {_FIX}")
        return cls(digest, tuple(values["b"]), "".join(values["d"]), invite)


def check_peer_address(address: str) -> str:
    """Return the peer id of a multiaddr; raise `LinkError` unless it ends in ``/p2p/<peer id>``."""
    example = "an address looks like /ip4/203.0.113.5/tcp/31337/p2p/Qm…"
    head, marker, peer_id = address.rpartition("/p2p/")
    check_address(address)
    if not marker or not head or not is_peer_id(peer_id):
        raise LinkError(f"{address[:120]!r} does not end in /p2p/<peer id>: {_FIX}; {example}")
    return peer_id


def check_address(address: str) -> None:
    """Raise `LinkError` unless ``address`` is a multiaddr."""
    forbidden = set("&?#,= \t\r\n")  # delimiters of the link and of p2pd's address lists
    if not address.startswith("/") or forbidden & set(address):
        raise LinkError(f"{address[:120]!r} is not a multiaddr: one looks like /ip4/203.0.113.5/tcp/31337")
    try:
        check_multiaddr(address)
    except ValueError as error:
        cause = type(error.__cause__).__name__
        raise LinkError(f"{address[:120]!r} is not a multiaddr ({cause}): {_FIX}") from error


def is_peer_id(text: str) -> bool:
    """True if ``text`` has the form of an RSA key's peer id: a base58 SHA-256 multihash."""
    if not 40 <= len(text) <= 60:
        return False
    try:
        raw = base58.b58decode(text)
    except ValueError:
        return False
    return len(raw) == 34 and raw[:2] == b"\x12\x20"
