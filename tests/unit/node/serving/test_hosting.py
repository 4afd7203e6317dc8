"""The settings of a host, and what its model can do."""

from types import SimpleNamespace
from typing import Any, cast

import pytest

from p2ptrain.config import PeerConfig
from p2ptrain.manifest import ModelSpec
from p2ptrain.node.serving.hosting import Serving


@pytest.mark.parametrize(("family", "context"), [("llama", 4096), ("gpt2", 64)])
def test_a_host_offers_no_positions_that_its_model_lacks(family: str, context: int) -> None:
    model = ModelSpec(family=family, layers=1, hidden=8, heads=2, intermediate=8, context=64)
    peer = SimpleNamespace(manifest=SimpleNamespace(model=model), record=SimpleNamespace(parts=[]))
    config = PeerConfig.model_validate({"role": "server", "manifest": "manifest.bin", "serving": {"context": 4096}})
    assert Serving(cast(Any, peer), config)._context() == context
