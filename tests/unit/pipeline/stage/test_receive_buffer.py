"""Room for what is on its way: bounded as a whole and for each sender, and given back once."""

from __future__ import annotations

import contextlib

import pytest

from p2ptrain.pipeline.stage.ledger import FullError, Limits
from p2ptrain.pipeline.stage.receive_buffer import Intake

LIMITS = Limits(max_bytes=100, max_share=0.5)


def test_nothing_is_received_that_there_is_no_room_for() -> None:
    intake = Intake(LIMITS)
    with contextlib.ExitStack() as held:
        held.enter_context(intake.hold("a", 30))
        held.enter_context(intake.hold("a", 20))
        with pytest.raises(FullError, match="this peer's"), intake.hold("a", 1):
            pass
        held.enter_context(intake.hold("b", 50))
        with pytest.raises(FullError, match="too much is being sent here"), intake.hold("c", 1):
            pass
        assert intake.num_bytes == 100
    assert intake.num_bytes == 0


def test_the_first_of_a_sender_fits_where_there_is_room_at_all() -> None:
    intake = Intake(LIMITS)
    with intake.hold("a", 100):
        assert intake.num_bytes == 100
    with pytest.raises(FullError), intake.hold("a", 101):
        pass


def test_room_is_given_back_once_also_after_an_error() -> None:
    intake = Intake(LIMITS)
    with intake.hold("a", 40), intake.hold("b", 40) as release:
        release()
        release()
        assert intake.num_bytes == 40
    with pytest.raises(RuntimeError), intake.hold("a", 40):
        raise RuntimeError
    assert intake.num_bytes == 0
