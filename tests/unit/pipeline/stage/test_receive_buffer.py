"""Room for what is on its way: bounded as a whole and for each sender, and given back once."""

from __future__ import annotations

import contextlib

import pytest

from p2ptrain.pipeline.messages import FullError
from p2ptrain.pipeline.stage.ledger import Limits
from p2ptrain.pipeline.stage.receive_buffer import ReceiveBuffer

LIMITS = Limits(max_bytes=100, max_share=0.5)


def test_nothing_is_received_that_there_is_no_room_for() -> None:
    buffer = ReceiveBuffer(LIMITS)
    with contextlib.ExitStack() as held:
        held.enter_context(buffer.hold("a", 30))
        held.enter_context(buffer.hold("a", 20))
        with pytest.raises(FullError, match="this peer's"), buffer.hold("a", 1):
            pass
        held.enter_context(buffer.hold("b", 50))
        with pytest.raises(FullError, match="too much is being sent here"), buffer.hold("c", 1):
            pass
        assert buffer.num_bytes == 100
    assert buffer.num_bytes == 0


def test_the_first_of_a_sender_fits_where_there_is_room_at_all() -> None:
    buffer = ReceiveBuffer(LIMITS)
    with buffer.hold("a", 100):
        assert buffer.num_bytes == 100
    with pytest.raises(FullError), buffer.hold("a", 101):
        pass


def test_room_is_given_back_once_also_after_an_error() -> None:
    buffer = ReceiveBuffer(LIMITS)
    with buffer.hold("a", 40), buffer.hold("b", 40) as release:
        release()
        release()
        assert buffer.num_bytes == 40
    with pytest.raises(RuntimeError), buffer.hold("a", 40):
        raise RuntimeError
    assert buffer.num_bytes == 0
