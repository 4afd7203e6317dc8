"""The part of the model that a peer serves, while rounds change it."""

from types import SimpleNamespace
from typing import Any, cast

import torch

from p2ptrain.node.serving.held import newest
from tests.support.sim.downloads import shared_state


def test_a_round_between_its_step_and_its_head_does_not_end_serving() -> None:
    state = shared_state(1000)
    held = SimpleNamespace(stages=[], synchronizer=None)
    peer = cast(Any, SimpleNamespace(held=held, manifest=SimpleNamespace(model=None), record=None))
    assert newest(peer, None) is None
    held.synchronizer = SimpleNamespace(state=state)
    state.apply(torch.ones(1000), 0)
    assert newest(peer, None) is None
    state.head = state.head
    found = newest(peer, None)
    assert found is not None
    state.apply(torch.ones(1000), 1)
    assert newest(peer, found) is found
    assert found.module() is None
