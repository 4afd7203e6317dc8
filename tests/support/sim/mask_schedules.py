"""Random schedules of sites that fail while their updates are masked: drawn from a seed, run, and what must hold.

Sites die, stop, or are cut off in a phase of secure aggregation: as many as may drop out, or more. What must hold:

* A committed mean is the sum of plain integers of its contributors' updates, to the bit.
* All sites hold the same bytes of it, and a round has one full result.
* The shares that are revealed uncover no single update, and no site reveals both kinds for one site.
* An update whose sum others may know is in no later sum.
* Each call for an average ends, and the sites that are left go on together.

Run it with ``python -m tests.support.sim.schedules --masks``.
"""

import asyncio
import contextlib
import inspect
import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

from p2ptrain.averaging.allreduce.messages import AllRevealed, Revealed
from p2ptrain.averaging.allreduce.planning import AttemptPlanner
from p2ptrain.averaging.allreduce.session import AllReduceSession
from p2ptrain.averaging.allreduce.unmasking import Unmasking
from p2ptrain.averaging.averager import RoundOutcome
from p2ptrain.averaging.commit.attempt import SpentError
from p2ptrain.averaging.masking.keys import Masking, MaskKeys, least_to_unmask
from p2ptrain.averaging.protocol.certificate import Roster
from p2ptrain.errors import TemporaryError
from p2ptrain.network.rpc.channel import Channel
from p2ptrain.network.simulated import SimulatedNetwork
from tests.support.sim.averagers import AveragingPeer, start_averagers, stop_averagers
from tests.support.sim.masking import SECURE, SPEC, plain_mean
from tests.support.sim.peers import until
from tests.support.sim.pipeline_schedules import problems_of
from tests.support.sim.trainers import InvariantError

PHASES: dict[str, tuple[type, str, str]] = {
    "tickets": (MaskKeys, "new_nonce", "before"),
    "keys": (MaskKeys, "masking", "after"),
    "sending": (Unmasking, "before_part", "before"),
    "shares": (Unmasking, "before_part", "after"),
    "parts": (Unmasking, "part_sent", "after"),
    "sums": (Unmasking, "mean_sent", "before"),
    "signatures": (Unmasking, "_own_shares", "after"),
    "agreed": (Unmasking, "_message", "before"),
    "revealing": (Unmasking, "_add_revealed", "after"),
    "unmasking": (Unmasking, "_mean", "before"),
    "opened": (AllReduceSession, "_sign", "before"),
    "voted": (AllReduceSession, "_sign", "after"),
    "certified": (AllReduceSession, "_collect_signatures", "after"),
}
"""By phase of secure aggregation: the method before or after which a site is in it."""
FAULTS = ("crash", "crash", "stall", "cut", "partition")
FAULT_SECONDS = 40.0
"""Virtual time within which traps spring: those that do not are for phases that nobody enters any more."""
CALL_SECONDS = 900.0
"""Limit of one call for an average: three attempts, and the longest fault in each."""
RECOVERY_SECONDS = 600.0
TRAINING_SECONDS = 2.0


@dataclass(frozen=True)
class Trap:
    """A fault that befalls ``site`` when it enters a phase for the ``nth`` time; others end after ``seconds``."""

    site: int
    fault: str
    phase: str
    nth: int
    seconds: float


@dataclass(frozen=True)
class MaskSchedule:
    """Sites, the weights of their updates, and what befalls them; each site is in one trap at most."""

    seed: int
    num_values: int
    tokens: tuple[int, ...]
    traps: tuple[Trap, ...]
    loss: float = 0.0

    @property
    def command(self) -> str:
        return f"python -m tests.support.sim.schedules --masks --first {self.seed} --count 1 --verbose"


def draw_mask_schedule(seed: int) -> MaskSchedule:
    """A schedule in which up to a third of the sites fails, or, in one of four, any number; three stay alive."""
    chance = random.Random(f"masks {seed}")
    count = chance.randint(3, 10)
    spare = count - least_to_unmask(count, SECURE.threshold)
    num_victims = chance.randint(1, max(1, spare)) if chance.random() < 0.75 else chance.randint(1, count)
    common = chance.choice(tuple(PHASES)) if chance.random() < 0.3 else ""
    traps, left = [], count
    for site in chance.sample(range(count), num_victims):
        fault = chance.choice(FAULTS)
        if fault == "crash":
            fault, left = ("crash", left - 1) if left > 3 else ("stall", left)
        phase = common or chance.choice(tuple(PHASES))
        traps.append(Trap(site, fault, phase, chance.choice((1, 1, 1, 2, 3, 5)), chance.choice((0.5, 3.0, 20.0, 60.0))))
    tokens = tuple(chance.choice((10, 10, 17, 30)) for _ in range(count))
    return MaskSchedule(seed, chance.randint(1, 90), tokens, tuple(traps), chance.choice((0.0, 0.0, 0.01, 0.05)))


