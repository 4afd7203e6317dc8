"""Grammars that answers follow: which tokens may come next is a function of the tokens so far.

An `AnswerForm` travels in the ticket, as JSON. The last host makes a grammar of it, and compiles that against the
vocabulary with llguidance, https://github.com/guidance-ai/llguidance. So a substitute computes the same masks. Clients
cannot send grammars: some take minutes to compile.
"""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import msgspec
import numpy as np
from msgspec import Meta

from p2ptrain.buffers import Bounded
from p2ptrain.errors import ConfigError, IntegrityError
from p2ptrain.serving.errors import GrammarError
from p2ptrain.serving.sampling import MAX_GRAMMAR_BYTES, Ids

if TYPE_CHECKING:
    from llguidance import LLMatcher

MAX_CACHED = 32
MAX_FUNCTIONS = 128
MAX_CALLS = 32
"""Calls that a form permits in one answer."""
MAX_PATTERNS = 16
"""Regular expressions in a form: the time for the intersection of many has no other bound."""
BUSY_SECONDS = 1.0
"""Timeout of the wait for another compilation."""
OPENING, CLOSING = "<tool_call>", "</tool_call>"
"""Around a tool call in an answer, as most open models are trained on (Hermes, Qwen, SmolLM2)."""
LIMITS: Mapping[str, Any] = {
    "max_grammar_size": 100_000, "initial_lexer_fuel": 1_000_000, "max_lexer_states": 10_000,
    "step_lexer_fuel": 100_000, "step_max_items": 20_000, "verbose_errors": False,
}  # fmt: skip
"""Bounds of a grammar: about 50 ms of compilation, 20 MB of states, and 10 ms a token. Equal on all hosts."""
MAX_REASON_CHARS = 200
WHITESPACE = r"[ \n]{0,16}"
"""Between tokens of JSON; bounded, so that an answer cannot consist of spaces."""


