"""A package whose parts can be imported without the code of its ``__init__``."""

import importlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from p2ptrain.network.libp2p.lazy_hivemind import put_in_place

NAME = "a_large_package"


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A package that imports all of its parts, of which one looks itself up while it is imported."""
    folder = tmp_path / NAME
    folder.mkdir()
    (folder / "__init__.py").write_text(f"from {NAME}.heavy import WEIGHT\nfrom {NAME}.light import word\n")
    (folder / "heavy.py").write_text("WEIGHT = 30\n")
    (folder / "light.py").write_text(f"import {NAME}.light as me\ndef word(): return me.__name__\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    yield NAME
    for module in [module for module in sys.modules if module.partition(".")[0] == NAME]:
        del sys.modules[module]


def test_a_part_is_imported_without_the_rest(package: str) -> None:
    put_in_place(package)
    assert importlib.import_module(f"{package}.light").word() == f"{package}.light"
    assert f"{package}.heavy" not in sys.modules


def test_the_rest_comes_when_it_is_asked_for(package: str) -> None:
    put_in_place(package)
    light = importlib.import_module(f"{package}.light")
    whole = importlib.import_module(package)
    assert whole.WEIGHT == 30
    assert whole.word is light.word
    with pytest.raises(AttributeError):
        whole.nothing  # noqa: B018 - asking is what is tested


def test_names_that_all_modules_are_asked_for_bring_nothing(package: str) -> None:
    put_in_place(package)
    assert not hasattr(importlib.import_module(package), "__wrapped__")
    assert f"{package}.heavy" not in sys.modules


def test_what_is_imported_or_missing_is_left_alone(package: str) -> None:
    whole = importlib.import_module(package)
    put_in_place(package)
    assert importlib.import_module(package) is whole
    for missing in ("no_such_package_anywhere", "no_such_package_anywhere.part"):
        put_in_place(missing)
        assert missing not in sys.modules


def test_the_network_does_without_hivemind_s_averager() -> None:
    check = "import p2ptrain.network.libp2p.directory, sys; sys.exit('hivemind.averaging' in sys.modules)"
    subprocess.run([sys.executable, "-c", check], check=True)
