"""Swarms of the product's own peers for tests."""

from pathlib import Path
from typing import Any

import pytest

from p2ptrain.network.simulated import SimulatedNetwork
from tests.support.sim.product_peers import Begin, ProductSwarm, small_manifest, use_virtual_time


@pytest.fixture
def begin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Begin:
    """Makes a swarm without peers in the test's folder: given the network, and what `small_manifest` takes."""
    text = tmp_path / "text.txt"
    text.write_text("".join(f"{number} bottles of beer on the wall\n" for number in range(400)))

    def begin(network: SimulatedNetwork, training: dict[str, Any], **options: Any) -> ProductSwarm:
        swarm = ProductSwarm(network, small_manifest(text, training, **options), tmp_path)
        use_virtual_time(monkeypatch, swarm)
        return swarm

    return begin
