"""The list of mutants stays one that can be applied, whatever moves in the product."""

import pytest

from tests.mutants import MUTANTS, ROOT, Mutant, occurrences


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_changes_one_place_and_names_a_test_that_is_there(mutant: Mutant) -> None:
    assert occurrences(mutant) == 1
    assert mutant.before != mutant.after
    assert (ROOT / "tests" / mutant.test.split(" ")[0]).is_file()


def test_no_two_mutants_have_one_name() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)
