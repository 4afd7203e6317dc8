"""What a swarm serves: sums over peers, rates and percentiles over time, restarts, and peers that lie."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2ptrain.monitor.store import PERCENTILES
from p2ptrain.network.records.record import PeerRecord, Sighting
from p2ptrain.network.records.serving import ServingReport, ServingTotals
from p2ptrain.status.serving import (
    MAX_TOKENS_PER_SECOND,
    NONE,
    WINDOW_SECONDS,
    Served,
    ServingBook,
    growth,
    serving_view,
)
from tests.support.coroutines import on_loop_within
from tests.support.web.served import TOKENS, served
from tests.support.web.stores import Watched, watched
from tests.support.web.watched import START, snapshot_of, trainer

STEP = 5.0


def host(peer: str, seconds: float, per_second: float = 2.0, **changes: object) -> PeerRecord:
    """A peer that serves since so long."""
    return replace(trainer(peer, serving=served(seconds, per_second)), **changes)  # type: ignore[arg-type]


def learned(*looks: list[PeerRecord]) -> ServingBook:
    """A book that has seen these, one look every five seconds."""
    book = ServingBook()
    for number, records in enumerate(looks):
        now = START + STEP * number
        book.learn([Sighting(record, now) for record in records], now)
    return book


def test_totals_of_all_peers_are_added_up_from_when_each_is_first_seen() -> None:
    book = learned(*([host("a", 100 + 5 * i), host("b", 50 + 5 * i, 1.0)] for i in range(5)))
    grown = [late.since(early) for early, late in (
        (served(100, 2.0).totals, served(120, 2.0).totals), (served(50, 1.0).totals, served(70, 1.0).totals),
    )]  # fmt: skip
    assert None not in grown
    totals = book.served().totals
    assert totals == sum((each for each in grown if each), NONE)
    assert totals.requests == 60
    assert book.served().seconds == 20.0
    assert book.rejected == 0


def test_a_peer_that_starts_again_counts_from_zero_and_nothing_falls() -> None:
    before = [host("a", 100 + 5 * i) for i in range(3)]
    after = [host("a", 5 * i, started_at=START + 12) for i in range(1, 4)]
    seen = [learned(*([record] for record in [*before, *after][:number])).served().totals for number in range(1, 7)]
    assert [totals.requests for totals in seen] == [0, 10, 20, 30, 40, 50]
    assert [late.since(early) is not None for early, late in itertools.pairwise(seen)] == [True] * 5


def test_who_leaves_takes_nothing_along_and_who_comes_back_is_not_counted_twice() -> None:
    other = host("b", 10)
    there, away = [host("a", 100), other], [other]
    back = [host("a", 120), other]
    book = learned(there, [host("a", 110), other], away, back, [host("a", 130), other])
    assert book.served().totals.requests == 20 + 20
    assert len(book._known) == 2, "of peers that left nothing is kept"


def test_a_peer_that_begins_to_serve_while_it_is_watched_counts_from_its_first_request() -> None:
    book = learned([trainer("a")], [host("a", 5)], [trainer("a")], [host("a", 15)])
    assert book.served().totals.requests == 30


def test_a_record_that_was_seen_before_counts_once() -> None:
    book = ServingBook()
    for now, record, at in ((0, host("a", 100), 0), (2, host("a", 105), 1), (4, host("a", 105), 1)):
        book.learn([Sighting(record, START + at)], START + now)
    assert book.served().totals.requests == 10


def test_counting_down_and_up_again_gains_nothing() -> None:
    book = learned(*([host("a", seconds)] for seconds in (100, 110, 50, 110, 50, 110, 120)))
    assert book.served().totals.requests == 40
    assert book.rejected == 2


@pytest.mark.parametrize("restarts", [False, True])
def test_who_claims_what_no_peer_can_do_is_not_counted(restarts: bool) -> None:
    huge = ServingReport(1, ServingTotals(generated_tokens=int(MAX_TOKENS_PER_SECOND * 100)))
    liar = trainer("liar", serving=huge, started_at=START + 1 if restarts else trainer("liar").started_at)
    book = learned([trainer("liar"), host("a", 0)], [liar, host("a", 5)], [liar, host("a", 10)])
    assert book.served().totals == served(10, 2.0).totals
    assert book.rejected == 1


def test_growth_is_bounded_by_the_time_between_two_records() -> None:
    def told(at: float, tokens: int) -> Sighting:
        return Sighting(trainer("a", serving=ServingReport(1, ServingTotals(generated_tokens=tokens))), at)

    most = int(MAX_TOKENS_PER_SECOND * 15)
    assert growth(told(0.0, 0), told(10.0, most)) == ServingTotals(generated_tokens=most)
    assert growth(told(0.0, 0), told(10.0, most + 1)) is None
    assert growth(told(10.0, 0), told(0.0, most)) is None, "a clock that goes back does not help"


@settings(max_examples=30)
@given(st.lists(st.tuples(st.integers(0, 2), st.floats(0, 200), st.booleans(), st.booleans()), max_size=30))
def test_whatever_peers_say_totals_only_grow(looks: list[tuple[int, float, bool, bool]]) -> None:
    book, before = ServingBook(), NONE
    for number, (peer, seconds, restarts, is_there) in enumerate(looks):
        now = START + STEP * number
        record = host(f"p{peer}", seconds, started_at=now if restarts else START)
        book.learn([Sighting(record, now)] if is_there else [], now)
        totals = book.served().totals
        assert totals.since(before) is not None
        assert book.served().recent.since(NONE) is not None
        before = totals


def test_the_present_is_of_the_last_minute() -> None:
    book = ServingBook()
    for second in range(0, 300, 5):
        slow = second > 200
        report = served(float(second), 2.0)
        if slow:
            extra = served(second - 200.0, 50.0, first_token=8.0)
            report = ServingReport(3, report.totals + extra.totals)
        book.learn([Sighting(trainer("a", serving=report), START + second)], START + second)
    now = book.served()
    assert now.seconds == WINDOW_SECONDS
    view = serving_view([host("a", 300)], now)
    assert view.tokens_per_second == pytest.approx(52 * TOKENS * 0.98, rel=0.02)
    assert view.first_token.p50 == pytest.approx(8.0, rel=0.34)
    assert view.totals.first_token.total == now.totals.first_token.total


def test_without_a_peer_that_serves_there_is_nothing_to_show() -> None:
    serving = snapshot_of([trainer("a")]).serving
    assert (serving.peers, serving.sessions, serving.tokens_per_second) == (0, 0, None)
    assert serving.first_token.p50 is None
    assert snapshot_of([trainer("a")]).peers[0].rates.served_per_second is None
    view = serving_view([host("a", 100)], Served())
    assert (view.peers, view.tokens_per_second) == (1, None), "a first look knows no rate"


# With a watch and a history


@on_loop_within(watched)
async def test_a_watch_shows_and_remembers_what_is_served_across_a_restart(swarm: Watched) -> None:
    for second in range(0, 600, 5):
        life, started_at = (100 + second, START - 3600) if second < 300 else (second - 300, START + 300)
        snapshot = await swarm.look(host("a", life, started_at=started_at), trainer("b"), seconds=5.0)
    assert snapshot.serving.peers == 1
    assert snapshot.serving.totals.requests == pytest.approx(1190, abs=12)
    serving, plain = snapshot.peers
    assert serving.rates.served_per_second == pytest.approx(2 * TOKENS, rel=0.2)
    assert serving.record.serving is not None
    assert plain.rates.served_per_second is None
    names = ["served_tokens_per_second", "served_requests", *PERCENTILES]
    for window in ("hour", "day", "week"):
        series = (await swarm.store.series(window, names, swarm.source.time))["series"]
        rates = [value for value in series["served_tokens_per_second"] if value is not None]
        assert sum(rates) / len(rates) == pytest.approx(2 * TOKENS, rel=0.1)
        assert all(TOKENS / 2 < rate < 2.5 * TOKENS for rate in rates), "less in the step of the restart alone"
        assert sum(value or 0 for value in series["served_requests"]) == pytest.approx(1180, abs=20)
        assert all(0.2 < value < 0.7 for value in series["first_token_seconds_p50"] if value is not None)
        assert any(value is not None for value in series["token_seconds_p99"])


@on_loop_within(watched)
async def test_totals_that_are_not_believed_are_counted_with_records_that_were_dropped(swarm: Watched) -> None:
    for seconds in (100, 50):
        snapshot = await swarm.look(host("a", seconds), seconds=5.0)
    assert snapshot.rejected == 1
    assert snapshot.peers[0].rates.served_per_second == 0.0
