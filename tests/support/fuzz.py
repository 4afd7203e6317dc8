"""Hostile values for a schema, drawn from its own bounds."""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import strategies as st
from msgspec import inspect as mi

from p2ptrain.errors import IntegrityError
from p2ptrain.network.schema import Message, from_wire, to_wire

NONSENSE = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats()
    | st.text(max_size=9)
    | st.binary(max_size=40),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=12,
)
MOST = 4
"""Elements of a sequence that has no lower bound above this."""


def check_any(data: st.DataObject, *schemas: type[Message]) -> None:
    """`check` values that are drawn for one of these schemas."""
    schema = data.draw(st.sampled_from(schemas))
    check(schema, data.draw(values(schema)))


def values(schema: Any) -> st.SearchStrategy[Any]:
    """Plain values that are within a schema's bounds, or have nonsense in one place."""
    return _of(mi.type_info(schema)) | _of(mi.type_info(schema), hostile=True) | NONSENSE


def check(schema: type[Message], plain: object) -> None:
    """Assert that values are refused by the one error, or come to a message that goes over the wire unchanged."""
    try:
        message = from_wire(schema, plain)
    except IntegrityError:
        return
    assert from_wire(schema, msgspec.msgpack.decode(msgspec.msgpack.encode(to_wire(message)))) == message


def _of(info: mi.Type, *, hostile: bool = False) -> st.SearchStrategy[Any]:
    found = _within(info, hostile)
    return found | NONSENSE if hostile else found


def _within(info: mi.Type, hostile: bool) -> st.SearchStrategy[Any]:
    match info:
        case mi.BoolType():
            return st.booleans()
        case mi.IntType():
            low = info.ge if info.ge is not None else -(2**63)
            high = info.le if info.le is not None else (info.lt - 1 if info.lt is not None else 2**63 - 1)
            return st.integers(low, high)
        case mi.FloatType():
            return st.floats(info.ge, info.le, allow_nan=False)
        case mi.StrType():
            return st.text("ab é", min_size=info.min_length or 0, max_size=_most(info.min_length, info.max_length))
        case mi.BytesType():
            return st.binary(min_size=info.min_length or 0, max_size=_most(info.min_length, info.max_length))
        case mi.NoneType():
            return st.none()
        case mi.LiteralType(options):
            return st.sampled_from(options)
        case mi.UnionType(options):
            return st.one_of(*(_of(each, hostile=hostile) for each in options))
        case mi.ListType() | mi.VarTupleType():
            most = _most(info.min_length, info.max_length)
            return st.lists(_of(info.item_type, hostile=hostile), min_size=info.min_length or 0, max_size=most)
        case mi.StructType() if info.array_like:
            return st.tuples(*(_of(each.type, hostile=hostile) for each in info.fields)).map(list)
        case mi.StructType() | mi.DataclassType():
            fields = {each.encode_name: _of(each.type, hostile=hostile) for each in info.fields}
            if isinstance(info, mi.StructType) and info.tag_field is not None:
                fields[info.tag_field] = st.just(info.tag)
            return st.fixed_dictionaries(fields)
    raise NotImplementedError(f"{info} has no values here yet")


def _most(least: int | None, most: int | None) -> int:
    return min(most if most is not None else MOST, max(MOST, least or 0))
