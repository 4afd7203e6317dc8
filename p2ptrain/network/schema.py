"""Schemas of messages and records: conversion of untrusted bytes to typed, bounded values.

A schema is a `Message` or a dataclass with bounded field types, such as `Count` or `Hash`. `from_wire` converts plain
values to it, or raises one error that names the field and its bound. Unknown fields are ignored, so later versions may
add fields. ``__post_init__`` checks rules between fields, and raises `ValueError`.

Alternative messages are subclasses of one tagged base. The receiver passes the base as the schema::

    class FromLeader(Message, frozen=True, tag=True): ...
    class Keepalive(FromLeader, frozen=True, tag="keepalive"): ...
    class Result(FromLeader, frozen=True, tag="result"): ...

    match await channel.receive(FromLeader, seconds): ...
"""

from __future__ import annotations

import threading
from collections.abc import Hashable, Sequence
from functools import cache
from typing import Annotated, Any, TypeVar, Union, cast

import msgpack
import msgspec
from msgspec import Meta

from p2ptrain.errors import IntegrityError
from p2ptrain.hashing import canonical_bytes

T = TypeVar("T")

MAX_COUNT = (1 << 63) - 1
Count = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
Amount = Annotated[float, Meta(ge=0.0, le=1e18)]
"""Not negative and finite."""
MAX_NUMBER = 1e12
Number = Annotated[float, Meta(ge=-MAX_NUMBER, le=MAX_NUMBER)]
Hash = Annotated[bytes, Meta(min_length=32, max_length=32)]
_BYTES = (bytes, bytearray, memoryview)
_resolving = threading.Lock()


class Message(msgspec.Struct, frozen=True):
    """One message of a protocol."""


class Nothing(Message, frozen=True):
    """An empty request or reply."""


@cache
def _target(schema: Any) -> Any:
    """Return the schema, or the union of a tagged base's subclasses, once msgspec knows the types of all its fields.

    One thread at a time: msgspec 0.22 resolves a class at its first use, and meanwhile another thread that uses the
    class ends the process with a segmentation fault.
    """
    derived = schema.__subclasses__() if issubclass(schema, Message) else []
    target = Union[tuple(derived)] if derived else schema  # noqa: UP007
    with _resolving:
        msgspec.msgpack.Decoder(target)
    return target


def to_wire(value: object) -> Any:
    """Return a schema as plain values, which msgpack encodes."""
    return msgspec.to_builtins(value, builtin_types=_BYTES)


def from_wire(schema: type[T], values: object) -> T:
    """Convert untrusted plain values to a schema, in time linear in their size.

    Raises `IntegrityError` if a field is missing, of the wrong type, out of bounds, or text that is not printable.
    """
    if schema is dict:
        return cast(T, values)
    return _converted(schema, values, _BYTES)


def _converted(schema: type[T], values: object, builtin_types: Sequence[type]) -> T:
    try:
        if not _are_texts_printable(values):
            _refuse_text(values)
        target = _target(cast(Hashable, schema))
        return cast(T, msgspec.convert(values, target, strict=True, builtin_types=builtin_types))
    except (msgspec.ValidationError, RecursionError) as error:
        reason, _, place = str(error).partition(" - at `$")
        field = place.rstrip("`").lstrip(".")
        raise IntegrityError(f"{field}: {reason}" if field else reason) from error


def to_bytes(value: object) -> bytes:
    """Return a schema as canonical msgpack: equal values have equal bytes."""
    return canonical_bytes(to_wire(value))


def from_bytes(schema: type[T], data: bytes | bytearray | memoryview) -> T:
    """Convert untrusted msgpack bytes to a schema; raise `IntegrityError` if they do not fit it."""
    try:
        values = msgpack.unpackb(data, raw=False, max_ext_len=0)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise IntegrityError("bytes that are no message") from error
    return from_wire(schema, values)


def from_json(schema: type[T], data: bytes) -> T:
    """Convert untrusted JSON, with bytes in base64, to a schema; raise `IntegrityError` if it does not fit."""
    try:
        values = msgspec.json.decode(data)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise IntegrityError("bytes that are no JSON") from error
    return _converted(schema, values, ())


def _are_texts_printable(values: object) -> bool:
    """True if all text among plain values is printable."""
    todo: list[Any] = [values]
    for value in todo:  # which grows meanwhile: a call for each of them would take most of the time of a message
        kind = type(value)
        if kind is str:
            if not value.isprintable():
                return False
        elif kind is dict:
            todo += value
            todo += value.values()
        elif kind is list or kind is tuple:
            todo += value
    return True


def _refuse_text(values: object) -> None:
    """Raise `msgspec.ValidationError` for unprintable text, because logs and terminals print texts."""
    if isinstance(values, str):
        if not values.isprintable():
            raise msgspec.ValidationError(f"Expected printable text, got {values[:32]!r}")
    elif isinstance(values, dict):
        for name, value in values.items():
            _refuse_text(name)
            try:
                _refuse_text(value)
            except msgspec.ValidationError as error:
                reason, _, place = str(error).partition(" - at `$")
                raise msgspec.ValidationError(f"{reason} - at `$.{str(name)[:32]}{place.rstrip('`')}`") from None
    elif isinstance(values, list | tuple):
        for value in values:
            _refuse_text(value)
