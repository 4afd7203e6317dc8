"""Schemas: what fits comes back as it was, and nothing else ever raises another error than one that names the field."""

import subprocess
import sys
from dataclasses import dataclass
from typing import Annotated, Any

import msgpack
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import Meta

from p2ptrain.errors import IntegrityError
from p2ptrain.network.schema import Amount, Count, Hash, Number, from_wire, to_wire
from tests.support.processes.commands import ROOT

THREADS = """
import sys, threading
import msgspec
from p2ptrain.network.schema import from_wire

sys.setswitchinterval(1e-6)
for number in range(100):
    inner = msgspec.defstruct("Inner", [("first", int)], frozen=True)
    outer = msgspec.defstruct("Outer", [(f"field_{n}", tuple[inner, ...]) for n in range(20)], frozen=True)
    values, together = {f"field_{n}": ({"first": n},) for n in range(20)}, threading.Barrier(3)

    def convert():
        together.wait()
        for _ in range(20):
            assert from_wire(outer, values).field_19[0].first == 19

    threads = [threading.Thread(target=convert) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
"""


@dataclass(frozen=True)
class Inner:
    name: Annotated[str, Meta(max_length=8)]
    data: bytes = b""


class Short(msgspec.Struct, frozen=True, array_like=True):
    first: Count
    second: Number = 0.0


@dataclass(frozen=True)
class Outer:
    count: Count
    amount: Amount
    root: Hash
    inner: Inner
    shorts: Annotated[tuple[Short, ...], Meta(max_length=3)] = ()
    maybe: Inner | None = None

    def __post_init__(self) -> None:
        if self.count and not self.amount:
            raise ValueError("a count without an amount")


GOOD = Outer(1, 2.5, bytes(32), Inner("ada", b"\0\xff"), (Short(1), Short(2, -1.5)), Inner("bob"))
NONSENSE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9) | st.binary(max_size=33),
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=6), inner, max_size=6),
    max_leaves=20,
)


def over_the_wire(value: object) -> Any:
    return msgpack.unpackb(msgpack.packb(to_wire(value)))


@given(NONSENSE)
def test_nonsense_raises_integrity_errors_only(values: Any) -> None:
    with pytest.raises(IntegrityError):
        from_wire(Outer, values)


@given(st.sampled_from(["count", "amount", "root", "inner", "shorts", "maybe"]), NONSENSE)
def test_an_error_of_nonsense_in_one_field_names_it(field: str, value: Any) -> None:
    values = {**over_the_wire(GOOD), field: value}
    try:
        from_wire(Outer, values)
    except IntegrityError as error:
        said = str(error)
    else:
        return
    assert field in said or "a count without" in said


@pytest.mark.parametrize(
    ("field", "value", "words"),
    [
        ("count", -1, "count: Expected `int` >= 0"),
        ("count", True, "count: Expected `int`, got `bool`"),
        ("count", 1.0, "count: Expected `int`, got `float`"),
        ("count", 1 << 63, "count: Expected `int` <="),
        ("amount", float("nan"), "amount: Expected `float` >= 0"),
        ("amount", "2.5", "amount: Expected `float`, got `str`"),
        ("root", bytes(31), "root: Expected `bytes` of length >= 32"),
        ("root", "AAAA", "root: Expected `bytes`, got `str`"),
        ("inner", {"name": "too long a name"}, "inner.name: Expected `str` of length <= 8"),
        ("inner", {"name": "\x1b[31m"}, "inner.name: Expected printable text"),
        ("inner", {"\x1b[31m": "\x07"}, "inner: Expected printable text"),
        ("inner", {"data": b""}, "missing required field `name`"),
        ("shorts", [[1], [2], [3], [4]], "shorts: Expected `array` of length <= 3"),
        ("shorts", [[1], [-2]], r"shorts[1][0]: Expected `int` >= 0"),
        ("amount", 0.0, "a count without an amount"),
    ],
)
def test_the_error_names_the_field_and_its_bound(field: str, value: Any, words: str) -> None:
    with pytest.raises(IntegrityError) as raised:
        from_wire(Outer, {**over_the_wire(GOOD), field: value})
    assert words in str(raised.value)


def test_deep_nesting_is_refused() -> None:
    deep: Any = []
    for _ in range(100_000):
        deep = [deep]
    with pytest.raises(IntegrityError):
        from_wire(Outer, {**over_the_wire(GOOD), "inner": deep})


def test_a_field_of_a_later_version_is_ignored() -> None:
    assert from_wire(Outer, over_the_wire(GOOD) | {"later": 1}) == GOOD


def test_threads_may_use_a_schema_for_the_first_time_together() -> None:
    done = subprocess.run([sys.executable, "-c", THREADS], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
