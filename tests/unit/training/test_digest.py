"""The digest changes with every bit, and does not depend on where the bytes lie."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from p2ptrain.errors import IntegrityError
from p2ptrain.training.digest import (
    CHUNK_BYTES,
    ChunkedBytes,
    byte_view,
    merkle_tree,
    root_of,
    specs_from_wire,
    verify_chunk,
)


def _sample(num_values: int = 700_000) -> list[tuple[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        ("vector", torch.randn(num_values, generator=generator)),
        ("step", torch.tensor(3.0)),
        ("empty", torch.zeros(0)),
        ("momentum", torch.randn(7, 11, generator=generator)),
    ]


def test_golden_digest() -> None:
    tensors = [("a", torch.arange(600_000, dtype=torch.float32)), ("b", torch.tensor(1.5))]
    data = b"".join(bytes(byte_view(tensor)) for _, tensor in tensors)
    chunks = [data[at : at + CHUNK_BYTES] for at in range(0, len(data), CHUNK_BYTES)]
    one, two, three = (blake3(b"\x00" + chunk).digest() for chunk in chunks)
    pair = blake3(b"\x01" + one + two).digest()
    tree = merkle_tree(tensors)
    assert tree.leaves == (one, two, three)
    assert tree.root.hex() == "b0704426e222e7264eee966ee2b1d75161f9ffa764f7e325b08204f4700e1a6e"
    description = b"\x92\x94\xa1a\xa7float32\x91\xce\x00\x09\x27\xc0\xce\x00\x24\x9f\x00\x94\xa1b\xa7float32\x90\x04"
    inner = blake3(b"\x01" + pair + three).digest()
    assert tree.root == blake3(b"p2ptrain state 1" + blake3(description).digest() + inner).digest()


@settings(max_examples=30)
@given(st.integers(0, 700_000 * 4 + 4 + 7 * 11 * 4 - 1), st.integers(0, 7))
def test_every_bit_counts(at: int, bit: int) -> None:
    tensors = _sample()
    before = merkle_tree(tensors)
    for _, tensor in tensors:
        view = byte_view(tensor)
        if at < len(view):
            view[at] ^= 1 << bit
            break
        at -= len(view)
    after = merkle_tree(tensors)
    assert after.root != before.root
    assert sum(a != b for a, b in zip(after.leaves, before.leaves, strict=True)) == 1


def test_names_shapes_and_order_count() -> None:
    tensor = torch.arange(6.0)
    roots = {
        merkle_tree(tensors).root
        for tensors in (
            [("a", tensor)],
            [("b", tensor)],
            [("a", tensor.view(2, 3))],
            [("a", tensor[:3]), ("b", tensor[3:])],
            [("b", tensor[:3]), ("a", tensor[3:])],
            [("a", tensor.view(torch.int32))],
            [("a", tensor), ("b", tensor[:0])],
        )
    }
    assert len(roots) == 7


def test_a_leaf_cannot_pass_for_a_node() -> None:
    tensors = _sample()
    tree = merkle_tree(tensors)
    specs = ChunkedBytes(tensors).specs
    node = blake3(b"\x01" + tree.leaves[0] + tree.leaves[1]).digest()
    assert root_of(specs, tree.leaves) == tree.root
    assert root_of(specs, [tree.leaves[0] + tree.leaves[1], tree.leaves[2]]) != tree.root
    assert node not in tree.leaves


def test_hashing_does_not_copy_and_refuses_what_it_would_have_to() -> None:
    tensor = torch.zeros(4)
    byte_view(tensor)[3] = 0x3F
    assert tensor[0] == 0.5
    with pytest.raises(ValueError, match="contiguous"):
        byte_view(torch.zeros(4, 4).t()[1:])


@settings(max_examples=25)
@given(st.lists(st.integers(0, 400_000), min_size=1, max_size=6))
def test_chunks_cover_all_bytes_in_order_and_write_what_they_read(sizes: list[int]) -> None:
    source = [(str(i), torch.full((size,), float(i + 1))) for i, size in enumerate(sizes)]
    target = [(name, torch.zeros_like(tensor)) for name, tensor in source]
    reading, writing = ChunkedBytes(source), ChunkedBytes(target)
    tree = merkle_tree(source)
    buffer = memoryview(bytearray(CHUNK_BYTES))
    for index in range(reading.num_chunks):
        size = reading.read(index, buffer)
        assert size == reading.chunk_bytes(index)
        assert verify_chunk(index, buffer[:size], tree.leaves)
        writing.write(index, buffer[:size])
    assert merkle_tree(target) == tree


def test_a_wrong_chunk_is_found() -> None:
    tensors = _sample()
    tree = merkle_tree(tensors)
    buffer = bytearray(CHUNK_BYTES)
    ChunkedBytes(tensors).read(1, memoryview(buffer))
    assert verify_chunk(1, buffer, tree.leaves)
    assert not verify_chunk(0, buffer, tree.leaves)
    assert not verify_chunk(1, buffer[:-1], tree.leaves)
    assert not verify_chunk(-2, buffer, tree.leaves)
    assert not verify_chunk(3, buffer, tree.leaves)


def test_descriptions_survive_the_wire() -> None:
    specs = ChunkedBytes(_sample()).specs
    assert specs_from_wire([spec.to_list() for spec in specs]) == specs


@pytest.mark.parametrize(
    "bad",
    [
        None,
        [],
        "x",
        [["a", "float32", [2]]],
        [["a", "float32", [2], 9]],
        [["a", "complex64", [2], 16]],
        [["a", ["float32"], [2], 8]],
        [["a", "float32", [-2], -8]],
        [["a", "float32", [True], 4]],
        [["a", "float32", [1 << 39], 4 << 39]],
        [["a", "float32", [1 << 30] * 16, 4]],
        [[1, "float32", [2], 8]],
        [["a", "float32", [2], 8], ["a", "float32", [2], 8]],
        [["x" * 2000, "float32", [2], 8]],
    ],
)
def test_hostile_descriptions_are_refused(bad: Any) -> None:
    with pytest.raises(IntegrityError):
        specs_from_wire(bad)
