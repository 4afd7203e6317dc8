"""A model that is cut into stages: each has hosts, a speed and a risk of its own, and is compared with itself alone."""

from dataclasses import replace
from typing import Any

import msgspec
import pytest

from p2ptrain.manifest import Manifest, ModelSpec, PipelineSpec, TrainingSpec
from p2ptrain.monitor.metrics import exposition
from p2ptrain.network.records.record import PeerRecord
from p2ptrain.status.agreed import stage_spans, what_is_missing
from p2ptrain.status.rounds import MAX_ROUNDS, SwarmRounds, told_of
from p2ptrain.status.stages import coverage, joined
from p2ptrain.status.views import RoundView, Snapshot
from tests.support.coroutines import on_loop, on_loop_within
from tests.support.web.site import Site, served
from tests.support.web.stores import watched
from tests.support.web.watched import (
    CUT,
    START,
    STRANGE,
    aborted,
    digest_after,
    feeder,
    host,
    pipeline,
    report,
    snapshot_of,
    trainer,
)

OTHER = b"x" * 32
USUAL = dict.fromkeys(range(4), 8)


def cut(*records: PeerRecord, **changes: Any) -> Snapshot:
    return snapshot_of(records, swarm=CUT, **changes)


def without(*peers: str) -> list[PeerRecord]:
    return [record for record in pipeline() if record.peer not in peers]


def with_stage(record: PeerRecord, unit: int, **changes: Any) -> PeerRecord:
    stages = tuple(msgspec.structs.replace(each, **changes) if each.unit == unit else each for each in record.stages)
    return replace(record, stages=stages)


def alerts(snapshot: Snapshot) -> list[tuple[str, str, str]]:
    return [(each.rule, each.severity, each.subject) for each in snapshot.alerts]


def test_a_pipeline_whose_stages_differ_is_healthy() -> None:
    snapshot = cut(*pipeline())
    assert snapshot.alerts == ()
    assert snapshot.headline.health == "healthy"
    assert snapshot.headline.summary == "9 peers train 4 stages; no round is committed yet"
    assert (snapshot.headline.training, snapshot.headline.round) == (9, 8)
    assert {peer.agrees for peer in snapshot.peers if peer.stages} == {True}


def test_each_stage_has_its_own_hosts_queue_and_speed() -> None:
    stages = cut(*pipeline()).stages
    assert [stage.hosts for stage in stages] == [(f"a{number}", f"b{number}") for number in range(4)]
    assert [stage.blocks for stage in stages] == list(CUT.spans)
    assert {(stage.waiting, stage.tokens_per_second, stage.risk) for stage in stages} == {(6, 200.0, "")}
    assert not any(stage.is_bottleneck for stage in stages), "none is slower than another"


def test_the_slowest_stage_is_the_bottleneck_and_the_others_loads_are_relative_to_it() -> None:
    stages = cut(*without("b2")).stages
    assert [stage.is_bottleneck for stage in stages] == [False, False, True, False]
    assert [stage.load for stage in stages] == [0.5, 0.5, 1.0, 0.5]


def test_no_stage_is_the_slowest_before_all_are_measured() -> None:
    unmeasured = [with_stage(record, 1, tokens_per_second=0.0) for record in pipeline()]
    assert {(stage.load, stage.is_bottleneck) for stage in cut(*unmeasured).stages} == {(None, False)}


def test_a_stage_with_one_host_is_a_warning_that_names_it() -> None:
    snapshot = cut(*without("b1"))
    assert alerts(snapshot) == [("replica", "warning", "1")]
    assert snapshot.alerts[0].text == (
        "stage 1 has one host, a1's laptop: losing it stops training; let another peer join"
    )
    assert snapshot.headline.health == "degraded"


def test_a_stage_without_hosts_stops_training_and_the_headline_says_so() -> None:
    snapshot = cut(*without("a2", "b2"))
    assert alerts(snapshot) == [("stage", "critical", "2")]
    assert snapshot.headline.health == "stopped"
    assert snapshot.headline.summary == "Training waits: stage 2 has no host"
    assert snapshot.headline.reasons == ("stage 2 has no host: training waits; start a peer that hosts it",)
    both = cut(*without("a2", "b2", "a0", "b0"))
    assert both.headline.summary == "Training waits: stages 0 and 2 have no host"


