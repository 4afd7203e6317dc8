"""The context that all parts of one peer's averaging share."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from p2ptrain.averaging.grouping.membership import Membership
from p2ptrain.averaging.protocol.certificate import Certificate
from p2ptrain.manifest import AveragingSpec
from p2ptrain.network.rpc.endpoint import Rpc
from p2ptrain.runtime import Runtime
from p2ptrain.signing import Signer


class Owner(Protocol):
    """The peer that averages, as its averaging sees it."""

    @property
    def is_reachable(self) -> bool:
        """True if others can open streams to this peer; otherwise it owns no share."""

    def state_changed(self) -> None:
        """Take note of another head, or of the end of a round; called on the event loop."""


@dataclass
class Unconcerned:
    """The `Owner` that others can reach, and that takes note of nothing."""

    is_reachable: bool = True

    def state_changed(self) -> None:
        """Take note of nothing."""


@dataclass(frozen=True)
class PeerContext:
    """One peer in one swarm.

    ``signer`` also verifies other peers' signatures; ``swarm`` is the manifest's digest, 32 bytes.
    """

    rpc: Rpc
    runtime: Runtime
    signer: Signer
    swarm: bytes
    spec: AveragingSpec
    membership: Membership
    owner: Owner = field(default_factory=Unconcerned)

    def certificate(self, raw: bytes) -> Certificate:
        """Return a certificate in wire form, which may come from anybody, once it is verified.

        Raises:
            IntegrityError: It is malformed, of another swarm, without a majority, or breaks the manifest's bounds.
        """
        certificate = Certificate.from_bytes(raw, self.swarm, self.signer)
        certificate.body.check_allowed(self.spec)
        return certificate
