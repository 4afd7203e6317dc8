"""``p2ptrain generate`` and ``chat``: texts that cannot be asked, and answers that fail."""

import asyncio
import builtins
import contextlib
import io
import sys
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from p2ptrain.cli.commands.serving import chat, talking
from p2ptrain.cli.main import main
from p2ptrain.errors import UsageError
from p2ptrain.network.link import SwarmLink
from p2ptrain.node.serving import thread as node_thread
from p2ptrain.serving.errors import OverloadedError
from p2ptrain.serving.sampling import Sampling
from p2ptrain.serving.text import Text
from tests.support.generators import tokenizer

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


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_conversation_on_a_terminal_outlives_an_answer_that_fails(
    is_terminal: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said, asked, made = iter(["one", "two", "three"]), list[str](), tokenizer()

    async def answer(model: Any, text: Text, ids: Sequence[int], *_: Any) -> str:
        asked.append(bytes(ids).decode())
        if len(asked) == 2:
            raise OverloadedError(1.0, "all hosts are full: try again later")
        return "yes"

    def read(_: str) -> str:
        if (line := next(said, None)) is None:
            raise EOFError
        return line

    @contextlib.contextmanager
    def thread(*_: Any) -> Iterator[Any]:
        yield SimpleNamespace(model=None, call=asyncio.run)

    monkeypatch.setattr(sys, "stdin", SimpleNamespace(isatty=lambda: is_terminal))
    monkeypatch.setattr(builtins, "input", read)
    monkeypatch.setattr(talking, "text_of", lambda *_: (Text(made), made, Sampling()))
    monkeypatch.setattr(node_thread, "ModelThread", thread)
    monkeypatch.setattr(chat, "answer", answer)
    assert main(["chat", LINK]) == (0 if is_terminal else 75)
    assert asked[-1] == f"user: one\nassistant: yes\nuser: {'three' if is_terminal else 'two'}\nassistant: "
    assert "all hosts are full" in capsys.readouterr().err


def latin() -> io.TextIOWrapper:
    return io.TextIOWrapper(io.BytesIO("café\n".encode("latin-1")), encoding="utf-8")
