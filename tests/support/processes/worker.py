"""A training script for swarm tests: one peer that trains a tiny model and says what it does, one JSON object a line.

Run by `tests.support.processes.swarmlet.Swarmlet` as ``python -m tests.support.processes.worker OPTIONS``; `Options`
says what can be set. It obeys one order a line on standard input, and leaves when that ends:

``hold ROUND``, ``go``
    Stop training in this round or a later one; start again.
``corrupt``
    Change one value of the shared state behind its back.
``nan``
    Read one batch whose loss is not a number.
``poison VALUE``
    Contribute this value (``nan``, ``inf``) in place of every part of the next round; once.
``refusals``
    Say how often each peer was refused, by cause.
``census``
    Say how many tasks its event loop has.
``fault PHASE SIGNAL``
    Send itself this signal when it next enters this phase of a round; ``serving`` and ``downloading`` are phases, too:
    in the middle of sending its state to somebody, or of downloading it.
``attack JSON``
    Run one of the laboratory's attacks as a member, by ``attack`` and ``options``, until it ends.
``leave``
    Say goodbye and end.
"""

import asyncio
import contextlib
import dataclasses
import json
import logging
import os
import signal
import struct
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from p2ptrain import Manifest, SavePolicy, Swarm
from p2ptrain.averaging.allreduce.member import ALLREDUCE
from p2ptrain.averaging.allreduce.messages import Bring
from p2ptrain.averaging.protocol.certificate import Certificate
from p2ptrain.errors import P2PTrainError
from p2ptrain.network.rpc.endpoint import Rpc
from p2ptrain.network.schema import from_bytes
from p2ptrain.node import thread as thread_module
from p2ptrain.runtime import Runtime, real_runtime
from p2ptrain.training.optimizer import SwarmOptimizer
from p2ptrain.training.state.shared_state import SharedState
from p2ptrain.training.sync.download import PartialDownload
from p2ptrain.training.sync.state_server import StateServer
from p2ptrain.training.sync.synchronizer import RoundResult, Synchronizer
from tests.support.lying import LyingChannel
from tests.support.slow_uploads import slow_read
from tests.support.web.served import served

WIDTH = 8
SERVED_CHUNKS = 3
"""The phase ``serving`` begins when so many chunks of a state have been sent."""
DOWNLOADED_CHUNKS = 20
"""The phase ``downloading`` begins when so many chunks of a state have been kept."""
TRUTH = torch.linspace(-1.0, 1.0, WIDTH)


@dataclass(frozen=True)
class Options:
    """The task of one worker; JSON on its command line. Without a ``link`` it starts the swarm of ``manifest``.

    Attributes:
        seed: Of the samples that it draws.
        step_seconds: Pause before each step, so that many workers can share a machine.
        hold: Begin without training, until told to ``go``.
        tell_values: Tell all parameters and the indices of the samples with every round.
        save_rounds: Rounds between checkpoints; 0 saves at the end only.
        serves: Requests per second that its record says it serves; 0 for a record without that part.
        upload: Bytes per second that it sends of its state; 0 for no limit.
        directory: Of a swarm that it starts; empty for the DHT.
        clock_seconds: How far this machine's wall clock is ahead, as this process sees it.
    """

    run_dir: str
    link: str = ""
    manifest: dict[str, Any] = field(default_factory=dict)
    hidden: int = 8
    seed: int = 0
    step_seconds: float = 0.05
    hold: bool = False
    tell_values: bool = False
    listen: str = "/ip4/127.0.0.1/tcp/0"
    save_rounds: int = 0
    serves: float = 0.0
    upload: float = 0.0
    directory: str = ""
    clock_seconds: float = 0.0


def make_model(hidden: int) -> torch.nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        return torch.nn.Sequential(torch.nn.Linear(WIDTH, hidden), torch.nn.Tanh(), torch.nn.Linear(hidden, 1))


