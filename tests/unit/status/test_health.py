"""Each rule of an alert begins and ends when it should; the headline tells the worst, and no liar moves its numbers."""

from dataclasses import replace
from typing import Any

import pytest

from p2ptrain.monitor.watch import CLEAR_SECONDS, HOLD_SECONDS, MAX_LASTING, AlertBook
from p2ptrain.network.records.record import PeerRecord
from p2ptrain.status.health import FORK_SECONDS, MAX_PER_RULE, MAX_SKEW_SECONDS, seconds_between
from p2ptrain.status.views import Alert, Headline, RoundView
from tests.support.web.watched import START, aborted, report, rounds_of, snapshot_of, trainer

ADA, BOB, EVE = trainer("a", name="Ada"), trainer("b", name="Bob"), trainer("e", name="Eve")
SEED = trainer("s", role="bootstrap", state="serving", digest=bytes(32))
FACTS: dict[str, Any] = {"since": START - 3600.0, "last_commit": START - 5.0}


def rounds_with(*digests: bytes) -> list[RoundView]:
    return rounds_of(
        *(trainer(f"p{index}", last_rounds=(report(7, digest=each),)) for index, each in enumerate(digests))
    )


def alerts_of(*records: PeerRecord, rounds: list[RoundView] | None = None, **facts: Any) -> list[Alert]:
    return list(snapshot_of(records, rounds or (), **FACTS | facts).alerts)


SAME, OTHER = b"d" * 32, b"x" * 32


def told(peer: PeerRecord, *failed: bool) -> PeerRecord:
    """``peer`` with reports of its last rounds, oldest first."""
    return replace(peer, last_rounds=tuple(aborted(7, "no quorum") if fails else report(7) for fails in failed))


