"""A newcomer's first contact: the manifest, from the peers that its link names, and its own credential."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from msgspec import Meta

from p2ptrain.disk import replace_file
from p2ptrain.errors import (
    BootstrapError,
    DeadlineError,
    IncompatibleError,
    IntegrityError,
    ManifestError,
    NotAdmittedError,
    NotListeningError,
    PeerError,
    PeerRefusedError,
    ProtocolError,
    WrongPeerError,
)
from p2ptrain.manifest import MAX_MANIFEST_BYTES, Manifest, SignedManifest
from p2ptrain.network.admission import BANNED, Admission, Credential, Invite, signed_pass, solve
from p2ptrain.network.issuing import PASS, AskPass, PassIssuer, PassReply
from p2ptrain.network.link import SwarmLink
from p2ptrain.network.records.record import PeerRecord
from p2ptrain.network.rpc.endpoint import OTHER_PROTOCOL, OTHER_SWARM, Rpc
from p2ptrain.network.schema import Message, Nothing, from_bytes, to_bytes
from p2ptrain.network.transport import Transport
from p2ptrain.node.options import PeerOptions
from p2ptrain.signing import Signer

logger = logging.getLogger(__name__)

MANIFEST = "manifest"
CONNECT_SECONDS = 30.0
LISTEN_SECONDS = 6.0  # of `CONNECT_SECONDS`, while nothing listens; two timeouts of a TCP probe, or a seed's restart
FIRST_DIAL_SECONDS = 5.0
MANIFEST_SECONDS = 10.0
PAUSE_SECONDS = 0.5
REVOCATION_SECONDS = 2.0  # between looks at the organizer's file
PASS_ANSWER_SECONDS = 10.0
RENEW_SECONDS = 60.0  # least time between requests for another pass; < `issuing.PASS_SECONDS`
CREDENTIAL_FILE = "credential.bin"
"""Name of a peer's pass, or of its solution of the puzzle, in its run directory."""
MAX_REPLY_BYTES = 2 * MAX_MANIFEST_BYTES


class ManifestReply(Message, frozen=True):
    """A signed manifest, which `SignedManifest.from_bytes` verifies."""

    manifest: Annotated[bytes, Meta(max_length=MAX_MANIFEST_BYTES)]


def serve_manifest(rpc: Rpc, signed: SignedManifest) -> None:
    async def serve(peer: str, request: Nothing) -> ManifestReply:
        return ManifestReply(signed.to_bytes())

    rpc.serve(MANIFEST, Nothing, serve)


async def ask_for_manifest(
    transport: Transport, rpc: Rpc, addresses: Sequence[str], verifier: Signer
) -> SignedManifest:
    """Fetch the swarm's manifest from any peer at ``addresses``; retry all of them for `CONNECT_SECONDS`.

    Give up after `LISTEN_SECONDS` if no peer takes a TCP connection by then.

    Raises:
        BootstrapError: No peer answers, or other peers than the link's hold the addresses.
        ManifestError: A peer sent another manifest than the link's, or all peers belong to other swarms.
        IncompatibleError: All peers speak another protocol.
    """
    loop = asyncio.get_running_loop()
    by_peer: dict[str, list[str]] = {}
    for address in addresses:
        by_peer.setdefault(address.rpartition("/")[2], []).append(address)
    deadline = loop.time() + CONNECT_SECONDS
    failure: Exception | None = None
    patience = FIRST_DIAL_SECONDS
    while True:
        failures: list[PeerError | DeadlineError] = []
        for of_peer in by_peer.values():
            seconds = max(FIRST_DIAL_SECONDS, min(patience, deadline - loop.time()))
            try:
                peer = await transport.connect(of_peer, seconds)
                return await _ask(rpc, peer, verifier)
            except (PeerError, DeadlineError) as error:
                failure = failure if isinstance(failure, WrongPeerError) else error
                failures.append(error)
        refusals = [error for error in failures if isinstance(error, PeerRefusedError | WrongPeerError)]
        if refusals and len(refusals) == len(by_peer):
            _raise_if_final(refusals)
        left = deadline - loop.time()
        if all(isinstance(error, NotListeningError) for error in failures):
            left -= CONNECT_SECONDS - LISTEN_SECONDS
        if left <= 0:
            break
        if patience == FIRST_DIAL_SECONDS:
            logger.warning("nobody answers yet (%s): asking for another %.0f s", failure, left)
        patience *= 2  # A retry dials from the start, and some peers answer seconds late.
        await asyncio.sleep(PAUSE_SECONDS)
    shown = ", ".join(addresses[:3]) or "no address"
    raise BootstrapError(
        f"none of the swarm's known peers answers ({shown}): {failure}. Check that the bootstrap peer runs and "
        "that this machine can reach it, and try again; or ask the organizer for a new link"
    )


