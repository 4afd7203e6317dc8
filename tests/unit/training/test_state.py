"""Shared state changes whole, and a snapshot of it does not change at all."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest
import torch
from torch import nn

from p2ptrain.averaging.head import Head, genesis
from p2ptrain.errors import IncompatibleError, TemporaryError
from p2ptrain.training.digest import CHUNK_BYTES, merkle_tree, verify_chunk
from p2ptrain.training.layout import Layout
from p2ptrain.training.outer import NesterovStep
from p2ptrain.training.state import MOVED_ON, SharedState, Snapshot

NUM_VALUES = 400_000


def _state(seed: int = 1) -> SharedState:
    module = nn.Module()
    generator = torch.Generator().manual_seed(seed)
    module.weight = nn.Parameter(torch.randn(NUM_VALUES, generator=generator))
    layout = Layout.from_module(module)
    state = SharedState.from_module(module, layout, NesterovStep(layout, 0.7, 0.9))
    state.head = genesis(b"s" * 32, state.tree().root)
    return state


def _advance(state: SharedState) -> Head:
    """One round, as a synchronizer applies it."""
    state.apply(torch.full((NUM_VALUES,), 0.5))
    root = state.tree().root
    head = state.head
    state.head = replace(head, round=head.round + 1, lineage=bytes([head.round + 1] * 32), digest=root)
    return state.head


def _is_intact(snapshot: Snapshot) -> bool:
    buffer = memoryview(bytearray(CHUNK_BYTES))
    return all(
        verify_chunk(index, buffer[: snapshot.read(index, buffer)], snapshot.tree.leaves)
        for index in range(snapshot.num_chunks)
    )


def test_a_snapshot_costs_nothing_and_survives_one_round() -> None:
    state = _state()
    snapshot = state.lease()
    assert snapshot._chunks is not None
    before = snapshot._chunks.pieces(0)[0].obj
    assert merkle_tree(state.tensors()).root == snapshot.tree.root
    assert _is_intact(snapshot)
    head = _advance(state)
    assert snapshot._chunks.pieces(0)[0].obj is not before
    assert snapshot.head.round == 0
    assert head.digest != snapshot.head.digest
    assert _is_intact(snapshot)


def test_a_round_without_readers_copies_nothing() -> None:
    state = _state()
    state.lease().release()
    _advance(state)
    assert state._copied is None
    assert state._live is None


def test_at_most_one_copy_is_kept_and_readers_of_an_older_one_are_told() -> None:
    state = _state()
    first = state.lease()
    _advance(state)
    second = state.lease()
    _advance(state)
    with pytest.raises(TemporaryError, match=f"^{MOVED_ON}2$"):
        first.read(0, memoryview(bytearray(CHUNK_BYTES)))
    assert first._chunks is None
    assert _is_intact(second)
    first.release()
    assert _is_intact(second)
    second.release()
    assert state._copied is None
    assert second._chunks is None


def test_a_copy_can_be_joined_by_its_lineage_while_it_lives() -> None:
    state = _state()
    lineage = state.head.lineage
    first = state.lease(lineage)
    _advance(state)
    second = state.lease(lineage)
    assert second is first
    first.release()
    assert _is_intact(second)
    second.release()
    with pytest.raises(TemporaryError, match=MOVED_ON):
        state.lease(lineage)


def test_newcomers_are_offered_what_others_read_unless_it_is_too_old() -> None:
    state = _state()
    first = state.offer(0)
    _advance(state)
    _advance(state)
    second = state.offer(0)
    assert second is first
    assert _is_intact(second)
    newer = state.offer(1)
    assert newer.head.round == 2
    for snapshot in (first, second, newer):
        snapshot.release()
    assert state.offer(0).head.round == 2


def test_what_others_read_is_not_offered_once_the_lineage_is_another() -> None:
    state, other = _state(1), _state(2)
    _advance(other)
    snapshot = state.offer(0)
    state.replace(other.tensors(), other.head)
    assert _is_intact(snapshot)
    assert state.tree().root == other.head.digest
    assert state.offer(0).head == other.head


def test_no_lease_between_a_step_and_its_head() -> None:
    state = _state()
    state.apply(torch.ones(NUM_VALUES))
    with pytest.raises(TemporaryError, match="between two rounds"):
        state.lease()
    root = state.tree().root
    state.head = replace(state.head, round=1, digest=root)
    assert _is_intact(state.lease())


def test_damaged_memory_is_found_and_not_served() -> None:
    state = _state()
    state.vector[5] += 1
    assert state.tree().root != state.head.digest
    with pytest.raises(TemporaryError, match="damaged"):
        state.lease()


def test_replace_takes_over_all_of_another_state() -> None:
    one, two = _state(1), _state(2)
    _advance(one)
    pointer = two.vector.data_ptr()
    snapshot = two.lease()
    two.replace(one.tensors(), one.head)
    assert two.vector.data_ptr() == pointer
    assert two.head == one.head
    assert two.tree().root == one.head.digest
    assert _is_intact(snapshot)
    assert _advance(one) == _advance(two)


@pytest.mark.parametrize("drop", ["vector", "momentum", "shape"])
def test_a_state_that_does_not_fit_changes_nothing(drop: str) -> None:
    one, two = _state(1), _state(2)
    tensors = one.tensors()
    if drop == "vector":
        tensors = tensors[1:]
    elif drop == "momentum":
        tensors = tensors[:1]
    else:
        tensors[0] = ("vector", tensors[0][1][:-1])
    head = two.head
    with pytest.raises(IncompatibleError):
        two.replace(tensors, one.head)
    assert two.head == head
    assert two.tree().root == head.digest


def test_a_reader_never_sees_half_a_step() -> None:
    state = _state()
    stop, torn, reads = threading.Event(), [], [0]

    def read() -> None:
        buffer = memoryview(bytearray(CHUNK_BYTES))
        while not stop.is_set():
            try:
                snapshot = state.lease()
            except TemporaryError:
                continue
            try:
                for index in range(snapshot.num_chunks):
                    size = snapshot.read(index, buffer)
                    if not verify_chunk(index, buffer[:size], snapshot.tree.leaves):
                        torn.append(index)
                    reads[0] += 1
            except TemporaryError:
                pass
            finally:
                snapshot.release()

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
    assert state._copied is None


def test_reading_does_not_wait_for_a_step_unless_asked() -> None:
    state = _state()
    snapshot = state.lease()
    buffer = memoryview(bytearray(CHUNK_BYTES))
    held, release = threading.Event(), threading.Event()

    def hold() -> None:
        with state._lock:
            held.set()
            release.wait(10)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(10)
    try:
        assert snapshot.read(0, buffer, wait=False) == -1
    finally:
        release.set()
        thread.join()
    assert snapshot.read(0, buffer, wait=False) == CHUNK_BYTES


def test_a_state_without_a_head_says_so() -> None:
    module = nn.Linear(2, 2)
    layout = Layout.from_module(module)
    state = SharedState.from_module(module, layout, NesterovStep(layout, 0.7, 0.9))
    with pytest.raises(ValueError, match="no head"):
        _ = state.head
