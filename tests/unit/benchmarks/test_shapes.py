"""Simulations of large pipelines send longer pieces than usual, and only while they run."""

from __future__ import annotations

from benchmarks.pipeline_shapes import QUANTUM_BYTES, lengths_alone
from p2ptrain.network.simulated import links


def test_streams_take_turns_in_units_of_a_frame_while_lengths_alone_are_sent() -> None:
    usual = links.QUANTUM_BYTES
    with lengths_alone():
        assert links.QUANTUM_BYTES == QUANTUM_BYTES > usual
    assert usual == links.QUANTUM_BYTES
