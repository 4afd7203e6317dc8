"""Records: sealed ones cannot be altered, and what they say is checked."""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2ptrain.errors import IntegrityError
from p2ptrain.network.records.record import (
    MAX_NOTE_CHARS,
    MAX_RECORD_BYTES,
    MAX_STAGES,
    PeerRecord,
    RoundReport,
    StageReport,
    open_record,
    peers_key,
    seal_record,
)
from p2ptrain.network.schema import to_wire
from tests.support.signers import NamedSigner

SWARM, OTHER_SWARM = b"s" * 32, b"o" * 32


ALICE, BOB = NamedSigner("alice"), NamedSigner("bob")


def record(**changes: Any) -> PeerRecord:
    values = PeerRecord(
        peer="alice",
        name="alice's laptop",
        version="0.1.0",
        protocol=1,
        role="trainer",
        state="training",
        device="cpu",
        round=7,
        lineage=b"l" * 32,
        digest=b"d" * 32,
        lineage_tokens=1 << 40,
        round_tokens=4096,
        loss=2.5,
        tokens_per_second=1234.5,
        bytes_sent=10,
        bytes_received=20,
        reachability="direct",
        addresses=("/ip4/127.0.0.1/tcp/1/p2p/x",),
        started_at=1.7e9,
        last_rounds=(
            RoundReport(6, True, "", 1.5, 3, 3, True, b"e" * 32, 4.0, 0.25, 1.25),
            RoundReport(7, False, "too few peers", 20.0, 1, 0),
        ),
        direct_refusals=4,
        trained_tokens=1 << 41,
        trained_rounds=6,
        diverged=False,
        clock_skew_seconds=-2.5,
        note="hello",
    )
    return dataclasses.replace(values, **changes)


def sealed(payload: dict[str, Any] | None = None, **changes: Any) -> bytes:
    arguments: dict[str, Any] = {"kind": "peer", "swarm": SWARM, "sequence": 3, "expires_at": 100.0, "signer": ALICE}
    return seal_record(payload={"a": 1} if payload is None else payload, **{**arguments, **changes})


def test_opening_inverts_sealing() -> None:
    opened = open_record(sealed({"a": [1, 2.5, None, b"x", "y"]}), "peer", SWARM, BOB)
    assert (opened.peer, opened.sequence, opened.expires_at) == ("alice", 3, 100.0)
    assert opened.payload == {"a": [1, 2.5, None, b"x", "y"]}


def test_equal_content_gives_equal_bytes() -> None:
    assert sealed({"a": 1, "b": 2}) == sealed({"b": 2, "a": 1})


def test_every_changed_byte_is_noticed() -> None:
    data = sealed()
    for position in range(len(data)):
        for bit in (1, 128):
            changed = bytearray(data)
            changed[position] ^= bit
            with pytest.raises(IntegrityError):
                open_record(bytes(changed), "peer", SWARM, BOB)


def test_every_truncation_is_noticed() -> None:
    data = sealed()
    for length in range(len(data)):
        with pytest.raises(IntegrityError):
            open_record(data[:length], "peer", SWARM, BOB)


@pytest.mark.parametrize(("kind", "swarm"), [("offer", SWARM), ("peer", OTHER_SWARM)])
def test_records_do_not_pass_for_another_kind_or_swarm(kind: str, swarm: bytes) -> None:
    with pytest.raises(IntegrityError, match="another swarm or is of another kind"):
        open_record(sealed(), kind, swarm, BOB)


def test_a_record_in_anothers_name_is_refused() -> None:
    body, _ = msgpack.unpackb(sealed())
    forged = msgpack.packb([body, BOB.sign(b"p2ptrain record\0" + body)])
    with pytest.raises(IntegrityError, match="not signed by that peer"):
        open_record(forged, "peer", SWARM, BOB)


@given(st.binary(max_size=400))
def test_garbage_raises_integrity_errors_only(data: bytes) -> None:
    with pytest.raises(IntegrityError):
        open_record(data, "peer", SWARM, BOB)


@given(
    st.recursive(
        st.none() | st.integers(-(2**40), 2**40) | st.text(max_size=5) | st.binary(max_size=5) | st.floats(),
        lambda inner: st.lists(inner, max_size=7) | st.dictionaries(st.text(max_size=8), inner, max_size=7),
        max_leaves=20,
    )
)
def test_well_signed_nonsense_raises_integrity_errors_only(value: Any) -> None:
    body = msgpack.packb(value)
    data = msgpack.packb([body, ALICE.sign(b"p2ptrain record\0" + body)])
    with pytest.raises(IntegrityError):
        open_record(data, "peer", SWARM, BOB)


