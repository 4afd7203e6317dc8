"""Masks of grammars: whatever is drawn within them fits the schema, and they are a function of the tokens alone."""

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2ptrain.errors import ConfigError, IntegrityError
from p2ptrain.models.tokenizers import byte_tokenizer
from p2ptrain.serving.errors import GrammarError
from p2ptrain.serving.grammar import MAX_CACHED, AnswerForm, Grammars, Matcher
from p2ptrain.serving.sampling import MAX_GRAMMAR_BYTES
from tests.support.generators import END, tokenizer
from tests.unit.serving.test_text import falling_back, learnt

SCHEMA = {
    "type": "object", "additionalProperties": False, "required": ["name", "ages"],
    "properties": {
        "name": {"enum": ["Grüße", 'a"b', None, 7]},
        "ages": {
            "type": "array", "items": {"type": "integer", "minimum": -5, "maximum": 120}, "minItems": 1, "maxItems": 3,
        },
    },
}  # fmt: skip
BYTES = Grammars(tokenizer(), 257)


def grammar_of(schema: Any) -> bytes:
    return AnswerForm(schema).encode()


def draw_within(matcher: Matcher, seed: int, end: int = END, most: int = 400) -> list[int]:
    """Return ids that are drawn at random among those that are allowed, with the end."""
    random, ids = np.random.default_rng(seed), list[int]()
    while not ids or ids[-1] != end:
        ids.append(int(random.choice(matcher.allowed(ids))))
        assert len(ids) < most
    return ids


@settings(max_examples=50, deadline=None)
@given(seed=st.integers(0, 1 << 30))
def test_what_is_drawn_within_the_masks_fits_the_schema(seed: int) -> None:
    ids = draw_within(BYTES.compile(grammar_of(SCHEMA), [END]), seed)
    values = json.loads(bytes(ids[:-1]))
    assert list(values) == ["name", "ages"]
    assert values["name"] in SCHEMA["properties"]["name"]["enum"]  # type: ignore[index]
    assert 1 <= len(values["ages"]) <= 3
    assert all(type(age) is int and -5 <= age <= 120 for age in values["ages"])


@pytest.mark.parametrize(("made", "end"), [(learnt(), 3), (falling_back(), 0)], ids=["bpe", "byte fallback"])
def test_tokens_of_other_vocabularies_make_up_the_text(made: Any, end: int) -> None:
    grammars = Grammars(made, len(made) + 3, [end])
    ids = draw_within(grammars.compile(grammar_of({"enum": ["Hello world", "ü世"]}), [end]), 5, end)
    assert json.loads(made.decode(ids[:-1])) in ("Hello world", "ü世")
    assert max(grammars.compile(grammar_of({"type": "string"}), [end]).allowed([])) < len(made)


@given(cut=st.integers(0, 12), seed=st.integers(0, 20))
@settings(max_examples=30, deadline=None)
def test_masks_are_a_function_of_the_tokens_whatever_was_asked_before(cut: int, seed: int) -> None:
    """A substitute host sees the tokens at once, and one that draws again goes back."""
    text = grammar_of(SCHEMA)
    ids = draw_within(BYTES.compile(text, [END]), seed)
    used = BYTES.compile(text, [END])
    draw_within(used, seed + 1)
    before = ids[: min(cut, len(ids) - 1)]
    assert used.allowed(before).tolist() == BYTES.compile(text, [END]).allowed(before).tolist()


def test_only_the_end_follows_a_whole_answer_and_it_follows_no_other() -> None:
    matcher = BYTES.compile(grammar_of({"enum": ["ab", "abc"]}), [END])
    assert END not in matcher.allowed(list(b'"ab'))
    assert matcher.allowed(list(b'"ab"')).tolist() == [END]
    several = Grammars(byte_tokenizer(8), 256, [0, 4]).compile(grammar_of({"const": 1}), [4, 0, 300])
    assert several.allowed(list(b"1")).tolist() == [0, 4]


def test_tokens_beside_the_grammar_are_refused_and_change_nothing() -> None:
    matcher = BYTES.compile(grammar_of({"enum": ["ab", "abc"]}), [END])
    for ids in (b'"x', b'"ab" "', b"\xff"):
        with pytest.raises(IntegrityError, match="the grammar ends here"):
            matcher.allowed(list(ids))
        assert matcher.allowed(list(b'"a')).tolist() == [ord("b")]


@pytest.mark.parametrize(
    ("schema", "reason"),
    [
        ({"type": "nonsense"}, "Invalid type: nonsense"), ({"not": {}}, "not"), ({"$ref": "http://other/x"}, "http"),
        ({"type": "string", "pattern": "(?=a)"}, "regex"), ({"enum": []}, ""), ({"$ref": "#/$defs/none"}, ""),
        ({"enum": [number * "x" for number in range(400)]}, f"{MAX_GRAMMAR_BYTES} are the most"),
        ({"allOf": [{"type": "string", "pattern": f"^(.*a.{{{each}}}b)+$"} for each in range(20)]}, "20 patterns"),
        ({"items": {"x-guidance": {"lenient": True}}}, "x-guidance"),
    ],
)  # fmt: skip
def test_what_is_no_schema_or_not_supported_or_too_large_is_refused_with_the_reason(schema: Any, reason: str) -> None:
    with pytest.raises(GrammarError) as caught:
        BYTES.compile(grammar_of(schema), [END])
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) <= 200


def test_a_schema_that_is_nested_too_deeply_is_refused() -> None:
    deep: dict[str, Any] = {}
    for _ in range(100_000):
        deep = {"items": deep}
    with pytest.raises(GrammarError, match="deeply"):
        grammar_of(deep)


@pytest.mark.parametrize(
    "text", [b"", b"start: foo", b"[" * 9999, b"\xff\x00", b"{}", b'{"functions": {"a b": {}}}', b'{"schema": [1]}']
)
def test_what_is_no_form_is_refused(text: bytes) -> None:
    with pytest.raises(GrammarError):
        BYTES.compile(text, [END])


def test_a_grammar_needs_an_end_and_a_library() -> None:
    with pytest.raises(GrammarError, match="ends the answer"):
        BYTES.compile(grammar_of({}), [65])
    with pytest.raises(ConfigError, match="has none"):
        Grammars(byte_tokenizer(8), 256)


def test_the_cache_is_bounded_and_equal_vocabularies_have_one_engine() -> None:
    grammars = Grammars(tokenizer(), 257)
    for number in range(2 * MAX_CACHED):
        grammars.compile(grammar_of({"const": number}), [END])
    assert len(grammars._compiled) == MAX_CACHED
    assert grammars.engine == BYTES.engine
    assert Grammars(learnt(), 400, [3]).engine != BYTES.engine
