"""Signed, bounded records of peers in the directory, and their validation.

A sealed record is canonical msgpack ``[body, proof]``. The body holds version, kind, swarm, peer, sequence, expiry and
payload; the proof is the peer's signature over the body. The payload stays untrusted: `PeerRecord.from_payload`
validates it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from p2ptrain.buffers import Bounded
from p2ptrain.errors import IntegrityError
from p2ptrain.hashing import canonical_bytes
from p2ptrain.network.admission import MAX_CREDENTIAL_BYTES, MAX_REVOCATION_BYTES
from p2ptrain.network.records.evaluation import Evaluation, PrivacyLoss
from p2ptrain.network.records.serving import ServingReport
from p2ptrain.network.schema import (
    MAX_NUMBER,
    Amount,
    Count,
    Hash,
    Message,
    Number,
    from_bytes,
    from_wire,
    to_bytes,
    to_wire,
)
from p2ptrain.signing import Signer

MAX_LIFETIME_SECONDS = 600.0
"""Longest accepted time to expiry; also bounds how far a publisher's clock may be ahead."""
MAX_RECORD_BYTES = 4096
MAX_PAYLOAD_BYTES = 3328
"""Of a peer's record; < `MAX_RECORD_BYTES` by key, signature and the other fields of the body."""
NUM_SHARDS = 8
"""Directory keys of a swarm; each record lies under one of them."""
RECORD_VERSION = 1
RECORD_KIND = "peer"
MAX_REPORTS = 8
MAX_DOUBTS = 8
MAX_STAGES = 16
MAX_NOTE_CHARS = 200
MAX_ADDRESSES = 16
MAX_ADDRESS_CHARS = 512
ROLES = ("bootstrap", "trainer", "stage", "server", "monitor", "client")
STATES = ("starting", "serving", "syncing", "training", "paused", "resting", "draining")
REACHABILITIES = ("direct", "relay", "unknown")
Role = Annotated[str, Meta(pattern=f"^({'|'.join(ROLES)})$")]
State = Annotated[str, Meta(pattern=f"^({'|'.join(STATES)})$")]
Reachability = Annotated[str, Meta(pattern=f"^({'|'.join(REACHABILITIES)})$")]
Name = Annotated[str, Meta(max_length=64)]
Version = Annotated[str, Meta(max_length=32)]
Note = Annotated[str, Meta(max_length=MAX_NOTE_CHARS)]
Address = Annotated[str, Meta(max_length=MAX_ADDRESS_CHARS)]
CredentialBytes = Annotated[bytes, Meta(max_length=MAX_CREDENTIAL_BYTES)]
RevocationBytes = Annotated[bytes, Meta(max_length=MAX_REVOCATION_BYTES)]
Addresses = Annotated[tuple[Address, ...], Meta(max_length=MAX_ADDRESSES)]
_CONTEXT = b"p2ptrain record\0"
_GUARD_CACHE = 4096


class _SealedRecord(Message, frozen=True, array_like=True, forbid_unknown_fields=True):
    body: bytes
    proof: bytes


class OpenedRecord(Message, frozen=True, forbid_unknown_fields=True):
    """The body of a sealed record.

    Attributes:
        kind: `RECORD_KIND`; others are of other versions.
        swarm: The manifest's digest, 32 bytes.
        sequence: Grows with each record of this peer and kind.
        expires_at: In seconds since the epoch.
        payload: Plain msgpack values, not validated.
    """

    version: Count
    kind: Annotated[str, Meta(max_length=64)]
    swarm: Annotated[bytes, Meta(max_length=64)]
    peer: Annotated[str, Meta(max_length=128)]
    sequence: Count
    expires_at: Amount
    payload: dict[str, Any]


def shard_of(peer: str) -> int:
    return hashlib.sha256(peer.encode()).digest()[0] % NUM_SHARDS


def peers_key(swarm: bytes, shard: int) -> str:
    """Return the directory key of one shard of a swarm's records; the subkey is the peer id."""
    return f"p2ptrain/{swarm.hex()}/peers/{shard}"


