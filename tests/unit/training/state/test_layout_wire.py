"""What a trainer tells of its model's layout is checked by whoever has no model."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from p2ptrain.errors import IntegrityError
from p2ptrain.training.state.layout import Layout
from p2ptrain.training.state.layout_wire import layout_from_wire, layout_to_wire


def make_layout() -> Layout:
    module = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 2).bfloat16())
    return Layout.from_module(module)


def test_a_layout_survives_the_wire_with_its_fingerprint() -> None:
    layout = make_layout()
    told = layout_from_wire(layout_to_wire(layout))
    assert told.entries == layout.entries
    assert told.fingerprint == layout.fingerprint


@pytest.mark.parametrize(
    ("index", "field", "value"),
    [(0, 0, "weight"), (0, 1, 5), (0, 1, "n" * 600), (0, 2, [-1]), (0, 2, [1 << 50]), (0, 2, [1 << 30] * 3),
     (0, 2, [1] * 20), (0, 2, "4"), (0, 3, "load"), (0, 3, "no_such"), (0, 3, None), (0, 0, "buffer"),
     (1, 1, "0.weight")],
)  # fmt: skip
def test_an_impossible_layout_is_refused(index: int, field: int, value: Any) -> None:
    told = layout_to_wire(make_layout())
    told[index][field] = value
    with pytest.raises(IntegrityError):
        layout_from_wire(told)


@pytest.mark.parametrize("garbage", [None, [], {}, [None], [[]], [["param", "a", [1]]], "layout", [["x"] * 4] * 70_000])
def test_garbage_in_place_of_a_layout_is_refused(garbage: Any) -> None:
    with pytest.raises(IntegrityError):
        layout_from_wire(garbage)


def test_another_shape_is_another_fingerprint() -> None:
    told = layout_to_wire(make_layout())
    told[0][2] = [3, 5]
    assert layout_from_wire(told).fingerprint != make_layout().fingerprint
