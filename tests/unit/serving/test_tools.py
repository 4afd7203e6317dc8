"""Tool calls are found wherever the text is cut, and a grammar of calls gives nothing but calls."""

import itertools
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2ptrain.serving.grammar import MAX_CALLS, AnswerForm
from p2ptrain.serving.tools import ToolCall, ToolCalls
from tests.support.generators import END
from tests.unit.serving.test_grammar import BYTES, draw_within

WEATHER = '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln"}}\n</tool_call>'
TIME = '<tool_call>{"arguments": {}, "name": "time"}</tool_call>'
CALLS = [ToolCall("weather", '{"city": "Köln"}'), ToolCall("time", "{}")]


def found(pieces: list[str]) -> tuple[str, list[ToolCall]]:
    tools = ToolCalls(["weather", "time"])
    told, calls = "", list[ToolCall]()
    for piece in pieces:
        text, more = tools.push(piece)
        told, calls = told + text, calls + more
    return told + tools.close(), calls


@pytest.mark.parametrize(
    ("text", "told", "calls"),
    [
        (f"Let me see.\n{WEATHER}\n{TIME}\n", "Let me see.\n", CALLS),
        (f"{TIME} and <tool", " and <tool", CALLS[1:]),
        ("no <tool_calls> here", "no <tool_calls> here", []),
        ('<tool_call>{"name": "other", "arguments": {}}</tool_call> so', None, []),
        ('<tool_call>{"name": ["time"]}</tool_call>', None, []), ("<tool_call>[1]</tool_call>", None, []),
        ('<tool_call>{"name": "time", "arguments": 3}</tool_call>', None, []), (f"{WEATHER[:-3]}", None, []),
        ('<tool_call>{"name": "weather", "arguments": {"city": "</tool_call>"}}</tool_call>!', "!",
         [ToolCall("weather", '{"city": "</tool_call>"}')]),
        ('<tool_call>{"name": "time", "arguments": {"at": NaN}}</tool_call>', None, []),
        ('<tool_call>{"name": "time", "arguments": {"at": "\\ud800"}}</tool_call>', None, []),
        (f"<tool_call>{{}}</tool_call>{TIME}", None, []), ("[" * 100_000, None, []),
        (f"<tool_call>{'[' * 100_000}</tool_call>", None, []),
    ],
)  # fmt: skip
def test_calls_are_found_and_what_is_none_stays_text(text: str, told: str | None, calls: list[ToolCall]) -> None:
    assert found([text]) == (text if told is None else told, calls)


@given(cuts=st.lists(st.integers(0, 200), max_size=12))
def test_the_cuts_between_pieces_change_nothing(cuts: list[int]) -> None:
    text = f"So.\n{WEATHER}\n{TIME} <tool_call {WEATHER[:20]}"
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[first:last] for first, last in itertools.pairwise(places)]
    assert found(pieces) == found([text])


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 1 << 30), is_parallel=st.booleans())
def test_a_grammar_of_calls_gives_calls_that_fit_the_parameters(seed: int, is_parallel: bool) -> None:
    parameters: dict[str, Any] = {
        "type": "object", "properties": {"city": {"enum": ["Köln", "a\n\"b"]}}, "required": ["city"],
        "additionalProperties": False,
    }  # fmt: skip
    functions = {"weather": parameters, "time": {"type": "object", "additionalProperties": False}}
    form = AnswerForm(functions=functions, is_parallel=is_parallel)
    ids = draw_within(BYTES.compile(form.encode(), [END]), seed, most=8000)
    told, calls = found([bytes(ids[:-1]).decode()])
    assert told == ""
    assert 1 <= len(calls) <= (MAX_CALLS if is_parallel else 1)
    for name, arguments in calls:
        values = json.loads(arguments)
        assert values == {} if name == "time" else values["city"] in ("Köln", 'a\n"b')