async def _ask(rpc: Rpc, peer: str, verifier: Signer) -> SignedManifest:
    try:
        reply = await rpc.call(
            peer, MANIFEST, Nothing(), ManifestReply, MANIFEST_SECONDS, max_reply_bytes=MAX_REPLY_BYTES
        )
    except ProtocolError as error:
        raise ManifestError("a peer sent something else than a manifest: ask the organizer for a link") from error
    return SignedManifest.from_bytes(reply.manifest, rpc.swarm, verifier)


def _raise_if_final(failures: Sequence[PeerRefusedError | WrongPeerError]) -> None:
    """Raise if a retry cannot help, given the failures at all known addresses."""
    wrong = [failure for failure in failures if isinstance(failure, WrongPeerError)]
    reasons = [failure.reason for failure in failures if isinstance(failure, PeerRefusedError)]
    are_of_others = all(reason.startswith(OTHER_SWARM) for reason in reasons)
    if wrong and are_of_others:
        raise BootstrapError(
            f"the address of the link is held by peer {wrong[0].holder}, and the link names {wrong[0].peer}: "
            "ask the organizer for a new link"
        )
    if are_of_others:
        raise ManifestError(
            "the peers that the link names do not know its swarm: the link was changed, or the organizer started "
            "another swarm; ask for a new link"
        )
    if all(reason.startswith(OTHER_PROTOCOL) for reason in reasons):
        raise IncompatibleError(
            f"the swarm refuses this version ({reasons[0]}): install the version that the swarm runs"
        )


def is_for_all(invite: bytes) -> bool:
    """True if a link's invite admits each peer that holds it; False for the pass of one peer, or for none.

    Raises `NotAdmittedError` if it is damaged.
    """
    if not invite:
        return False
    try:
        return isinstance(from_bytes(Credential, invite), Invite)
    except IntegrityError as error:
        raise NotAdmittedError("the link's invite is damaged: copy the whole link") from error


def credential_at_hand(admission: Admission, peer: str, invite: bytes, run_dir: Path | None) -> tuple[bytes, str]:
    """Return a credential that admits a peer, and an empty text; or none, and why the peer is not admitted.

    ``invite`` is the link's, with which a peer signs its own pass, or a pass. An earlier credential is in ``run_dir``.
    """
    if not (missing := admission.admitted(peer)):
        return b"", ""
    if is_for_all(invite):
        invite = to_bytes(admission.use(from_bytes(Invite, invite), peer))
    kept = run_dir / CREDENTIAL_FILE if run_dir is not None else None
    reasons = []
    for credential in filter(None, (invite, kept.read_bytes() if kept is not None and kept.is_file() else b"")):
        reasons.append(admission.admitted(peer, credential))
        if not reasons[-1]:
            return credential, ""
    return b"", next(iter(reasons), missing)


def what_to_do(admission: Admission, peer: str, reason: str) -> str:
    """Return the message of a `NotAdmittedError`: why the swarm does not admit a peer, and the remedy."""
    link = "an invite link (p2ptrain://…invite=…), or for " if admission.mode == "invite" else ""
    remedy = (
        "only its organizer can take that back"
        if reason == BANNED
        else f"ask its organizer for {link}a pass, which 'p2ptrain invite DIR --peer {peer}' makes"
    )
    return f"the swarm does not admit this peer: {reason}; {remedy}"


