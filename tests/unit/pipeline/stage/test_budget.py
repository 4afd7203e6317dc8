"""What a host holds for others is bounded, in all and for each of them."""

import contextlib

import pytest

from p2ptrain.pipeline.messages import FullError
from p2ptrain.pipeline.stage.budget import Amounts, Budget


def bytes_of(number: int) -> Amounts:
    return Amounts(1, 0, number)


def budget() -> Budget:
    return Budget(Amounts(9, 0, 100), 0.5, "are here")


def test_nothing_is_held_that_there_is_no_room_for() -> None:
    made = budget()
    with contextlib.ExitStack() as held:
        held.enter_context(made.hold("a", bytes_of(30)))
        held.enter_context(made.hold("a", bytes_of(20)))
        with pytest.raises(FullError, match="2 microbatches of this peer are here"), made.hold("a", bytes_of(1)):
            pass
        held.enter_context(made.hold("b", bytes_of(50)))
        with pytest.raises(FullError, match="3 microbatches are here"), made.hold("c", bytes_of(1)):
            pass
        assert made.total == Amounts(3, 0, 100)
    assert made.total == Amounts()
    with made.hold("a", bytes_of(100)):
        assert made.total.num_bytes == 100, "the first one of a peer fits where there is room at all"
    with pytest.raises(FullError), made.hold("a", bytes_of(101)):
        pass


@pytest.mark.parametrize("one", [Amounts(1), Amounts(0, 10), Amounts(0, 0, 10)])
def test_one_peer_gets_at_most_its_share_of_each_amount(one: Amounts) -> None:
    made = Budget(Amounts(10, 100, 100), 0.5, "are here")
    with contextlib.ExitStack() as held:
        for _ in range(5):
            held.enter_context(made.hold("a", one))
        with pytest.raises(FullError, match="of this peer"), made.hold("a", one):
            pass
        for _ in range(5):
            held.enter_context(made.hold("b", one))
        with pytest.raises(FullError, match="go to another host"), made.hold("c", one):
            pass


def test_room_is_given_back_once_also_after_an_error() -> None:
    made = budget()
    with made.hold("a", bytes_of(40)), made.hold("b", bytes_of(40)) as release:
        release()
        release()
        assert made.total.num_bytes == 40
    with pytest.raises(RuntimeError), made.hold("a", bytes_of(40)):
        raise RuntimeError
    assert made.total == Amounts()
