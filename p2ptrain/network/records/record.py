"""Signed, bounded records of peers in the directory.

A sealed record is canonical msgpack ``[body, proof]``. The body holds version, kind, swarm, peer, sequence, expiry and
payload; the proof is the peer's signature over the body. The payload stays untrusted: `PeerRecord.from_payload`
validates it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Annotated, Any

import msgpack
import msgspec
from msgspec import Meta

from p2ptrain.errors import IntegrityError
from p2ptrain.manifest import canonical_bytes
from p2ptrain.network.records.serving import ServingReport
from p2ptrain.network.schema import Amount, Count, Hash, Number, from_wire, to_wire
from p2ptrain.signing import Signer

MAX_RECORD_BYTES = 16 * 1024
RECORD_VERSION = 1
MAX_KIND_CHARS = 64
MAX_REPORTS = 8
MAX_STAGES = 64
MAX_NOTE_CHARS = 200
MAX_ADDRESSES = 16
MAX_ADDRESS_CHARS = 512
ROLES = ("bootstrap", "trainer", "stage", "monitor", "client")
STATES = ("starting", "serving", "syncing", "training", "paused", "draining")
REACHABILITIES = ("direct", "relay", "unknown")
Role = Annotated[str, Meta(pattern=f"^({'|'.join(ROLES)})$")]
State = Annotated[str, Meta(pattern=f"^({'|'.join(STATES)})$")]
Reachability = Annotated[str, Meta(pattern=f"^({'|'.join(REACHABILITIES)})$")]
Name = Annotated[str, Meta(max_length=64)]
Version = Annotated[str, Meta(max_length=32)]
Note = Annotated[str, Meta(max_length=MAX_NOTE_CHARS)]
Address = Annotated[str, Meta(max_length=MAX_ADDRESS_CHARS)]
Addresses = Annotated[tuple[Address, ...], Meta(max_length=MAX_ADDRESSES)]
_CONTEXT = b"p2ptrain record\0"
_BODY_KEYS = {"version", "kind", "swarm", "peer", "sequence", "expires_at", "payload"}


@dataclass(frozen=True)
class OpenedRecord:
    """The content of a sealed record with a valid signature.

    Attributes:
        payload: Plain msgpack values, not validated.
        sequence: Grows with each record of this peer and kind.
        expires_at: In seconds since the epoch.
    """

    peer: str
    payload: dict[str, Any]
    sequence: int
    expires_at: float


def peers_key(swarm: bytes) -> str:
    """Return the directory key of a swarm's peers; the subkey is the peer id."""
    return f"p2ptrain/{swarm.hex()}/peers"


def seal_record(
    kind: str, swarm: bytes, payload: dict[str, Any], sequence: int, expires_at: float, signer: Signer
) -> bytes:
    """Sign a payload as this peer's record.

    Args:
        kind: 1 to 64 characters.
        swarm: The manifest's digest, 32 bytes.
        payload: Plain msgpack values with str keys.
        sequence: Larger than in this peer's earlier records of this kind, and less than 2**63.
        expires_at: Expiry, in seconds since the epoch.

    Raises:
        ValueError: The record is larger than `MAX_RECORD_BYTES`, or an argument is out of range.
    """
    if not 0 < len(kind) <= MAX_KIND_CHARS or len(swarm) != 32 or not 0 <= sequence < 1 << 63:
        raise ValueError("kind has 1 to 64 characters, swarm 32 bytes, and sequence is in [0, 2**63)")
    body = canonical_bytes(
        {
            "version": RECORD_VERSION,
            "kind": kind,
            "swarm": swarm,
            "peer": signer.peer_id,
            "sequence": sequence,
            "expires_at": float(expires_at),
            "payload": payload,
        }
    )
    sealed = canonical_bytes([body, signer.sign(_CONTEXT + body)])
    if len(sealed) > MAX_RECORD_BYTES:
        raise ValueError(f"the record has {len(sealed)} bytes, and at most {MAX_RECORD_BYTES} are allowed")
    return sealed


