"""The context that all parts of one peer's averaging share."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Protocol

from p2ptrain.averaging.grouping.membership import Membership
from p2ptrain.averaging.masking.keys import MaskKeys
from p2ptrain.averaging.protocol.anchors import AnchorBook
from p2ptrain.averaging.protocol.ballots import Ballots, SeenVotes
from p2ptrain.averaging.protocol.certificate import Certificate, Head, genesis
from p2ptrain.averaging.protocol.table import NO_MEMBERS, Table, founding_table, stands
from p2ptrain.errors import IntegrityError
from p2ptrain.manifest import MAX_ANCHOR_KEYS, AveragingSpec, Manifest, SecureAggregationSpec
from p2ptrain.network.rpc.endpoint import Rpc
from p2ptrain.runtime import Runtime
from p2ptrain.signing import Signer


@dataclass(frozen=True)
class Sending:
    """Parts of a vector that are about to leave in an attempt at a round.

    Attributes:
        level: Of the tree; above 0 the vector is the mean of a group, and not this peer's own.
        values: Length of the vector.
        codec: Name of the parts' codec.
        weight: Of the vector, as the ticket tells it.
        receivers: Peers to which values of it may be shown: owners of shares, or all members if they see parts.
    """

    round: int
    level: int
    values: int
    codec: str
    weight: int
    receivers: tuple[str, ...]


class SendingLog(Protocol):
    """A peer's log of the parts that leave it; each call may block on a disk."""

    def sending(self, sending: Sending) -> None:
        """Note parts before their first byte leaves; they stay if this raises."""

    def sent(self, sending: Sending, parts: Mapping[int, memoryview]) -> None:
        """Note which of them left complete, encoded, by share."""


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


def founding_of(manifest: Manifest) -> Table:
    """Return the member table before the first round of a manifest's swarm, and of each of its stages."""
    return founding_table(manifest.founders, is_open=manifest.admission.mode == "open")


def ballots_in(folder: Path | None, swarm: bytes) -> Ballots:
    """Return a peer's votes in a swarm or one of its units, kept in ``folder`` if there is one.

    Raises:
        IntegrityError: The file is damaged.
    """
    return Ballots(folder / f"votes-{swarm.hex()[:16]}" if folder is not None else None)


@dataclass(frozen=True)
class PeerContext:
    """One peer in one swarm.

    Attributes:
        signer: Also verifies other peers' signatures.
        swarm: The manifest's digest, 32 bytes.
        founding: The member table before the first round.
        ballots: This peer's votes.
        seen_votes: Those of others.
        sending_log: Of the parts that leave this peer; None if none is kept.
        secure_aggregation: How contributions are masked; None if they are not.
        participation: Share of the members that are drawn for a round.
    """

    rpc: Rpc
    runtime: Runtime
    signer: Signer
    swarm: bytes
    spec: AveragingSpec
    membership: Membership
    owner: Owner = field(default_factory=Unconcerned)
    founding: Table = NO_MEMBERS
    ballots: Ballots = field(default_factory=Ballots)
    seen_votes: SeenVotes = field(default_factory=SeenVotes)
    sending_log: SendingLog | None = None
    secure_aggregation: SecureAggregationSpec | None = None
    participation: float = 1.0

    @cached_property
    def mask_keys(self) -> MaskKeys | None:
        """The secrets behind this peer's tickets; None without secure aggregation."""
        spec = self.secure_aggregation
        return MaskKeys(spec, self.runtime.random, self.rpc.peer_id) if spec is not None else None

    @cached_property
    def anchors(self) -> AnchorBook:
        """This peer's anchors, kept in the runtime's folder if there is one; raise `IntegrityError` if damaged.

        Unless the manifest names keys, those of founders count among strangers. Friends may all restart from
        checkpoints that are older than an anchor, and go on.
        """
        spec, folder = self.spec, self.runtime.scratch
        founders = sorted(self.founding.electorate) if self.founding.is_open else []
        path = folder / f"anchors-{self.swarm.hex()[:16]}" if folder is not None else None
        keys, read = spec.anchors or founders[:MAX_ANCHOR_KEYS], self.any_certificate
        return AnchorBook(self.swarm, self.signer, read, keys, spec.anchor_quorum, spec.anchor_rounds, path)

    def genesis(self, digest: bytes) -> Head:
        """Return the head of a new lineage, whose initial state has this digest."""
        return genesis(self.swarm, digest, self.founding)

    def undrawn(self, head: Head) -> frozenset[str]:
        """Return the members that are not drawn for the round after a head, as all its holders compute them."""
        return head.table.undrawn(head.lineage, self.participation, self.spec.min_peers)

    def sitting_out(self, head: Head, there: Collection[str] = ()) -> frozenset[str]:
        """Return the `undrawn`; nobody, if too few of the others are ``there``, by default in this peer's view."""
        if not (undrawn := self.undrawn(head)):
            return undrawn
        there = there or {self.rpc.peer_id, *self.membership.alive_trainers()}
        return undrawn if stands(head.table.leading - undrawn, there, self.spec.min_peers) else frozenset()

    def certificate(self, raw: bytes) -> Certificate:
        """Return a certificate in wire form, which may come from anybody, with its signatures verified.

        Whether it counts depends on the lineage: see `Table.check`.

        Raises:
            IntegrityError: It is malformed, of another swarm, without a majority, breaks the manifest's bounds, or
                belongs to a lineage that parts from the newest anchor's there.
        """
        certificate = self.any_certificate(raw)
        if self.anchors.parts(certificate):
            raise IntegrityError("a certificate leads past the newest anchor on another lineage")
        return certificate

    def any_certificate(self, raw: bytes) -> Certificate:
        """Return a certificate that may also be of a lineage without the newest anchor; raise as `certificate`."""
        certificate = Certificate.from_bytes(raw, self.swarm, self.signer)
        certificate.body.check_allowed(self.spec)
        self.seen_votes.add(certificate.body, certificate.proofs)
        return certificate
