import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import p2ptrain.errors as errors
from p2ptrain.cli.main import EXIT_CODES
from p2ptrain.errors import P2PTrainError, PeerError

ROOT = Path(__file__).resolve().parents[2]


def subclasses(root: type[P2PTrainError]) -> Iterator[type[P2PTrainError]]:
    for child in root.__subclasses__():
        yield child
        yield from subclasses(child)


def in_module() -> list[type[P2PTrainError]]:
    return [error for error in subclasses(P2PTrainError) if error.__module__ == errors.__name__]


def test_the_tree_in_the_docstring_names_every_error_and_nothing_else() -> None:
    drawn = set(re.findall(r"\b\w+Error\b", str(errors.__doc__)))
    assert drawn == {error.__name__ for error in in_module()} | {"P2PTrainError"}


def test_the_help_names_every_exit_code_and_nothing_else() -> None:
    documented = {int(number) for number in re.findall(r"^  (\d+) ", EXIT_CODES, re.MULTILINE)}
    assert documented == {error.exit_code for error in in_module()} | {0, 1, 130}


@pytest.mark.parametrize(
    ("file", "lines"),
    [
        ("compose.yaml", r"entrypoint: \[tini, (-e, .*), --"),
        ("compose.stages.yaml", r"entrypoint: \[tini, (-e, .*), --"),
        ("deploy/systemd/p2ptrain@.service", r"RestartPreventExitStatus=(.*)"),
        ("docs/how-to/systemd.md", r"RestartPreventExitStatus=(.*)"),
        ("tests/docker/test_image.py", r'REMAPPED = \("tini", (.*), "--"'),
    ],
)
def test_peers_are_not_started_again_after_the_exit_codes_that_the_reference_names(file: str, lines: str) -> None:
    reference = (ROOT / "docs/reference/exit-codes.md").read_text()
    (named,) = re.findall(r"must not start a peer again after ([\d, or]+):", reference)
    found = re.findall(lines, (ROOT / file).read_text())
    assert found
    for each in found:
        assert re.findall(r"\d+", each) == re.findall(r"\d+", named)


def test_a_peers_failure_names_the_peer_and_keeps_its_reason() -> None:
    error = PeerError("QmAAAAAAAAAAAAbbbbbbbb", "it went silent")
    assert (error.reason, error.peer) == ("it went silent", "QmAAAAAAAAAAAAbbbbbbbb")
    assert str(error) == "peer bbbbbbbb: it went silent"