class AnswerForm(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The form of an answer: JSON that a schema describes, or calls of functions with the schemas of their parameters.

    Attributes:
        schema: A JSON Schema; None for calls.
        functions: Parameters' schemas by name.
        is_parallel: True if an answer may have several calls.
    """

    schema: dict[str, Any] | None = None
    functions: Annotated[
        dict[Annotated[str, Meta(pattern="^[a-zA-Z0-9_.-]{1,64}$")], dict[str, Any]], Meta(max_length=MAX_FUNCTIONS)
    ] = {}
    is_parallel: bool = False

    def __post_init__(self) -> None:
        if (self.schema is None) != bool(self.functions):
            raise ValueError("a form has a schema, or functions")

    def encode(self) -> bytes:
        """Return the form as JSON; raise `GrammarError` if it is too long or nested too deeply."""
        try:
            text = msgspec.json.encode(self)
        except RecursionError as error:
            raise GrammarError("the schema is nested too deeply") from error
        if len(text) > MAX_GRAMMAR_BYTES:
            raise GrammarError(f"it has {len(text)} bytes, and {MAX_GRAMMAR_BYTES} are the most")
        return text

    def grammar(self) -> str:
        """Return the grammar in llguidance's variant of Lark."""
        if self.schema is not None:
            return f"start: {_json_rule(self.schema)}"
        more = f' ("\\n" call){{0,{MAX_CALLS - 1}}}' if self.is_parallel else ""
        choices = [f"call_{number}" for number in range(len(self.functions))]
        rules = [f"start: call{more}", f'call: "{OPENING}\\n" ({" | ".join(choices)}) "\\n{CLOSING}"']
        for choice, (name, parameters) in zip(choices, self.functions.items(), strict=True):
            beginning = json.dumps(f'{{"name": {json.dumps(name)}, "arguments": ')
            rules += [f'{choice}: {beginning} {choice}_arguments "}}"', f"{choice}_arguments: {_json_rule(parameters)}"]
        return "\n".join(rules)


class Grammars:
    """Compiles forms for one vocabulary, from any thread.

    Attributes:
        engine: Id of library, limits and vocabulary. Equal ids give equal masks.
        ends: Tokens that end an answer.
    """

    def __init__(self, tokenizer: Any, vocabulary: int, end_ids: Collection[int] = ()) -> None:
        """Prepare a transformers tokenizer; takes up to a second.

        Args:
            vocabulary: Number of the model's token ids.
            end_ids: Tokens that end an answer, beside the tokenizer's end-of-sequence token.

        Raises:
            ConfigError: llguidance is not installed, or the tokenizer is of a kind that it does not read.
        """
        try:
            import llguidance
            from llguidance.hf import from_tokenizer
        except ImportError as error:
            raise ConfigError("answers in a given form need llguidance: pip install 'p2ptrain[grammar]'") from error
        own = tokenizer.eos_token_id
        self.ends = {each for each in (end_ids if own is None else {own, *end_ids}) if each < len(tokenizer)}
        if not self.ends:
            raise ConfigError("answers in a given form need a token that ends them, and this tokenizer has none")
        names = json.dumps(sorted(tokenizer.get_vocab().items(), key=lambda each: each[1])).encode()
        self.engine = f"llguidance-{llguidance.__version__}-{hashlib.sha256(names).hexdigest()[:8]}"
        self._vocabulary, size = vocabulary, max(vocabulary, len(tokenizer))
        self._mask_words = -(-size // 32)
        try:
            self._tokenizer = from_tokenizer(tokenizer, size, sorted(self.ends))
        except (ValueError, TypeError) as error:
            raise ConfigError(f"answers in a given form: llguidance reads no such tokenizer: {error}") from error
        self._compiled: Bounded[bytes, LLMatcher] = Bounded(MAX_CACHED)
        self._lock = threading.Lock()

    def compile(self, text: bytes, stops: Collection[int]) -> Matcher:
        """Return the matcher of a form, as `AnswerForm.encode` gives it, for an answer that one of ``stops`` ends.

        Raises `GrammarError` if the form is invalid or not supported, exceeds `LIMITS`, or no stop is one of `ends`.
        """
        if not self.ends & set(stops):
            raise GrammarError("it needs a token that ends the answer")
        if not self._lock.acquire(timeout=BUSY_SECONDS):
            raise GrammarError("another one takes long to compile: try again")
        try:
            found = self._compiled[text] = self._compiled.get(text) or self._compile(text)
            return Matcher(found, self._vocabulary, self._mask_words, self.ends & set(stops))
        finally:
            self._lock.release()

    def _compile(self, text: bytes) -> LLMatcher:
        from llguidance import LLMatcher, LLParserLimits

        try:
            form = msgspec.json.decode(text, type=AnswerForm)
            _check((form.schema, form.functions))
            found = LLMatcher(self._tokenizer, form.grammar(), log_level=0, limits=LLParserLimits(**LIMITS))
        except (msgspec.DecodeError, UnicodeError, RecursionError) as error:
            raise GrammarError(_reason(str(error))) from error
        if not found.is_error():
            found.compute_bitmask()  # Some bounds show with the first mask.
        if found.is_error():
            raise GrammarError(_reason(found.get_error()))
        return found


class Matcher:
    """One session's place in its grammar."""

    def __init__(self, compiled: LLMatcher, vocabulary: int, mask_words: int, ends: Collection[int]) -> None:
        self._compiled = compiled
        self._vocabulary = vocabulary
        self._ends = sorted(each for each in ends if each < vocabulary)
        self._mask = np.zeros(mask_words, dtype=np.int32)
        self._begin()

    def _begin(self) -> None:
        self._at = self._compiled.deep_copy()
        self._consumed: list[int] = []

    def allowed(self, ids: Sequence[int]) -> Ids:
        """Return the ids that may follow an answer's tokens so far, ascending.

        Raises `IntegrityError` if the tokens do not fit the grammar, or its `LIMITS` are reached.
        """
        known = len(self._consumed)
        if list(ids[:known]) != self._consumed:
            self._begin()
            known = 0
        more = list(ids[known:])
        if is_fitting := self._at.try_consume_tokens(more) == len(more):
            self._consumed += more
            self._at.unsafe_compute_mask_ptr(self._mask.ctypes.data, self._mask.nbytes)
        if not is_fitting or self._at.is_error():
            reason = _reason(self._at.get_error()) or "the tokens do not fit it"
            self._begin()
            raise IntegrityError(f"the grammar ends here: {reason}")
        bits = np.unpackbits(self._mask.view(np.uint8), bitorder="little")[: self._vocabulary]
        bits[self._ends] = self._at.is_accepting()
        if not bits.any():
            raise IntegrityError("no token of the vocabulary continues the grammar")
        return np.flatnonzero(bits)


def _json_rule(schema: Mapping[str, Any]) -> str:
    options = {"whitespace_pattern": WHITESPACE, "coerce_one_of": True}
    return f"%json {json.dumps({**schema, 'x-guidance': options})}"


def _check(schemas: Any) -> None:
    """Raise `GrammarError` if schemas have too many regular expressions, or options of the library."""
    waiting, patterns = [schemas], 0
    while waiting:
        each = waiting.pop()
        if isinstance(each, dict):
            if "x-guidance" in each:
                raise GrammarError("x-guidance: is not supported")
            patterns += isinstance(each.get("pattern"), str)
            patterns += len(each["patternProperties"]) if isinstance(each.get("patternProperties"), dict) else 0
            waiting += each.values()
        elif isinstance(each, list | tuple):
            waiting += each
    if patterns > MAX_PATTERNS:
        raise GrammarError(f"it has {patterns} patterns, and {MAX_PATTERNS} are the most")


def _reason(text: str) -> str:
    """Return the first line of an error of the library, without its place."""
    line = text.strip().partition("\n")[0]
    line = line.partition("): ")[2] if line.startswith("at ") else line
    return line.removeprefix("failed to compile JSON schema: ")[:MAX_REASON_CHARS]
