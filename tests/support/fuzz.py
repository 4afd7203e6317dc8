"""Messages drawn from their schema's own bounds, and others that are just outside of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgpack
import msgspec
import pytest
from hypothesis import strategies as st
from msgspec import inspect

from p2ptrain.errors import ProtocolError
from p2ptrain.network.rpc.frames import pack, unpack
from p2ptrain.network.schema import Message

Values = st.SearchStrategy[dict[str, Any]]

_SAMPLES: tuple[Any, ...] = (None, True, 1, 0.5, "text", b"bytes", [], {}, [[]] * 3)


def wires(schema: type[Message]) -> Values:
    """Return what msgpack decodes from messages of a schema, or of those derived from a tagged base."""
    return st.one_of([st.fixed_dictionaries(_fields(each)[0]) for each in _leaves(schema)])


def malformed(schema: type[Message]) -> Values:
    """Return the same with one field missing, of another type, or out of its bounds."""
    found: list[Values] = []
    for leaf in _leaves(schema):
        right, wrong = _fields(leaf)
        found += [st.fixed_dictionaries({**right, name: values}) for name, values in wrong.items()]
        optional = {field.encode_name for field in msgspec.structs.fields(leaf) if not field.required}
        missing = [name for name in right if name not in optional]
        found += [st.fixed_dictionaries({each: right[each] for each in right if each != name}) for name in missing]
    return st.one_of(found)


def _leaves(schema: type[Message]) -> list[type[Message]]:
    return schema.__subclasses__() or [schema]


def _fields(schema: type[Message]) -> tuple[dict[str, st.SearchStrategy[Any]], dict[str, st.SearchStrategy[Any]]]:
    """Strategies for right and for wrong values of all fields."""
    info = inspect.type_info(schema)
    assert isinstance(info, inspect.StructType)
    both = {field.encode_name: _values(field.type) for field in info.fields}
    if info.tag_field is not None:
        both[info.tag_field] = st.just(info.tag), st.sampled_from(["", "other", 1, None])
    return {name: right for name, (right, _) in both.items()}, {name: wrong for name, (_, wrong) in both.items()}


def _values(kind: inspect.Type) -> tuple[st.SearchStrategy[Any], st.SearchStrategy[Any]]:
    match kind:
        case inspect.IntType(ge=int(low), le=int(high)):
            return st.integers(low, high), _wrong(int, [low - 1, high + 1])
        case inspect.BytesType(min_length=low, max_length=int(high)):
            return st.binary(min_size=low or 0, max_size=high), _wrong(bytes, [bytes(high + 1)])
        case inspect.StrType(min_length=low, max_length=int(high)):
            text = st.text(st.characters(categories=["L", "N", "P"]), min_size=low or 0, max_size=high)
            return text, _wrong(str, ["x" * (high + 1), "\x1b[2J"])
        case inspect.VarTupleType(item_type=item, max_length=int(high)):
            right, wrong = _values(item)
            too_long = st.lists(right, min_size=high + 1, max_size=high + 1)
            return st.lists(right, max_size=high), too_long | st.lists(wrong, min_size=1, max_size=high) | _wrong(list)
    raise NotImplementedError(f"no values for {kind}: add them")


def _wrong(right: type, out_of_bounds: Sequence[Any] = ()) -> st.SearchStrategy[Any]:
    return st.sampled_from([*out_of_bounds, *(each for each in _SAMPLES if type(each) is not right)])


def check(schema: type[Message], data: st.DataObject) -> None:
    """Assert that a message within its bounds is read as it was sent, and that others are refused."""
    right = data.draw(wires(schema))
    assert msgpack.unpackb(pack(unpack(pack(right), "peer", schema))) == right
    with pytest.raises(ProtocolError):
        unpack(pack(data.draw(malformed(schema))), "peer", schema)
