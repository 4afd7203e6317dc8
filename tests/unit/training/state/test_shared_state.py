"""Shared state changes whole, and each chunk that is read of it is of one round."""

import threading
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

from p2ptrain.averaging.protocol.certificate import Head, genesis
from p2ptrain.errors import IncompatibleError, TemporaryError
from p2ptrain.manifest import TrainingSpec
from p2ptrain.training.learning_rate import WrappedOptimizer
from p2ptrain.training.state.adamw import AdamWStep
from p2ptrain.training.state.digest import CHUNK_BYTES, TensorSpec, cut_of, description_hash, proves
from p2ptrain.training.state.layout import Layout
from p2ptrain.training.state.outer_optimizers import AdamStep, AverageStep, GradientStep, NesterovStep, Stepper
from p2ptrain.training.state.shared_state import SharedState, Stamp, stamped_bytes

NUM_VALUES = 400_000


def _state(seed: int = 1) -> SharedState:
    module = nn.Module()
    generator = torch.Generator().manual_seed(seed)
    module.weight = nn.Parameter(torch.randn(NUM_VALUES, generator=generator))
    layout = Layout.from_module(module)
    state = SharedState(module, layout, NesterovStep(layout, 0.7, 0.9))
    state.head = genesis(b"s" * 32, state.tree().root)
    return state


def _advance(state: SharedState) -> Head:
    """One round, as a synchronizer applies it."""
    state.apply(torch.full((NUM_VALUES,), 0.5), 0)
    root = state.tree().root
    head = state.head
    state.head = replace(head, round=head.round + 1, lineage=(head.round + 1).to_bytes(32), digest=root)
    return state.head


def _specs(state: SharedState) -> tuple[TensorSpec, ...]:
    described = state.describe()
    assert described is not None
    return described[1]


def _stamp(specs: tuple[TensorSpec, ...], index: int, data: memoryview) -> Stamp | None:
    """The stamp of a chunk that was read; None if its proof does not lead to it."""
    cut, end = cut_of(specs), cut_of(specs).chunk_bytes(index)
    assert len(data) == stamped_bytes(end, cut.depth)
    stamp, proof = Stamp.from_bytes(data[end : end + Stamp.NUM_BYTES]), data[end + Stamp.NUM_BYTES :]
    is_right = proves(description_hash(specs), cut.leaf(index, data[:end]), index, cut.num_chunks, proof, stamp.digest)
    return stamp if is_right else None


def _stamps(state: SharedState) -> set[Stamp | None]:
    """Of all chunks."""
    specs, buffer = _specs(state), _buffer()
    return {_stamp(specs, i, buffer[: state.read(i, buffer, specs)]) for i in range(cut_of(specs).num_chunks)}


def _buffer() -> memoryview:
    return memoryview(bytearray(CHUNK_BYTES + 4096))


def test_every_chunk_comes_with_a_proof_of_the_digest_of_its_round() -> None:
    state = _state()
    assert _stamps(state) == {Stamp.of(state.head)}
    head = _advance(state)
    assert _stamps(state) == {Stamp.of(head)}


def test_damaged_memory_and_a_state_without_a_head_are_not_served() -> None:
    state = _state()
    state.vector[5] += 1
    assert state.tree().root != state.head.digest
    with pytest.raises(TemporaryError, match="damaged"):
        state.describe()
    with pytest.raises(ValueError, match="no head"):
        _ = SharedState(nn.Linear(2, 2), *_small()).head


def _small() -> tuple[Layout, Stepper]:
    layout = Layout.from_module(nn.Linear(2, 2))
    return layout, AverageStep(layout, 1.0)


def test_nothing_is_read_between_a_step_and_its_head() -> None:
    state = _state()
    specs = _specs(state)
    state.apply(torch.ones(NUM_VALUES), 1)
    assert state.describe() is None
    assert state.read(0, _buffer(), specs) == -1
    root = state.tree().root
    state.head = replace(state.head, round=1, digest=root)
    assert _stamps(state) == {Stamp.of(state.head)}


