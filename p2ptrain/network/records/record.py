"""Records of peers in the directory, signed and bounded.

A sealed record is canonical msgpack ``[body, proof]``; the body holds version, kind, swarm, peer, sequence, expiry and
payload, and the proof is the peer's signature over all of it. So a record cannot be passed off as another peer's,
another kind's or another swarm's, and neither its lifetime nor its order can be changed.

What is in a payload still comes from a stranger: `p2ptrain.network.schema` holds it against `PeerRecord`.
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
    """The content of a sealed record, after its signature was checked.

    Attributes:
        peer: Who signed it.
        payload: Plain msgpack values; not checked any further.
        sequence: Grows with each record of this peer and kind.
        expires_at: Wall-clock second (since the epoch) after which it means nothing.
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
        kind: What the payload is, at most 64 characters; readers ask for the same.
        swarm: The manifest's digest, 32 bytes.
        payload: Plain msgpack values with str keys.
        sequence: Larger than in this peer's earlier records of this kind, and less than 2**63.
        expires_at: Wall-clock second at which it stops being valid.
        signer: This peer's key.

    Raises:
        ValueError: The record would be larger than 16 KiB, or an argument is out of range.
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
    """Check a sealed record and return what it says. The caller compares ``expires_at`` with its clock.

    Args:
        data: The result of `seal_record`, from anywhere.
        kind: The kind that is wanted; None takes any (for those who only store records).
        swarm: The manifest's digest, 32 bytes.
        verifier: Any signer of this swarm's kind of key.

    Raises:
        IntegrityError: It is oversized, malformed, of another kind or swarm, or not signed by the peer it names.
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
    """How one round went for one peer.

    Attributes:
        reason: Why it was not committed, or why this peer's work is not in it; else empty. At most 200 characters.
        seconds: From the start of matchmaking to the end of the round.
        members: Peers in the group.
        contributors: Peers whose contribution counted.
        contributed: Whether this peer's did.
        digest: Of the state with the round applied, 32 bytes; zeros when it was not committed.
        compute_seconds: From the end of the round before to the start of matchmaking: training, and waiting for others.
        matchmaking_seconds: Of ``seconds``, until the group stood; ``transfer_seconds``: from then to the certificate.
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
    """A peer's report of one stage that it hosts, or of embeddings that it averages beside it.

    It travels without names, which would be half of its bytes: with 64 stages a record has no room for more.

    Attributes:
        unit: The stage's number; the number of stages for embeddings that the first and the last one share.
        round: The round that it is working towards.
        lineage: Head of its chain of certificates, 32 bytes; ``digest``: of its state, 32 bytes.
        lineage_tokens: Tokens that the lineage's rounds were trained on.
        tokens_per_second: What it can do, forward and backward; 0 before it was measured.
        waiting: Passes in its queue.
        samples: Settled in this round.
        saved_round: The last that it has a checkpoint of; 0 for none. ``saved_digest``: of the state in it, 32 bytes.
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
    """A peer's record about itself, from which all others know it.

    Attributes:
        peer: Its id. Not in the payload: it comes from the signature.
        name: Chosen by its owner; at most 64 characters.
        version: Of the software; ``protocol`` is the wire protocol's.
        round: The round that it is working towards.
        lineage: Head of its chain of certificates, 32 bytes; ``digest``: of its state, 32 bytes.
        lineage_tokens: Tokens that the lineage's rounds were trained on; ``round_tokens``: in the current round, here.
        loss: Of the last batches, in nats; None before the first.
        addresses: Multiaddrs at which it can be dialled.
        started_at: Wall-clock second at which it started.
        last_rounds: How its last rounds went, oldest first, at most 8.
        direct_refusals: What it refused at its port for direct connections since it began to listen there.
        trained_tokens: Tokens of this peer's that count in committed rounds, since it started; ``trained_rounds``: in
            how many.
        diverged: Whether its loss is not a finite number any more.
        clock_skew_seconds: How far its machine's clock is ahead of the swarm's; it goes by the swarm's.
        note: One line for people, at most 200 characters.
        stages: What it hosts of a pipeline; empty where peers train the whole model.
        failovers: How often a host failed to which it sent microbatches, so that it went to others.
        next_stage: The stage that it is going to host; its own while it cannot move; None where that is open.
        serving: What it served since it started; None where it does not serve.
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
        """The name, or the end of the id where there is none."""
        return self.name or self.peer[-8:]

    def of_unit(self, unit: int) -> PeerRecord | None:
        """Return this record as one of a stage's own swarm (see `StageReport`); None where it hosts another stage."""
        for stage in self.stages:
            if stage.unit == unit:
                return replace(
                    self, role="trainer", round=stage.round, lineage=stage.lineage, digest=stage.digest,
                    lineage_tokens=stage.lineage_tokens,
                )  # fmt: skip
        return None

    def to_payload(self) -> dict[str, Any]:
        """Return plain values for `seal_record`: text cut to its bounds, numbers that are not finite as 0 or None."""
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
        """Return a peer's record.

        Args:
            peer: Who signed it (`OpenedRecord.peer`).
            payload: The result of `to_payload`, from the network.

        Raises:
            IntegrityError: A field is missing, of the wrong type, too long or out of range.
        """
        try:
            return from_wire(cls, {**payload, "peer": peer})
        except IntegrityError as error:
            raise IntegrityError(f"the record of peer {peer[-8:]} is malformed ({error}): ignored") from error