Case = tuple[str, str, str, tuple[str, ...], dict[str, Any], dict[str, Any]]
CASES: list[Case] = [
    # The rule, its severity, whom it is about, what its text has, what makes it hold, what is almost the same.
    ("directory", "critical", "", ("directory", "bootstrap peers"), {"directory_answers": False}, {}),
    ("stage", "critical", "0", ("stands still", "start a peer"), {"peers": [replace(ADA, state="draining")]},
     {"peers": [replace(ADA, state="syncing")]}),
    ("stage", "critical", "0", ("stands still", "start a peer"),
     {"peers": [replace(ADA, state="draining"), replace(BOB, state="draining")]}, {"peers": []}),
    ("replica", "warning", "0", ("only Ada", "join"), {"peers": [ADA]}, {"peers": [ADA, BOB]}),
    ("replica", "warning", "0", ("only Ada",), {"peers": [ADA, replace(BOB, state="draining")]},
     {"peers": [ADA, replace(BOB, state="resting")]}),
    ("stage", "critical", "0", ("stands still",), {"peers": [SEED, replace(ADA, state="resting")]},
     {"peers": [SEED, ADA]}),
    ("digest", "critical", "e", ("Eve", "round 8", "restart"), {"peers": [ADA, BOB, replace(EVE, digest=OTHER)]},
     {"peers": [ADA, BOB, replace(EVE, digest=OTHER, round=9)]}),
    ("digest", "critical", "", ("round 8", "2 different", "compare"), {"rounds": rounds_with(SAME, OTHER, SAME)},
     {"rounds": rounds_with(SAME, SAME)}),
    ("fork", "critical", "", ("split", "2 min", "restart"), {"forked_since": START - 2 * FORK_SECONDS},
     {"forked_since": START - FORK_SECONDS + 1.0}),
    ("jump", "critical", "", ("500 rounds", "7000 tokens", "checkpoints"), {"jump": (500, 7000)}, {"jump": None}),
    ("loss", "critical", "e", ("Eve", "restart"), {"peers": [ADA, BOB, replace(EVE, loss=None, diverged=True)]},
     {"peers": [ADA, BOB, replace(EVE, loss=None)]}),
    ("worth", "warning", "e", ("Eve", "audits of 1 peer:", "p2ptrain ban"),
     {"peers": [replace(ADA, doubts=("e",)), BOB, EVE]}, {"peers": [ADA, BOB, replace(EVE, doubts=("e",))]}),
    ("worth", "warning", "e", ("audits of 2 peers:",),
     {"peers": [replace(ADA, doubts=("e",)), replace(BOB, doubts=("e",)), replace(BOB, peer="c"), EVE]},
     {"peers": [replace(ADA, doubts=("e",)), BOB, replace(BOB, peer="c"), EVE]}),
    ("ban", "warning", "QmEvil12345678", ("12345678", "two results", "pass"),
     {"peers": [replace(ADA, banned=("QmEvil12345678",)), BOB]},
     {"peers": [replace(ADA, banned=("QmEvil12345678",)), BOB, replace(BOB, peer="c")]}),
    ("rising", "warning", "", ("3.000", "2.500", "learning rate"), {"losses": (2.5, 3.0)}, {"losses": (2.5, 2.6)}),
    ("no-round", "critical", "", ("11 min", "reasons"), {"last_commit": START - 660.0}, {"last_commit": START - 540.0}),
    ("no-round", "critical", "", ("11 min",), {"last_commit": None, "since": START - 660.0},
     {"last_commit": None, "since": START - 540.0}),
    ("rounds", "warning", "", ("3 of the last 5", "no quorum", "reach each other"),
     {"peers": [told(ADA, False, True, True, False, True), told(BOB, True, True), told(EVE, False, False)]},
     {"peers": [told(ADA, True, True, True, False, False, True, False, False), told(BOB, False, True), EVE]}),
    ("rounds", "warning", "e", ("Eve's rounds fail", "4 of the last 5", "no quorum"),
     {"peers": [told(ADA, False), told(BOB, False), told(EVE, True, True, True, False, True)]},
     {"peers": [told(ADA, False), told(BOB, False), replace(told(EVE, True, True), state="draining")]}),
    ("bootstrap", "warning", "QmBoot12345678", ("12345678", "cannot join", "start it"),
     {"bootstraps": ("QmBoot12345678",)}, {"bootstraps": ("a", "b")}),
    ("bootstrap", "warning", "gone", ("gone", "have 1 other:", "start it"), {"bootstraps": ("gone", "a")},
     {"bootstraps": ("a",)}),
    ("clock", "warning", "e", ("Eve", "6 s ahead", "NTP"),
     {"peers": [ADA, replace(EVE, clock_skew_seconds=MAX_SKEW_SECONDS + 1.0)]},
     {"peers": [ADA, replace(EVE, clock_skew_seconds=MAX_SKEW_SECONDS)]}),
    ("clock", "warning", "e", ("Eve", "7 s behind", "NTP"), {"peers": [ADA, replace(EVE, clock_skew_seconds=-7.0)]},
     {"peers": [ADA, replace(EVE, clock_skew_seconds=-1.0)]}),
    ("protocol", "warning", "", ("1 of protocol 1", "1 of protocol 2", "update"),
     {"peers": [ADA, replace(BOB, protocol=2)]}, {"peers": [replace(ADA, protocol=2), replace(BOB, protocol=2)]}),
]  # fmt: skip


def case(facts: dict[str, Any]) -> list[Alert]:
    values = dict(facts)
    return alerts_of(*values.pop("peers", [ADA, BOB]), **values)


@pytest.mark.parametrize(
    ("rule", "severity", "subject", "words", "wrong", "right"), CASES, ids=[f"{each[0]}-{each[2]}" for each in CASES]
)
def test_a_rule_holds_exactly_when_it_should_and_says_what_to_do(
    rule: str, severity: str, subject: str, words: tuple[str, ...], wrong: dict[str, Any], right: dict[str, Any]
) -> None:
    [alert] = [each for each in case(wrong) if each.rule == rule and each.subject == subject]
    assert alert.severity == severity
    assert all(word in alert.text for word in words), alert.text
    assert [each for each in case(right) if (each.rule, each.subject) == (rule, subject)] == []