def open_record(data: bytes, kind: str | None, swarm: bytes, verifier: Signer) -> OpenedRecord:
    """Verify a sealed record and return its content. The caller compares ``expires_at`` with its clock.

    Args:
        kind: The expected kind; None accepts any.
        swarm: The manifest's digest, 32 bytes.
        verifier: Any signer with the swarm's type of key.

    Raises:
        IntegrityError: The record is oversized, malformed, of another kind or swarm, or not signed by its peer.
    """
    if len(data) > MAX_RECORD_BYTES:
        raise IntegrityError(f"a record of {len(data)} bytes is larger than {MAX_RECORD_BYTES}: ignored")
    try:
        body_bytes, proof = _unpack(data)
        body = _unpack(body_bytes)
        if not isinstance(body, dict) or set(body) != _BODY_KEYS or not isinstance(proof, bytes):
            raise ValueError("its fields differ")
        peer, payload, sequence, expires_at = (body[name] for name in ("peer", "payload", "sequence", "expires_at"))
        if not (isinstance(peer, str) and isinstance(payload, dict) and type(sequence) is int and sequence >= 0):
            raise ValueError("its fields have the wrong types")
        if not isinstance(expires_at, float) or not math.isfinite(expires_at):
            raise ValueError("its expiry is not a time")
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise IntegrityError(f"a record cannot be parsed ({error}): ignored") from error
    if body["version"] != RECORD_VERSION:
        raise IntegrityError(f"a record has version {body['version']!r}, this peer reads {RECORD_VERSION}: ignored")
    if body["swarm"] != swarm or (kind is not None and body["kind"] != kind):
        raise IntegrityError("a record belongs to another swarm or is of another kind: ignored")
    if not verifier.verify(peer, _CONTEXT + body_bytes, proof):
        raise IntegrityError(f"a record of peer {peer[-8:]} is not signed by that peer: ignored")
    return OpenedRecord(peer, payload, sequence, expires_at)


def _unpack(data: object) -> Any:
    if not isinstance(data, bytes):
        raise ValueError("not bytes")
    return msgpack.unpackb(data, raw=False, strict_map_key=True, max_ext_len=0)


@dataclass(frozen=True)
class RoundReport:
    """A peer's report of one round.

    Attributes:
        reason: Why the round was not committed, or why it lacks this peer's contribution; else empty.
        seconds: From the start of matchmaking to the end of the round.
        contributors: Peers whose contribution counted.
        contributed: True if this peer's contribution counted.
        digest: Of the state after the round, 32 bytes; zeros if the round was not committed.
        compute_seconds: From the end of the previous round to the start of matchmaking: training and waiting.
        matchmaking_seconds: The part of ``seconds`` until the group was complete.
        transfer_seconds: The part of ``seconds`` from then to the certificate.
    """

    round: Count
    committed: bool
    reason: Note
    seconds: Amount
    members: Count
    contributors: Count
    contributed: bool = False
    digest: Hash = bytes(32)
    compute_seconds: Amount = 0.0
    matchmaking_seconds: Amount = 0.0
    transfer_seconds: Amount = 0.0


class StageReport(msgspec.Struct, frozen=True, array_like=True):
    """A peer's report of one hosted stage, or of shared embeddings that it averages beside a stage.

    Encoded as an array, so that `MAX_STAGES` reports fit into a record.

    Attributes:
        unit: The stage's number; the number of stages for embeddings that the first and the last stage share.
        round: The round in progress.
        lineage: Head of the stage's chain of certificates, 32 bytes.
        digest: Of the stage's state, 32 bytes.
        lineage_tokens: Tokens of all the lineage's rounds.
        tokens_per_second: Throughput of forward and backward passes; 0 before the first measurement.
        waiting: Passes in the queue.
        samples: Settled in this round.
        saved_round: Round of the last checkpoint; 0 for none.
        saved_digest: Of the state in that checkpoint, 32 bytes.
    """

    unit: Count
    round: Count
    lineage: Hash
    digest: Hash
    lineage_tokens: Count
    tokens_per_second: Amount = 0.0
    waiting: Count = 0
    samples: Count = 0
    saved_round: Count = 0
    saved_digest: Hash = bytes(32)


