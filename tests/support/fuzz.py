"""Values of a message's schema, and values that are nearly of it: for tests of what a stranger may send."""

from __future__ import annotations

from typing import Any

import msgspec
from hypothesis import strategies as st
from msgspec import inspect

MAX_ITEMS = 4
"""Of a drawn sequence, or more where the schema asks for it."""
JUNK = st.one_of(
    st.none(), st.booleans(), st.integers(-(1 << 63), (1 << 64) - 1), st.floats(), st.text(max_size=9),
    st.binary(max_size=40), st.lists(st.integers(0, 9), max_size=3), st.just({"a": 1}),
)  # fmt: skip


def values_of(schema: Any) -> st.SearchStrategy[Any]:
    """Plain values within a schema's bounds; of any of its messages if it is a tagged base."""
    derived = schema.__subclasses__() if issubclass(schema, msgspec.Struct) else []
    return st.one_of(*(_of(inspect.type_info(each)) for each in derived or [schema]))


def _of(info: Any) -> st.SearchStrategy[Any]:
    match info:
        case inspect.BoolType():
            return st.booleans()
        case inspect.IntType():
            return st.integers(info.ge or 0, info.le if info.le is not None else (info.lt or 1 << 63) - 1)
        case inspect.FloatType():
            return st.floats(info.ge, info.le, allow_nan=False)
        case inspect.StrType():
            return st.text(
                st.characters(categories=["L", "N"]), min_size=info.min_length or 0, max_size=info.max_length
            )
        case inspect.BytesType():
            return st.binary(min_size=info.min_length or 0, max_size=min(info.max_length or 64, 64))
        case inspect.VarTupleType():
            least = info.min_length or 0
            return st.lists(_of(info.item_type), min_size=least, max_size=min(info.max_length or 64, least + MAX_ITEMS))
        case inspect.TupleType():
            return st.tuples(*map(_of, info.item_types)).map(list)
        case inspect.NamedTupleType():
            return st.tuples(*(_of(field.type) for field in info.fields)).map(list)
        case inspect.UnionType():
            return st.one_of(*map(_of, info.types))
        case inspect.NoneType():
            return st.none()
        case inspect.StructType() | inspect.DataclassType():
            tag = {info.tag_field: info.tag} if isinstance(info, inspect.StructType) and info.tag_field else {}
            fields = {field.encode_name: _of(field.type) for field in info.fields}
            return st.fixed_dictionaries({name: st.just(value) for name, value in tag.items()} | fields)
    raise TypeError(f"no strategy for {info}")


@st.composite
def nearly(draw: st.DrawFn, schema: Any) -> Any:
    """Plain values of a schema, of which one, at any depth, is replaced by another or left out."""
    values = draw(values_of(schema))
    holder, key = values, draw(st.sampled_from(sorted(values)))
    while isinstance(holder[key], dict | list) and holder[key] and draw(st.booleans()):
        holder = holder[key]
        key = draw(st.sampled_from(sorted(holder) if isinstance(holder, dict) else range(len(holder))))
    if draw(st.integers(0, 3)):
        holder[key] = draw(JUNK)
    else:
        del holder[key]
    return values
