"""Of members that gave up an attempt, one that did so first is found."""

import pytest

from p2ptrain.averaging.allreduce.member import first_to_give_up


@pytest.mark.parametrize(
    ("blames", "first"),
    [
        ({3: ()}, {3}),
        ({3: (0,)}, {3}),
        ({1: (3,), 2: (3,), 3: (0,)}, {3}),
        ({1: (2,), 2: (3,), 3: (0,)}, {3}),
        ({1: (2,), 2: (1,)}, {1, 2}),
        ({1: (1,)}, {1}),
        ({1: (5,), 2: (0, 1)}, {1}),
    ],
    ids=["for nothing", "alone", "two follow", "a chain", "each blames the other", "itself", "it and another"],
)
def test_the_others_name_the_member_that_gave_up_first(blames: dict[int, tuple[int, ...]], first: set[int]) -> None:
    assert first_to_give_up({index: frozenset(each) for index, each in blames.items()}) in first