def test_while_a_host_is_on_the_way_there_is_no_need_of_another() -> None:
    snapshot = cut(*without("a2", "b2"), host("c", 2, state="syncing"))
    assert alerts(snapshot) == [("stage", "warning", "2")]
    assert snapshot.stages[2].syncing == ("c",)
    assert snapshot.headline.summary == "Training waits: stage 2 has no host"
    assert cut(*(replace(record, state="syncing") for record in pipeline())).alerts == (), "all are about to begin"


def test_a_digest_is_compared_within_one_stage_and_lineage_alone() -> None:
    astray = [with_stage(each, 1, digest=OTHER) if each.peer == "b1" else each for each in pipeline()]
    snapshot = cut(*astray, host("c1", 1))
    assert alerts(snapshot) == [("digest", "critical", "b1")]
    assert "another state of stage 1 than the other hosts of round 8" in snapshot.alerts[0].text
    assert [peer.record.peer for peer in snapshot.peers if peer.agrees is False] == ["b1"]
    elsewhere = [with_stage(each, 1, lineage=OTHER) if each.peer == "b1" else each for each in astray]
    assert cut(*elsewhere, host("c1", 1)).alerts == ()


def test_shared_embeddings_are_compared_between_the_first_and_the_last_stage() -> None:
    astray = [with_stage(each, 4, digest=OTHER) if each.peer == "b3" else each for each in pipeline()]
    snapshot = cut(*astray)
    assert alerts(snapshot) == [("digest", "critical", "b3")]
    assert "the shared embeddings" in snapshot.alerts[0].text


def test_stages_that_are_not_there_and_whole_models_host_nothing() -> None:
    stranger = replace(host("s", 17), round=8)
    liar = trainer("whole")
    snapshot = cut(*pipeline(), stranger, liar)
    views = {view.record.peer: view for view in snapshot.peers}
    assert (views["s"].hosting, views["s"].spans, views["whole"].spans) == ((), (), ())
    assert all(len(stage.hosts) == 2 for stage in snapshot.stages)
    whole = snapshot_of([trainer("a"), replace(trainer("b"), stages=host("s", 0).stages)])
    assert len(whole.stages[0].hosts) == 2, "where the model is not cut, stages say nothing"


def test_a_peer_shows_what_it_holds_with_gaps_where_there_are() -> None:
    both = replace(host("m", 0), stages=(*host("m", 0).stages, *host("m", 2).stages))
    beside = replace(host("n", 0), stages=(*host("n", 1).stages, *host("n", 0).stages))
    snapshot = cut(both, beside)
    views = {view.record.peer: view for view in snapshot.peers}
    assert (views["m"].spans, views["m"].stages) == (((0, 2), (4, 6)), (0, 2))
    assert views["n"].spans == ((0, 4),)
    rows = {row.peer: row.cells for row in coverage(snapshot).rows}
    assert rows["m"] == (True, True, False, False, True, True, False, False)
    assert joined([(4, 6), (0, 2), (2, 4)]) == ((0, 6),)


def test_who_only_feeds_is_among_those_that_train_and_in_no_row_of_blocks() -> None:
    snapshot = cut(*pipeline(), feeder("g", state="syncing"))
    assert snapshot.headline.training == 9
    drawn = coverage(snapshot)
    assert len(drawn.rows) == 8
    assert drawn.others == 0
    assert all(summary["hosts"] == 2 and summary["waiting"] == 6 for summary in drawn.stages)


def test_the_stages_are_those_of_the_manifest() -> None:
    manifest = Manifest(name="cut", model=ModelSpec(layers=4), training=TrainingSpec(every=1))
    assert stage_spans(manifest) == ((0, 4),)
    spans = stage_spans(manifest.model_copy(update={"pipeline": PipelineSpec(stages=2)}))
    assert len(spans) == 2
    assert spans[0][0] == 0
    assert spans[0][1] == spans[1][0]