@contextlib.contextmanager
def watched(entered: Callable[[str, str], None]) -> Iterator[None]:
    """Call ``entered`` with a peer's id and the phase that the peer is in."""
    with contextlib.ExitStack() as patches:
        for phase, (owner, name, when) in PHASES.items():
            patches.enter_context(mock.patch.object(owner, name, _watched(getattr(owner, name), phase, when, entered)))
        yield


def _watched(
    real: Callable[..., Any], phase: str, when: str, entered: Callable[[str, str], None]
) -> Callable[..., Any]:
    def enter(of: Any) -> None:
        entered(of._peer if isinstance(of, MaskKeys) else getattr(of, "_session", of).context.rpc.peer_id, phase)

    async def slowly(of: Any, *given: Any) -> Any:
        if when == "before":
            enter(of)
            await asyncio.sleep(0)  # A peer that is hit stops here.
        found = await real(of, *given)
        if when == "after":
            enter(of)
            await asyncio.sleep(0)
        return found

    def at_once(of: Any, *given: Any) -> Any:
        if when == "before":
            enter(of)
        found = real(of, *given)
        if when == "after":
            enter(of)
        return found

    return slowly if inspect.iscoroutinefunction(real) else at_once


class Witness:
    """Sees what sites average, hold and reveal, and what they commit."""

    def __init__(self) -> None:
        self._used: dict[tuple[bytes, str], torch.Tensor] = {}
        self._tokens: dict[bytes, list[int]] = {}
        self._held: dict[tuple[bytes, str, str], tuple[bytes, bytes]] = {}
        self._told: set[bytes] = set()
        self._committed: dict[bytes, list[bytes]] = {}
        self._bodies: dict[tuple[int, bytes], bytes] = {}
        self.most: dict[bytes, int] = {}

    @contextlib.contextmanager
    def seeing(self) -> Iterator[None]:
        plan, open_box, send = AttemptPlanner.plan, Masking.open_box, Channel.send
        witness = self

        def planned(planner: AttemptPlanner, roster: Roster, head: Any, vector: torch.Tensor, origin: Any) -> Any:
            witness._used[roster.group_id, planner._context.rpc.peer_id] = vector
            witness._tokens[roster.group_id] = [ticket.tokens for ticket in roster.tickets]
            witness.most[roster.group_id] = least_to_unmask(len(roster.tickets), SECURE.threshold)
            return plan(planner, roster, head, vector, origin)

        def opened(masking: Masking, dealer: int, box: bytes) -> tuple[bytes, bytes]:
            members = masking.roster.members
            found = open_box(masking, dealer, box)
            witness._held[masking.roster.group_id, members[masking.own], members[dealer]] = found
            return found

        async def sent(channel: Channel, message: Any, *given: Any) -> None:
            revealed = [message] if isinstance(message, Revealed) else []
            if isinstance(message, AllRevealed):
                revealed = [each for _, each in message.revealed]
            witness._told.update(share for each in revealed for share in each.shares)
            await send(channel, message, *given)

        with (
            mock.patch.object(AttemptPlanner, "plan", planned),
            mock.patch.object(Masking, "open_box", opened),
            mock.patch.object(Channel, "send", sent),
        ):
            yield

    def check_commit(self, site: AveragingPeer, outcome: RoundOutcome) -> None:
        """The mean is that of plain integers, and all hold the same bytes."""
        body, means = outcome.result.certificate.body, [bytes(mean) for mean in outcome.result.means]
        group, contributors = body.group_id, [index for index, *_ in body.contributors]
        zeros = torch.zeros_like(site.vector)
        given = [self._used.get((group, peer), zeros) for peer in body.members]
        if not torch.equal(site.mean(), plain_mean(given, self._tokens[group], contributors)):
            raise InvariantError(f"{site.peer.name}: the mean of round {body.round} is not that of plain integers")
        if self._committed.setdefault(body.body_hash, means) != means:
            raise InvariantError(f"{site.peer.name} holds other bytes of round {body.round} than another site")
        if body.is_reduced:  # Each side of a partition may close one; the lineages meet again in the end.
            return
        if self._bodies.setdefault((body.round, body.lineage), body.body_hash) != body.body_hash:
            raise InvariantError(f"round {body.round} has two full results")

    def check_secrets(self) -> None:
        """No site revealed both of its shares for another, no two kinds are known of one, no spent update is sent."""
        known: defaultdict[tuple[bytes, str], Counter[str]] = defaultdict(Counter)
        spent: set[tuple[bytes, str]] = set()
        for (group, teller, dealer), (pair, own) in self._held.items():
            if pair in self._told and own in self._told:
                raise InvariantError(f"{teller} reveals both kinds of share for {dealer}")
            known[group, dealer].update(pair=pair in self._told, own=own in self._told)
            if teller == dealer and own in self._told:
                spent.add((group, teller))
        for (group, dealer), number in known.items():
            if min(number["pair"], number["own"]) >= self.most[group]:
                raise InvariantError(f"the update of {dealer} is known")
        last_spent: dict[str, torch.Tensor] = {}
        for (group, peer), vector in self._used.items():  # In order of time.
            if peer in last_spent and vector.data_ptr() == last_spent[peer].data_ptr():
                raise InvariantError(f"{peer} averages an update again whose sum others may know")
            if (group, peer) in spent:
                last_spent[peer] = vector


