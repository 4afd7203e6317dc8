from __future__ import annotations

import asyncio
import os
import signal

import pytest

from p2ptrain.node.signals import FORCED_EXIT_CODE, StopSignals


def test_the_first_signal_asks_to_drain_and_the_second_ends_after_the_terminal_was_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    done: list[object] = []

    async def main() -> None:
        ended = asyncio.Event()

        def end(code: int) -> None:
            done.append(code)
            ended.set()

        monkeypatch.setattr(os, "_exit", end)
        signals = StopSignals()
        signals.install()
        signals.before_exit = lambda: done.append("left the terminal")
        os.kill(os.getpid(), signal.SIGINT)
        async with asyncio.timeout(10):
            await signals.requested.wait()
        assert done == []
        os.kill(os.getpid(), signal.SIGINT)
        async with asyncio.timeout(10):
            await ended.wait()

    asyncio.run(main())
    assert done == ["left the terminal", FORCED_EXIT_CODE]
