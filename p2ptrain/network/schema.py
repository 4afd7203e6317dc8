"""Schemas of messages and records: the one place where bytes of a stranger become typed values.

A schema is a `Message` or a dataclass whose fields have types with bounds, such as `Count` or `Hash`. `from_wire`
converts plain values to it and raises one error, which names the field and its bound. `to_wire` is the inverse. A field
that the schema does not have is ignored, so a later version may add some. A rule between fields belongs into the
schema's ``__post_init__`` and raises `ValueError`.

Where one of several messages may come, they are subclasses of one tagged base, which is the schema to ask for::

    class FromHost(Message, frozen=True, tag=True): ...
    class Beat(FromHost, frozen=True, tag="beat"): ...
    class News(FromHost, frozen=True, tag="news"): ...

    match await channel.receive(FromHost, seconds): ...
"""

from __future__ import annotations

from collections.abc import Hashable
from functools import cache
from typing import Annotated, Any, TypeVar, Union, cast

import msgpack
import msgspec
from msgspec import Meta

from p2ptrain.errors import IntegrityError
from p2ptrain.manifest import canonical_bytes

T = TypeVar("T")

MAX_COUNT = (1 << 63) - 1
Count = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
Amount = Annotated[float, Meta(ge=0.0, le=1e18)]
"""Not negative and finite."""
Number = Annotated[float, Meta(ge=-1e12, le=1e12)]
Hash = Annotated[bytes, Meta(min_length=32, max_length=32)]
_BYTES = (bytes, bytearray, memoryview)


class Message(msgspec.Struct, frozen=True):
    """One message of a protocol."""


class Nothing(Message, frozen=True):
    """A request, or a reply, that says all by its name."""


@cache
def _target(schema: Any) -> Any:
    """Return what msgspec converts to: a tagged base stands for the messages derived from it."""
    derived = schema.__subclasses__() if issubclass(schema, Message) else []
    return Union[tuple(derived)] if derived else schema  # noqa: UP007


def to_wire(value: object) -> Any:
    """Return a schema's values as plain ones, which msgpack encodes."""
    return msgspec.to_builtins(value, builtin_types=_BYTES)


def from_wire(schema: type[T], values: object) -> T:
    """Return the schema that plain values are, in time linear in their size.

    Args:
        schema: A `Message` or a dataclass; a tagged base stands for all messages derived from it.
        values: What msgpack decoded from a stranger's bytes.

    Raises:
        IntegrityError: A field is missing, or it has another type, is out of bounds, or is text that cannot be printed.
    """
    if schema is dict:
        return cast(T, values)
    try:
        _check_texts(values)
        return cast(T, msgspec.convert(values, _target(cast(Hashable, schema)), strict=True, builtin_types=_BYTES))
    except (msgspec.ValidationError, RecursionError) as error:
        reason, _, place = str(error).partition(" - at `$")
        field = place.rstrip("`").lstrip(".")
        raise IntegrityError(f"{field}: {reason}" if field else reason) from error


def to_bytes(value: object) -> bytes:
    """Return a schema's values as canonical msgpack: equal values have equal bytes."""
    return canonical_bytes(to_wire(value))


def from_bytes(schema: type[T], data: bytes | bytearray | memoryview) -> T:
    """Return the schema that `to_bytes` packed, or another peer did.

    Raises:
        IntegrityError: It is no msgpack, or does not fit the schema.
    """
    try:
        values = msgpack.unpackb(data, raw=False, max_ext_len=0)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise IntegrityError("bytes that are no message") from error
    return from_wire(schema, values)


def _check_texts(values: object) -> None:
    """Raise `msgspec.ValidationError` for a text with control characters: logs and terminals print texts."""
    if isinstance(values, str):
        if not values.isprintable():
            raise msgspec.ValidationError(f"Expected printable text, got {values[:32]!r}")
    elif isinstance(values, dict):
        for name, value in values.items():
            try:
                _check_texts(value)
            except msgspec.ValidationError as error:
                reason, _, place = str(error).partition(" - at `$")
                raise msgspec.ValidationError(f"{reason} - at `$.{str(name)[:32]}{place.rstrip('`')}`") from None
    elif isinstance(values, list | tuple):
        for value in values:
            _check_texts(value)