def _stepped(kind: str, seed: int) -> SharedState:
    """A state with a stepper of some kind, that is not at the beginning."""
    module = nn.Sequential(nn.Linear(600, 500), nn.Linear(500, 200))
    generator = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator)
    layout = Layout.from_module(module)
    spec = TrainingSpec()
    steppers: dict[str, Callable[[], Stepper]] = {
        "nesterov": lambda: NesterovStep(layout, 0.7, 0.9),
        "adam": lambda: AdamStep(layout, 0.01, 0.9, 0.99, 1e-3),
        "average": lambda: AverageStep(layout, 0.7),
        "adamw": lambda: AdamWStep(layout, spec),
        "adamw 8 bit": lambda: AdamWStep(layout, spec, "8bit"),
        "torch": lambda: GradientStep(
            WrappedOptimizer(torch.optim.AdamW(module.parameters(), lr=0.01), clip_norm=1.0), module, layout
        ),
    }
    state = SharedState(module, layout, steppers[kind]())
    state.head = genesis(b"s" * 32, state.tree().root)
    for _ in range(seed):
        _step(state, generator)
    return state


def _step(state: SharedState, generator: torch.Generator) -> None:
    state.apply(torch.randn(state.layout.num_values, generator=generator), state.head.round)
    head = state.head
    state.head = replace(head, round=head.round + 1, digest=state.tree().root)


@pytest.mark.parametrize("kind", ["nesterov", "adam", "average", "adamw", "adamw 8 bit", "torch"])
def test_chunks_of_several_rounds_become_the_state_of_the_last(kind: str) -> None:
    """Each chunk is put in place when the others have come to its round, whatever is beside it."""
    source, target = _stepped(kind, 3), _stepped(kind, 2)
    specs, buffer = _specs(source), _buffer()
    cut = cut_of(specs)
    assert cut.num_chunks >= 2
    means, same = torch.Generator().manual_seed(9), torch.Generator().manual_seed(9)
    for index in range(cut.num_chunks):
        source.read(index, buffer, specs)
        target.patch(specs, [(index, buffer[: cut.chunk_bytes(index)])])
        _step(source, means)
        target.apply(torch.randn(target.layout.num_values, generator=same), source.head.round - 1)
    assert target.tree().root == source.head.digest
    assert not target.is_settled


def test_replace_takes_over_all_of_another_state() -> None:
    one, two = _state(1), _state(2)
    _advance(one)
    pointer = two.vector.data_ptr()
    two.replace(one.tensors(), one.head)
    assert two.vector.data_ptr() == pointer
    assert two.head == one.head
    assert two.tree().root == one.head.digest
    assert _advance(one) == _advance(two)


@pytest.mark.parametrize("drop", ["vector", "momentum", "shape"])
def test_a_state_that_does_not_fit_changes_nothing(drop: str) -> None:
    one, two = _state(1), _state(2)
    (name, vector), *rest = one.tensors()
    tensors = {"vector": rest, "momentum": [(name, vector)], "shape": [(name, vector[:-1]), *rest]}[drop]
    head = two.head
    with pytest.raises(IncompatibleError):
        two.replace(tensors, one.head)
    assert two.head == head
    assert two.tree().root == head.digest


def test_a_reader_never_sees_half_a_step() -> None:
    state = _state()
    specs, stop, torn, reads = _specs(state), threading.Event(), [], [0]

    def read() -> None:
        buffer = _buffer()
        while not stop.is_set():
            for index in range(cut_of(specs).num_chunks):
                size = state.read(index, buffer, specs)
                if size >= 0:
                    reads[0] += 1
                    if _stamp(specs, index, buffer[:size]) is None:
                        torn.append(index)

    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        rounds = 0
        while rounds < 20 or (reads[0] < 50 and rounds < 500):
            _advance(state)
            rounds += 1
    finally:
        stop.set()
        for thread in threads:
            thread.join()
    assert not torn
    assert reads[0] >= 50


def test_reading_does_not_wait_for_a_step_unless_asked() -> None:
    state = _state()
    specs = _specs(state)
    held, release = threading.Event(), threading.Event()

    def hold() -> None:
        with state._lock:
            held.set()
            release.wait(10)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(10)
    try:
        assert state.read(0, _buffer(), specs, wait=False) == -1
        assert state.is_being_changed()
    finally:
        release.set()
        thread.join()
    assert state.read(0, _buffer(), specs, wait=False) > 0