@pytest.mark.parametrize(
    ("cuts", "num_stages"),
    [
        (PipelineSpec(stages=3), 3),
        (PipelineSpec(cuts=(2, 3)), 3),
        (PipelineSpec(stages="auto", stage_memory=1 << 30), 4),
    ],
)
@pytest.mark.parametrize("family", ["nobody-has-it", "custom"])
def test_stages_of_a_model_that_this_machine_does_not_know_are_counted(
    family: str, cuts: PipelineSpec, num_stages: int
) -> None:
    four = pipeline()  # Whose first and last stage share something, which is no fifth.
    model = ModelSpec(layers=4, family=family)
    manifest = Manifest(name="cut", model=model, training=TrainingSpec(every=1), pipeline=cuts)
    assert stage_spans(manifest, [*four, feeder("f")]) == ((0, 0),) * num_stages
    assert what_is_missing(manifest).startswith("stages are shown without their blocks: ")
    known = manifest.model_copy(update={"model": ModelSpec(layers=4)})
    assert what_is_missing(known) == what_is_missing(manifest.model_copy(update={"pipeline": PipelineSpec()})) == ""


def test_stages_without_known_blocks_are_watched_like_others() -> None:
    known, strange = cut(*without("b2")), snapshot_of(without("b2"), swarm=STRANGE)
    assert [replace(stage, blocks=(0, 0)) for stage in known.stages] == list(strange.stages)
    assert (known.headline, known.alerts) == (strange.headline, strange.alerts)
    assert [peer.stages for peer in known.peers] == [peer.stages for peer in strange.peers]
    assert {peer.spans for peer in strange.peers} == {()}
    drawn = coverage(strange)
    assert [row.cells for row in drawn.rows if row.peer == "a1"] == [(False, True, False, False)]


@on_loop_within(served, *pipeline(), swarm=STRANGE)
async def test_the_page_says_what_is_missing_and_names_no_blocks(site: Site) -> None:
    page = (await site.get("/")).text
    assert "Stages are shown without their blocks: unknown model family" in page
    assert "Stages 0\u20133" in page
    assert "block 0" not in page
    assert "stage 0" in (await site.get("/peers/a0")).text
    assert (await site.json("/join"))["missing"] == STRANGE.missing


def test_stages_are_measured_for_prometheus() -> None:
    text = exposition(cut(*without("b2"))).decode()
    for line in (
        'p2ptrain_stage_hosts{stage="2"} 1.0', 'p2ptrain_stage_tokens_per_second{stage="0"} 200.0',
        'p2ptrain_stage_waiting_passes{stage="0"} 6.0', 'p2ptrain_stage_load_ratio{stage="0"} 0.5',
        'p2ptrain_peers{role="stage",state="training"} 7.0',
    ):  # fmt: skip
        assert line in text
    assert "p2ptrain_stage_load_ratio" not in exposition(snapshot_of([trainer("a")])).decode()


# Rounds


def told(stage: int, *reports: Any, peer: str = "a") -> PeerRecord:
    return replace(host(f"{peer}{stage}", stage), last_rounds=reports)


def of_stage(stage: int, round_: int, **changes: Any) -> Any:
    digest = digest_after(1000 * stage + round_)
    return report(round_, **{"digest": digest, "members": 2, "contributors": 2, **changes})


def book_of(*records: PeerRecord) -> SwarmRounds:
    book = SwarmRounds(16, 4)
    for record in records:
        book.learn(record, START, USUAL)
    return book


def rounds_of(*records: PeerRecord) -> list[RoundView]:
    return book_of(*records).views()


def test_a_round_is_that_of_all_stages_and_as_long_as_the_slowest() -> None:
    reports = [of_stage(stage, 7, seconds=1.0 + stage, members=2 + stage) for stage in range(4)]
    [view] = rounds_of(*(told(stage, each) for stage, each in enumerate(reports)))
    assert (view.round, view.committed, view.seconds) == (7, True, 4.0)
    assert (view.members, view.contributors) == (14, 8)
    assert (view.agrees, view.digests) == (None, ()), "digests of different stages are not compared"


def test_a_round_is_shown_when_every_stage_has_told_of_it() -> None:
    early = [told(stage, of_stage(stage, 6), of_stage(stage, 7)) for stage in range(3)]
    assert [view.round for view in rounds_of(*early, told(3, of_stage(3, 6)))] == [6]
    assert [view.round for view in rounds_of(*early, told(3, of_stage(3, 6), of_stage(3, 7)))] == [7, 6]


