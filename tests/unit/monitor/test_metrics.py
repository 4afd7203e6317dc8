"""Prometheus can read what it scrapes, whatever peers call themselves, and however many there are."""

import math

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from prometheus_client import Metric
from prometheus_client.parser import text_string_to_metric_families

from p2ptrain.monitor.metrics import MAX_LABELLED_PEERS, exposition
from p2ptrain.status.serving import Served
from p2ptrain.status.views import Snapshot
from tests.support.web.served import served
from tests.support.web.watched import report, rounds_of, snapshot_of, trainer


def scraped(snapshot: Snapshot) -> dict[str, Metric]:
    return {family.name: family for family in text_string_to_metric_families(exposition(snapshot).decode())}


def value(snapshot: Snapshot, metric: str, /, **labels: str) -> float:
    [sample] = [
        sample
        for family in scraped(snapshot).values()
        for sample in family.samples
        if sample.name == metric and sample.labels == labels
    ]
    return sample.value


def a_swarm() -> Snapshot:
    rounds = rounds_of(trainer("a", last_rounds=(report(6), report(7))))
    return snapshot_of([trainer("a"), trainer("b", state="syncing")], rounds)


def test_all_families_parse_with_help_in_base_units_and_counters_end_in_total() -> None:
    families = scraped(a_swarm())
    assert len(families) > 20
    for family in families.values():
        assert family.name.startswith("p2ptrain_")
        assert family.documentation
        assert not family.name.endswith(("_ms", "_kb", "_mb", "_percent", "_hours"))
        if family.type == "counter":
            assert all(sample.name == f"{family.name}_total" for sample in family.samples)
        elif family.type == "histogram":
            assert family.name.endswith("_seconds")
        else:
            assert family.type == "gauge"
            assert not family.name.endswith("_total")


def test_values_are_those_of_the_snapshot() -> None:
    snapshot = a_swarm()
    assert value(snapshot, "p2ptrain_peers", role="trainer", state="syncing") == 1.0
    assert value(snapshot, "p2ptrain_loss") == 2.5
    assert value(snapshot, "p2ptrain_rounds_committed_total") == 5.0
    assert value(snapshot, "p2ptrain_round_phase_seconds", phase="transfer") == 1.25
    assert value(snapshot, "p2ptrain_peer_sent_bytes_total", peer="a", name="a's laptop") == 1000.0
    assert value(snapshot, "p2ptrain_health", health=snapshot.headline.health) == 1.0
    assert value(snapshot, "p2ptrain_alerts", rule="replica", severity="warning") == 1.0
    assert value(snapshot, "p2ptrain_directory_up") == 1.0


def test_what_is_not_known_has_no_sample() -> None:
    families = scraped(snapshot_of([], tokens_per_second=None))
    assert not {"p2ptrain_loss", "p2ptrain_tokens_per_second", "p2ptrain_round_phase_seconds"} & set(families)
    assert sum(sample.value for sample in families["p2ptrain_health"].samples) == 1.0


@settings(max_examples=40)
@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20))
@example('"} 1\np2ptrain_fake 1')
@example('\\"\n\\n')
def test_any_name_survives_as_a_label_and_makes_up_no_metrics(name: str) -> None:
    families = scraped(snapshot_of([trainer("a", name=name)]))
    assert [sample.labels for sample in families["p2ptrain_peer_sent_bytes"].samples] == [{"peer": "a", "name": name}]
    assert families.keys() == scraped(snapshot_of([trainer("a")])).keys()


@pytest.mark.parametrize(("peers", "labelled"), [(MAX_LABELLED_PEERS, True), (MAX_LABELLED_PEERS + 1, False)])
def test_large_swarms_have_no_series_for_each_peer(peers: int, labelled: bool) -> None:
    families = scraped(snapshot_of([trainer(f"p{number}") for number in range(peers)]))
    assert any(name.startswith("p2ptrain_peer_") for name in families) == labelled
    assert value(snapshot_of([trainer("a"), trainer("b")]), "p2ptrain_stage_hosts", stage="0") == 2.0
    assert families["p2ptrain_peers"].samples[0].value == peers


def test_what_is_served_is_counted_and_latencies_are_histograms() -> None:
    totals = served(1000.0).totals
    snapshot = snapshot_of([trainer("a", serving=served(1000.0))], served=Served(totals, totals, 60.0))
    assert value(snapshot, "p2ptrain_serving_peers") == 1.0
    assert value(snapshot, "p2ptrain_serving_requests_total") == totals.requests
    assert value(snapshot, "p2ptrain_serving_generated_tokens_total") == totals.generated_tokens
    assert value(snapshot, "p2ptrain_peer_served_tokens_total", peer="a", name="a's laptop") == totals.generated_tokens
    name = "p2ptrain_serving_time_to_first_token_seconds"
    family = scraped(snapshot)[name]
    assert family.type == "histogram"
    buckets = [(float(each.labels["le"]), each.value) for each in family.samples if each.name == f"{name}_bucket"]
    counts = [count for _, count in buckets]
    assert counts == sorted(counts)
    assert math.isinf(buckets[-1][0])
    assert counts[-1] == totals.first_token.total
    assert value(snapshot, f"{name}_count") == totals.first_token.total
    assert value(snapshot, f"{name}_sum") == pytest.approx(totals.first_token.seconds)


def test_before_anybody_serves_counters_are_there_and_zero() -> None:
    assert value(a_swarm(), "p2ptrain_serving_requests_total") == 0.0
    assert value(a_swarm(), "p2ptrain_serving_time_per_output_token_seconds_count") == 0.0
    assert value(a_swarm(), "p2ptrain_serving_peers") == 0.0
