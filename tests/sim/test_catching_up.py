"""A peer that was away catches up over the fewer bytes, from who has them; its work counts once, whichever way."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from p2ptrain.averaging.commit.round_log import Result
from p2ptrain.averaging.protocol.certificate import Certificate, Head
from p2ptrain.codecs import get_codec
from p2ptrain.errors import PeerRefusedError
from p2ptrain.network.simulated import SimulatedNetwork
from p2ptrain.training.sync import catch_up
from p2ptrain.training.sync.replica import Contribution
from tests.support.coroutines import simulated
from tests.support.sim.trainers import TOKENS_PER_STEP, Ledger, SimulatedTrainer, make_manifest

WIDTH = 200
NUM_VALUES = WIDTH * (WIDTH + 1)
STATE_BYTES = 8 * NUM_VALUES
"""Parameters and outer momentum."""
OVERHEAD_BYTES = 20_000
"""Certificates, headers and calls."""
DECAY = 0.5


@dataclass(frozen=True)
class Checkpoint:
    """A trainer's state, with its error-feedback residual and the work that waits."""

    head: Head
    tensors: list[tuple[str, torch.Tensor]]
    residual: torch.Tensor
    work: tuple[dict[str, Any], dict[str, torch.Tensor]]

    @classmethod
    def of(cls, trainer: SimulatedTrainer) -> "Checkpoint":
        residual = trainer.sync.feedback.residual
        assert residual is not None
        tensors = [(name, tensor.clone()) for name, tensor in trainer.state.tensors()]
        return cls(trainer.sync.head, tensors, residual.clone(), trainer.work.to_save())


class Trainers:
    """Trainers that average when they are told to, and share one ledger, which checks that equal lineages are equal."""

    def __init__(self, network: SimulatedNetwork, fragments: int, **averaging: object) -> None:
        self.network = network
        self.manifest = make_manifest({"fragments": fragments}, min_peers=2, late_decay=DECAY, **averaging)
        self.ledger = Ledger()
        self.all: dict[str, SimulatedTrainer] = {}
        self.noise = torch.Generator().manual_seed(1)

    async def start(self, name: str) -> SimulatedTrainer:
        """A trainer that has joined the others."""
        peer = self.network.add_peer(name)
        self.all[name] = trainer = SimulatedTrainer(peer, self.manifest, self.ledger, width=WIDTH)
        await trainer.rpc.start()
        await trainer.presence.start()
        await trainer._join()
        return trainer

    async def rounds(self, names: str, count: int) -> None:
        """So many rounds of those named, one local step each."""
        for _ in range(count):
            before = self.all[names[0]].sync.head.round
            for name in names:
                self.step(name)
            while self.all[names[0]].sync.head.round == before:
                await asyncio.gather(*(self.all[name].synchronize() for name in names))

    def step(self, name: str) -> None:
        trainer = self.all[name]
        with torch.no_grad():
            for parameter in trainer.module.parameters():
                parameter.add_(torch.randn(parameter.shape, generator=self.noise), alpha=0.01)
        trainer.work.steps = trainer.work.samples = 0
        trainer.work.add_step(1, TOKENS_PER_STEP)

    async def restart(self, name: str, checkpoint: Checkpoint) -> SimulatedTrainer:
        """End a trainer, start it again from a checkpoint, and let it join the others."""
        before = self.all.pop(name)
        self.network.mend(before.peer)
        await before.close()
        self.network.crash(before.peer)
        for each in self.all.values():
            await each.presence.publish()
        await asyncio.sleep(60.0)
        self.all[name] = trainer = SimulatedTrainer(
            self.network.restart(before.peer), self.manifest, self.ledger, width=WIDTH
        )
        trainer.state.replace(checkpoint.tensors, checkpoint.head)
        trainer.sync.averager.begin_at(checkpoint.head)
        trainer.sync.replica.restore_residual(checkpoint.residual)
        if checkpoint.work[0] and trainer.work.restore(*checkpoint.work):
            trainer.sync.averager.contributions.forget(range(len(trainer.work.pending)))
        await trainer.rpc.start()
        await trainer.presence.start()
        await trainer._join()
        return trainer

    def leave(self, name: str) -> None:
        self.network.cut(self.all[name].peer)

    async def come_back(self, name: str) -> SimulatedTrainer:
        """Plug it in again, and let it see the others."""
        trainer = self.all[name]
        self.network.mend(trainer.peer)
        for each in self.all.values():
            await each.presence.publish()
        await asyncio.sleep(60.0)
        assert await trainer.presence.refresh()
        return trainer


