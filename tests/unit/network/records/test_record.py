"""Records: sealed ones cannot be altered, and what they say is checked."""

import dataclasses
import math
from dataclasses import replace
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2ptrain.errors import IntegrityError
from p2ptrain.network.identity import Identity
from p2ptrain.network.records.record import (
    MAX_NOTE_CHARS,
    MAX_RECORD_BYTES,
    MAX_STAGES,
    PeerRecord,
    RoundReport,
    StageReport,
    open_record,
    seal_record,
)
from p2ptrain.network.schema import to_wire
from tests.support.signers import NamedSigner

SWARM, OTHER_SWARM = b"s" * 32, b"o" * 32
ALICE, BOB = NamedSigner("alice"), NamedSigner("bob")
STAGES = (
    StageReport(2, 7, b"l" * 32, b"d" * 32, 1 << 40, 1234.5, 3, 96, 5, b"s" * 32),
    StageReport(4, 7, b"m" * 32, b"e" * 32, 1 << 41),
)
STAGE_FIELDS = StageReport.__struct_fields__
NAN, INF = math.nan, math.inf


def record(**changes: Any) -> PeerRecord:
    values = PeerRecord(
        peer="alice", name="alice's laptop", version="0.1.0", protocol=1, role="trainer", state="training",
        device="cpu", round=7, lineage=b"l" * 32, digest=b"d" * 32, lineage_tokens=1 << 40, round_tokens=4096,
        loss=2.5, tokens_per_second=1234.5, bytes_sent=10, bytes_received=20, reachability="direct",
        addresses=("/ip4/127.0.0.1/tcp/1/p2p/x",), started_at=1.7e9,
        last_rounds=(
            RoundReport(6, True, "", 1.5, 3, 3, True, b"e" * 32, 4.0, 0.25, 1.25),
            RoundReport(7, False, "too few peers", 20.0, 1, 0),
        ),
        direct_refusals=4, trained_tokens=1 << 41, trained_rounds=6, clock_skew_seconds=-2.5, note="hello",
    )  # fmt: skip
    return dataclasses.replace(values, **changes)


def sealed(payload: dict[str, Any] | None = None, **changes: Any) -> bytes:
    arguments: dict[str, Any] = {"swarm": SWARM, "sequence": 3, "expires_at": 100.0, "signer": ALICE}
    return seal_record(payload={"a": 1} if payload is None else payload, **{**arguments, **changes})


def over_the_wire(sent: PeerRecord) -> PeerRecord:
    opened = open_record(sealed(sent.to_payload()), SWARM, BOB)
    return PeerRecord.from_payload(opened.peer, opened.payload)


def test_opening_inverts_sealing() -> None:
    opened = open_record(sealed({"a": [1, 2.5, None, b"x", "y"]}), SWARM, BOB)
    assert (opened.peer, opened.sequence, opened.expires_at) == ("alice", 3, 100.0)
    assert opened.payload == {"a": [1, 2.5, None, b"x", "y"]}


def test_every_changed_or_missing_byte_is_noticed() -> None:
    data = sealed()
    for position in range(len(data)):
        flipped = [data[:position] + bytes([data[position] ^ bit]) + data[position + 1 :] for bit in (1, 128)]
        for changed in (*flipped, data[:position]):
            with pytest.raises(IntegrityError):
                open_record(changed, SWARM, BOB)


@pytest.mark.parametrize(("kind", "swarm"), [("offer", SWARM), ("peer", OTHER_SWARM)])
def test_records_do_not_pass_for_another_kind_or_swarm(kind: str, swarm: bytes) -> None:
    body, _ = msgpack.unpackb(sealed())
    with pytest.raises(IntegrityError, match="another swarm or is of another kind"):
        open_record(signed({**msgpack.unpackb(body), "kind": kind, "swarm": swarm}), SWARM, BOB)


def test_a_record_in_anothers_name_is_refused() -> None:
    body, _ = msgpack.unpackb(sealed())
    forged = msgpack.packb([body, BOB.sign(b"p2ptrain record\0" + body)])
    with pytest.raises(IntegrityError, match="not signed by that peer"):
        open_record(forged, SWARM, BOB)


def signed(value: Any) -> bytes:
    body: bytes = msgpack.packb(value)
    found: bytes = msgpack.packb([body, ALICE.sign(b"p2ptrain record\0" + body)])
    return found


