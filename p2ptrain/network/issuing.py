"""Passes with which the seeds of an ``open`` swarm let newcomers in, few of each network (`AdmissionSpec`).

A newcomer solves the swarm's puzzle, and asks the seeds of its link. Its pass counts for `PASS_SECONDS`, and it asks
again halfway. So a peer that left makes room for another one of its network. Each seed counts for itself.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Annotated

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from msgspec import Meta

from p2ptrain.disk import replace_file
from p2ptrain.errors import ConfigError, IntegrityError, NotAdmittedError
from p2ptrain.network.admission import BANNED, MAX_CREDENTIAL_BYTES, MAX_GRANTS, Admission, is_solved, signed_pass
from p2ptrain.network.rpc.endpoint import Rpc
from p2ptrain.network.schema import Count, Message, from_bytes, to_bytes
from p2ptrain.runtime import Runtime

logger = logging.getLogger(__name__)

PASS = "admission.pass"
PASSES_FILE = "passes.bin"
PASS_SECONDS = 7 * 24 * 3600
MAX_PASSES = MAX_GRANTS
IPV4_BITS, IPV6_BITS = 24, 48
MAX_REFUSAL_LENGTH = 256

Text = Annotated[str, Meta(max_length=128)]


class AskPass(Message, frozen=True):
    """Request for a pass; ``nonce`` solves the swarm's puzzle for the sender."""

    nonce: Count


class PassReply(Message, frozen=True):
    """A `Pass` of the caller in wire form, or why it gets none."""

    credential: Annotated[bytes, Meta(max_length=MAX_CREDENTIAL_BYTES)] = b""
    refusal: Annotated[str, Meta(max_length=MAX_REFUSAL_LENGTH)] = ""


class Issued(Message, frozen=True, array_like=True):
    """A pass that counts until ``expires``, in seconds since the epoch."""

    peer: Text
    network: Text
    expires: Count


class IssuedPasses(Message, frozen=True):
    """The content of `PASSES_FILE`."""

    passes: Annotated[tuple[Issued, ...], Meta(max_length=MAX_PASSES)]


def network_of(host: str) -> str:
    """Return the network of an IP address, which one owner usually holds alone."""
    address = ip_address(host)
    address = getattr(address, "ipv4_mapped", None) or address
    return str(ip_network((int(address), IPV4_BITS if address.version == 4 else IPV6_BITS), strict=False))


class PassIssuer:
    """Gives passes to newcomers, with a key that the manifest names."""

    def __init__(
        self,
        key: bytes,
        admission: Admission,
        hosts_of: Callable[[str], Awaitable[list[str]]],
        runtime: Runtime,
        folder: Path | None,
    ) -> None:
        """``hosts_of`` returns the IP addresses from which a peer is connected; ``folder`` keeps `PASSES_FILE`.

        Raises `ConfigError` if the file is damaged.
        """
        self._key = Ed25519PrivateKey.from_private_bytes(key)
        self._admission = admission
        self._hosts_of = hosts_of
        self._runtime = runtime
        self._file = folder / PASSES_FILE if folder is not None else None
        self._issued: dict[str, Issued] = {}
        self._saving = asyncio.Lock()
        if self._file is not None and self._file.is_file():
            try:
                kept = from_bytes(IssuedPasses, self._file.read_bytes())
            except IntegrityError as error:
                raise ConfigError(
                    f"{self._file} is damaged ({error}): move it away, and the peers of each network count anew"
                ) from error
            self._issued = {each.peer: each for each in kept.passes}

    def serve(self, rpc: Rpc) -> None:
        rpc.serve(PASS, AskPass, self._serve)

    async def _serve(self, peer: str, request: AskPass) -> PassReply:
        try:
            return PassReply(await self._issue(peer, request.nonce))
        except NotAdmittedError as error:
            return PassReply(refusal=str(error))

    async def _issue(self, peer: str, nonce: int) -> bytes:
        """Return a pass in wire form; raise `NotAdmittedError` if the peer gets none."""
        admission = self._admission
        if admission.admitted(peer) == BANNED:
            raise NotAdmittedError(BANNED)
        if not is_solved(admission.swarm, peer, admission.puzzle_bits, nonce):
            raise NotAdmittedError("its solution of the puzzle is wrong")
        networks = list(map(network_of, await self._hosts_of(peer)))
        now = int(self._runtime.now())
        issued = Issued(peer, self._room_for(peer, networks, now), now + PASS_SECONDS)
        self._issued[peer] = issued
        if self._file is not None:
            async with self._saving:
                content = to_bytes(IssuedPasses(tuple(self._issued.values())))
                try:
                    await self._runtime.offload(replace_file, self._file, content)
                except OSError as error:
                    logger.warning("cannot save %s (%s): a restart forgets newer passes", self._file, error.strerror)
        logger.info("peer %s of %s has a pass", peer[-8:], issued.network)
        return to_bytes(signed_pass(self._key, admission.swarm, peer, issued.expires))

    def _room_for(self, peer: str, networks: list[str], now: int) -> str:
        """Return the network of a peer in which it has a place; raise `NotAdmittedError` if there is none."""
        self._issued = {each.peer: each for each in self._issued.values() if each.expires > now}
        others, limit = [each for each in self._issued.values() if each.peer != peer], self._admission.per_network
        if len(others) >= MAX_PASSES:
            raise NotAdmittedError(f"its seed has let in {MAX_PASSES} peers, and keeps count of no more")
        if not networks:
            raise NotAdmittedError("its seed sees no address of it, for it came over a relay")
        for network in networks:
            if sum(each.network == network for each in others) < limit:
                return network
        first = min(each.expires for each in others if each.network in networks)
        raise NotAdmittedError(
            f"the {limit} places of its network {', '.join(networks)} are taken at its seed;"
            f" one is free within {(first - now) / 86400:.1f} days"
        )