def test_hosts_of_one_stage_that_differ_make_the_round_differ() -> None:
    equal = [told(stage, of_stage(stage, 7), peer=name) for stage in range(4) for name in "ab"]
    assert rounds_of(*equal)[0].agrees is True
    [view] = rounds_of(*equal[:-1], told(3, of_stage(3, 7, digest=OTHER), peer="b"))
    assert (view.agrees, len(view.digests)) == (False, 2)
    snapshot = cut(*pipeline(), rounds=[view])
    assert alerts(snapshot) == [("digest", "critical", "")]
    assert "hosts of one stage" in snapshot.alerts[0].text


def test_a_stage_that_aborts_keeps_the_round_from_being_committed_and_is_named() -> None:
    fine = [told(stage, of_stage(stage, 7)) for stage in range(3)]
    [view] = rounds_of(*fine, told(3, aborted(7, "nobody came")))
    assert (view.committed, view.broken_tries, view.broken_reason) == (False, 1, "stage 3: nobody came")


def test_rounds_are_counted_once_for_all_stages() -> None:
    book = SwarmRounds(16, 4)
    assert not book.settle({})
    book.settle(USUAL)
    for stage in range(4):
        book.learn(told(stage, of_stage(stage, 7), of_stage(stage, 8)), START, dict.fromkeys(range(4), 9))
        assert book.settle(USUAL) == (stage == 3)
    assert (book.committed, book.aborted) == (1, 0), "what was before the first look does not count"
    assert not book.settle(USUAL)


def test_rounds_that_a_pipeline_redoes_count_again() -> None:
    """It restarted from an old checkpoint, more rounds back than are remembered."""
    book = SwarmRounds(16, 4)

    def commit(round_: int, peer: str) -> tuple[int, int]:
        for seen, reports in ((round_, 0), (round_ + 1, 1)):
            medians = dict.fromkeys(range(4), seen)
            for stage in range(4):
                book.learn(told(stage, *[of_stage(stage, round_)] * reports, peer=peer), START, medians)
                book.settle(medians)
        return book.committed, book.aborted

    book.settle(dict.fromkeys(range(4), 100))
    assert commit(100, "a") == (1, 0)
    assert commit(100 - MAX_ROUNDS - 2, "b") == (2, 0), "it is behind the first look, and counts"
    assert commit(100, "c") == (3, 0)


def test_a_hosts_rounds_are_those_of_the_stage_that_its_record_is_about() -> None:
    assert told_of(host("a", 2, 4), 4) == 2
    assert told_of(feeder("f"), 4) is None
    moving = replace(host("a", 2), stages=(*host("a", 1).stages, *host("a", 2).stages))
    assert told_of(moving, 4) == 2


# Watching


async def after(*looks: list[PeerRecord]) -> Snapshot:
    """A snapshot after these looks, two minutes apart."""
    async with watched(swarm=CUT) as found:
        snapshots = [await found.look(*records, seconds=120.0) for records in looks]
        assert found.source.asked == [], "certificates of stages are those of other swarms"
        return snapshots[-1]


def moved_on(records: list[PeerRecord], rounds: int) -> list[PeerRecord]:
    """The same some rounds later, of 1000 tokens each."""
    return [
        replace(record, stages=tuple(
            msgspec.structs.replace(each, round=8 + rounds, lineage_tokens=8000 + 1000 * rounds)
            for each in record.stages
        ))
        for record in records
    ]  # fmt: skip


@on_loop
async def test_stages_follow_different_lineages_and_that_is_no_split() -> None:
    assert (await after(pipeline(), pipeline(), pipeline())).alerts == ()
    split = [with_stage(each, 1, lineage=OTHER) if each.peer == "b1" else each for each in pipeline()]
    assert alerts(await after(split, split)) == [("fork", "critical", "")]


@pytest.mark.parametrize(("behind", "tokens_per_second"), [(None, 1000 / 120), (3, 0.0)])
@on_loop
async def test_a_token_counts_when_all_stages_have_counted_it(behind: int | None, tokens_per_second: float) -> None:
    looks = [moved_on(pipeline(), number) for number in range(3)]
    for look in looks:
        look[:] = [with_stage(each, 3, round=8, lineage_tokens=8000) if behind is not None else each for each in look]
    rate = (await after(*looks)).headline.tokens_per_second
    assert (rate or 0.0) == pytest.approx(tokens_per_second, rel=0.01)


# The page
