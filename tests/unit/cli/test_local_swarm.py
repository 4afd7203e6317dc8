"""``p2ptrain up --serve``: signals while the chat has the terminal, and after it."""

import asyncio
import signal
import sys
from types import SimpleNamespace
from typing import Any, cast

import pytest

from p2ptrain.cli.local_swarm import _chat
from p2ptrain.cli.screen.live import stop_on_signals
from p2ptrain.network.link import SwarmLink
from tests.support.coroutines import on_uvloop

LINK = SwarmLink(bytes(32), (f"/ip4/127.0.0.1/tcp/1/p2p/Qm{'a' * 44}",))


@on_uvloop
async def test_ctrl_c_ends_the_swarm_at_once_after_its_chat(monkeypatch: pytest.MonkeyPatch) -> None:
    at_once = asyncio.Event()
    stop = stop_on_signals(at_once.set)
    monkeypatch.setattr(sys, "executable", "/bin/true")
    await _chat(LINK, (), stop, cast(Any, SimpleNamespace(say=lambda text: None)))
    assert stop.is_set()
    signal.raise_signal(signal.SIGINT)
    async with asyncio.timeout(10):
        await at_once.wait()
