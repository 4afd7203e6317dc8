"""Text on the client's side: prompts to tokens, tokens to text as they arrive, and stop strings.

A `TextStream` decodes a short window of tokens at a time, as text-generation-inference does, so its time is linear.
The window begins before the new tokens, since some decoders strip the space of the first one.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from typing import Any

import jinja2

from p2ptrain.models.tokenizers import byte_characters
from p2ptrain.serving.errors import ChatTemplateError

CONTEXT_TOKENS = 6
"""Tokens of the prompt that a stream decodes before the first generated one."""
MAX_WINDOW_TOKENS = 48
"""Tokens after which a stream no longer waits for the rest of a character."""
INCOMPLETE_CHARS = 3
"""Largest number of U+FFFD in a decoded text's end that the next token may still complete to one character."""
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
_FALLBACK_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


class Text:
    """A model's tokenizer, as serving uses it.

    Args:
        tokenizer: A transformers tokenizer.
        end_ids: Tokens that end an answer, beside the tokenizer's end-of-sequence token.
    """

    def __init__(self, tokenizer: Any, end_ids: Collection[int] = ()) -> None:
        own = tokenizer.eos_token_id
        self.tokenizer = self._tokenizer = tokenizer
        self.end_ids = frozenset(end_ids if own is None else {own, *end_ids})

    def encode(self, text: str) -> list[int]:
        """Return the tokens of a prompt, with those that the tokenizer puts around each text."""
        ids: list[int] = self._tokenizer.encode(text, verbose=False)
        return ids

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> list[int]:
        """Return the tokens of a conversation and of the beginning of the assistant's answer.

        Raises `ChatTemplateError` if there is no chat template, or it refuses the messages or takes no tools.
        """
        if not self._tokenizer.chat_template:
            raise ChatTemplateError("the model's tokenizer has no chat template: use generate or /v1/completions")
        if tools and "tools" not in str(self._tokenizer.chat_template):
            raise ChatTemplateError("the model's chat template takes no tools: leave them out")
        try:
            text = self._tokenizer.apply_chat_template(
                list(messages), tools=list(tools) or None, tokenize=False, add_generation_prompt=True
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError) as error:
            raise ChatTemplateError(f"the model's chat template refuses the messages: {error}") from error
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False, verbose=False)
        return ids

    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of tokens without special ones."""
        text: str = self._tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of one token, which may be part of a character."""
        added = self._added.get(token_id)
        piece = str(added) if added is not None else self._tokenizer.convert_ids_to_tokens(token_id)
        if not isinstance(piece, str):
            return b""
        if added is None and self._bytes_of_characters is not None:
            return bytes(self._bytes_of_characters.get(character, 0x3F) for character in piece)
        if (byte := _FALLBACK_BYTE.fullmatch(piece)) is not None:
            return bytes.fromhex(byte[1])
        return piece.replace("\u2581", " ").encode(errors="replace")

    @cached_property
    def _added(self) -> Mapping[int, Any]:
        """The tokens beside the vocabulary; the tokenizer makes all of them anew each time."""
        added: Mapping[int, Any] = self._tokenizer.added_tokens_decoder
        return added

    @cached_property
    def _bytes_of_characters(self) -> Mapping[str, int] | None:
        """Bytes by the characters that stand for them in a byte-level vocabulary; None in other vocabularies."""
        backend = getattr(self._tokenizer, "backend_tokenizer", None)
        if backend is None or '"ByteLevel"' not in _decoder_json(backend):
            return None
        return {character: byte for byte, character in enumerate(byte_characters())}


def _decoder_json(backend: Any) -> str:
    """Return the decoder of a ``tokenizers`` tokenizer as JSON."""
    return "" if backend.decoder is None else str(backend.decoder.__getstate__().decode())


class TextStream:
    """Turns tokens into text one at a time.

    It holds back a character until its last byte is there; without that, it drops the character. Other bytes that are
    no UTF-8 become U+FFFD.

    Args:
        context: Tokens before the first one, such as the prompt.
    """

    def __init__(self, text: Text, context: Sequence[int] = ()) -> None:
        self._text = text
        self._window = list(context[-CONTEXT_TOKENS:])
        self._num_old = len(self._window)
        before = text.decode(self._window)
        self._num_sent = len(before) - _incomplete(before)

    def push(self, token_id: int) -> str:
        """Return the text that is certain now; it may be empty."""
        self._window.append(token_id)
        decoded = self._text.decode(self._window)
        stable = len(decoded) - _incomplete(decoded)
        found = decoded[self._num_sent : stable]
        self._num_sent = max(self._num_sent, stable)
        if stable == len(decoded) and found:
            self._keep(len(self._window) - self._num_old)
        elif len(self._window) - self._num_old > MAX_WINDOW_TOKENS:
            found += self._shorten(decoded)
        return found

    def _keep(self, number: int) -> None:
        """Keep the last tokens, all of whose text is sent, as the context of the next ones."""
        self._window = self._window[-number:]
        self._num_old = number
        self._num_sent = len(self._text.decode(self._window))

    def _shorten(self, decoded: str) -> str:
        """Cut a window that has not ended with a whole character for long; return text that is certain by that.

        The cut is where it changes no character. In a window without such a place, the last bytes are given up.
        """
        for number in range(INCOMPLETE_CHARS + 1, MAX_WINDOW_TOKENS // 2):
            before, after = self._text.decode(self._window[:-number]), self._text.decode(self._window[-number:])
            if before + after == decoded:
                rest = before[self._num_sent :]
                self._window, self._num_old = self._window[-number:], number
                self._num_sent = max(0, self._num_sent - len(before))
                return rest
        rest = decoded[self._num_sent :]
        self._keep(INCOMPLETE_CHARS + 1)
        return rest


def _incomplete(text: str) -> int:
    """Return the number of characters at the end that the next token may change."""
    return min(INCOMPLETE_CHARS, len(text) - len(text.rstrip(_REPLACEMENT)))


class StopStrings:
    """Finds the first stop string that is completed in a text, however the text is cut into pieces.

    It holds back the end of the text only while that may become a stop string.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = [stop for stop in stops if stop]
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """Return the text before a stop string, as far as it is certain, and whether a stop string is complete."""
        held = self._held + text
        ends = [(start + len(stop), start) for stop in self._stops if (start := held.find(stop)) >= 0]
        if ends:
            self._held = ""
            return held[: min(ends)[1]], True
        keep = max((overlap(held, stop) for stop in self._stops), default=0)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep], False

    def close(self) -> str:
        """Return the text that is held back, which has become no stop string."""
        held, self._held = self._held, ""
        return held


def overlap(text: str, stop: str) -> int:
    """Return the length of the longest end of ``text`` with which ``stop`` begins."""
    most = min(len(text), len(stop) - 1)
    return next((number for number in range(most, 0, -1) if text.endswith(stop[:number])), 0)
