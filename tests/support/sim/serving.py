"""Serving hosts and clients on a simulated network, with a small stage whose sums are exact."""

from __future__ import annotations

import asyncio
import functools
import hashlib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import numpy as np
import torch

from p2ptrain.models.exact import PAGE, ExactStage, Part
from p2ptrain.network.records.serving import ServedStage
from p2ptrain.network.rpc.endpoint import Rpc
from p2ptrain.network.simulated import LinkModel, SimulatedNetwork, SimulatedPeer, simulate
from p2ptrain.runtime import Runtime
from p2ptrain.serving.client.routes import Host
from p2ptrain.serving.client.swarm import ServedModel, SwarmGenerator
from p2ptrain.serving.generation import Token
from p2ptrain.serving.grammar import Grammars, Matcher
from p2ptrain.serving.host.pool import PagePool
from p2ptrain.serving.host.service import ServingHost
from p2ptrain.serving.host.sessions import ORPHAN_SECONDS, Offer, SessionBook
from p2ptrain.serving.journal import Wire
from p2ptrain.serving.sampling import Drawn, Sampling, draw
from tests.support.coroutines import Test, declared
from tests.support.sim.peers import SWARM, until

T = TypeVar("T")
WIDTH = 4
VOCABULARY = 61
PRIME = 65521
ARITHMETIC = "small-1"
GREEDY = Sampling(temperature=0.0)
DRAWN = Sampling(temperature=1.0, seed=7)