def make_samples(indices: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs ``[n, WIDTH]`` and targets ``[n, 1]``, each a function of its index."""
    points = torch.stack([torch.randn(WIDTH, generator=torch.Generator().manual_seed(i)) for i in indices])
    return points, (points @ TRUTH).sin().unsqueeze(1)


def loss_of(model: torch.nn.Module, indices: list[int]) -> torch.Tensor:
    points, targets = make_samples(indices)
    return torch.nn.functional.mse_loss(model(points), targets)


def make_optimizer(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


_say_lock = threading.Lock()


def say(event: str, **values: Any) -> None:
    with _say_lock:
        sys.stdout.write(json.dumps({"event": event, **values}) + "\n")
        sys.stdout.flush()


class Orders:
    def __init__(self, hold: bool) -> None:
        self.leave = threading.Event()
        self.corrupt = threading.Event()
        self.nan = threading.Event()
        self.poison: float | None = None
        self.refusals: Mapping[tuple[str, str], int] = {}
        self.hold_from: int | None = 0 if hold else None
        self.fault: tuple[str, signal.Signals] | None = None
        self.loop: asyncio.AbstractEventLoop | None = None
        self.attack: Callable[[str, dict[str, Any]], Coroutine[Any, Any, None]] | None = None
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        for line in sys.stdin:
            match line.split():
                case ["hold", number]:
                    self.hold_from = int(number)
                case ["go"]:
                    self.hold_from = None
                case ["corrupt"]:
                    self.corrupt.set()
                case ["nan"]:
                    self.nan.set()
                case ["poison", value]:
                    self.poison = float(value)
                case ["refusals"]:
                    say("refusals", counts=[[*key, count] for key, count in self.refusals.items()])
                case ["census"] if self.loop is not None:
                    self.loop.call_soon_threadsafe(self.count_tasks)
                case ["fault", phase, name]:
                    self.fault = phase, signal.Signals[name]
                case ["attack", *_] if self.loop is not None and self.attack is not None:
                    what = json.loads(line.partition(" ")[2])
                    asyncio.run_coroutine_threadsafe(self.attack(what["attack"], what["options"]), self.loop)
                case ["leave"]:
                    break
        self.leave.set()

    def count_tasks(self) -> None:
        say("census", tasks=len(asyncio.all_tasks()))

    def on_phase(self, phase: str, round_: int) -> None:
        """Carry out the fault that was ordered, if this is its phase."""
        if self.fault is not None and self.fault[0] == phase:
            number, self.fault = self.fault[1], None
            say("fault", phase=phase, round=round_)
            os.kill(os.getpid(), number)


def follow_phases(orders: Orders, synchronizer: Synchronizer) -> None:
    """Tell the orders each phase of a round and of serving state, in which they make faults happen."""
    synchronizer.averager.phase_listeners = [orders.on_phase]
    read = SharedState.read

    def read_chunk(state: SharedState, index: int, *rest: Any, **options: Any) -> int:
        if index >= SERVED_CHUNKS:
            orders.on_phase("serving", state.head.round)
        return read(state, index, *rest, **options)

    SharedState.read = read_chunk  # type: ignore[method-assign, assignment]


def follow_poison(orders: Orders, rpc: Rpc) -> None:
    """Contribute values that are not finite, once the parent orders it."""
    open_ = rpc.open
    poisoned: dict[bytes, float] = {}

    @contextlib.asynccontextmanager
    async def open_poisoned(peer: str, name: str, request: Any, *rest: Any, **options: Any) -> Any:
        async with open_(peer, name, request, *rest, **options) as channel:
            if name == ALLREDUCE and isinstance(request, Bring):
                if orders.poison is not None:
                    poisoned[request.group], orders.poison = orders.poison, None
                    say("poisoned")
                if request.group in poisoned:
                    number = struct.pack("<f", poisoned[request.group])
                    yield LyingChannel(channel, bulk_lie=lambda data: (number * len(data))[: len(data)])
                    return
            yield channel

    rpc.open = open_poisoned  # type: ignore[method-assign]
    orders.refusals = rpc.refusals


downloaded_bytes = 0
"""Of chunks of a state that this process kept."""


def follow_downloads(orders: Orders) -> None:
    """Count what is downloaded, and let faults happen in the middle of it."""
    put = PartialDownload.put

    def put_chunk(partial: PartialDownload, index: int, data: memoryview, *rest: Any) -> bool:
        global downloaded_bytes
        kept = put(partial, index, data, *rest)
        downloaded_bytes += len(data)
        if partial.num_done >= DOWNLOADED_CHUNKS:
            orders.on_phase("downloading", 0)
        return kept

    PartialDownload.put = put_chunk  # type: ignore[method-assign, assignment]


def follow_attacks(orders: Orders, swarm: Swarm, synchronizer: Synchronizer, hidden: int) -> None:
    """Attack the others from this peer, once it is ordered to."""

    async def attack(attack: str, options: dict[str, Any]) -> None:
        from tests.lab.attacker import attacker_of
        from tests.lab.stranger import Member

        peer = swarm._peer
        try:
            await Member(**attacker_of(peer, peer.options.name, hidden), sync=synchronizer).run(attack, options)
        except Exception as error:
            say("attack ended", error=repr(error))
            raise

    orders.attack = attack


def train(swarm: Swarm, options: Options, orders: Orders) -> None:
    model, spec = make_model(options.hidden), swarm.manifest.training
    opt = swarm.optimizer(model, make_optimizer(model), clip_norm=spec.clip_norm, tokens_per_step=spec.local_batch)
    synchronizer = swarm._peer.held.synchronizer
    assert synchronizer is not None
    follow_phases(orders, synchronizer)
    follow_poison(orders, swarm._peer.rpc)
    follow_attacks(orders, swarm, synchronizer, options.hidden)

    def wait_for_others(result: RoundResult) -> bool:
        say("round", **{**dataclasses.asdict(result), **describe(synchronizer)})
        return not orders.leave.wait(0.2)

    opt.on_pause = wait_for_others
    say("training", downloaded=downloaded_bytes, **describe(synchronizer))
    size = swarm.manifest.training.local_batch
    index = 1_000_000 * options.seed
    pending: list[int] = []
    while not orders.leave.is_set():
        hold_from = orders.hold_from
        if hold_from is not None and synchronizer.head.round >= hold_from:
            time.sleep(0.05)
            continue
        if orders.corrupt.is_set():
            orders.corrupt.clear()
            synchronizer.state.vector[3] += 1.0
            say("corrupted", **describe(synchronizer))
        time.sleep(options.step_seconds)
        batch = list(range(index, index + size))
        index += size
        loss = loss_of(model, batch)
        made, is_spoiled = opt.total_tokens, orders.nan.is_set()
        if is_spoiled:
            orders.nan.clear()
            loss = loss * torch.nan
        loss.backward()  # type: ignore[no-untyped-call]
        pending += batch
        opt.loss = loss.item()
        step(opt, synchronizer, options, pending, loss.item())
        if is_spoiled:
            say("spoiled", made=opt.total_tokens - made, **describe(synchronizer))


def step(opt: SwarmOptimizer, synchronizer: Synchronizer, options: Options, pending: list[int], loss: float) -> None:
    opt.last_result = None
    opt.step()
    opt.zero_grad()
    result: RoundResult | None = opt.last_result
    if result is None:
        return
    told = {"loss": loss, **dataclasses.asdict(result), **describe(synchronizer), **account(opt, synchronizer)}
    if options.tell_values:
        told |= {"samples": list(pending), "values": synchronizer.state.vector.tolist()}
    say("round", **told)
    if opt.work.samples == 0:
        pending.clear()


def describe(synchronizer: Synchronizer) -> dict[str, Any]:
    """Where this peer stands, and whether what it holds is what its head says."""
    head = synchronizer.head
    return {
        "round": head.round,
        "full": head.full,
        "lineage": head.lineage.hex(),
        "digest": head.digest.hex(),
        "intact": synchronizer.state.tree().root == head.digest,
        "resyncs": synchronizer.catch_up.resyncs,
        "tokens": head.tokens,
    }


def account(opt: SwarmOptimizer, synchronizer: Synchronizer) -> dict[str, Any]:
    """The tokens that this process made, those that wait, and those that each peer has in the newest round.

    With them: how many batches were dropped, and whether model, shared state and inner optimizer are finite.
    """
    told: dict[str, Any] = {"made": opt.total_tokens, "waiting": opt.work.tokens, "counted": {}, "extends": ""}
    held = [synchronizer.state.vector, *opt.work.module.parameters()]
    held += [value for state in opt.inner.state.values() for value in state.values()]
    told |= {"dropped": opt.dropped_batches, "finite": all(bool(tensor.isfinite().all()) for tensor in held)}
    if synchronizer.head.certificate:
        body = from_bytes(Certificate, synchronizer.head.certificate).body
        told["counted"] = {body.members[index]: tokens for index, tokens, _ in body.contributors}
        told["extends"] = body.lineage.hex()
    return told


def report_serving(swarm: Swarm, per_second: float) -> None:
    """Add what a serving peer reports to this peer's record."""
    since = time.monotonic()
    peer = swarm._peer
    peer.record.parts.append(
        lambda record: dataclasses.replace(record, serving=served(time.monotonic() - since, per_second))
    )


def set_clock(ahead_seconds: float) -> None:
    def make_runtime(name: str = "cpu", scratch: Path | None = None) -> Runtime:
        return dataclasses.replace(real_runtime(name, scratch), clock=lambda: time.time() + ahead_seconds)

    thread_module.real_runtime = make_runtime  # type: ignore[attr-defined]


def main() -> int:
    torch.set_num_threads(1)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    options = Options(**json.loads(sys.argv[1]))
    orders = Orders(options.hold)
    name, listen = os.path.basename(options.run_dir), (options.listen,)
    saving = SavePolicy(options.save_rounds, 0)
    set_clock(options.clock_seconds)
    follow_downloads(orders)
    if options.upload:
        setattr(StateServer, "read", slow_read(options.upload))  # noqa: B010
    with contextlib.ExitStack() as stack:
        try:
            if options.link:
                swarm = Swarm.join(options.link, run_dir=options.run_dir, name=name, listen=listen, saving=saving)
            else:
                manifest = Manifest.model_validate(options.manifest)
                swarm = Swarm.create(
                    manifest, run_dir=options.run_dir, name=name, listen=listen, saving=saving,
                    directory=options.directory,
                )  # fmt: skip
            stack.enter_context(swarm)
            orders.loop = swarm._running.thread.loop
            transport: Any = swarm._peer.network.transport
            if options.serves:
                report_serving(swarm, options.serves)
            say("joined", peer=swarm.peer_id, link=swarm.link, daemon=transport.daemon.process_id)
            train(swarm, options, orders)
        except P2PTrainError as error:
            say("error", kind=type(error).__name__, exit_code=error.exit_code, message=str(error))
            return error.exit_code
    say("left")
    return 0


if __name__ == "__main__":
    sys.exit(main())
