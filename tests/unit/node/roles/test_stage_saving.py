"""What a host writes of its stage."""

import asyncio
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from p2ptrain.averaging.protocol.certificate import Head
from p2ptrain.config import PeerConfig
from p2ptrain.node.roles.stage_saving import save_and_tell
from p2ptrain.pipeline.checkpoints.saving import StageSaves
from p2ptrain.pipeline.plan import Unit
from p2ptrain.training.checkpoints import files as checkpoint
from p2ptrain.training.state.digest import merkle_tree
from tests.support.coroutines import on_loop
from tests.unit.pipeline.test_view import OWN, make_view


@on_loop
async def test_a_last_save_waits_for_the_periodic_one_that_is_under_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun, may_go_on = threading.Event(), threading.Event()
    write_files = checkpoint._write_files

    def slowly(*arguments: Any, **options: Any) -> Any:
        begun.set()
        assert may_go_on.wait(30)
        return write_files(*arguments, **options)

    monkeypatch.setattr(checkpoint, "_write_files", slowly)
    tensors = [("weight", torch.ones(4))]
    head = Head(round=3, lineage=b"l" * 32, tokens=9, samples=9, digest=merkle_tree(tensors).root)
    state = SimpleNamespace(head=head, tensors=lambda: tensors)
    view = make_view(2)
    hosted: Any = SimpleNamespace(
        number=0, saves=StageSaves(view.plan, view.saves, OWN),
        units=[SimpleNamespace(synchronizer=SimpleNamespace(state=state), unit=Unit(0, (0,), ()), swarm=b"s" * 32)],
    )  # fmt: skip
    runtime = SimpleNamespace(compute=asyncio.to_thread, offload=asyncio.to_thread)
    peer: Any = SimpleNamespace(runtime=runtime, presence=SimpleNamespace(changed=lambda: None))
    config = PeerConfig(role="stage", run_dir=tmp_path, link="p2ptrain://x")

    periodic = asyncio.create_task(save_and_tell(peer, config, hosted))
    await asyncio.to_thread(begun.wait, 30)
    last = asyncio.create_task(save_and_tell(peer, config, hosted, is_last=True))
    done, _ = await asyncio.wait({periodic, last}, timeout=0.3)
    may_go_on.set()
    assert not done, "both wait, neither fails"
    assert [await periodic, await last] == [None, None]
    newest = hosted.saves.newest.get(0)
    assert newest.round == 3
    assert newest.path.is_dir()
