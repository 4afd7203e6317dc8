"""Is the swarm healthy: the word, the reasons in order, and numbers that one liar does not move."""

from dataclasses import replace
from typing import Any

import pytest

from p2ptrain.network.records.record import PeerRecord
from p2ptrain.status.health import seconds_between
from p2ptrain.status.rounds import RoundBook
from p2ptrain.status.views import Headline, RoundView
from tests.support.web.watched import START, aborted, report, snapshot_of, trainer

ADA, BOB, CAT = (trainer(peer) for peer in "abc")
LATE = (report(5), aborted(6), aborted(6), report(6), aborted(7))
"""Of the last five rounds of a peer, three were not committed."""
WELL = [replace(peer, last_rounds=(report(7),)) for peer in (ADA, BOB)]
FAILING = [replace(peer, last_rounds=LATE) for peer in (ADA, BOB)]
BOOTSTRAP = trainer("boot", role="bootstrap", state="serving", digest=bytes(32), loss=None)


def headline_of(*records: PeerRecord, rounds: list[RoundView] | None = None, **facts: Any) -> Headline:
    return snapshot_of(records, rounds or (), **facts).headline


def some_rounds() -> list[RoundView]:
    book = RoundBook(4)
    book.learn(replace(ADA, last_rounds=(report(5), report(6, seconds=4.0), report(7))), START, 8)
    return book.views()


@pytest.mark.parametrize(
    ("peers", "facts", "health", "summary"),
    [
        ([ADA, BOB], {"rounds": some_rounds()}, "healthy", "2 peers train"),
        ([ADA, BOB, replace(CAT, state="syncing")], {"rounds": some_rounds()}, "healthy",
         "2 peers train, 1 more on the way"),
        ([ADA, BOB], {}, "healthy", "2 peers train; no round is committed yet"),
        ([ADA], {"rounds": some_rounds()}, "degraded", "1 peer trains"),
        ([ADA, BOB], {"bootstraps": ("gone",)}, "degraded", "2 peers train; no round is committed yet"),
        ([ADA, BOB, replace(CAT, digest=b"x" * 32)], {"rounds": some_rounds()}, "degraded", "3 peers train"),
        (FAILING, {"rounds": some_rounds()}, "degraded",
         "2 peers train, and rounds fail: 3 of the last 5 were not committed (too few peers)"),
        ([*WELL, replace(CAT, last_rounds=LATE)], {"rounds": some_rounds()}, "degraded", "3 peers train"),
        (FAILING, {"since": START - 3600.0}, "stopped", "Training stands still"),
        ([ADA, BOB], {"since": START - 3600.0}, "stopped", "Training stands still"),
        ([replace(ADA, state="syncing"), BOOTSTRAP], {}, "stopped", "No peer trains at the moment"),
        ([replace(ADA, state="draining")], {}, "stopped", "No peer trains at the moment"),
        ([BOOTSTRAP], {}, "empty", "Nobody trains in this swarm yet"),
        ([], {}, "empty", "Nobody trains in this swarm yet"),
    ],
)  # fmt: skip
def test_health_and_its_summary(peers: list[PeerRecord], facts: dict[str, Any], health: str, summary: str) -> None:
    headline = headline_of(*peers, **facts)
    assert (headline.health, headline.summary) == (health, summary)


def test_the_worst_reason_is_the_first() -> None:
    diverged = replace(BOB, loss=None, diverged=True)
    headline = headline_of(ADA, diverged, bootstraps=("gone",), directory_answers=False)
    words = ("directory", "loss", "gone")
    assert [word for word, reason in zip(words, headline.reasons, strict=True) if word in reason] == list(words)


def test_an_empty_swarm_has_no_numbers() -> None:
    headline = headline_of(BOOTSTRAP)
    assert (headline.loss, headline.round_seconds, headline.bytes_per_token) == (None, None, None)
    assert (headline.peers, headline.training, headline.round) == (1, 0, 0)


def test_one_liar_among_three_honest_peers_does_not_move_medians() -> None:
    honest = [
        replace(peer, loss=loss, bytes_sent=1000 * index, trained_tokens=1000)
        for index, (peer, loss) in enumerate(zip((ADA, BOB, CAT), (2.4, 2.5, 2.6), strict=True), start=1)
    ]
    for lie in (1e12, -1e12):
        liar = trainer(
            "liar", loss=lie, bytes_sent=2**63 - 1, trained_tokens=1, round=2**63 - 1, lineage_tokens=2**63 - 1,
            tokens_per_second=1e18,
        )  # fmt: skip
        headline = headline_of(*honest, liar)
        assert headline.loss is not None
        assert headline.bytes_per_token is not None
        assert 2.4 <= headline.loss <= 2.6
        assert 1.0 <= headline.bytes_per_token <= 3.0
        assert headline.round == 8


def test_only_who_trains_counts_for_the_loss() -> None:
    assert headline_of(ADA, replace(BOB, loss=9.0, state="syncing"), replace(BOOTSTRAP, loss=99.0)).loss == 2.5


def test_the_time_of_a_round_is_the_median_between_committed_ones() -> None:
    rounds = some_rounds()
    assert seconds_between(rounds) == pytest.approx(6.0)
    assert headline_of(ADA, rounds=rounds).round_seconds == pytest.approx(6.0)
    assert seconds_between(rounds[:1]) is None
    assert seconds_between([rounds[0], replace(rounds[1], committed=False), rounds[2]]) == pytest.approx(12.0)
