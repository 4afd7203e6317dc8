"""A newcomer and peers that serve it their state, in simulation."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from p2ptrain.averaging.protocol.certificate import Head, genesis
from p2ptrain.errors import IntegrityError, TemporaryError
from p2ptrain.network.chunks.fetch import FetchOptions, FetchReport
from p2ptrain.network.rpc.channel import LeastRate
from p2ptrain.network.simulated import LinkModel, SimulatedNetwork
from p2ptrain.training.state import digest
from p2ptrain.training.state.digest import ChunkedBytes, NamedTensors, merkle_tree, new_tensors
from p2ptrain.training.state.layout import Layout
from p2ptrain.training.state.outer_optimizers import NesterovStep
from p2ptrain.training.state.shared_state import SharedState, Stamp
from p2ptrain.training.sync import background_download, state_server
from p2ptrain.training.sync.download import PartialDownload, download_state
from p2ptrain.training.sync.state_server import StateServer
from tests.support.sim.peers import Member, members
from tests.support.slow_uploads import slow_read

NUM_VALUES = 1_500_000  # 11.4 MiB with momentum: 12 chunks
NUM_CHUNKS = 12
CHUNK_VALUES = 131_072
FAST = LinkModel(latency_seconds=(0.005, 0.02), up_bytes_per_second=4e6, down_bytes_per_second=40e6)


def shared_state(num_values: int = NUM_VALUES) -> SharedState:
    module = nn.Module()
    module.weight = nn.Parameter(torch.randn(num_values, generator=torch.Generator().manual_seed(3)))
    layout = Layout.from_module(module)
    state = SharedState(module, layout, NesterovStep(layout, 0.7, 0.9))
    state.stepper.state_tensors()[0][1].copy_(torch.randn(num_values, generator=torch.Generator().manual_seed(4)))
    state.head = genesis(b"s" * 32, state.tree().root)
    return state


def advance(state: SharedState) -> None:
    state.apply(torch.ones(state.layout.num_values), 0)
    root = state.tree().root
    state.head = replace(state.head, round=state.head.round + 1, lineage=root, digest=root)


class OneState:
    """Admits chunks of one state alone; implements `p2ptrain.training.sync.download.Admission`."""

    def __init__(self, head: Head) -> None:
        self.head = head

    async def admit(self, source: str, stamp: Stamp) -> None:
        if stamp.lineage != self.head.lineage:
            raise TemporaryError(f"moved on to round {stamp.round}")
        if stamp.digest != self.head.digest:
            raise IntegrityError("another digest")

    async def wait_for_turn(self) -> None:
        pass


def tensors_of(partial: PartialDownload) -> NamedTensors:
    tensors = new_tensors(partial.specs)
    chunks = ChunkedBytes(tensors)
    for index, _ in partial.chunks():
        chunks.write(index, partial.chunk(index))
    return tensors


class Sources:
    """A newcomer (member 0) and sources with equal states; ``seconds`` is how long the last download took."""

    seconds: float

    def __init__(self, network: SimulatedNetwork, everyone: list[Member]) -> None:
        self.network = network
        self.newcomer, *self.sources = everyone
        self.states = [shared_state() for _ in self.sources]
        self.head = self.states[0].head
        self.layout = self.states[0].layout.fingerprint
        for member, state in zip(self.sources, self.states, strict=True):
            StateServer(member.rpc, state)

    @property
    def ids(self) -> list[str]:
        return [member.rpc.peer_id for member in self.sources]

    async def download(self, resume: PartialDownload | None = None, **options: Any) -> FetchReport:
        self.partial = resume if resume is not None else PartialDownload()
        own, admission = options.pop("own", self.states[0]), OneState(self.head)
        loop = asyncio.get_running_loop()
        began = loop.time()
        try:
            return await download_state(self.newcomer.rpc, lambda: self.ids, own, self.partial, admission, **options)
        finally:
            self.seconds = loop.time() - began

    def start(self, **options: Any) -> asyncio.Task[FetchReport]:
        return self.newcomer.peer.spawn(self.download(**options))

    def is_right(self) -> bool:
        return self.partial.is_complete and merkle_tree(tensors_of(self.partial)).root == self.head.digest

    def refusals(self, source: int) -> int:
        return self.newcomer.rpc.refusals[self.ids[source], "bad state"]


@asynccontextmanager
async def sources(network: SimulatedNetwork, count: int) -> AsyncIterator[Sources]:
    async with members(network, count + 1) as everyone:
        yield Sources(network, everyone)


def slow_downloads(patch: pytest.MonkeyPatch, chunk_bytes: int, upload: float) -> list[int]:
    """Cut states into chunks of this size, of which sources send so many bytes a second.

    Returns the list of chunks that downloads keep from now on.
    """
    digest.cut_of.cache_clear()
    for module in (digest, state_server):
        patch.setattr(module, "CHUNK_BYTES", chunk_bytes)
    patch.setattr(state_server.StateServer, "read", slow_read(upload))
    options = FetchOptions(least=LeastRate(bytes_per_second=upload / 100, window_seconds=600.0))
    patch.setattr(background_download, "download_state", partial(download_state, options=options))
    put, kept = PartialDownload.put, list[int]()

    def noted(download: PartialDownload, index: int, *chunk: Any) -> bool:
        kept.append(index)
        return put(download, index, *chunk)

    patch.setattr(PartialDownload, "put", noted)
    return kept


async def until_started(swarm: Sources, partial: PartialDownload, chunks: int = 1) -> None:
    async with asyncio.timeout(60):
        while partial.num_done < chunks:  # noqa: ASYNC110 - virtual time
            await asyncio.sleep(0.01)
