"""The organizer's folder: its key, the signed manifest and the list of revocations."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from p2ptrain.cli.manifests import KEY_FILE, LINK_FILE, read_revocations
from p2ptrain.disk import replace_file
from p2ptrain.errors import ConfigError, IntegrityError, UsageError
from p2ptrain.manifest import REVOCATIONS_FILE, SIGNED_FILE, Manifest, SignedManifest
from p2ptrain.network.admission import Invite, Issuer, Revocations, mark
from p2ptrain.network.identity import Identity
from p2ptrain.network.link import SwarmLink, is_peer_id
from p2ptrain.network.schema import from_bytes


@dataclass(frozen=True)
class Organizer:
    """An organizer's or issuer's folder, opened with `at`."""

    folder: Path
    manifest: Manifest
    issuer: Issuer
    revocations: Revocations
    given_link: str | None

    @classmethod
    @contextmanager
    def at(cls, folder: Path, link: str | None = None) -> Iterator[Organizer]:
        """Open a folder for the block; raise `ConfigError` if it lacks the key or the manifest, or they do not fit."""
        for name, command in ((KEY_FILE, "init"), (SIGNED_FILE, "seed")):
            if not (folder / name).is_file():
                raise ConfigError(f"{folder / name} is not there: 'p2ptrain {command} {folder}' writes it")
        with Identity.create_or_load(folder / KEY_FILE) as key:
            manifest = SignedManifest.from_bytes((folder / SIGNED_FILE).read_bytes(), None, key).manifest
            revocations = read_revocations(manifest, folder / REVOCATIONS_FILE)
            yield cls(folder, manifest, Issuer(manifest, key), revocations, link)

    @property
    def link(self) -> SwarmLink:
        """The swarm's link, as given or as the seed wrote it; raise `ConfigError` if there is none, or another's."""
        path = self.folder / "bootstrap" / LINK_FILE
        if not self.given_link and not path.is_file():
            raise ConfigError(f"{path} is not there: start 'p2ptrain seed {self.folder}', or give --link")
        link = SwarmLink.parse(self.given_link or path.read_text(encoding="utf-8")).plain
        if link.digest != self.manifest.digest:
            raise ConfigError(f"the link is of another swarm than {self.folder / SIGNED_FILE}: start the seed again")
        return link

    async def invited_by(self, invite: bytes) -> tuple[bytes, ...]:
        """Return the marks of the present peers that the invite with this mark let in."""
        from p2ptrain.node.observe import observing

        async with observing(self.link) as observer:
            peers = [record.peer for record in await observer.peers()]
            grants = {peer: observer.peer.admission.grant(peer) for peer in peers}
        return tuple(mark(peer) for peer, grant in grants.items() if grant is not None and grant.invite == invite)

    def publish(self, **changes: Any) -> None:
        """Sign the changed list of revocations into the folder, where the seed finds it."""
        sequence = max(self.revocations.sequence + 1, int(time.time()))
        data = self.issuer.sign(replace(self.revocations, sequence=sequence, **changes))
        replace_file(self.folder / REVOCATIONS_FILE, data, synced=True)
        print(f"wrote {self.folder / REVOCATIONS_FILE}, which a running seed publishes within seconds")


def change(marks: Sequence[bytes], changed: Sequence[bytes], undo: bool) -> tuple[bytes, ...]:
    """Return the marks with ``changed`` added, or without them."""
    return tuple(sorted(set(marks) - set(changed) if undo else set(marks) | set(changed)))


def mark_of(target: str) -> bytes:
    """Return the mark of an invite link, an invite's id or a peer id; raise `UsageError` if it is none of them."""
    if is_peer_id(target):
        return mark(target)
    found = b""
    with contextlib.suppress(ValueError, IntegrityError):
        if not target.startswith("p2ptrain:"):
            found = bytes.fromhex(target)
        else:
            found = mark(from_bytes(Invite, SwarmLink.parse(target).invite).key)
    if len(found) != 16:
        raise UsageError(f"{target[:80]!r}: give an invite link, the 32 digits of an invite's id, or a peer's id")
    return found