def test_a_swarm_in_which_nobody_trains_yet_has_no_alerts() -> None:
    bootstrap = trainer("boot", role="bootstrap", state="serving", digest=bytes(32))
    assert alerts_of(bootstrap, last_commit=None, bootstraps=("boot",)) == []
    starting = [trainer(peer, state="starting", round=0, loss=None) for peer in "ab"]
    assert alerts_of(bootstrap, *starting, last_commit=None, bootstraps=("boot",)) == []


def test_no_rule_hides_another_however_many_it_finds() -> None:
    crowd = [trainer(f"e{number:03}", name=f"!{number}", digest=OTHER) for number in range(200)]
    honest = [trainer(f"h{number:03}") for number in range(201)]
    rules = [alert.rule for alert in alerts_of(*crowd, *honest, bootstraps=("gone",))]
    assert rules.count("digest") == MAX_PER_RULE
    assert "bootstrap" in rules


ALERT = Alert("clock", "warning", "e", "Eve's clock is 6 s ahead")


def kinds(book: AlertBook, now: float, *alerts: Alert) -> list[tuple[str, str]]:
    return [(event.kind, event.peer) for event in book.update(alerts, START + now)]


def test_what_holds_is_told_once_and_its_end_once() -> None:
    book, told = AlertBook(), []
    for second in range(0, 30, 2):
        told += kinds(book, second, ALERT)
    assert told == [("alert", "e")]
    for second in range(30, 90, 2):
        told += kinds(book, second)
    assert told == [("alert", "e"), ("cleared", "e")]
    assert kinds(book, 90, ALERT) == []
    assert kinds(book, 90 + HOLD_SECONDS, ALERT) == [("alert", "e")], "it is told again when it comes again"


def test_what_flickers_is_never_told() -> None:
    book = AlertBook()
    for second in range(0, 600, 2):
        holds = second % 6 < 4
        assert kinds(book, second, *([ALERT] if holds else [])) == []


def test_a_short_pause_does_not_end_what_was_told_and_the_newest_text_is_told() -> None:
    book, newer = AlertBook(), replace(ALERT, text="7 s ahead")
    assert kinds(book, 0, ALERT) == []
    [began] = book.update([newer], START + HOLD_SECONDS)
    assert (began.kind, began.text) == ("alert", "7 s ahead")
    assert kinds(book, HOLD_SECONDS + CLEAR_SECONDS - 1.0) == []
    assert kinds(book, HOLD_SECONDS + CLEAR_SECONDS, newer) == []
    [ended] = book.update([], START + HOLD_SECONDS + 2 * CLEAR_SECONDS)
    assert (ended.kind, ended.text) == ("cleared", "over: 7 s ahead")


def test_what_stands_is_bounded_and_room_comes_back() -> None:
    book = AlertBook()
    crowd = [replace(ALERT, subject=f"p{number}") for number in range(3 * MAX_LASTING)]
    kinds(book, 0, *crowd)
    assert len(kinds(book, HOLD_SECONDS, *crowd)) == MAX_LASTING
    assert len(kinds(book, HOLD_SECONDS + CLEAR_SECONDS)) == MAX_LASTING
    kinds(book, 100, ALERT)
    assert kinds(book, 100 + HOLD_SECONDS, ALERT) == [("alert", "e")]


# --- the headline ---------------------------------------------------------------------------------------------------

ANN, BEN, CAT = (trainer(peer) for peer in "abc")
LATE = (report(5), aborted(6), aborted(6), report(6), aborted(7))
"""Of the last five rounds of a peer, three were not committed."""
WELL = [replace(peer, last_rounds=(report(7),)) for peer in (ANN, BEN)]
FAILING = [replace(peer, last_rounds=LATE) for peer in (ANN, BEN)]
BOOTSTRAP = trainer("boot", role="bootstrap", state="serving", digest=bytes(32), loss=None)


