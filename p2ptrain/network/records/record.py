"""Records: what peers say about themselves in the directory, signed and bounded.

A sealed record is canonical msgpack ``[body, proof]``; the body holds version, kind, swarm, peer, sequence, expiry and
payload, and the proof is the peer's signature over all of it. So a record cannot be passed off as another peer's,
another kind's or another swarm's, and neither its lifetime nor its order can be changed.

What is in a payload still comes from a stranger: `PeerRecord.from_payload` checks every type, length and range.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import Any

import msgpack

from p2ptrain.errors import IntegrityError
from p2ptrain.manifest import canonical_bytes
from p2ptrain.network.records import checks
from p2ptrain.network.records.serving import ServingReport
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
_CONTEXT = b"p2ptrain record\0"
_BODY_KEYS = {"version", "kind", "swarm", "peer", "sequence", "expires_at", "payload"}


@dataclass(frozen=True)
class OpenedRecord:
    """What a sealed record says, after its signature was checked.

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
    """The directory key under which the peers of a swarm publish themselves; the subkey is the peer id."""
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

    round: int
    committed: bool
    reason: str
    seconds: float
    members: int
    contributors: int
    contributed: bool = False
    digest: bytes = bytes(32)
    compute_seconds: float = 0.0
    matchmaking_seconds: float = 0.0
    transfer_seconds: float = 0.0


@dataclass(frozen=True)
class StageReport:
    """What a peer says of one stage that it hosts, or of what it averages beside it.

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

    unit: int
    round: int
    lineage: bytes
    digest: bytes
    lineage_tokens: int
    tokens_per_second: float = 0.0
    waiting: int = 0
    samples: int = 0
    saved_round: int = 0
    saved_digest: bytes = bytes(32)


@dataclass(frozen=True)
class PeerRecord:
    """What a peer publishes about itself; the status page and all others read nothing else.

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
    name: str
    version: str
    protocol: int
    role: str
    state: str
    device: str
    round: int
    lineage: bytes
    digest: bytes
    lineage_tokens: int
    round_tokens: int
    loss: float | None
    tokens_per_second: float
    bytes_sent: int
    bytes_received: int
    reachability: str
    addresses: tuple[str, ...]
    started_at: float
    last_rounds: tuple[RoundReport, ...]
    direct_refusals: int = 0
    trained_tokens: int = 0
    trained_rounds: int = 0
    diverged: bool = False
    clock_skew_seconds: float = 0.0
    note: str = ""
    stages: tuple[StageReport, ...] = ()
    failovers: int = 0
    next_stage: int | None = None
    serving: ServingReport | None = None

    def of_unit(self, unit: int) -> PeerRecord | None:
        """This record as one of the swarm that averages a stage (see `StageReport`); None where it hosts another."""
        for stage in self.stages:
            if stage.unit == unit:
                return replace(
                    self, role="trainer", round=stage.round, lineage=stage.lineage, digest=stage.digest,
                    lineage_tokens=stage.lineage_tokens,
                )  # fmt: skip
        return None

    def to_payload(self) -> dict[str, Any]:
        """Plain values for `seal_record`: text cut to its limits, and values that are not finite as 0 or None."""
        values = dict(vars(self))  # Not `asdict`, which copies deep: peers do this every few seconds.
        del values["peer"]
        values["name"] = self.name[:64]
        values["note"] = self.note[:MAX_NOTE_CHARS]
        values["addresses"] = [address for address in self.addresses if len(address) <= MAX_ADDRESS_CHARS]
        values["addresses"] = values["addresses"][:MAX_ADDRESSES]
        values["diverged"] = self.diverged or (self.loss is not None and not math.isfinite(self.loss))
        values["loss"] = None if values["diverged"] else self.loss
        values["tokens_per_second"] = self.tokens_per_second if math.isfinite(self.tokens_per_second) else 0.0
        values["last_rounds"] = [
            {**vars(report), "reason": report.reason[:MAX_NOTE_CHARS]} for report in self.last_rounds[-MAX_REPORTS:]
        ]
        # Without names, which would be half of the bytes: with 64 stages there would be no room for the rest.
        values["stages"] = [list(vars(stage).values()) for stage in self.stages[:MAX_STAGES]]
        for name, default in _ADDED_LATER.items():
            if values[name] == default:
                del values[name]
        if self.serving is not None:
            values["serving"] = self.serving.to_payload()
        return values

    @classmethod
    def from_payload(cls, peer: str, payload: dict[str, Any]) -> PeerRecord:
        """Check what a peer says about itself.

        Args:
            peer: Who signed it (`OpenedRecord.peer`).
            payload: The result of `to_payload`, from the network.

        Raises:
            IntegrityError: A field is missing or unknown, of the wrong type, too long or out of range.
        """
        known = {field.name for field in fields(cls)} - {"peer"}
        try:
            checks.expect(
                known - _ADDED_LATER.keys() <= set(payload) <= known, "fields", "differ from what this version knows"
            )
            return cls(peer=peer, **{name: _CHECKS[name](name, payload[name]) for name in payload})
        except (ValueError, TypeError, KeyError) as error:
            raise IntegrityError(f"the record of peer {peer[-8:]} is malformed ({error}): ignored") from error


