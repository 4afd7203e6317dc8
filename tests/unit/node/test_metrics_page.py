"""What one peer tells Prometheus."""

from dataclasses import replace

from prometheus_client.parser import text_string_to_metric_families

from p2ptrain.network.records.record import PeerRecord, RoundReport
from p2ptrain.network.records.serving import ServedStage
from p2ptrain.node.reports.metrics_page import exposition
from tests.support.web.served import served
from tests.support.web.watched import trainer

LAST = RoundReport(6, True, "", 1.5, 3, 3, compute_seconds=4.0, matchmaking_seconds=0.5, transfer_seconds=1.0)
RECORD = trainer("QmPeer", name='says "hi"\\', last_rounds=(LAST,), trained_tokens=4000)


def samples(record: PeerRecord) -> dict[str, float]:
    """Values by name and labels."""
    families = text_string_to_metric_families(exposition(record, (3, 1)).decode())
    return {
        " ".join([sample.name, *(f"{key}={value}" for key, value in sorted(sample.labels.items()) if key == "phase")]):
        sample.value
        for family in families
        for sample in family.samples
    }  # fmt: skip


def test_a_peer_tells_of_its_rounds_traffic_and_loss() -> None:
    found = samples(RECORD)
    assert found["p2ptrain_peer_rounds_committed_total"] == 3
    assert found["p2ptrain_peer_rounds_aborted_total"] == 1
    assert found["p2ptrain_peer_tokens_total"] == 4000
    assert found["p2ptrain_peer_sent_bytes_total"] == 1000
    assert found["p2ptrain_peer_loss"] == 2.5
    assert found["p2ptrain_peer_round_phase_seconds phase=compute"] == 4.0


def test_names_survive_whatever_is_in_them() -> None:
    families = text_string_to_metric_families(exposition(RECORD, (0, 0)).decode())
    labels = next(sample.labels for family in families for sample in family.samples if "version" in sample.labels)
    assert labels["name"] == RECORD.name


def test_what_is_not_known_is_left_out() -> None:
    found = samples(replace(RECORD, loss=None, last_rounds=()))
    assert "p2ptrain_peer_loss" not in found
    assert not [name for name in found if "phase" in name]


def test_a_peer_that_serves_tells_of_it() -> None:
    before = served(1000.0)
    stage = ServedStage(0, 1, (), "exact-1/fp32", 512, free_pages=5, pages=64)
    report = replace(before, totals=replace(before.totals, drafted_tokens=9, accepted_tokens=7), served=stage)
    found = samples(replace(RECORD, serving=report))
    assert found["p2ptrain_peer_serving_sessions"] == report.sessions
    assert (found["p2ptrain_peer_serving_kv_pages"], found["p2ptrain_peer_serving_kv_free_pages"]) == (64, 5)
    assert found["p2ptrain_peer_serving_requests_total"] == report.totals.requests
    assert found["p2ptrain_peer_serving_drafted_tokens_total"] == 9
    assert found["p2ptrain_peer_serving_accepted_tokens_total"] == 7
    assert found["p2ptrain_peer_serving_time_to_first_token_seconds_count"] == report.totals.first_token.total
    assert not [name for name in samples(RECORD) if "serving" in name]