def headline_of(*records: PeerRecord, rounds: list[RoundView] | None = None, **facts: Any) -> Headline:
    return snapshot_of(records, rounds or (), **facts).headline


SOME_ROUNDS = rounds_of(replace(ANN, last_rounds=(report(5), report(6, seconds=4.0), report(7))))


@pytest.mark.parametrize(
    ("peers", "facts", "health", "summary"),
    [
        ([ANN, BEN], {"rounds": SOME_ROUNDS}, "healthy", "2 peers train"),
        ([ANN, BEN, replace(CAT, state="syncing")], {"rounds": SOME_ROUNDS}, "healthy",
         "2 peers train, 1 more on the way"),
        ([ANN, BEN, replace(CAT, state="draining")], {"rounds": SOME_ROUNDS}, "healthy", "2 peers train"),
        ([ANN, BEN], {}, "healthy", "2 peers train; no round is committed yet"),
        ([ANN], {"rounds": SOME_ROUNDS}, "degraded", "1 peer trains"),
        ([ANN, BEN], {"bootstraps": ("gone",)}, "degraded", "2 peers train; no round is committed yet"),
        ([ANN, BEN, replace(CAT, digest=b"x" * 32)], {"rounds": SOME_ROUNDS}, "degraded", "3 peers train"),
        (FAILING, {"rounds": SOME_ROUNDS}, "degraded",
         "2 peers train, and rounds fail: 3 of the last 5 were not committed (too few peers)"),
        ([*WELL, replace(CAT, last_rounds=LATE)], {"rounds": SOME_ROUNDS}, "degraded", "3 peers train"),
        (FAILING, {"since": START - 3600.0}, "stopped", "Training stands still"),
        ([ANN, BEN], {"since": START - 3600.0}, "stopped", "Training stands still"),
        ([replace(ANN, state="syncing"), BOOTSTRAP], {}, "stopped", "No peer trains at the moment"),
        ([replace(ANN, state="draining")], {}, "stopped", "No peer trains at the moment"),
        ([BOOTSTRAP], {}, "empty", "Nobody trains in this swarm yet"),
        ([], {}, "empty", "Nobody trains in this swarm yet"),
    ],
)  # fmt: skip
def test_health_and_its_summary(peers: list[PeerRecord], facts: dict[str, Any], health: str, summary: str) -> None:
    headline = headline_of(*peers, **facts)
    assert (headline.health, headline.summary) == (health, summary)


def test_the_worst_reason_is_the_first() -> None:
    diverged = replace(BEN, loss=None, diverged=True)
    headline = headline_of(ANN, diverged, bootstraps=("gone",), directory_answers=False)
    words = ("directory", "loss", "gone")
    assert [word for word, reason in zip(words, headline.reasons, strict=True) if word in reason] == list(words)


def test_an_empty_swarm_has_no_numbers() -> None:
    headline = headline_of(BOOTSTRAP)
    assert (headline.loss, headline.round_seconds, headline.bytes_per_token) == (None, None, None)
    assert (headline.peers, headline.training, headline.round) == (1, 0, 0)


def test_one_liar_among_three_honest_peers_does_not_move_medians() -> None:
    honest = [
        replace(peer, loss=loss, bytes_sent=1000 * index, trained_tokens=1000)
        for index, (peer, loss) in enumerate(zip((ANN, BEN, CAT), (2.4, 2.5, 2.6), strict=True), start=1)
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
    assert headline_of(ANN, replace(BEN, loss=9.0, state="syncing"), replace(BOOTSTRAP, loss=99.0)).loss == 2.5


def test_the_time_of_a_round_is_the_median_between_committed_ones() -> None:
    assert seconds_between(SOME_ROUNDS) == pytest.approx(6.0)
    assert headline_of(ANN, rounds=SOME_ROUNDS).round_seconds == pytest.approx(6.0)
    assert seconds_between(SOME_ROUNDS[:1]) is None
    first, second, third = SOME_ROUNDS
    assert seconds_between([first, replace(second, committed=False), third]) == pytest.approx(12.0)
