"""Tool calls in an answer's text: JSON with name and arguments, between ``<tool_call>`` and ``</tool_call>``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import NamedTuple

from p2ptrain.serving.grammar import CLOSING, OPENING
from p2ptrain.serving.text import overlap


class ToolCall(NamedTuple):
    """A function's name, and its arguments as JSON."""

    name: str
    arguments: str


class ToolCalls:
    """Finds the calls in a text, however the text is cut into pieces.

    It holds back text that may become a call. A call that is not valid, or names an unknown function, is text at last.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._names = frozenset(names)
        self._held = ""
        self._seen = 0
        self._is_after_call = False

    def push(self, text: str) -> tuple[str, list[ToolCall]]:
        """Return the text that belongs to no call, as far as it is certain, and the calls that are complete."""
        held, told, calls = self._held + text, "", list[ToolCall]()
        while (start := held.find(OPENING)) >= 0:
            call, begin = None, start + len(OPENING)
            end = held.find(CLOSING, max(begin, self._seen))
            while end >= 0 and (call := self._parse(held[begin:end])) is None:  # A string may have the word in it.
                end = held.find(CLOSING, end + 1)
            if call is None:
                self._held, self._seen = held[start:], len(held) - start - len(CLOSING) + 1
                return told + self._text(held[:start]), calls
            calls.append(call)
            told += self._text(held[:start])
            held, self._seen, self._is_after_call = held[end + len(CLOSING) :], 0, True
        keep = overlap(held, OPENING)
        self._held = held[len(held) - keep :]
        return told + self._text(held[: len(held) - keep]), calls

    def close(self) -> str:
        """Return the text that is held back, which has become no call."""
        held, self._held = self._held, ""
        return self._text(held)

    def _text(self, text: str) -> str:
        """Return text outside of calls, without the lines' ends that follow a call."""
        text = text.lstrip("\n") if self._is_after_call else text
        self._is_after_call = self._is_after_call and not text
        return text

    def _parse(self, text: str) -> ToolCall | None:
        try:
            values = json.loads(text)
            if not isinstance(values, dict) or str(values.get("name")) not in self._names:
                return None
            if not isinstance(arguments := values.get("arguments", {}), dict):
                return None
            told = json.dumps(arguments, ensure_ascii=False, allow_nan=False)
            told.encode()  # Python reads NaN and halves of characters, which are no JSON and no text.
        except (ValueError, RecursionError):
            return None
        return ToolCall(str(values["name"]), told)
