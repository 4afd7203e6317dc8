"""The package and its tests grow no further: what `tests.support.house` counts stays within these limits."""

from pathlib import Path

import pytest

from tests.support import house

LIMITS = {house.PACKAGE: 46_500, house.TESTS: 51_300}
MAX_FILES = 13
MAX_IMPORTS = 12


@pytest.mark.parametrize("root", LIMITS, ids=lambda root: root.name)
def test_lines_stay_within_their_limit(root: Path) -> None:
    assert house.count_lines(root) <= LIMITS[root]


def test_no_folder_of_the_package_is_too_full() -> None:
    number, folder = house.largest_folder()
    assert number <= MAX_FILES, f"{folder} has {number} modules: merge those that change together"


def test_no_module_imports_too_many_others() -> None:
    number, module = house.largest_imports(house.modules())
    assert number <= MAX_IMPORTS, f"{module} imports {number} modules: let objects that it holds answer instead"