def test_size_is_bounded_on_both_sides() -> None:
    with pytest.raises(ValueError, match=str(MAX_RECORD_BYTES)):
        sealed({"a": b"x" * MAX_RECORD_BYTES})
    with pytest.raises(IntegrityError, match="larger"):
        open_record(b"x" * (MAX_RECORD_BYTES + 1), "peer", SWARM, BOB)


@pytest.mark.parametrize("changes", [{"kind": ""}, {"kind": "k" * 65}, {"swarm": b""}, {"sequence": -1}])
def test_arguments_out_of_range_are_the_callers_mistake(changes: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="1 to 64 characters"):
        sealed(**changes)


def test_expiry_must_be_a_time() -> None:
    with pytest.raises(IntegrityError, match="expires_at"):
        open_record(sealed(expires_at=float("nan")), "peer", SWARM, BOB)


def test_peer_record_survives_the_wire() -> None:
    data = sealed(record().to_payload())
    opened = open_record(data, "peer", SWARM, BOB)
    assert PeerRecord.from_payload(opened.peer, opened.payload) == record()


def test_a_fresh_peer_record_without_loss_survives() -> None:
    fresh = record(loss=None, last_rounds=(), addresses=(), note="")
    assert PeerRecord.from_payload("alice", fresh.to_payload()) == fresh


def test_the_largest_peer_record_fits() -> None:
    report = RoundReport(2**62, False, "x" * 900, 1e9, 256, 256, True, b"d" * 32, 1e9, 1e9, 1e9)
    largest = record(
        name="n" * 99, note="n" * 900, addresses=("/ip4/203.0.113.255/tcp/65535/p2p/" + "Q" * 400,) * 20,
        last_rounds=(report,) * 20, trained_tokens=2**62, trained_rounds=2**62, clock_skew_seconds=-1e9,
    )  # fmt: skip
    data = sealed(largest.to_payload())
    parsed = PeerRecord.from_payload("alice", open_record(data, "peer", SWARM, BOB).payload)
    assert len(parsed.last_rounds) == 8
    assert len(parsed.note) == MAX_NOTE_CHARS


def test_values_that_are_not_finite_never_leave() -> None:
    payload = record(loss=float("nan"), tokens_per_second=float("inf")).to_payload()
    parsed = PeerRecord.from_payload("alice", payload)
    assert parsed.loss is None
    assert parsed.diverged, "that is said instead"
    assert parsed.tokens_per_second == 0.0


@pytest.mark.parametrize("loss", [float("nan"), float("inf"), float("-inf")])
def test_a_loss_that_is_no_number_means_that_it_diverged(loss: float) -> None:
    parsed = PeerRecord.from_payload("alice", record(loss=loss).to_payload())
    assert (parsed.loss, parsed.diverged) == (None, True)


def test_a_peer_that_has_no_loss_yet_did_not_diverge() -> None:
    assert not PeerRecord.from_payload("alice", record(loss=None).to_payload()).diverged


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("round", -1),
        ("round", 1.0),
        ("round", True),
        ("round", 2**63),
        ("lineage", b"short"),
        ("digest", "d" * 32),
        ("role", "admin"),
        ("state", None),
        ("reachability", "magic"),
        ("loss", float("nan")),
        ("loss", "2.5"),
        ("tokens_per_second", float("inf")),
        ("tokens_per_second", -1.0),
        ("bytes_sent", -5),
        ("direct_refusals", -1),
        ("direct_refusals", "3"),
        ("name", "x" * 65),
        ("name", "red\x1b[31m"),
        ("note", "two\nlines"),
        ("note", "x" * 201),
        ("addresses", ["/a"] * 17),
        ("addresses", "/ip4/1.2.3.4"),
        ("addresses", [1]),
        ("last_rounds", [{"round": 1}]),
        ("last_rounds", [[]]),
        ("last_rounds", {}),
        ("started_at", None),
        ("trained_tokens", -1),
        ("trained_tokens", 1.5),
        ("trained_rounds", 2**63),
        ("diverged", 1),
        ("diverged", None),
        ("clock_skew_seconds", float("nan")),
        ("clock_skew_seconds", 1e13),
        ("clock_skew_seconds", "0"),
        ("next_stage", -1),
        ("next_stage", True),
        ("next_stage", "0"),
    ],
)
def test_a_field_out_of_bounds_is_refused_by_name(name: str, value: Any) -> None:
    payload = record().to_payload() | {name: value}
    with pytest.raises(IntegrityError, match=name):
        PeerRecord.from_payload("alice", payload)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("contributed", 1),
        ("contributed", None),
        ("digest", b"short"),
        ("digest", "d" * 32),
        ("compute_seconds", -1.0),
        ("matchmaking_seconds", float("inf")),
        ("transfer_seconds", None),
        ("transfer_seconds", 1e19),
        ("reason", "two\nlines"),
    ],
)
def test_a_field_of_a_report_out_of_bounds_is_refused_by_name(name: str, value: Any) -> None:
    payload = record().to_payload()
    payload["last_rounds"][0][name] = value
    with pytest.raises(IntegrityError, match=name):
        PeerRecord.from_payload("alice", payload)


