from __future__ import annotations

import pytest

from p2ptrain.buffers import HUGE_PAGE_BYTES, new_buffer


@pytest.mark.parametrize("num_bytes", [0, 1, HUGE_PAGE_BYTES - 1, HUGE_PAGE_BYTES, 2 * HUGE_PAGE_BYTES + 5])
def test_a_buffer_is_zeroed_writable_and_of_the_size_asked_for(num_bytes: int) -> None:
    buffer = new_buffer(num_bytes)
    assert bytes(buffer) == bytes(num_bytes)
    buffer[:] = b"\x01" * num_bytes
    assert bytes(buffer) == b"\x01" * num_bytes


def test_more_memory_than_there_is_is_an_error_and_not_a_crash() -> None:
    with pytest.raises(MemoryError):
        new_buffer(1 << 60)