RoundReports = Annotated[tuple[RoundReport, ...], Meta(max_length=MAX_REPORTS)]
StageReports = Annotated[tuple[StageReport, ...], Meta(max_length=MAX_STAGES)]


@dataclass(frozen=True)
class PeerRecord:
    """A peer's record about itself.

    Attributes:
        peer: The signer's id; not in the payload.
        protocol: Version of the wire protocol.
        round: The round in progress.
        lineage: Head of the peer's chain of certificates, 32 bytes.
        digest: Of the peer's state, 32 bytes.
        lineage_tokens: Tokens of all the lineage's rounds.
        round_tokens: This peer's tokens in the current round.
        loss: Of the last batches, in nats; None before the first batch.
        addresses: Multiaddrs.
        started_at: In seconds since the epoch.
        last_rounds: Reports of the last rounds, oldest first.
        direct_refusals: Refused direct connections since the listener started.
        trained_tokens: This peer's tokens in committed rounds, since it started.
        trained_rounds: Committed rounds with its contribution, since it started.
        diverged: True if the loss is no longer finite.
        clock_skew_seconds: The machine's clock minus the swarm's; the peer uses the swarm's.
        stages: Hosted pipeline stages; empty if peers train the whole model.
        failovers: Failovers of this peer's microbatches from a failed host to another.
        next_stage: The stage that it hosts next; its own while it cannot move; None if undecided.
    """

    peer: str
    name: Name
    version: Version
    protocol: Count
    role: Role
    state: State
    device: Name
    round: Count
    lineage: Hash
    digest: Hash
    lineage_tokens: Count
    round_tokens: Count
    loss: Number | None
    tokens_per_second: Amount
    bytes_sent: Count
    bytes_received: Count
    reachability: Reachability
    addresses: Addresses
    started_at: Amount
    last_rounds: RoundReports
    direct_refusals: Count = 0
    trained_tokens: Count = 0
    trained_rounds: Count = 0
    diverged: bool = False
    clock_skew_seconds: Number = 0.0
    note: Note = ""
    stages: StageReports = ()
    failovers: Count = 0
    next_stage: Count | None = None
    serving: ServingReport | None = None

    def __post_init__(self) -> None:
        if len({stage.unit for stage in self.stages}) < len(self.stages):
            raise ValueError("stages: a stage is named twice")

    @property
    def label(self) -> str:
        """The name, or the end of the id if the name is empty."""
        return self.name or self.peer[-8:]

    def of_unit(self, unit: int) -> PeerRecord | None:
        """Return this record as a trainer's record of one unit (see `StageReport.unit`); None if it lacks the unit."""
        for stage in self.stages:
            if stage.unit == unit:
                return replace(
                    self, role="trainer", round=stage.round, lineage=stage.lineage, digest=stage.digest,
                    lineage_tokens=stage.lineage_tokens,
                )  # fmt: skip
        return None

    def to_payload(self) -> dict[str, Any]:
        """Return plain values for `seal_record`, cut to their bounds, with non-finite numbers as 0 or None."""
        diverged = self.diverged or (self.loss is not None and not math.isfinite(self.loss))
        within = replace(
            self,
            name=self.name[:64],
            note=self.note[:MAX_NOTE_CHARS],
            addresses=tuple(each for each in self.addresses if len(each) <= MAX_ADDRESS_CHARS)[:MAX_ADDRESSES],
            diverged=diverged,
            loss=None if diverged else self.loss,
            tokens_per_second=self.tokens_per_second if math.isfinite(self.tokens_per_second) else 0.0,
            last_rounds=tuple(
                replace(report, reason=report.reason[:MAX_NOTE_CHARS]) for report in self.last_rounds[-MAX_REPORTS:]
            ),
            stages=self.stages[:MAX_STAGES],
        )
        values: dict[str, Any] = to_wire(within)
        del values["peer"]
        return values

    @classmethod
    def from_payload(cls, peer: str, payload: dict[str, Any]) -> PeerRecord:
        """Return the record of an untrusted payload; raise `IntegrityError` if it is malformed."""
        try:
            return from_wire(cls, {**payload, "peer": peer})
        except IntegrityError as error:
            raise IntegrityError(f"the record of peer {peer[-8:]} is malformed ({error}): ignored") from error
