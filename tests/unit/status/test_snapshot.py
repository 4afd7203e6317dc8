"""Records in, a snapshot out: who agrees with whom, who hosts what, and JSON whatever peers say."""

import json
from dataclasses import fields
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2ptrain.monitor.web import to_json
from p2ptrain.network.records.evaluation import Evaluation, PrivacyLoss
from p2ptrain.network.records.record import (
    MAX_DOUBTS,
    REACHABILITIES,
    ROLES,
    STATES,
    PeerRecord,
    RoundReport,
    Sighting,
    StageReport,
)
from p2ptrain.network.records.serving import Latencies, ServingReport, ServingTotals
from p2ptrain.status.snapshot import majority_digests, peer_views
from p2ptrain.status.stages import coverage
from p2ptrain.status.views import Rates, SwarmView, plain
from tests.support.web.watched import CUT, START, SWARM, report, snapshot_of, trainer, views_of

A, B = b"a" * 32, b"b" * 32
OTHER_LINEAGE = b"o" * 32


@pytest.mark.parametrize(
    ("digests", "agrees"),
    [((A, B, A), [True, False, True]), ((A, B), [True, False]), ((B, A), [False, True]), ((A,), [None])],
    ids=["most agree", "of as many the smaller digest counts", "whoever looks", "nobody to agree with"],
)
def test_who_holds_what_most_hold_agrees_and_the_others_do_not(
    digests: tuple[bytes, ...], agrees: list[bool | None]
) -> None:
    assert [
        view.agrees for view in views_of(*(trainer(f"p{i}", digest=each) for i, each in enumerate(digests)))
    ] == agrees


def test_who_is_alone_in_its_round_or_lineage_has_nobody_to_agree_with() -> None:
    views = views_of(trainer("a"), trainer("b", round=9), trainer("c", lineage=OTHER_LINEAGE), trainer("d"))
    assert [view.agrees for view in views] == [True, None, None, True]


def test_peers_without_state_are_not_compared_and_show_none() -> None:
    bootstrap = trainer("z", role="bootstrap", state="serving", digest=bytes(32), lineage=bytes(32))
    views = views_of(trainer("a", digest=A), bootstrap, trainer("y", role="bootstrap", digest=bytes(32)))
    assert [view.agrees for view in views] == [None, None, None]
    assert views[2].spans == ()
    assert majority_digests([bootstrap, bootstrap]) == {}


def test_peers_are_ordered_by_name_without_regard_to_case_then_by_id() -> None:
    views = views_of(trainer("3", name="beta"), trainer("2", name="Alpha"), trainer("1", name="alpha"))
    assert [view.record.peer for view in views] == ["1", "2", "3"]


def test_a_peer_without_a_name_goes_by_the_end_of_its_id() -> None:
    assert views_of(trainer("Qm" + "x" * 30 + "12345678", name=""))[0].name == "12345678"


def test_a_view_says_what_the_record_says_and_never_its_addresses() -> None:
    record = trainer("a", addresses=("/ip4/10.1.2.3/tcp/1",), last_rounds=(report(7),), clock_skew_seconds=-2.0)
    [view] = peer_views([Sighting(record, START + 5.0)], {"a": Rates(7.0, 8.0)}, [(0, 4)], START)
    assert (view.record, view.rates) == (record, Rates(7.0, 8.0))
    assert view.last_seen == START, "nobody was seen in the future"
    assert "10.1.2.3" not in json.dumps(view, default=plain)


@pytest.mark.parametrize(
    ("state", "hosts"),
    [("training", 1), ("paused", 1), ("serving", 1), ("starting", 0), ("syncing", 0), ("draining", 0)],
)
def test_who_takes_part_in_rounds_hosts_the_model(state: str, hosts: int) -> None:
    [stage] = snapshot_of([trainer("a", state=state)]).stages
    assert len(stage.hosts) == hosts
    assert (stage.syncing == ("a",)) == (state in ("starting", "syncing"))


