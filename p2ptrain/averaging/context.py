"""The context that all parts of one peer's averaging share."""

from __future__ import annotations

from dataclasses import dataclass

from p2ptrain.manifest import AveragingSpec
from p2ptrain.network.rpc.endpoint import Rpc
from p2ptrain.runtime import Runtime
from p2ptrain.signing import Signer


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

    @property
    def peer_id(self) -> str:
        return self.rpc.peer_id