def seal_record(swarm: bytes, payload: dict[str, Any], sequence: int, expires_at: float, signer: Signer) -> bytes:
    """Sign a payload (plain msgpack values with str keys) as this peer's record; arguments as in `OpenedRecord`.

    Raises `ValueError` if the record is larger than `MAX_RECORD_BYTES`, or an argument is out of range.
    """
    if len(swarm) != 32 or not 0 <= sequence < 1 << 63:
        raise ValueError("swarm has 32 bytes, and sequence is in [0, 2**63)")
    opened = OpenedRecord(RECORD_VERSION, RECORD_KIND, swarm, signer.peer_id, sequence, float(expires_at), payload)
    body = to_bytes(opened)
    sealed = to_bytes(_SealedRecord(body, signer.sign(_CONTEXT + body)))
    if len(sealed) > MAX_RECORD_BYTES:
        raise ValueError(f"the record has {len(sealed)} bytes, and at most {MAX_RECORD_BYTES} are allowed")
    return sealed


def open_record(data: bytes, swarm: bytes, verifier: Signer) -> OpenedRecord:
    """Verify a sealed record and return its content.

    The caller compares ``expires_at`` with its clock. ``verifier`` is any signer with the swarm's type of key. Raises
    `IntegrityError` if the record is oversized, malformed, of another kind or swarm, or not signed by its peer.
    """
    if len(data) > MAX_RECORD_BYTES:
        raise IntegrityError(f"a record of {len(data)} bytes is larger than {MAX_RECORD_BYTES}: ignored")
    try:
        sealed = from_bytes(_SealedRecord, data)
        opened = from_bytes(OpenedRecord, sealed.body)
    except IntegrityError as error:
        raise IntegrityError(f"a record cannot be parsed ({error}): ignored") from error
    if opened.version != RECORD_VERSION:
        raise IntegrityError(f"a record has version {opened.version}, this peer reads {RECORD_VERSION}: ignored")
    if opened.swarm != swarm or opened.kind != RECORD_KIND:
        raise IntegrityError("a record belongs to another swarm or is of another kind: ignored")
    if not verifier.verify(opened.peer, _CONTEXT + sealed.body, sealed.proof):
        raise IntegrityError(f"a record of peer {opened.peer[-8:]} is not signed by that peer: ignored")
    return opened


class RecordGuard:
    """Checks sealed records of one swarm, each distinct one once. The caller counts ``refused``."""

    def __init__(self, swarm: bytes, verifier: Signer, now: Callable[[], float]) -> None:
        self.refused = 0
        self._swarm = swarm
        self._verifier = verifier
        self._now = now
        self._checked = Bounded[bytes, tuple[str, float] | IntegrityError](_GUARD_CACHE)

    def check(self, value: bytes) -> tuple[str, float]:
        """Return a record's signer and expiry; raise `IntegrityError` if the record is invalid or lives too long."""
        fingerprint = hashlib.sha256(value).digest()
        found = self._checked[fingerprint] = self._checked.get(fingerprint) or self._open(value)
        if isinstance(found, IntegrityError):
            raise IntegrityError(str(found))
        if found[1] > self._now() + MAX_LIFETIME_SECONDS:
            raise IntegrityError("a record claims to live too long: ignored")
        return found

    def _open(self, value: bytes) -> tuple[str, float] | IntegrityError:
        try:
            opened = open_record(value, self._swarm, self._verifier)
        except IntegrityError as error:
            return IntegrityError(str(error))  # The original one would keep the frames and all that was parsed.
        return opened.peer, opened.expires_at


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
        lineage_full, lineage_returned: See `PeerRecord`.
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
    lineage_full: Count = 0
    lineage_returned: Count = 0


