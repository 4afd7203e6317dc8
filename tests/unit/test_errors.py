import re
from collections.abc import Iterator

import p2ptrain.errors as errors
from p2ptrain.cli.main import EXIT_CODES
from p2ptrain.errors import P2PTrainError, PeerError


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


def test_a_peers_failure_names_the_peer_and_keeps_its_reason() -> None:
    error = PeerError("QmAAAAAAAAAAAAbbbbbbbb", "it went silent")
    assert (error.reason, error.peer) == ("it went silent", "QmAAAAAAAAAAAAbbbbbbbb")
    assert str(error) == "peer bbbbbbbb: it went silent"