def test_a_missing_field_is_refused_and_one_of_a_later_version_ignored() -> None:
    payload = record().to_payload()
    assert PeerRecord.from_payload("alice", payload | {"admin": True}) == record()
    del payload["round"]
    with pytest.raises(IntegrityError, match="round"):
        PeerRecord.from_payload("alice", payload)


def test_a_payload_names_nobody_but_who_signed_it() -> None:
    assert PeerRecord.from_payload("alice", record().to_payload() | {"peer": "bob"}).peer == "alice"


def test_swarms_have_keys_of_their_own() -> None:
    assert peers_key(SWARM) != peers_key(hashlib.sha256(SWARM).digest())


# Stages

STAGES = (
    StageReport(2, 7, b"l" * 32, b"d" * 32, 1 << 40, 1234.5, 3, 96, 5, b"s" * 32),
    StageReport(4, 7, b"m" * 32, b"e" * 32, 1 << 41),
)
NAMES = StageReport.__struct_fields__


def test_stages_survive_the_wire() -> None:
    hosting = record(role="stage", stages=STAGES, next_stage=3)
    opened = open_record(sealed(hosting.to_payload()), "peer", SWARM, BOB)
    assert PeerRecord.from_payload("alice", opened.payload) == hosting


def test_a_peer_hosts_sixty_four_stages_at_most_and_says_all_else_beside_them() -> None:
    many = tuple(
        StageReport(unit, 2**40, b"l" * 32, b"d" * 32, 2**62, 1e9, 2**30, 2**40, 2**40, b"s" * 32) for unit in range(70)
    )
    reports = (RoundReport(2**40, False, "x" * 200, 1.5, 300, 300, True, b"e" * 32, 4.0, 0.25, 1.25),) * 8
    addresses = ("/ip4/203.0.113.200/tcp/31337/p2p/" + "x" * 46 + "/p2p-circuit",) * 8
    sent = record(stages=many, last_rounds=reports, addresses=addresses, note="n" * 200, name="n" * 64)
    opened = open_record(sealed(sent.to_payload()), "peer", SWARM, BOB)
    assert PeerRecord.from_payload("alice", opened.payload).stages == many[:MAX_STAGES]
    payload = sent.to_payload()
    payload["stages"] = to_wire(many)
    with pytest.raises(IntegrityError, match=r"stages: .*length <= 64"):
        PeerRecord.from_payload("alice", payload)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("unit", -1),
        ("unit", "2"),
        ("unit", True),
        ("round", 1.0),
        ("round", 2**63),
        ("lineage", b"short"),
        ("digest", "d" * 32),
        ("lineage_tokens", None),
        ("tokens_per_second", float("inf")),
        ("tokens_per_second", float("nan")),
        ("tokens_per_second", -1.0),
        ("waiting", -1),
        ("samples", 0.5),
        ("saved_round", -1),
        ("saved_digest", b"short"),
    ],
)
def test_a_field_of_a_stage_out_of_bounds_is_refused_by_name(name: str, value: Any) -> None:
    payload = record(stages=STAGES).to_payload()
    place = NAMES.index(name)
    payload["stages"][1][place] = value
    with pytest.raises(IntegrityError, match=rf"stages\[1\]\[{place}\]"):
        PeerRecord.from_payload("alice", payload)


@pytest.mark.parametrize(
    "stages", [None, {}, "stages", [1], [[]], [{}], [{"unit": 1}], [dict(zip(NAMES, to_wire(STAGES[0]), strict=True))]]
)
def test_what_is_no_list_of_stages_is_refused(stages: Any) -> None:
    with pytest.raises(IntegrityError, match="stages"):
        PeerRecord.from_payload("alice", record().to_payload() | {"stages": stages})


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