COUNTS = st.integers(0, 2**63 - 1)
AMOUNTS = st.floats(0, 1e18)
NUMBERS = st.floats(-1e12, 1e12)
HASHES = st.sampled_from([bytes(32), A, B])
TEXT = st.text(max_size=20).map(lambda text: "".join(each if each.isprintable() else "?" for each in text))
REPORTS = st.builds(
    RoundReport, round=COUNTS, committed=st.booleans(), reason=TEXT, seconds=AMOUNTS, members=COUNTS,
    contributors=COUNTS, contributed=st.booleans(), digest=HASHES, compute_seconds=AMOUNTS,
    matchmaking_seconds=AMOUNTS, transfer_seconds=AMOUNTS,
)  # fmt: skip
STAGES = st.builds(
    StageReport, unit=COUNTS | st.integers(0, 4), round=COUNTS, lineage=HASHES, digest=HASHES, lineage_tokens=COUNTS,
    tokens_per_second=AMOUNTS, waiting=COUNTS, samples=COUNTS,
)  # fmt: skip
LATENCIES = st.builds(Latencies.of, st.lists(st.floats(0, 5000), max_size=8))
FEW = st.integers(0, 2**40)
SERVING = st.builds(
    lambda sessions, ok, failed, further, prompt, first, token: ServingReport(
        sessions,
        ServingTotals(ok + failed + first.total, failed, further + token.total, prompt, first, token),
    ),
    st.integers(0, 10**6), FEW, FEW, FEW, FEW, LATENCIES, LATENCIES,
)  # fmt: skip
EVALUATIONS = st.builds(
    Evaluation, metric=TEXT.filter(bool), round=COUNTS, mean=NUMBERS, error=st.none() | AMOUNTS,
    samples=st.integers(1, 2**40),
)  # fmt: skip
PRIVACY = st.builds(PrivacyLoss, epsilon=AMOUNTS, limit=AMOUNTS, delta=AMOUNTS)
KINDS: dict[str, st.SearchStrategy[Any]] = {
    "str": TEXT, "Name": TEXT, "Version": TEXT, "Note": TEXT, "Addresses": st.just(()), "bool": st.booleans(),
    "Count": COUNTS, "Amount": AMOUNTS, "Number": NUMBERS, "Hash": HASHES,
    "Number | None": st.none() | NUMBERS, "Count | None": st.none() | COUNTS | st.integers(0, 4),
    "Role": st.sampled_from(ROLES), "State": st.sampled_from(STATES),
    "Reachability": st.sampled_from(REACHABILITIES),
    "RoundReports": st.lists(REPORTS, max_size=8).map(tuple),
    "StageReports": st.lists(STAGES, max_size=4, unique_by=lambda stage: stage.unit).map(tuple),
    "ServingReport | None": st.none() | SERVING, "CredentialBytes": st.binary(max_size=20),
    "RevocationBytes": st.binary(max_size=20), "Doubts": st.lists(TEXT, max_size=MAX_DOUBTS).map(tuple),
    "Evaluation | None": st.none() | EVALUATIONS, "PrivacyLoss | None": st.none() | PRIVACY,
}  # fmt: skip
RECORDS = st.builds(PeerRecord, **{field.name: KINDS[str(field.type)] for field in fields(PeerRecord)})


@pytest.mark.parametrize("swarm", [SWARM, CUT], ids=["whole", "cut"])
@settings(max_examples=40)
@given(records=st.lists(RECORDS, max_size=6, unique_by=lambda record: record.peer), now=st.floats(0, 1e12))
def test_whatever_peers_may_say_there_is_a_snapshot_and_it_becomes_json(
    swarm: SwarmView, records: list[PeerRecord], now: float
) -> None:
    received = [PeerRecord.from_payload(record.peer, record.to_payload()) for record in records]
    snapshot = snapshot_of(received, now=now, swarm=swarm)
    text = to_json([snapshot, coverage(snapshot)]).decode()
    assert "<" not in text
    values, _ = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert (len(values["peers"]), len(values["stages"])) == (len(records), len(swarm.spans))


def test_json_cannot_end_a_script_or_a_line() -> None:
    value = {"name": "</script><!--\u2028\u2029"}
    text = to_json(value).decode()
    assert not set("<\u2028\u2029") & set(text)
    assert json.loads(text) == value


def test_trainers_that_no_certificate_names_are_counted_apart() -> None:
    records = [trainer("a"), trainer("x"), trainer("boot", role="bootstrap")]
    shown = snapshot_of(records, proven={"a"})
    assert {view.record.peer: view.proven for view in shown.peers} == {"a": True, "x": False, "boot": None}
    assert (shown.headline.peers, shown.headline.unproven) == (3, 1)
    assert (snapshot_of(records).headline.unproven, snapshot_of(records).peers[0].proven) == (0, None)