NONSENSE = st.recursive(
    st.none() | st.integers(-(2**40), 2**40) | st.text(max_size=5) | st.binary(max_size=5) | st.floats(),
    lambda inner: st.lists(inner, max_size=7) | st.dictionaries(st.text(max_size=8), inner, max_size=7),
    max_leaves=20,
)


@given(st.binary(max_size=400) | NONSENSE.map(signed))
def test_garbage_and_well_signed_nonsense_raise_integrity_errors_only(data: bytes) -> None:
    with pytest.raises(IntegrityError):
        open_record(data, SWARM, BOB)


def test_what_would_be_refused_is_not_sealed() -> None:
    for changes in ({"swarm": b""}, {"sequence": -1}):
        with pytest.raises(ValueError, match="swarm has 32 bytes"):
            sealed(**changes)
    with pytest.raises(ValueError, match=str(MAX_RECORD_BYTES)):
        sealed({"a": b"x" * MAX_RECORD_BYTES})
    with pytest.raises(IntegrityError, match="larger"):
        open_record(b"x" * (MAX_RECORD_BYTES + 1), SWARM, BOB)
    with pytest.raises(IntegrityError, match="expires_at"):
        open_record(sealed(expires_at=NAN), SWARM, BOB)


# Peers


@pytest.mark.parametrize(
    "sent",
    [
        record(),
        record(loss=None, last_rounds=(), addresses=(), note=""),
        record(role="stage", stages=STAGES, next_stage=3),
    ],
    ids=["trainer", "fresh", "stages"],
)
def test_a_peer_record_survives_the_wire(sent: PeerRecord) -> None:
    assert over_the_wire(sent) == sent


def test_the_largest_peer_record_fits() -> None:
    """It loses the oldest reports before anything else, and keeps the stages that it hosts."""
    report = RoundReport(2**40, False, "x" * 900, 1.5, 300, 300, True, b"e" * 32, 4.0, 0.25, 1.25)
    stages = tuple(
        StageReport(unit, 2**40, b"l" * 32, b"d" * 32, 2**62, 1e9, 2**30, 2**40, 2**40, b"s" * 32) for unit in range(70)
    )
    largest = record(
        name="n" * 99, note="n" * 900, last_rounds=(report,) * 20, stages=stages, clock_skew_seconds=-1e9,
        addresses=("/ip4/203.0.113.200/tcp/31337/p2p/" + "x" * 46 + "/p2p-circuit",) * 8,
    )  # fmt: skip
    with Identity.ephemeral() as identity:
        assert len(sealed(largest.to_payload(), signer=identity, sequence=2**62)) <= MAX_RECORD_BYTES
    parsed = over_the_wire(largest)
    assert (parsed.name, len(parsed.addresses), parsed.stages) == ("n" * 64, 2, stages[:MAX_STAGES])
    rounds = tuple(replace(report, round=number, reason="r" * MAX_NOTE_CHARS) for number in range(20))
    parsed = over_the_wire(record(last_rounds=rounds))
    assert 1 < len(parsed.last_rounds) < 8
    assert parsed.last_rounds[-1] == rounds[-1]
    assert parsed.note == "hello"
    with pytest.raises(IntegrityError, match=r"stages: .*length <= 16"):
        PeerRecord.from_payload("alice", largest.to_payload() | {"stages": to_wire(stages)})


@pytest.mark.parametrize("loss", [NAN, INF, -INF, None, 2.5])
def test_a_loss_that_is_no_number_means_that_it_diverged(loss: float | None) -> None:
    parsed = over_the_wire(record(loss=loss, tokens_per_second=INF))
    diverged = loss is not None and not math.isfinite(loss)
    assert (parsed.loss, parsed.diverged) == (None if diverged else loss, diverged)
    assert parsed.tokens_per_second == 0.0


@pytest.mark.parametrize("loss", [3e13, -3e13])
def test_a_loss_beyond_all_bounds_makes_no_record_that_others_refuse(loss: float) -> None:
    """Such as the summed squared errors of prices."""
    parsed = PeerRecord.from_payload("alice", record(loss=loss).to_payload())
    assert (parsed.loss, parsed.diverged) == (math.copysign(1e12, loss), False)