def _stage(name: str, value: Any) -> int | None:
    return None if value is None else checks.count(name, value)


def _loss(name: str, value: Any) -> float | None:
    return None if value is None else checks.number(name, value)


def _addresses(name: str, value: Any) -> tuple[str, ...]:
    checks.expect(
        isinstance(value, list) and len(value) <= MAX_ADDRESSES, name, f"is not a list of up to {MAX_ADDRESSES}"
    )
    return tuple(checks.text(MAX_ADDRESS_CHARS)(name, address) for address in value)


def _reports(name: str, value: Any) -> tuple[RoundReport, ...]:
    checks.expect(isinstance(value, list) and len(value) <= MAX_REPORTS, name, f"is not a list of up to {MAX_REPORTS}")
    reports = []
    for report in value:
        checks.expect(isinstance(report, dict) and set(report) == set(_REPORT_CHECKS), name, "holds something else")
        reports.append(RoundReport(**{key: check(key, report[key]) for key, check in _REPORT_CHECKS.items()}))
    return tuple(reports)


def _stages(name: str, value: Any) -> tuple[StageReport, ...]:
    checks.expect(isinstance(value, list) and len(value) <= MAX_STAGES, name, f"is not a list of up to {MAX_STAGES}")
    stages = []
    for stage in value:
        if isinstance(stage, dict):  # As peers sent it that could not say what they saved.
            checks.expect(set(stage) == set(_FIRST_STAGE_FIELDS), name, "holds something else")
            stage = [stage[key] for key in _FIRST_STAGE_FIELDS]
        is_good = isinstance(stage, list) and len(_FIRST_STAGE_FIELDS) <= len(stage) <= len(_STAGE_CHECKS)
        checks.expect(is_good, name, "holds something else")
        checked = zip(_STAGE_CHECKS.items(), stage, strict=False)
        stages.append(StageReport(**{key: check(key, each) for (key, check), each in checked}))
    checks.expect(len({stage.unit for stage in stages}) == len(stages), name, "names a stage twice")
    return tuple(stages)


_STAGE_CHECKS: dict[str, Callable[[str, Any], Any]] = {
    "unit": checks.count,
    "round": checks.count,
    "lineage": checks.digest,
    "digest": checks.digest,
    "lineage_tokens": checks.count,
    "tokens_per_second": checks.amount,
    "waiting": checks.count,
    "samples": checks.count,
    "saved_round": checks.count,
    "saved_digest": checks.digest,
}
_FIRST_STAGE_FIELDS = tuple(_STAGE_CHECKS)[:8]
"""Those before ``saved_round``, which every version sends."""
_REPORT_CHECKS: dict[str, Callable[[str, Any], Any]] = {
    "round": checks.count,
    "committed": checks.boolean,
    "reason": checks.text(MAX_NOTE_CHARS),
    "seconds": checks.amount,
    "members": checks.count,
    "contributors": checks.count,
    "contributed": checks.boolean,
    "digest": checks.digest,
    "compute_seconds": checks.amount,
    "matchmaking_seconds": checks.amount,
    "transfer_seconds": checks.amount,
}
_CHECKS: dict[str, Callable[[str, Any], Any]] = {
    "name": checks.text(64),
    "version": checks.text(32),
    "protocol": checks.count,
    "role": checks.one_of(ROLES),
    "state": checks.one_of(STATES),
    "device": checks.text(64),
    "round": checks.count,
    "lineage": checks.digest,
    "digest": checks.digest,
    "lineage_tokens": checks.count,
    "round_tokens": checks.count,
    "loss": _loss,
    "tokens_per_second": checks.amount,
    "bytes_sent": checks.count,
    "bytes_received": checks.count,
    "reachability": checks.one_of(REACHABILITIES),
    "addresses": _addresses,
    "started_at": checks.amount,
    "last_rounds": _reports,
    "direct_refusals": checks.count,
    "trained_tokens": checks.count,
    "trained_rounds": checks.count,
    "diverged": checks.boolean,
    "clock_skew_seconds": checks.number,
    "note": checks.text(MAX_NOTE_CHARS),
    "stages": _stages,
    "failovers": checks.count,
    "next_stage": _stage,
    "serving": ServingReport.from_payload,
}
_ADDED_LATER: dict[str, int | None] = {"failovers": 0, "next_stage": None, "serving": None}
"""Sent only by those that have something to say, so that earlier versions read the records of all others."""
