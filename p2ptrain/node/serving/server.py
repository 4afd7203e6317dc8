"""A peer that serves and does not train: it needs the memory of the served weights alone."""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Collection, Mapping, Sequence

import torch

from p2ptrain.config import PeerConfig
from p2ptrain.errors import ConfigError, ResourceError
from p2ptrain.node.draining import until_over
from p2ptrain.node.peer import Peer
from p2ptrain.node.process import StopSignals
from p2ptrain.node.roles.feeding import start_view
from p2ptrain.node.serving.only import ServingOnly
from p2ptrain.pipeline.measure import available_memory
from p2ptrain.pipeline.plan import PipelinePlan, serving_bytes
from p2ptrain.pipeline.view import PipelineView
from p2ptrain.tasks import Tasks

logger = logging.getLogger(__name__)

LOOK_SECONDS = 2.0
MISSED_SECONDS, TURN_SECONDS = 10.0, 15.0
"""Time for which a stage lacks hosts before one moves there, and from one host's turn to the next; > the time until the
record of a host that moved says so."""


async def serve_only(peer: Peer, config: PeerConfig, signals: StopSignals) -> None:
    """Serve until stopped, or for ``stop_after.minutes``.

    Raises:
        ConfigError: The configured stage does not exist.
        ResourceError: No stage fits into the memory.
        P2PTrainError: As `ServingOnly`.
    """
    if config.resources.threads:
        torch.set_num_threads(config.resources.threads)
    manifest, view = peer.manifest, None
    if manifest.in_stages:
        view = await start_view(peer, PipelinePlan(manifest))
    needs = serving_bytes(manifest, config.serving.weights, config.serving.cache)
    memory = config.resources.max_memory or available_memory()
    fitting = [number for number, need in enumerate(needs) if need <= memory]
    if view is not None:
        if config.pipeline.stage >= len(needs):
            raise ConfigError(f"pipeline.stage = {config.pipeline.stage}: the model has {len(needs)} stages")
        fitting = [config.pipeline.stage] if config.pipeline.stage >= 0 else fitting
    if not fitting:
        raise ResourceError(f"serving needs about {min(needs) / 1e9:.1f} GB, and {memory / 1e9:.1f} GB is free")
    peer.set_state("serving")
    async with Tasks() as tasks:
        server = _Server(peer, config, view, fitting)
        signals.wishes.join(lambda paused: peer.set_state("resting" if paused else "serving"))
        signals.wishes.join(server.pause)
        serving = tasks.call(server.run(), "serving")
        await until_over(serving, signals, config.stop_after.minutes)
        if serving.done():
            serving.result()


class _Server:
    """Serves one stage at a time, and moves to where hosts are missing."""

    def __init__(self, peer: Peer, config: PeerConfig, view: PipelineView | None, fitting: list[int]) -> None:
        """``fitting`` are the stages that it may serve, at least one."""
        self._peer = peer
        self._config = config
        self._view = view
        self._fitting = fitting
        self._is_paused = False
        self._served: ServingOnly | None = None

    def pause(self, paused: bool) -> None:
        self._is_paused = paused
        if self._served is not None:
            self._served.pause(paused)

    async def run(self) -> None:
        """Serve until cancelled; raises as `ServingOnly`."""
        hosts = self._hosts()
        least = min(len(hosts[stage]) for stage in self._fitting)
        stage = self._peer.runtime.random.choice([each for each in self._fitting if len(hosts[each]) == least])
        while True:
            logger.info("serving stage %d without training", stage)
            served = self._served = ServingOnly(self._peer, self._config, self._view, stage)
            served.pause(self._is_paused)
            async with Tasks() as tasks:
                serving, moving = tasks.call(served.run(), "serve"), tasks.call(self._until_missed(stage), "look")
                await asyncio.wait({serving, moving}, return_when=asyncio.FIRST_COMPLETED)
                if serving.done():
                    return serving.result()
                target = moving.result()
            logger.info("moving to stage %d, which has fewer hosts than stage %d", target, stage)
            stage = target

    async def _until_missed(self, stage: int) -> int:
        """Return the stage to move to, once this host has been missed there for long enough.

        All hosts of a stage see the same, and wait for different times: one of them moves first, and ends the others'
        wait.
        """
        loop, own, since = asyncio.get_running_loop(), self._peer.rpc.peer_id, math.inf
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            hosts = self._hosts()
            target, turn = better_stage(own, stage, hosts, self._fitting)
            since = math.inf if target == stage or self._is_paused else min(since, loop.time())
            if loop.time() - since >= MISSED_SECONDS + turn * TURN_SECONDS:
                return target

    def _hosts(self) -> dict[int, set[str]]:
        """Return the other hosts of each stage, by their records."""
        found: dict[int, set[str]] = {stage: set() for stage in self._fitting}
        for record in [held.record for held in self._peer.presence.book.held()]:
            served = record.serving.served if record.serving is not None else None
            if served is not None and record.peer != self._peer.rpc.peer_id:
                found.setdefault(served.stage, set()).add(record.peer)
        return found


def better_stage(own: str, stage: int, hosts: Mapping[int, Collection[str]], fitting: Sequence[int]) -> tuple[int, int]:
    """Return the stage at which a host of ``stage`` is missed most, and how many hosts of its stage move before it.

    It is ``stage`` itself unless one of ``fitting`` has at least two hosts less. Then a move makes the numbers of both
    more alike, so moves end. ``hosts`` are the others, by stage.
    """
    here = sorted({own, *hosts.get(stage, ())})
    target = min(fitting, key=lambda each: (len(hosts.get(each, ())), each))
    is_better = target != stage and len(here) - len(hosts.get(target, ())) >= 2
    return (target if is_better else stage), here.index(own)
