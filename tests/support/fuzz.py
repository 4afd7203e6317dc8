"""Hypothesis strategies for what may come over the wire, from the types and bounds of a schema."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from hypothesis import strategies as st
from msgspec import inspect

NONSENSE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9) | st.binary(max_size=33),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=6), inner, max_size=6),
    max_leaves=20,
)


def fitting(schema: type, known: Mapping[type, st.SearchStrategy[Any]] | None = None) -> st.SearchStrategy[Any]:
    """Plain values that fit a schema's types and bounds; a rule between fields may still refuse them.

    Args:
        schema: A `Message`; a tagged base stands for those derived from it.
        known: What to draw for schemas with rules that random values seldom keep.
    """
    schemas: list[type] = schema.__subclasses__() or [schema]
    return st.one_of([_values(inspect.type_info(each), known or {}) for each in schemas])


def broken(values: Any, data: st.DataObject) -> Any:
    """The same plain values with nonsense in place of one of them, at any depth."""
    keys: list[Any] = list(values) if isinstance(values, dict) else list(range(len(values)))
    if not keys:
        return data.draw(NONSENSE)
    key = data.draw(st.sampled_from(keys))
    goes_deeper = isinstance(values[key], dict | list | tuple) and data.draw(st.booleans())
    changed: Any = dict(values) if isinstance(values, dict) else list(values)
    changed[key] = broken(values[key], data) if goes_deeper else data.draw(NONSENSE)
    return changed


def _values(info: inspect.Type, known: Mapping[type, st.SearchStrategy[Any]]) -> st.SearchStrategy[Any]:
    match info:
        case inspect.Metadata(type=inner):
            return _values(inner, known)
        case inspect.BoolType():
            return st.booleans()
        case inspect.NoneType():
            return st.none()
        case inspect.IntType():
            least = info.ge if info.ge is not None else None if info.gt is None else info.gt + 1
            most = info.le if info.le is not None else None if info.lt is None else info.lt - 1
            return st.integers(least, most)
        case inspect.FloatType():
            return st.floats(info.ge, info.le, allow_nan=False, allow_infinity=False)
        case inspect.StrType():
            return st.text("ab 12é", min_size=info.min_length or 0, max_size=info.max_length)
        case inspect.BytesType():
            return st.binary(min_size=info.min_length or 0, max_size=info.max_length)
        case inspect.EnumType(cls=cls):
            return st.sampled_from([each.value for each in cls])
        case inspect.UnionType(types=types):
            return st.one_of([_values(each, known) for each in types])
        case inspect.VarTupleType(item_type=item):
            return st.lists(_values(item, known), min_size=info.min_length or 0, max_size=min(info.max_length or 9, 9))
        case inspect.TupleType(item_types=items):
            return st.tuples(*(_values(each, known) for each in items)).map(list)
        case inspect.NamedTupleType(fields=fields):
            return st.tuples(*(_values(each.type, known) for each in fields)).map(list)
        case inspect.StructType(cls=cls, fields=fields, tag=tag):
            if cls in known:
                return known[cls].map(msgspec.to_builtins)
            drawn = {each.encode_name: _values(each.type, known) for each in fields}
            return st.fixed_dictionaries(drawn | ({str(info.tag_field): st.just(tag)} if info.tag_field else {}))
    raise TypeError(f"no values for {info}")
