"""What every part of one peer's averaging needs."""

from __future__ import annotations

from dataclasses import dataclass

from p2ptrain.manifest import AveragingSpec
from p2ptrain.network.rpc.client import Rpc
from p2ptrain.runtime import Runtime
from p2ptrain.signing import Signer


@dataclass(frozen=True)
class PeerContext:
    """One peer in one swarm.

    Attributes:
        rpc: To reach other peers.
        runtime: Time, chance, arithmetic.
        signer: This peer's key; verifies others' signatures, too.
        swarm: The manifest's digest, 32 bytes.
        spec: Quorum, grace, deadlines, and the rule by which shares are reduced.
    """

    rpc: Rpc
    runtime: Runtime
    signer: Signer
    swarm: bytes
    spec: AveragingSpec

    @property
    def peer_id(self) -> str:
        """This peer's id."""
        return self.rpc.peer_id