class Entry:
    """One peer's own admission to the swarm of a manifest.

    Attributes:
        admission: Decides who is in the swarm.
        dismissed: Resolves to the reason when the swarm admits this peer no longer.
    """

    def __init__(self, manifest: Manifest, rpc: Rpc, options: PeerOptions, contacts: Sequence[str]) -> None:
        """``contacts`` are the peers that the link and earlier runs name."""
        self.admission = Admission(manifest, rpc.runtime.now)
        self.dismissed: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        self._peer = rpc.peer_id
        self._rpc = rpc
        self._options = options
        self._contacts = tuple(dict.fromkeys((*manifest.founders, *contacts)))  # The founder is usually the seed.

    async def enter(self, link: SwarmLink | None) -> bytes:
        """Return the invite for links to others; `Rpc` shows this peer's credential from now on.

        The credential is kept in the run directory. Raises `NotAdmittedError` if nothing admits this peer.
        """
        invite = (link.invite if link is not None else b"") or self._options.invite
        credential, reason = credential_at_hand(self.admission, self._peer, invite, self._options.run_dir)
        if reason and self.admission.mode == "open":
            credential, reason = await self._earn()
        if reason:
            raise NotAdmittedError(what_to_do(self.admission, self._peer, reason))
        self._use(credential)
        return invite if is_for_all(invite) else b""

    def issue_passes(self, hosts_of: Callable[[str], Awaitable[list[str]]]) -> None:
        """Serve passes to newcomers, if this peer is a seed with the key for it; ``hosts_of`` as of `PassIssuer`."""
        options = self._options
        if options.issuer and self.admission.per_network:
            PassIssuer(options.issuer, self.admission, hosts_of, self._rpc.runtime, options.run_dir).serve(self._rpc)

    def _use(self, credential: bytes) -> None:
        self._rpc.credential = credential
        if credential and self._options.run_dir is not None:
            replace_file(self._options.run_dir / CREDENTIAL_FILE, credential)

    async def _earn(self) -> tuple[bytes, str]:
        """Solve the puzzle of an ``open`` swarm, and ask its seeds for a pass if it needs one.

        Returns:
            As `credential_at_hand`.
        """
        admission = self.admission
        if admission.per_network and self._options.issuer:  # A seed lets itself in.
            key = Ed25519PrivateKey.from_private_bytes(self._options.issuer)
            credential = to_bytes(signed_pass(key, admission.swarm, self._peer))
            return credential, admission.admitted(self._peer, credential)
        logger.info("solving the swarm's puzzle of %d bits, once", admission.puzzle_bits)
        solution = await self._rpc.runtime.offload(solve, admission.swarm, self._peer, admission.puzzle_bits)
        credential, contributes = to_bytes(solution), self._options.role != "client"
        if not (admission.per_network and contributes):
            return credential, admission.admitted(self._peer, credential, contributes=contributes)
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CONNECT_SECONDS):
                while True:
                    if answer := await self._ask_for_pass(solution.nonce):
                        return answer
                    await asyncio.sleep(PAUSE_SECONDS)
        return b"", "none of the swarm's seeds answers"

    async def _ask_for_pass(self, nonce: int) -> tuple[bytes, str] | None:
        """Return a seed's answer as `credential_at_hand` does; None if no seed answers."""
        refusals = []
        for peer in self._contacts:
            try:
                reply = await self._rpc.call(peer, PASS, AskPass(nonce), PassReply, PASS_ANSWER_SECONDS)
                if not (why := reply.refusal or self.admission.admitted(self._peer, reply.credential)):
                    return reply.credential, ""
                refusals.append(why)
            except (PeerError, DeadlineError) as error:
                logger.debug("peer %s gives no pass: %s", peer[-8:], error)
        return (b"", refusals[0]) if refusals else None

    async def keep_pass(self, changed: Callable[[], None]) -> None:
        """Ask for another pass halfway through the time of each, and call ``changed``; end if this peer needs none."""
        while self.admission.per_network and (grant := self.admission.grant(self._peer)) and grant.expires:
            await asyncio.sleep(max(RENEW_SECONDS, (grant.expires - self._rpc.runtime.now()) / 2))
            credential, reason = await self._earn()
            if reason:
                logger.warning("no new pass for this peer: %s", reason)
                continue
            self._use(credential)
            changed()

    def check_later(self, *_: object) -> None:
        """Resolve ``dismissed`` if newer revocations, or an expiry, ended this peer's admission."""
        reason = self.admission.admitted(self._peer)
        if reason and not self.dismissed.done():
            self.dismissed.set_result(what_to_do(self.admission, self._peer, reason))

    def check(self) -> None:
        """Raise `NotAdmittedError` if the swarm does not admit this peer any longer."""
        self.check_later()
        if self.dismissed.done():
            raise NotAdmittedError(self.dismissed.result())

    def describe(self, record: PeerRecord) -> PeerRecord:
        """Return the record with the credential and, in a seed's, the organizer's list."""
        revocations = self.admission.signed_revocations if self._options.revocations is not None else b""
        return replace(record, credential=self._rpc.credential, revocations=revocations)

    async def follow_revocations(self, changed: Callable[[], None]) -> None:
        """Read the organizer's list whenever its file changes, and call ``changed``; end if there is no such file."""
        path = self._options.revocations
        while path is not None:
            with contextlib.suppress(OSError):
                if self.admission.learn(await asyncio.to_thread(path.read_bytes)):
                    changed()
            await asyncio.sleep(REVOCATION_SECONDS)
