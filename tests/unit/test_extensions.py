"""What packages add is found by name, loaded once, and checked; what is missing or wrong is named with the fix."""

from pathlib import Path

import pytest

from p2ptrain.errors import IncompatibleError
from p2ptrain.extensions import Extensions, check_packages
from tests.support.packages import install

MODULE = """
class Long(str): pass
tall = "tall"
number = 7
"""


def refuse_tall(found: str) -> None:
    if found == "tall":
        raise ValueError("too tall")


@pytest.fixture
def words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Extensions[str]:
    points = {name: f"brought_words:{name}" for name in ("Long", "tall", "number", "gone", "own")}
    install(tmp_path, monkeypatch, "brings", {"brought_words": MODULE}, {"test.words": points})
    return Extensions("test.words", "word", str, {"own": "os:sep"}, f"{__name__}:refuse_tall")


def test_own_and_installed_ones_are_found_and_loaded_once(words: Extensions[str]) -> None:
    assert words.own == ("own",)
    assert words.names() == ("own", "Long", "tall", "number", "gone")
    assert words.get("own") == "/"
    assert type(words.get("Long")).__name__ == "Long"
    assert words.get("Long") is words.get("Long")
    assert (words.package_of("Long"), words.package_of("own")) == ("brings==1.0", "")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("unheard-of", r"unknown word 'unheard-of'; this machine has own, Long, .*install the package.*test\.words"),
        ("gone", "'gone' of brought_words:gone cannot be loaded: "),
        ("number", "'number' of brought_words:number is no builtins.str"),
        ("tall", "'tall' of brought_words:tall is refused: too tall"),
    ],
)
def test_what_cannot_be_used_is_refused(words: Extensions[str], name: str, message: str) -> None:
    for _ in range(2):
        with pytest.raises(IncompatibleError, match=message):
            words.get(name)


def test_packages_have_to_be_there_in_the_version_that_the_manifest_pins(words: Extensions[str]) -> None:
    check_packages(["brings==1.0"])
    with pytest.raises(IncompatibleError, match=r"brings 2\.0, and this machine has 1\.0.*pip install 'brings==2\.0'"):
        check_packages(["brings==2.0"])
    with pytest.raises(IncompatibleError, match="this machine has none"):
        check_packages(["p2ptrain-unheard-of==1.0"])
