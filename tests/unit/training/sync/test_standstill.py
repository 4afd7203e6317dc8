"""The warnings while a peer's rounds fail."""

from p2ptrain.training.sync.standstill import FIRST_SECONDS, Standstill
from p2ptrain.training.sync.synchronizer import CAUGHT_UP, RoundResult

DONE = RoundResult(True, 4, "")
FAILED = RoundResult(False, 3, "commit: 0 of the 1 voters signed", seconds=10.0)
PAUSED = RoundResult(False, 3, "1 of at least 2 peers are ready", paused=True, seconds=10.0)


def told_at(result: RoundResult, last: int) -> list[int]:
    """Return the times of warnings if such a result comes every ten seconds from 10 to ``last``."""
    standstill = Standstill()
    return [now for now in range(10, last + 1, 10) if standstill.note(result, float(now))]


def test_a_pause_is_told_at_once_and_again_when_it_has_doubled() -> None:
    assert told_at(PAUSED, 600) == [10, 30, 60, 120, 240, 480]


def test_failed_rounds_are_told_only_if_they_last() -> None:
    assert told_at(FAILED, int(FIRST_SECONDS) - 10) == []
    assert told_at(FAILED, 250) == [30, 60, 120, 240]


def test_a_committed_round_ends_a_standstill() -> None:
    standstill = Standstill()
    assert "paused for 10 s" in standstill.note(PAUSED, 10.0)
    assert standstill.note(DONE, 20.0) == ""
    assert "paused for 10 s" in standstill.note(PAUSED, 1000.0)


def test_a_warning_tells_what_is_missing_and_what_to_do() -> None:
    told = Standstill().note(PAUSED, 10.0)
    assert told.startswith("round 3: paused for 10 s: 1 of at least 2 peers are ready. ")
    assert "if the others are done, end it with Ctrl-C" in told


def test_who_catches_up_again_and_again_is_told_that_it_is_too_slow() -> None:
    standstill = Standstill()
    told = [standstill.note(RoundResult(True, 20 * n, CAUGHT_UP, seconds=12.0), 20.0 * n) for n in range(1, 10)]
    assert [bool(each) for each in told] == [n in (3, 6) for n in range(1, 10)]
    assert told[2].startswith("this peer has taken part in no round for 52 s: it caught up 3 times, while the others")
    assert "ended 40 rounds" in told[2]


def test_who_takes_part_after_it_caught_up_is_told_nothing() -> None:
    standstill = Standstill()
    for now in range(100, 1000, 100):
        assert standstill.note(RoundResult(True, now, CAUGHT_UP), float(now)) == ""
        assert standstill.note(DONE, now + 50.0) == ""


def test_a_failure_of_who_caught_up_often_is_told_with_its_reason() -> None:
    standstill = Standstill()
    for now in (20.0, 40.0, 60.0):
        standstill.note(RoundResult(True, int(now), CAUGHT_UP, seconds=12.0), now)
    assert "0 of the 1 voters signed" in standstill.note(FAILED, 500.0)