OUT_OF_BOUNDS: dict[str, tuple[Any, ...]] = {
    "round": (-1, 1.0, True, 2**63), "lineage": (b"short",), "digest": ("d" * 32,), "role": ("admin",),
    "state": (None,), "reachability": ("magic",), "loss": (NAN, "2.5"), "tokens_per_second": (INF, -1.0),
    "bytes_sent": (-5,), "direct_refusals": (-1, "3"), "name": ("x" * 65, "red\x1b[31m", "\ud800"),
    "note": ("two\nlines", "x" * 201), "addresses": (["/a"] * 17, "/ip4/1.2.3.4", [1]),
    "last_rounds": ([{"round": 1}], [[]], {}), "started_at": (None,), "trained_tokens": (-1, 1.5),
    "trained_rounds": (2**63,), "diverged": (1, None), "clock_skew_seconds": (NAN, 1e13, "0"),
    "doubts": ("e", ["x" * 65], ["a"] * 9), "banned": ("e", ["x" * 65], ["a"] * 9), "next_stage": (-1, True, "0"),
    "evaluation": (1, [], {"metric": "loss"}), "privacy": (1, [], {"epsilon": 1.0}),
    "stages": (None, {}, "stages", [1], [[]], [{}], [{"unit": 1}]),
}  # fmt: skip
OF_A_REPORT: dict[str, tuple[Any, ...]] = {
    "contributed": (1, None), "digest": (b"short", "d" * 32), "compute_seconds": (-1.0,),
    "matchmaking_seconds": (INF,), "transfer_seconds": (None, 1e19), "reason": ("two\nlines",),
}  # fmt: skip
OF_A_STAGE: dict[str, tuple[Any, ...]] = {
    "unit": (-1, "2", True), "round": (1.0, 2**63), "lineage": (b"short",), "digest": ("d" * 32,),
    "lineage_tokens": (None,), "tokens_per_second": (INF, NAN, -1.0), "waiting": (-1,), "samples": (0.5,),
    "saved_round": (-1,), "saved_digest": (b"short",),
}  # fmt: skip


@pytest.mark.parametrize(
    ("part", "name", "values"),
    [
        *((None, name, values) for name, values in OUT_OF_BOUNDS.items()),
        *(("last_rounds", name, values) for name, values in OF_A_REPORT.items()),
        *(("stages", name, values) for name, values in OF_A_STAGE.items()),
    ],
    ids=str,
)
def test_a_field_out_of_bounds_is_refused_by_name(part: str | None, name: str, values: tuple[Any, ...]) -> None:
    payload = record(stages=STAGES).to_payload()
    place: Any = STAGE_FIELDS.index(name) if part == "stages" else name
    held = payload[part][0] if part else payload
    for value in values:
        held[place] = value
        with pytest.raises(IntegrityError, match=rf"stages\[0\]\[{place}\]" if part == "stages" else name):
            PeerRecord.from_payload("alice", payload)


def test_a_missing_field_is_refused_and_one_of_a_later_version_ignored() -> None:
    payload = record().to_payload()
    assert PeerRecord.from_payload("alice", payload | {"admin": True}) == record()
    del payload["round"]
    with pytest.raises(IntegrityError, match="round"):
        PeerRecord.from_payload("alice", payload)


def test_a_payload_names_nobody_but_who_signed_it() -> None:
    assert PeerRecord.from_payload("alice", record().to_payload() | {"peer": "bob"}).peer == "alice"


def test_a_stage_that_is_named_twice_is_refused() -> None:
    payload = record(stages=STAGES).to_payload()
    payload["stages"][1][0] = payload["stages"][0][0]
    with pytest.raises(IntegrityError, match="a stage is named twice"):
        PeerRecord.from_payload("alice", payload)


def test_a_host_is_one_of_each_swarm_whose_unit_it_averages_and_of_no_other() -> None:
    hosting = record(role="stage", round=0, stages=STAGES)
    for stage in STAGES:
        seen = hosting.of_unit(stage.unit)
        assert seen is not None
        assert (seen.role, seen.state, seen.peer) == ("trainer", hosting.state, hosting.peer)
        assert (seen.round, seen.lineage) == (stage.round, stage.lineage)
        assert (seen.digest, seen.lineage_tokens) == (stage.digest, stage.lineage_tokens)
    assert hosting.of_unit(0) is None
    assert record().of_unit(0) is None
