"""The digest changes with every bit, and does not depend on where the bytes lie."""

from typing import Any

import pytest
import torch
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st

from p2ptrain.errors import IntegrityError
from p2ptrain.network.schema import from_wire
from p2ptrain.training.state.digest import (
    CHUNK_BYTES,
    ChunkedBytes,
    Description,
    byte_view,
    description_hash,
    is_finite,
    leaf_of,
    merkle_tree,
    proves,
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
    """Common tensors first; then each run of the vector with what belongs to its values."""
    tensors = [
        ("vector", torch.arange(300_000, dtype=torch.float32)),
        ("outer.first", torch.arange(300_000, dtype=torch.float32)),
        ("outer.steps", torch.tensor([1.5])),
    ]
    vector, first, steps = (bytes(byte_view(tensor)) for _, tensor in tensors)
    runs = [slice(at, at + (1 << 19)) for at in range(0, len(vector), 1 << 19)]
    chunks = [(b"", steps), *((vector[r], first[r]) for r in runs)]
    one, two, three, four = (blake3(b"\x00" + blake3(a).digest() + blake3(b).digest()).digest() for a, b in chunks)
    left, right = (blake3(b"\x01" + a + b).digest() for a, b in ((one, two), (three, four)))
    inner = blake3(b"\x01" + left + right).digest()
    tree = merkle_tree(tensors)
    assert tree.levels[0] == [one, two, three, four]
    assert tree.rests == [blake3(rest).digest() for _, rest in chunks]
    description = description_hash(ChunkedBytes(tensors).specs)
    assert tree.root == blake3(b"p2ptrain state 3" + description + inner).digest()
    assert tree.root.hex() == "e0684d261dd36a909392de3f53f06041c5b695dc4ea7ca7fe2c20e3a9edfcc68"


def test_the_state_of_a_value_is_in_its_chunk() -> None:
    """Also in 8 bits, with an exponent for 256 values, and where each parameter has tensors of its own."""
    num = 500_000
    eight = [
        ("vector", torch.zeros(num)),
        ("adamw.first", torch.zeros(num, dtype=torch.uint8)),
        ("adamw.first_exponents/256", torch.zeros(-(-num // 256), dtype=torch.uint8)),
        ("adamw.steps", torch.zeros(1)),
    ]
    own = [
        ("vector", torch.zeros(num)),
        ("optim.a.exp_avg", torch.zeros(300_000)),
        ("optim.a.step", torch.tensor(1.0)),
        ("optim.b.exp_avg", torch.zeros(20, 10_000)),
        ("optim.b.step", torch.tensor(1.0)),
    ]
    for tensors, starts in ((eight, {1: 0, 2: 0}), (own, {1: 0, 3: 300_000})):
        chunks = ChunkedBytes(tensors)
        assert chunks.cut.num_common == 1
        for index in range(1, chunks.num_chunks):
            pieces = {tensor: (start, stop) for tensor, start, stop in chunks.cut.pieces(index)}
            low, high = (at // 4 for at in pieces.pop(0))
            for tensor, (start, stop) in pieces.items():
                size = tensors[tensor][1].element_size()
                stride = 256 if tensors[tensor][0].endswith("/256") else 1
                assert low <= starts[tensor] + start // size * stride < high
                assert starts[tensor] + (stop // size - 1) * stride < high


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
    assert sum(a != b for a, b in zip(after.levels[0], before.levels[0], strict=True)) == 1


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
    node = blake3(b"\x01" + tree.levels[0][0] + tree.levels[0][1]).digest()
    assert leaf_of(tree.levels[0][0], tree.levels[0][1]) != node
    assert node not in tree.levels[0]


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
    tree, description = merkle_tree(source), description_hash(reading.specs)
    buffer = memoryview(bytearray(CHUNK_BYTES))
    assert sum(map(reading.cut.chunk_bytes, range(reading.num_chunks))) == sum(tensor.nbytes for _, tensor in source)
    for index in range(reading.num_chunks):
        size = reading.read(index, buffer)
        assert size == reading.cut.chunk_bytes(index) <= CHUNK_BYTES
        leaf, proof = reading.cut.leaf(index, buffer[:size]), tree.proof(index)
        assert len(proof) == 32 * reading.cut.depth
        assert proves(description, leaf, index, reading.num_chunks, proof, tree.root)
        writing.write(index, buffer[:size])
    assert merkle_tree(target) == tree


def test_a_wrong_chunk_is_found() -> None:
    tensors = _sample()
    tree, chunks = merkle_tree(tensors), ChunkedBytes(tensors)
    description, count = description_hash(chunks.specs), chunks.num_chunks
    buffer = memoryview(bytearray(CHUNK_BYTES))
    data = buffer[: chunks.read(1, buffer)]
    leaf = chunks.cut.leaf(1, data)
    assert proves(description, leaf, 1, count, tree.proof(1), tree.root)
    assert not proves(description, leaf, 0, count, tree.proof(1), tree.root)
    assert not proves(description, leaf, 1, count, tree.proof(0), tree.root)
    assert not proves(description, chunks.cut.leaf(1, data[:-1]), 1, count, tree.proof(1), tree.root)
    assert not proves(bytes(32), leaf, 1, count, tree.proof(1), tree.root)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_what_is_not_finite_is_found_in_any_tensor_of_a_chunk(value: float) -> None:
    tensors = [("vector", torch.ones(1001)), ("a.codes", torch.ones(3, dtype=torch.uint8)), ("b.x", torch.ones(1001))]
    chunks = ChunkedBytes(tensors)
    buffer = memoryview(bytearray(CHUNK_BYTES))
    for index in range(chunks.num_chunks):
        assert is_finite(chunks.specs, index, buffer[: chunks.read(index, buffer)])
    tensors[2][1][1000] = value
    found = [is_finite(chunks.specs, index, buffer[: chunks.read(index, buffer)]) for index in range(chunks.num_chunks)]
    assert found.count(False) == 1


@pytest.mark.parametrize(
    "bad",
    [
        [],
        [["a", "float32", [1 << 39]]],
        [["a", "float32", [1 << 30] * 16]],
        [["a", "float32", [2]], ["a", "float32", [2]]],
    ],
)
def test_descriptions_of_nothing_of_too_much_or_of_a_tensor_twice_are_refused(bad: Any) -> None:
    with pytest.raises(IntegrityError):
        from_wire(Description, {"tensors": bad})
