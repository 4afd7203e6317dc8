"""A swarm's model for synchronous programs."""

from __future__ import annotations

import contextlib

from p2ptrain.network.link import SwarmLink
from p2ptrain.node.serving.client import SwarmModel, generating
from p2ptrain.node.thread import LoopThread


class ModelThread:
    """A swarm's model on an event loop of its own, for a synchronous program; a context manager.

    Attributes:
        model: The model; set by ``__enter__``, which raises as `generating`.
        call: Runs a coroutine on the loop, and returns its result; an interruption cancels it.
    """

    model: SwarmModel

    def __init__(self, link: SwarmLink, wait_seconds: float = 30.0) -> None:
        thread = LoopThread()
        self.call = thread.call
        self._stack = contextlib.ExitStack()
        self._stack.callback(thread.stop)
        self._holding = thread.holding(generating(link, wait_seconds))

    def __enter__(self) -> ModelThread:
        try:
            self.model = self._stack.enter_context(self._holding)
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(Exception):
            self._stack.close()
