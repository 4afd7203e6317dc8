"""Whom a leader asks before few peers end a round."""

from __future__ import annotations

from p2ptrain.averaging.grouping.absentees import ANSWER_SECONDS, SILENCE_SECONDS, Absent
from p2ptrain.averaging.grouping.cells import Key

KEY = Key(3, b"l" * 32, 4)
NEXT = Key(4, b"m" * 32, 4)


def test_the_larger_part_asks_nobody() -> None:
    assert Absent().to_ask(KEY, 2, ["a"], 0.0) == []
    assert Absent().to_ask(KEY, 1, ["a"], 0.0) == ["a"]
    assert Absent().to_ask(KEY, 2, ["a", "b", "c"], 0.0) == ["a", "b", "c"]


def test_who_answered_is_asked_again_about_the_next_round_or_after_a_while() -> None:
    absent = Absent()
    absent.answered("a", KEY, asked=5.0)
    assert absent.to_ask(KEY, 1, ["a", "b"], 6.0) == ["b"]
    assert absent.to_ask(KEY, 1, ["a"], 5.0 + ANSWER_SECONDS) == ["a"]
    absent.answered("a", KEY, asked=8.0)
    assert absent.to_ask(NEXT, 1, ["a"], 8.0) == ["a"]


def test_who_was_silent_is_not_asked_about_later_rounds_until_it_is_heard_from() -> None:
    absent = Absent()
    for peer in ("a", "b"):
        absent.silent(peer, asked=5.0, now=8.0, patience_seconds=3.0)
    assert absent.to_ask(NEXT, 1, ["a", "b"], 9.0) == []
    absent.heard_from("a")
    assert absent.to_ask(NEXT, 1, ["a", "b"], 9.0) == ["a"]
    assert absent.to_ask(NEXT, 1, ["a", "b"], 5.0 + SILENCE_SECONDS) == ["a", "b"]


def test_who_stood_still_itself_knows_nothing_of_the_others_silence() -> None:
    absent = Absent()
    absent.silent("a", asked=5.0, now=12.0, patience_seconds=3.0)
    assert absent.to_ask(KEY, 1, ["a"], 12.0) == ["a"]