class MaskRun:
    def __init__(self, schedule: MaskSchedule, network: SimulatedNetwork, hits: Counter[str]) -> None:
        self.schedule = schedule
        self.network = network
        self.hits = hits
        self.witness = Witness()
        self._traps = {trap.site: trap for trap in schedule.traps}
        self._entered: Counter[tuple[int, str]] = Counter()
        self._ending: list[asyncio.Task[None]] = []
        self._apart: set[int] = set()
        self._chance = random.Random(f"updates {schedule.seed}")

    async def run(self) -> None:
        peers = [self.network.add_peer(f"site{index}") for index in range(len(self.schedule.tokens))]
        spec = SPEC.model_copy(update={"min_peers": 3})
        self.sites = await start_averagers(self.network, peers, spec, self.schedule.num_values, secure=SECURE)
        self._index = {site.peer.peer_id: index for index, site in enumerate(self.sites)}
        with watched(self._spring), self.witness.seeing():
            runs = [site.peer.spawn(self._take_part(index)) for index, site in enumerate(self.sites)]
            try:
                await self._go_on(runs)
            finally:
                for run in (*runs, *self._ending):
                    run.cancel()
                await asyncio.gather(*runs, *self._ending, return_exceptions=True)
                self.witness.check_secrets()
        await stop_averagers(self.sites)

    async def _go_on(self, runs: list[asyncio.Task[None]]) -> None:
        """Wait for all faults and their ends; then all that are left get two rounds further together."""

        def check() -> None:
            for run, site in zip(runs, self.sites, strict=True):
                if run.done() and site.peer.alive:
                    run.result()

        def sprung() -> bool:
            check()
            return not self._traps

        with contextlib.suppress(TimeoutError):
            await until(sprung, FAULT_SECONDS, 0.1)
        self._traps.clear()
        await asyncio.gather(*self._ending)
        left = [site for site in self.sites if site.peer.alive]
        await until(lambda: all(site.peer.is_running for site in left), 100.0, 0.1)
        front = max(site.averager.head.round for site in left)

        def together() -> bool:
            check()
            heads = {site.averager.head.lineage for site in left}
            return len(heads) == 1 and min(site.averager.head.round for site in left) >= front + 2

        try:
            await until(together, RECOVERY_SECONDS, 0.1)
        except TimeoutError:
            rounds = {site.peer.name: site.averager.head.round for site in left}
            raise InvariantError(f"sites do not go on from round {front}: {rounds}") from None

    async def _take_part(self, index: int) -> None:
        """Average round after round, a new update once the last one counted or may be known."""
        site = self.sites[index]
        while True:
            try:
                async with asyncio.timeout(CALL_SECONDS):
                    outcome = await site.round(self.schedule.tokens[index])
            except SpentError:
                self.hits["updates that were spent"] += 1
            except TemporaryError:
                continue
            else:
                self.hits["commits"] += 1
                self.witness.check_commit(site, outcome)
                if not (outcome.contributed or outcome.refusal):
                    continue
            await asyncio.sleep(TRAINING_SECONDS)
            generator = torch.Generator().manual_seed(self._chance.randrange(1 << 62))
            site.vector = torch.randn(self.schedule.num_values, generator=generator)

    def _spring(self, peer: str, phase: str) -> None:
        index = self._index[peer]
        trap, site = self._traps.get(index), self.sites[index].peer
        self._entered[index, phase] += 1
        if trap is None or trap.phase != phase or self._entered[index, phase] < trap.nth or not site.is_running:
            return
        del self._traps[index]
        self.hits[f"{trap.fault} in {phase}"] += 1
        self.network.record("trap", trap.fault, phase)
        match trap.fault:
            case "crash":
                self.network.crash(site)
            case "stall":
                self.network.stall(site, trap.seconds)
            case "cut":
                self.network.cut(site)
                self._end(trap.seconds, lambda: self.network.mend(site))
            case "partition":
                self._part(index, self._apart | {index, (index + 1) % len(self.sites)})
                self._end(trap.seconds, lambda: self._part(index, set()))

    def _part(self, index: int, apart: set[int]) -> None:
        self._apart = apart
        self.network.partition([self.sites[each].peer for each in sorted(apart)])

    def _end(self, seconds: float, end: Callable[[], None]) -> None:
        async def later() -> None:
            await asyncio.sleep(seconds)
            end()

        self._ending.append(self.network.loop.create_task(later(), context=self.network.context.copy()))


def find_mask_problems(schedule: MaskSchedule, hits: Counter[str] | None = None) -> list[str]:
    """`problems_of` a schedule; ``hits`` is told how often who was hit in which phase."""
    return problems_of(schedule, lambda network: MaskRun(schedule, network, Counter() if hits is None else hits).run())
