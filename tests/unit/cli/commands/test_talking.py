"""``p2ptrain generate`` and ``chat``: texts that cannot be asked, and answers that fail."""

import io
import sys

import pytest

from p2ptrain.cli.commands.serving import chat
from p2ptrain.cli.main import main
from p2ptrain.errors import UsageError
from p2ptrain.network.link import SwarmLink

LINK = str(SwarmLink(bytes(32), (f"/ip4/127.0.0.1/tcp/1/p2p/Qm{'a' * 44}",)))


@pytest.mark.parametrize(
    ("words", "what"),
    [
        (["generate", LINK, "caf\udce9"], "PROMPT"), (["generate", LINK, "-"], "PROMPT"),
        (["chat", LINK, "--system", "caf\udce9"], "--system"),
    ],
)  # fmt: skip
def test_bytes_that_are_no_text_are_refused_before_it_connects(
    words: list[str], what: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", latin())
    assert main(words) == 2
    assert f"{what}: is not UTF-8" in capsys.readouterr().err


def test_a_message_that_is_no_text_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", latin())
    with pytest.raises(UsageError, match="standard input: is not UTF-8"):
        chat._read()


def latin() -> io.TextIOWrapper:
    return io.TextIOWrapper(io.BytesIO("café\n".encode("latin-1")), encoding="utf-8")
