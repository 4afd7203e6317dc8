"""A peer takes its role while its network answers."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from p2ptrain.config import PeerConfig
from p2ptrain.manifest import Manifest
from p2ptrain.node.peer import Peer
from p2ptrain.node.process import StopSignals
from p2ptrain.node.roles import take_role

STAGES = Manifest.model_validate({"pipeline": {"stages": 2}, "training": {"every": 1}})


@pytest.mark.parametrize(
    ("role", "manifest", "module"),
    [
        ("trainer", Manifest(), "roles.trainer"),
        ("both", STAGES, "roles.pipeline"),
        ("server", STAGES, "serving.server"),
    ],
)
def test_torch_is_imported_off_the_event_loop(role: str, manifest: Manifest, module: str) -> None:
    offloaded: list[Any] = []

    async def offload(function: Any, *arguments: Any) -> None:
        offloaded.extend(arguments)
        raise TimeoutError

    peer = SimpleNamespace(manifest=manifest, runtime=SimpleNamespace(offload=offload))
    config = PeerConfig.model_validate({"role": role, "link": "p2ptrain://x"})

    async def take() -> None:
        await take_role(cast(Peer, peer), config, StopSignals())

    with pytest.raises(TimeoutError):
        asyncio.run(take())
    assert offloaded == [f"p2ptrain.node.{module}"]
