"""Text that tries to become something else on a page, put into every field that holds text, whatever its name."""

import typing
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any, Literal, TypeVar, get_args, get_origin

T = TypeVar("T")

SENTINEL = "brokenInto"
"""The global variable that a payload sets when it is executed."""
_SET = f"window.{SENTINEL}=1"
PAYLOADS = {
    "script": f"<script>{_SET}</script>",
    "double quote": f'"><img src=x onerror="{_SET}">',
    "single quote": f"'><svg onload='{_SET}'>",
    "end of raw text": f"</script></style></title></textarea></noscript>--><img src=x onerror={_SET}>",
    "handler": f'" autofocus onfocus="{_SET}" onmouseover="{_SET}" style="color:red" x="',
    "scheme": f"javascript:{_SET}",
    "template": "{{ 7 * 7 }}{% raw %}{{ self.__init__ }}${7 * 7}#{7*7}<%= 7*7 %>[[7*7]]",
    "encoded twice": "&lt;script&gt;&#60;script&#62; %3Cscript%3E \\u003cscript\\u003e \\x3cscript\\x3e",
    "path": "..%2f../..\\..//203.0.113.9/x?a=b&c=d#e",
    "frame": f'<iframe srcdoc="<script>parent.{SENTINEL}=1</script>"></iframe><a href="javascript:{_SET}">a</a>',
    "loader": '<link rel=stylesheet href="//203.0.113.9/x.css"><base href="//203.0.113.9/">'
    '<meta http-equiv=refresh content="0;url=//203.0.113.9/">',
    "right to left": "\u202ecod.exe\u202c\u2067 \u05e9\u05dc\u05d5\u05dd \u200f",
    "control": "a\x00b\x07c\x1b[31md\u2028e\u2029f\ufeffg\ud7ff",
    "huge": "W" * 4000,
    "many marks": "Z" + "\u0316\u0317\u0318\u0319\u0341" * 200,
}  # fmt: skip
"""By what they try."""


def poisoned(value: T, text: str, keep: frozenset[str] = frozenset()) -> T:
    """A copy of a value in which all text, at any depth, is ``text``, and all bytes begin with it.

    Fields named in ``keep`` stay as they are, and so do those with a fixed choice of words.
    """
    return typing.cast(T, _poisoned(value, text, keep))


def _poisoned(value: Any, text: str, keep: frozenset[str]) -> Any:
    if is_dataclass(value) and not isinstance(value, type):
        hints = typing.get_type_hints(type(value))
        values = {
            field.name: old if field.name in keep or get_origin(hints[field.name]) is Literal
            else _poisoned(old, text, keep)
            for field in fields(value)
            for old in [getattr(value, field.name)]
        }  # fmt: skip
        return type(value)(**values)
    if isinstance(value, str):
        return text
    if isinstance(value, bytes):
        return text.encode(errors="replace")[: len(value)].ljust(len(value), b"<")
    if isinstance(value, dict):
        return {_poisoned(key, text, keep): _poisoned(old, text, keep) for key, old in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(_poisoned(old, text, keep) for old in value)
    return value


def text_fields(kind: Any) -> set[str]:
    """All fields that hold text, in a dataclass and those within it, as ``Class.field``."""
    found = set()
    if is_dataclass(kind):
        for name, hint in typing.get_type_hints(kind).items():
            found |= text_fields(hint)
            if _holds_text(hint):
                found.add(f"{typing.cast(type, kind).__name__}.{name}")
    for inner in get_args(kind) if get_origin(kind) is not Literal else ():
        found |= text_fields(inner)
    return found


def _holds_text(hint: Any) -> bool:
    if get_origin(hint) is Literal:
        return False
    return hint in (str, bytes, Any) or any(map(_holds_text, get_args(hint)))


def filled_text_fields(value: Any) -> set[str]:
    """Those of `text_fields` in which this value has any text."""
    found = set()
    if is_dataclass(value) and not isinstance(value, type):
        hints = typing.get_type_hints(type(value))
        for field in fields(value):
            inner = getattr(value, field.name)
            found |= filled_text_fields(inner)
            if _holds_text(hints[field.name]) and any(_texts(inner)):
                found.add(f"{type(value).__name__}.{field.name}")
    elif isinstance(value, (tuple, list, dict)):
        for inner in value.values() if isinstance(value, dict) else value:
            found |= filled_text_fields(inner)
    return found


def _texts(value: Any) -> Iterator[str | bytes]:
    if isinstance(value, (str, bytes)):
        yield value
    elif isinstance(value, (tuple, list, dict)):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _texts(inner)