Doubts = Annotated[tuple[Annotated[str, Meta(max_length=64)], ...], Meta(max_length=MAX_DOUBTS)]
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
        lineage_full: Round of its newest head that two thirds of its voters signed.
        lineage_returned: Voters of that head on the rosters since; 0 if no round closed without the others.
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
        credential: Admits the peer; see `p2ptrain.network.admission`.
        revocations: The organizer's newest list, in a seed's record.
        doubts: Peers whose work this peer's audits should have proved, and did not; see `p2ptrain.training.worth`.
        banned: Peers that its lineage's members have banned, by their evidence.
        evaluation: Its last measurement on its own held-out data, in a private swarm.
        privacy: Its loss of privacy so far; None without differential privacy.
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
    lineage_full: Count = 0
    lineage_returned: Count = 0
    failovers: Count = 0
    next_stage: Count | None = None
    serving: ServingReport | None = None
    credential: CredentialBytes = b""
    revocations: RevocationBytes = b""
    doubts: Doubts = ()
    banned: Doubts = ()
    evaluation: Evaluation | None = None
    privacy: PrivacyLoss | None = None

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
                    lineage_tokens=stage.lineage_tokens, lineage_full=stage.lineage_full,
                    lineage_returned=stage.lineage_returned,
                )  # fmt: skip
        return None

    def to_payload(self, max_bytes: int = MAX_PAYLOAD_BYTES) -> dict[str, Any]:
        """Return plain values for `seal_record`, cut to their bounds, with non-finite numbers as 0 or None.

        A payload above ``max_bytes`` loses the oldest reports, then addresses, the note and the serving report.
        """
        diverged = self.diverged or (self.loss is not None and not math.isfinite(self.loss))
        within = replace(
            self,
            name=self.name[:64],
            note=self.note[:MAX_NOTE_CHARS],
            addresses=tuple(each for each in self.addresses if len(each) <= MAX_ADDRESS_CHARS)[:MAX_ADDRESSES],
            diverged=diverged,
            loss=None if diverged or self.loss is None else max(-MAX_NUMBER, min(MAX_NUMBER, self.loss)),
            tokens_per_second=self.tokens_per_second if math.isfinite(self.tokens_per_second) else 0.0,
            last_rounds=tuple(
                replace(report, reason=report.reason[:MAX_NOTE_CHARS]) for report in self.last_rounds[-MAX_REPORTS:]
            ),
            stages=self.stages[:MAX_STAGES],
            doubts=self.doubts[:MAX_DOUBTS],
            banned=self.banned[:MAX_DOUBTS],
        )
        values: dict[str, Any] = to_wire(within)
        del values["peer"]
        while len(canonical_bytes(values)) > max_bytes and _shorten(values):
            pass
        return values

    @classmethod
    def from_payload(cls, peer: str, payload: dict[str, Any]) -> PeerRecord:
        """Return the record of an untrusted payload; raise `IntegrityError` if it is malformed."""
        try:
            return from_wire(cls, {**payload, "peer": peer})
        except IntegrityError as error:
            raise IntegrityError(f"the record of peer {peer[-8:]} is malformed ({error}): ignored") from error


def _shorten(payload: dict[str, Any]) -> bool:
    """Drop the part of a payload that readers miss least; False if nothing is left to drop."""
    if len(payload["last_rounds"]) > 1:
        payload["last_rounds"] = payload["last_rounds"][1:]
    elif len(payload["addresses"]) > 2:
        payload["addresses"] = payload["addresses"][:-1]
    elif payload["note"]:
        payload["note"] = ""
    elif payload["last_rounds"]:
        payload["last_rounds"] = ()
    elif payload["serving"]:
        payload["serving"] = None
    else:
        return False
    return True


@dataclass(frozen=True)
class Sighting:
    """A peer's record and its publication time, in seconds since the epoch."""

    record: PeerRecord
    at: float


@dataclass(frozen=True)
class Look:
    """The records of a swarm at one moment, in seconds since the epoch.

    Attributes:
        sightings: One per peer; None if the directory did not answer.
        rejected: Invalid records dropped since the first look.
    """

    at: float
    sightings: Sequence[Sighting] | None
    rejected: int = 0