class SmallStage:
    """A stage of integers below `PRIME`, which fp32 holds exactly. A row depends on all earlier ones of its session."""

    arithmetic = ARITHMETIC
    hidden = WIDTH
    vocabulary = VOCABULARY

    def __init__(self, number: int) -> None:
        self._number = number
        self.rows = 0

    def new_pages(self, number: int) -> torch.Tensor:
        return torch.full((number, PAGE), torch.nan, dtype=torch.float64)

    def step(self, parts: Sequence[Part], inputs: torch.Tensor, store: torch.Tensor) -> torch.Tensor:
        rows, kept, at = inputs.numpy().reshape(len(inputs), -1), store.numpy(), 0
        past = np.empty((len(rows), 1))
        for part in parts:
            of, end = slice(at, at + part.rows), part.first + part.rows
            positions, pages = np.arange(part.first, end), np.array(part.pages)
            kept[pages[positions // PAGE], positions % PAGE] = rows[of, 0] + 3 * rows[of, -1]
            sums = np.cumsum(kept[pages].reshape(-1)[:end] * np.arange(1.0, end + 1.0))
            past[of, 0] = sums[part.first :] % PRIME
            at = of.stop
        self.rows += at
        outputs = (31 * past + 7 * np.trunc(rows.astype(np.float64)) + np.arange(WIDTH) + self._number) % PRIME
        return torch.from_numpy(outputs.astype(np.float32))

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        found = (hidden[:, :1].numpy().astype(np.int64) * 7919 + np.arange(VOCABULARY) * 40503) % 997 / 100
        return torch.from_numpy(found.astype(np.float32))

    def head(self, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.logits(hidden), hidden + 1


class CopyingStage(SmallStage):
    """A stage whose tokens mostly follow a cycle, so that drafts are often right; each row ends with its token.

    One token in ``breaks`` leaves the cycle.
    """

    breaks = 11

    def step(self, parts: Sequence[Part], inputs: torch.Tensor, store: torch.Tensor) -> torch.Tensor:
        outputs = super().step(parts, inputs, store)
        outputs[:, -1] = inputs if inputs.dim() == 1 else inputs[:, -1]
        return outputs

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        found = super().logits(hidden)
        for row, values in zip(hidden, found, strict=True):
            if int(row[0]) % self.breaks:
                values[(int(row[-1]) + 1) % 9] += 12
        return found


class PacedRuntime(Runtime):
    """A runtime whose batches of generation take ``serve_seconds``, and a further ``row_seconds`` a row."""

    serve_seconds, row_seconds = 0.01, 0.0

    async def serve(self, function: Callable[..., T], *args: Any, **kwargs: Any) -> T:
        rows = args[-1]  # Or their number, or a batch.
        if not isinstance(rows, int):
            rows = len(rows) if isinstance(rows, torch.Tensor) else sum(share.part.rows for share in rows)
        await asyncio.sleep(self.serve_seconds + self.row_seconds * rows)
        return function(*args, **kwargs)


@dataclass
class ServingPeer:
    """A simulated peer with a host of one stage."""

    peer: SimulatedPeer
    rpc: Rpc
    host: ServingHost
    stage: SmallStage
    number: int

    @property
    def is_clean(self) -> bool:
        """True if the host has no session, and all its pages are free."""
        return not self.host.executor.sessions and self.host.book.pool.num_free == self.host.book.pool.num_pages


@dataclass
class ServingSwarm:
    """Hosts of each stage, and clients that know of those that are alive."""

    network: SimulatedNetwork
    num_stages: int
    num_pages: int = 64
    context: int = 4096
    serve_seconds: float = 0.01
    row_seconds: float = 0.0
    kind: Callable[[int], SmallStage] = SmallStage
    vocabulary: int = VOCABULARY
    runtime: type[PacedRuntime] = PacedRuntime
    hosts: dict[str, ServingPeer] = field(default_factory=dict)
    rounds: tuple[int, ...] = (5,)
    speculates: bool = True
    grammars: Grammars | None = None
    arithmetic: str = ARITHMETIC
    claims: dict[str, tuple[float, float]] = field(default_factory=dict)

    async def start_host(
        self, name: str, number: int, peer: SimulatedPeer | None = None, grammars: Grammars | None = None
    ) -> ServingPeer:
        peer = peer or self.network.add_peer(name)
        runtime = peer.runtime = self.runtime(random=peer.runtime.random, clock=peer.runtime.clock)
        runtime.serve_seconds, runtime.row_seconds = self.serve_seconds, self.row_seconds
        rpc = Rpc(peer.transport, peer.runtime, SWARM)
        stage = self.kind(number)

        async def start() -> ServingHost:
            await rpc.start()
            own = grammars if number == self.num_stages - 1 else None
            offer = Offer(number, self.num_stages, self.arithmetic, self.context, self.speculates, own)
            host = ServingHost(rpc, SessionBook(rpc, peer.signer, offer, PagePool(self.num_pages)))
            for round_ in self.rounds:
                host.serve((round_, digest(round_, number)), cast(ExactStage, stage))
            return host

        host = await peer.spawn(start())
        made = self.hosts[name] = ServingPeer(peer, rpc, host, stage, number)
        return made

    async def start(self, *replicas: int) -> None:
        """Start so many hosts of each stage: ``s0a``, ``s0b``, …"""
        for number, count in enumerate(replicas):
            for replica in "abcdefgh"[:count]:
                await self.start_host(f"s{number}{replica}", number, grammars=self.grammars)

    async def restart(self, name: str) -> ServingPeer:
        before = self.hosts[name]
        return await self.start_host(name, before.number, self.network.restart(before.peer), self.grammars)

    def known(self, rpc: Rpc) -> list[Host]:
        """Return the hosts by their records, dead ones too, as a client with this ``rpc`` knows them."""

        def record(name: str) -> ServedStage:
            each = self.hosts[name]
            told = cast(ServedStage, each.host.report().served)
            costs = self.claims.get(name, (told.base_seconds, told.row_seconds))
            versions = tuple((round_, digest(round_, each.number)) for round_ in self.rounds)
            return ServedStage(
                each.number, self.num_stages, versions, told.arithmetic, self.context, 1, 0, told.grammars, told.pages,
                *costs,
            )  # fmt: skip

        found = []
        for name, each in self.hosts.items():
            peer, totals = each.peer.peer_id, each.host.book.meter.totals()
            drafts = (totals.drafted_tokens, totals.accepted_tokens)
            found.append(Host(peer, record(name), rpc.dial_seconds.get(peer), drafts=drafts))
        return found

    async def start_client(
        self, name: str = "client", wait_seconds: float = 30.0, audit_share: float = 0.0,
        runtime: type[Runtime] = Runtime,
    ) -> SimulatedClient:  # fmt: skip
        peer = self.network.add_peer(name)
        peer.runtime = runtime(random=peer.runtime.random, clock=peer.runtime.clock)
        rpc = Rpc(peer.transport, peer.runtime, SWARM)
        await peer.spawn(rpc.start())
        model = ServedModel("small", self.vocabulary, WIDTH, tuple((each, each + 1) for each in range(self.num_stages)))
        generator = SwarmGenerator(rpc, peer.signer, model, lambda: self.known(rpc), wait_seconds, audit_share)
        return SimulatedClient(peer, rpc, generator)

    def host_of(self, peer_id: str) -> ServingPeer:
        return next(each for each in self.hosts.values() if each.peer.peer_id == peer_id)

    async def end(self, *clients: SimulatedClient) -> None:
        for client in clients:
            if client.peer.alive:
                await client.rpc.close()
                await client.peer.close()
        for each in self.hosts.values():
            if each.peer.alive:
                self.network.resume(each.peer)
                await each.host.close()
                await each.rpc.close()
                await each.peer.close()


@dataclass
class SimulatedClient:
    peer: SimulatedPeer
    rpc: Rpc
    generator: SwarmGenerator

    async def ask(
        self, prompt: Sequence[int], num_tokens: int, sampling: Sampling = GREEDY, *,
        on_token: Callable[[Any, Token], None] = lambda generation, token: None, stops: Sequence[int] = (),
    ) -> tuple[list[int], int]:  # fmt: skip
        """Return a generation's tokens, and how often a host was replaced."""
        found: list[int] = []
        async with self.generator.generate(prompt, sampling, max_tokens=num_tokens, stops=stops) as generation:
            async for token in generation:
                assert token.position == len(prompt) + len(found)
                found.append(token.id)
                on_token(generation, token)
            return found, generation.failovers


def digest(round_: int, stage: int) -> bytes:
    return hashlib.sha256(f"{round_}/{stage}".encode()).digest()


CHARACTERS = '{}[]":,abcdefghijklmnopqrstuvwxyz0123456789 .-_ABCDEFGHIJKLM'
END = VOCABULARY - 1


def small_grammars() -> Grammars:
    """Return grammars of a vocabulary with the stage's 61 tokens: `CHARACTERS`, and `END`."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    names = [*CHARACTERS.replace(" ", "\u0120"), "<end>"]
    made = Tokenizer(models.BPE(vocab={name: place for place, name in enumerate(names)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    return Grammars(PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<end>"), VOCABULARY)  # type: ignore[no-untyped-call]


def golden(
    prompt: Sequence[int], num_tokens: int, num_stages: int, sampling: Sampling = GREEDY, matcher: Matcher | None = None
) -> list[int]:
    """Return the tokens that one process computes, a row at a time; with a matcher up to `END`."""
    return [drawn.id for drawn in golden_draws(prompt, num_tokens, num_stages, sampling, matcher=matcher)]


def golden_draws(
    prompt: Sequence[int], num_tokens: int, num_stages: int, sampling: Sampling, kind: type[SmallStage] = SmallStage,
    matcher: Matcher | None = None, wire: Wire | None = None,
) -> list[Drawn]:  # fmt: skip
    """Return the tokens of `golden` with their log probabilities; rows pass through ``wire`` between stages."""
    compute: Callable[..., list[Drawn]] = _golden_draws if matcher is None else _golden_draws.__wrapped__
    return list(compute(tuple(prompt), num_tokens, num_stages, sampling, kind, matcher, wire))


@functools.lru_cache(maxsize=64)
def _golden_draws(
    prompt: tuple[int, ...], num_tokens: int, num_stages: int, sampling: Sampling, kind: type[SmallStage],
    matcher: Matcher | None, wire: Wire | None,
) -> list[Drawn]:  # fmt: skip
    stages = [kind(number) for number in range(num_stages)]
    draws: list[Drawn] = []
    num_pages = -(-(len(prompt) + num_tokens) // PAGE)
    stores = [stage.new_pages(num_pages) for stage in stages]
    ids = list(prompt)
    hidden = torch.empty(0)
    for position in range(len(prompt) + num_tokens - 1):
        hidden = torch.tensor([ids[position]])
        for stage, store in zip(stages, stores, strict=True):
            if wire is not None and stage is not stages[0]:
                hidden = wire.decode(bytearray(wire.encode(hidden)))
            hidden = stage.step([Part(1, position, range(num_pages))], hidden, store)
        if position >= len(prompt) - 1:
            allowed = matcher.allowed(ids[len(prompt) :]) if matcher is not None else None
            draws.append(draw(stages[-1].logits(hidden)[0], position + 1, ids, sampling, len(prompt), allowed))
            ids.append(draws[-1].id)
            if matcher is not None and ids[-1] == END:
                break
    return draws


def golden_outputs(prompt: Sequence[int], num_stages: int) -> torch.Tensor:
    """Return the logits that one process computes after each of some tokens, and the last states beside them."""
    hidden = torch.tensor(list(prompt))
    num_pages = -(-len(prompt) // PAGE)
    stages = [SmallStage(number) for number in range(num_stages)]
    for stage in stages:
        hidden = stage.step([Part(len(prompt), 0, range(num_pages))], hidden, stage.new_pages(num_pages))
    return torch.cat(stages[-1].head(hidden), 1)


def serve(
    main: Any,
    *replicas: int,
    seed: int = 0,
    model: LinkModel | None = None,
    wait_seconds: float = 30.0,
    **settings: Any,
) -> Any:
    """Run ``main(swarm, client)`` beside hosts; check that it leaves no session and no page behind."""

    async def run(network: SimulatedNetwork) -> Any:
        swarm = ServingSwarm(network, len(replicas), **settings)
        await swarm.start(*replicas)
        client = await swarm.start_client(wait_seconds=wait_seconds)
        result = await client.peer.spawn(main(swarm, client))
        for each in swarm.hosts.values():
            network.resume(each.peer)
        is_clean = lambda: all(each.is_clean for each in swarm.hosts.values() if each.peer.alive)  # noqa: E731
        await until(is_clean, len(replicas) * (ORPHAN_SECONDS + 5.0))
        for each in swarm.hosts.values():
            each.host.report()  # Raises if the totals contradict each other: the peer would have no record.
        await swarm.end(client)
        return result

    return simulate(run, seed, model=model)


def served(*replicas: int, **options: Any) -> Callable[[Test], Callable[..., None]]:
    """Run a test as `serve` runs ``main``; pytest passes its arguments after swarm and client."""

    def decorate(test: Test) -> Callable[..., None]:
        @functools.wraps(test)
        def run(**named: Any) -> None:
            serve(functools.partial(test, **named), *replicas, **options)

        return declared(run, list(inspect.signature(test).parameters)[2:])

    return decorate