@asynccontextmanager
async def trainers(
    network: SimulatedNetwork, names: str, codec: str = "int8", fragments: int = 1, **averaging: object
) -> AsyncIterator[Trainers]:
    """Trainers called by one letter each that have averaged once."""
    swarm = Trainers(network, fragments, codec=codec, **averaging)
    for name in names:
        await swarm.start(name)
    await swarm.rounds(names, 1)
    assert len({trainer.sync.head.lineage for trainer in swarm.all.values()}) == 1
    try:
        yield swarm
    finally:
        for trainer in swarm.all.values():
            await trainer.close()


@pytest.fixture(params=["replay", "download"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """The way in which peers catch up, whatever it costs."""
    monkeypatch.setattr(catch_up, "choose_way", lambda *_: (request.param == "download", request.param))
    return str(request.param)


async def bytes_to_follow(trainer: SimulatedTrainer) -> int:
    """What a trainer receives to catch up."""
    before = trainer.rpc.traffic.received
    assert await trainer.sync.follow_swarm(trainer.work)
    return trainer.rpc.traffic.received - before


def assert_equal_states(*several: SimulatedTrainer) -> None:
    assert len({(trainer.sync.head.lineage, trainer.sync.head.digest) for trainer in several}) == 1
    for trainer in several[1:]:
        for (_, ours), (_, theirs) in zip(several[0].state.tensors(), trainer.state.tensors(), strict=True):
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("codec", "num_rounds"), [("fp32", 1), ("fp32", 2), ("fp32", 3), ("fp16", 4), ("fp16", 5), ("int8", 7)]
)
@simulated(seed=lambda num_rounds, **_: num_rounds)
async def test_a_laggard_moves_the_fewer_bytes_and_holds_the_same_bits(
    network: SimulatedNetwork, codec: str, num_rounds: int
) -> None:
    async with trainers(network, "abc", codec) as swarm:
        swarm.leave("c")
        await swarm.rounds("ab", num_rounds)
        laggard = await swarm.come_back("c")
        num_missed = swarm.all["a"].sync.head.round - laggard.sync.head.round
        assert num_missed >= num_rounds
        moved = await bytes_to_follow(laggard)
        replay_bytes = num_missed * get_codec(codec).encoded_bytes(NUM_VALUES)
        assert moved <= min(replay_bytes, STATE_BYTES) / 0.9 + OVERHEAD_BYTES
        assert laggard.sync.catch_up.resyncs == (0.9 * replay_bytes > STATE_BYTES)
        assert_equal_states(*swarm.all.values())


@simulated(seed=1)
async def test_work_that_waits_is_carried_alike_and_counted_once(network: SimulatedNetwork, way: str) -> None:
    async with trainers(network, "abc") as swarm:
        laggard = swarm.all["c"]
        laggard.sync.feedback.residual.fill_(0.5)  # type: ignore[union-attr]
        swarm.step("c")
        work, tokens = torch.empty(NUM_VALUES), laggard.work.tokens
        laggard.work.collect(work)
        swarm.leave("c")
        await swarm.rounds("ab", 3)
        await swarm.come_back("c")
        num_missed = swarm.all["a"].sync.head.round - laggard.sync.head.round
        await bytes_to_follow(laggard)
        assert laggard.sync.catch_up.resyncs == (way == "download")
        assert_equal_states(*swarm.all.values())
        carried = torch.empty(NUM_VALUES)
        laggard.work.collect(carried)
        torch.testing.assert_close(carried, work * DECAY**num_missed, rtol=1e-3, atol=1e-6)
        assert laggard.work.tokens == tokens
        assert torch.equal(laggard.sync.feedback.residual, torch.full((NUM_VALUES,), 0.5))  # type: ignore[arg-type]
        await swarm.rounds("abc", 1)
        head = laggard.sync.head
        body = Certificate.from_bytes(head.certificate, laggard.swarm, laggard.peer.signer).body
        counted = {body.members[index]: of_one for index, of_one, _ in body.contributors}
        assert laggard.work.tokens == 0
        assert counted[laggard.peer.peer_id] == 2 * tokens
        assert_equal_states(*swarm.all.values())


@simulated(seed=1)
async def test_each_fragment_s_work_decays_with_the_rounds_that_it_missed(network: SimulatedNetwork, way: str) -> None:
    async with trainers(network, "abc", fragments=2) as swarm:
        laggard = swarm.all["c"]
        swarm.step("c")
        work = torch.empty(laggard.state.layout.num_values)
        laggard.work.collect(work)
        pending, first = list(laggard.work.pending), laggard.sync.head.round
        swarm.leave("c")
        await swarm.rounds("ab", 4)
        await swarm.come_back("c")
        missed = range(first, swarm.all["a"].sync.head.round)
        await bytes_to_follow(laggard)
        assert laggard.sync.catch_up.resyncs == (way == "download")
        assert_equal_states(*swarm.all.values())
        carried = torch.empty_like(work)
        laggard.work.collect(carried)
        for fragment in laggard.state.fragments:
            decay = DECAY ** sum(number % 2 == fragment.index for number in missed)
            for start, _, count in fragment.parameter_spans:
                span = slice(start, start + count)
                torch.testing.assert_close(carried[span], work[span] * decay, rtol=1e-3, atol=1e-6)
        assert laggard.work.pending == pending
        await swarm.rounds("abc", 2)
        assert laggard.work.pending[0] in (0, TOKENS_PER_STEP)
        assert sum(laggard.work.pending) == TOKENS_PER_STEP  # The fragment of the round before last waits again.


@simulated(seed=2)
async def test_work_in_a_round_whose_end_was_not_seen_is_not_brought_again(network: SimulatedNetwork, way: str) -> None:
    async with trainers(network, "abcd") as swarm:
        laggard = swarm.all["d"]

        def on_phase(phase: str, round_: int) -> None:
            if phase == "gather":  # Its parts are counted, and as it owns no share the others can do without it.
                swarm.leave("d")

        laggard.is_reachable = False
        laggard.sync.averager.phase_listeners = [on_phase]
        for name in swarm.all:
            swarm.step(name)
        await asyncio.gather(*(trainer.synchronize() for trainer in swarm.all.values()))
        head = swarm.all["a"].sync.head
        body = Certificate.from_bytes(head.certificate, laggard.swarm, laggard.peer.signer).body
        assert laggard.peer.peer_id in [body.members[index] for index, *_ in body.contributors]
        assert laggard.sync.head.lineage == body.lineage
        assert laggard.work.tokens > 0
        laggard.sync.averager.phase_listeners = []
        await swarm.rounds("abc", 2)
        await swarm.come_back("d")
        await bytes_to_follow(laggard)
        assert laggard.sync.catch_up.resyncs == (way == "download")
        assert laggard.work.tokens == 0
        assert not bool(laggard.sync.feedback.residual.any())  # type: ignore[union-attr]
        assert_equal_states(*swarm.all.values())


@pytest.mark.parametrize("others_have_it", [True, False])
@simulated(seed=3)
async def test_rounds_that_the_source_does_not_have_come_from_others_before_the_state_does(
    network: SimulatedNetwork, others_have_it: bool
) -> None:
    async with trainers(network, "abc") as swarm:
        swarm.leave("c")
        await swarm.rounds("ab", 1)
        newcomer = await swarm.start("n")
        newcomer.sync.averager.round_log.begin_at(newcomer.sync.head)  # as after a download
        await swarm.rounds("abn", 1)
        if not others_have_it:
            for name in "ab":
                swarm.all[name].sync.averager.round_log.begin_at(swarm.all[name].sync.head)
        laggard = await swarm.come_back("c")
        source = newcomer.peer.peer_id
        assert await newcomer.sync.averager.round_log.certificates_after(
            swarm.all["a"].peer.peer_id, laggard.sync.head
        ) == swarm.all["a"].sync.averager.round_log.chain(laggard.sync.head.lineage)
        assert not newcomer.sync.averager.round_log.chain(laggard.sync.head.lineage)
        assert await laggard.sync.catch_up.follow(source, laggard.work)
        assert laggard.sync.catch_up.resyncs == (not others_have_it)
        assert_equal_states(*swarm.all.values())


@pytest.mark.parametrize("num_replayed", [1, 3])
@simulated(seed=4)
async def test_a_replay_that_breaks_off_goes_on_as_a_download(
    network: SimulatedNetwork, monkeypatch: pytest.MonkeyPatch, num_replayed: int
) -> None:
    """The source drops a result before a slow peer has fetched it, and ends further rounds meanwhile."""
    monkeypatch.setattr(catch_up, "choose_way", lambda *_: (False, "replay"))
    async with trainers(network, "abc") as swarm:
        swarm.leave("c")
        await swarm.rounds("ab", 4)
        laggard = await swarm.come_back("c")
        source, replica, first = swarm.all["a"].peer.peer_id, laggard.sync.replica, laggard.sync.head.round
        apply_missed, broke = replica.apply_missed, list[int]()

        async def break_off(result: Result, work: Contribution | None) -> None:
            if laggard.sync.head.round == first + num_replayed and not broke:
                broke.append(first + num_replayed)
                await swarm.rounds("ab", 1)
                raise PeerRefusedError(source, "this result is not kept here")
            await apply_missed(result, work)

        monkeypatch.setattr(replica, "apply_missed", break_off)
        assert await laggard.sync.catch_up.follow(source, laggard.work)
        assert broke
        assert laggard.sync.catch_up.resyncs == 1
        assert_equal_states(*swarm.all.values())


@pytest.mark.usefixtures("way")
@simulated(seed=1)
async def test_work_and_a_residual_whose_round_is_over_are_not_restored(network: SimulatedNetwork) -> None:
    async with trainers(network, "abc") as swarm:
        swarm.step("a")
        saved = Checkpoint.of(swarm.all["a"])
        assert saved.residual.abs().max() > 0
        assert any(saved.work[0]["pending"])
        await swarm.rounds("abc", 2)  # The first of them adds what the checkpoint holds as a residual.
        again = await swarm.restart("a", saved)
        assert_equal_states(*swarm.all.values())
        assert again.sync.feedback.residual is not None
        assert again.sync.feedback.residual.abs().max() == 0
        assert not any(again.work.pending)
        assert torch.equal(live_values(again), again.state.vector)


@pytest.mark.usefixtures("way")
@simulated(seed=1)
async def test_work_and_a_residual_that_no_round_has_used_are_restored(network: SimulatedNetwork) -> None:
    async with trainers(network, "abc") as swarm:
        swarm.step("a")
        saved = Checkpoint.of(swarm.all["a"])
        done = saved.work[1]["live"] - saved.tensors[0][1]
        swarm.leave("a")
        await swarm.rounds("bc", 1)
        again = await swarm.restart("a", saved)
        assert_equal_states(*swarm.all.values())
        assert again.sync.feedback.residual is not None
        assert torch.equal(again.sync.feedback.residual, saved.residual)
        assert again.work.pending == saved.work[0]["pending"]
        torch.testing.assert_close(live_values(again) - again.state.vector, done * DECAY)


async def sent_and_own(trainer: SimulatedTrainer) -> tuple[torch.Tensor, torch.Tensor]:
    """What a trainer would contribute now, without its residual, and its update alone."""
    (fragment,), own = trainer.state.fragments, torch.empty(NUM_VALUES)
    trainer.work.collect(own)
    sent = await trainer.sync.replica.collect(trainer.work, fragment)
    assert sent is not None
    residual = trainer.sync.feedback.residual
    return (sent.clone() if residual is None else sent - residual), own


@pytest.mark.parametrize("codec", ["fp32", "int8"])
@simulated(seed=1)
async def test_worker_momentum_is_the_mean_of_the_updates_that_counted(network: SimulatedNetwork, codec: str) -> None:
    async with trainers(network, "ab", codec, worker_momentum=0.75) as swarm:
        trainer = swarm.all["a"]
        await trainer.sync.replica.reset(trainer.work)
        updates: list[torch.Tensor] = []
        for counts in (True, True, False, True):  # What does not count waits, and is in the next update.
            swarm.step("a")
            swarm.step("b")
            sent, own = await sent_and_own(trainer)
            weights = [0.75**age for age in reversed(range(len(updates) + 1))]
            terms = [weight * update for weight, update in zip(weights, [*updates, own], strict=True)]
            torch.testing.assert_close(sent, torch.stack(terms).sum(0) / sum(weights), rtol=1e-4, atol=1e-6)
            if counts:
                before = trainer.sync.replica.trained_rounds
                await asyncio.gather(*(each.synchronize() for each in swarm.all.values()))
                assert trainer.sync.replica.trained_rounds == before + 1
                updates.append(own)


def live_values(trainer: SimulatedTrainer) -> torch.Tensor:
    values = trainer.state.layout.new_vector()
    trainer.state.layout.read(trainer.module, values)
    return values
