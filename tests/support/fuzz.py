"""Messages drawn from their schema's own types and bounds, and others that are just outside of them."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgpack
import pytest
from hypothesis import strategies as st
from msgspec import inspect

from p2ptrain.errors import IntegrityError
from p2ptrain.network.schema import Message, from_wire, to_wire

Values = st.SearchStrategy[Any]
Known = Mapping[type, Values]

_SAMPLES: tuple[Any, ...] = (None, True, 1, 0.5, "nonsense", b"bytes", [], {}, [[]] * 3)
_MOST_ITEMS = 9
_MOST_CHARS = 64
_LONGEST = 1 << 16


def fitting(schema: Any, known: Known | None = None) -> Values:
    """Return plain values within a schema's types and bounds; a rule between fields may still refuse them.

    A tagged base stands for the messages derived from it. ``known`` has strategies for schemas with rules that random
    values seldom keep.
    """
    return st.one_of([right for right, _ in _leaves(schema, known)])


def malformed(schema: Any, known: Known | None = None) -> Values:
    """Return the same with one value, at any depth, missing, of another type or out of its bounds."""
    return st.one_of([wrong for _, wrong in _leaves(schema, known)])


def check(schema: type[Message], data: st.DataObject, known: Known | None = None) -> Any:
    """Assert that messages within their bounds are read as they were sent, and that others are refused.

    Returns the message that was read; None if a rule between its fields refused it.
    """
    with pytest.raises(IntegrityError):
        from_wire(schema, data.draw(malformed(schema, known)))
    values = _over_the_wire(data.draw(fitting(schema, known)))
    message, refusal = None, ""
    try:
        message = from_wire(schema, values)
    except IntegrityError as error:
        refusal = str(error)
    if message is None:
        assert "Expected" not in refusal  # Refusals for a type or a bound say that.
        return None
    assert _over_the_wire(to_wire(message)) == values
    return message


def _over_the_wire(values: Any) -> Any:
    return msgpack.unpackb(msgpack.packb(values))


def _leaves(schema: Any, known: Known | None) -> list[tuple[Values, Values]]:
    found = [_values(inspect.type_info(each), known or {}) for each in schema.__subclasses__() or [schema]]
    return [(right, _wrong(accepted, outside)) for right, accepted, outside in found]


def _wrong(accepted: set[type], outside: Values) -> Values:
    return outside | st.sampled_from([each for each in _SAMPLES if type(each) not in accepted])


def _values(info: inspect.Type, known: Known) -> tuple[Values, set[type], Values]:
    """Return what fits a type, the plain types that it may have, and values of these that are out of bounds."""
    match info:
        case inspect.Metadata(type=inner):
            return _values(inner, known)
        case inspect.BoolType():
            return st.booleans(), {bool}, st.nothing()
        case inspect.NoneType():
            return st.none(), {type(None)}, st.nothing()
        case inspect.IntType():
            low = info.ge if info.ge is not None else None if info.gt is None else info.gt + 1
            high = info.le if info.le is not None else None if info.lt is None else info.lt - 1
            least, most = -(1 << 63) if low is None else low, (1 << 63) - 1 if high is None else high
            return st.integers(least, most), {int}, st.sampled_from([least - 1, max(most, (1 << 64) - 1) + 1, most + 1])
        case inspect.FloatType(ge=low, le=high):
            outside: list[Any] = [math.nextafter(low, -math.inf), -math.inf] if low is not None else []
            outside += [math.nextafter(high, math.inf), math.inf] if high is not None else []
            floats = st.floats(low, high, allow_nan=False, allow_infinity=False)
            return floats, {float, int}, st.sampled_from(outside) if outside else st.nothing()
        case inspect.StrType(min_length=low, max_length=high):
            text = st.text(st.characters(categories=["L", "N", "P"]), min_size=low or 0, max_size=_shown(low, high))
            return text, {str}, st.just("\x1b[2J") | _of_length(low, high, "x".__mul__)
        case inspect.BytesType(min_length=low, max_length=high):
            some = st.binary(min_size=low or 0, max_size=_shown(low, high))
            return some, {bytes}, _of_length(low, high, bytes)
        case inspect.EnumType() | inspect.LiteralType():
            options = [each.value for each in info.cls] if isinstance(info, inspect.EnumType) else list(info.values)
            outside = [each for each in _SAMPLES if type(each) in set(map(type, options)) and each not in options]
            return st.sampled_from(options), set(map(type, options)), st.sampled_from(outside)
        case inspect.UnionType(types=types):
            found = [_values(each, known) for each in types]
            accepted = set[type]().union(*(accepted for _, accepted, _ in found))
            return st.one_of([right for right, _, _ in found]), accepted, st.one_of([out for _, _, out in found])
        case (
            inspect.VarTupleType(item_type=item, min_length=low, max_length=high)
            | inspect.ListType(item_type=item, min_length=low, max_length=high)
        ):
            right, accepted, out = _values(item, known)
            items = st.lists(right, min_size=low or 0, max_size=_shown(low, high, _MOST_ITEMS))
            one_wrong = st.tuples(items.filter(bool), _wrong(accepted, out)).map(lambda both: [both[1], *both[0][1:]])
            return items, {list}, one_wrong | _of_length(low, high, lambda number: [None] * number)
        case inspect.DictType():
            return st.dictionaries(st.text("abc", max_size=8), st.integers(0, 9), max_size=4), {dict}, st.nothing()
        case inspect.TupleType(item_types=types):
            return _sequence(types, len(types), known)
        case inspect.NamedTupleType(fields=fields) | inspect.StructType(array_like=True, fields=fields):
            tag = getattr(info, "tag", None)
            first: list[inspect.Type] = [inspect.LiteralType((tag,))] if tag is not None else []
            parts = [*first, *(each.type for each in fields)]
            return _sequence(parts, len(first) + sum(each.required for each in fields), known)
        case inspect.StructType() | inspect.DataclassType():
            return _fields(info, known)
    raise TypeError(f"no values for {info}: add them")


def _shown(low: int | None, high: int | None, most: int = _MOST_CHARS) -> int:
    most = max(low or 0, most)
    return most if high is None else min(high, most)


def _of_length(low: int | None, high: int | None, make: Callable[[int], Any]) -> Values:
    lengths = [*([low - 1] if low else []), *([high + 1] if high is not None and high < _LONGEST else [])]
    return st.sampled_from([make(length) for length in lengths]) if lengths else st.nothing()


def _sequence(types: Sequence[inspect.Type], least: int, known: Known) -> tuple[Values, set[type], Values]:
    found = [_values(each, known) for each in types]
    right = st.tuples(*(right for right, _, _ in found)).map(list)
    outside: list[Values] = [right.map(lambda values: values[: least - 1])] if least else []
    for number, (_, accepted, out) in enumerate(found):
        outside.append(_replaced(right, number, _wrong(accepted, out)))
    return right, {list}, st.one_of(outside)


def _fields(info: inspect.StructType | inspect.DataclassType, known: Known) -> tuple[Values, set[type], Values]:
    found = {each.encode_name: _values(each.type, known) for each in info.fields}
    drawn = {name: right for name, (right, _, _) in found.items()}
    wrong = {name: _wrong(accepted, out) for name, (_, accepted, out) in found.items()}
    required = [each.encode_name for each in info.fields if each.required]
    if isinstance(info, inspect.StructType) and info.tag_field is not None:
        drawn[info.tag_field] = st.just(info.tag)
        wrong[info.tag_field] = st.sampled_from(["", "other", 1, None])
    right = known[info.cls].map(to_wire) if info.cls in known else st.fixed_dictionaries(drawn)
    outside = [_replaced(right, name, values) for name, values in wrong.items()]
    outside += [_without(right, name) for name in required]
    return right, {dict}, st.one_of(outside)


def _replaced(right: Values, key: Any, values: Values) -> Values:
    def replace(both: tuple[Any, Any]) -> Any:
        changed = both[0].copy()
        changed[key] = both[1]
        return changed

    return st.tuples(right, values).map(replace)


def _without(right: Values, name: str) -> Values:
    return right.map(lambda values: {key: value for key, value in values.items() if key != name})
