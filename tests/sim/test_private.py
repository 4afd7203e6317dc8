"""Sites that train one model on text of their own, which stays with them."""

import asyncio
from typing import Any

import numpy as np
import pytest
import torch

from p2ptrain.averaging.allreduce.unmasking import Unmasking
from p2ptrain.averaging.averager import Averager, RoundOutcome
from p2ptrain.averaging.commit.attempt import AttemptFailedError, decode_means
from p2ptrain.codecs import get_codec
from p2ptrain.manifest import AdmissionSpec, PrivacySpec, PrivateSpec
from p2ptrain.network.simulated import SimulatedNetwork
from p2ptrain.network.simulated.network import SimulatedSigner
from p2ptrain.training.loop import Trainer
from p2ptrain.training.optimizer import KEEPS_BUDGET
from p2ptrain.training.private import gradients
from p2ptrain.training.private.noise import add_noise
from tests.support.coroutines import simulated
from tests.support.sim.masking import SECURE, plain_mean
from tests.support.sim.product_peers import Begin, ProductSwarm

ROUNDS = 6
TRAINING = {"every": 4, "warmup_steps": 0}
LETTERS = {"a": 4000, "b": 3000, "c": 900}
"""Bytes of each site's text, whose numbered words begin with the site's letter: a window tells whose it is."""


def _write(sites: ProductSwarm, letters: dict[str, int] = LETTERS) -> None:
    for letter, count in letters.items():
        words = [f"{letter}{number:05d}" for number in range(count // 7)]
        (sites.folder / f"{letter}.txt").write_text("\n".join(words))


def _start(sites: ProductSwarm, name: str, rounds: int) -> None:
    sites.start(name, rounds, data=sites.folder / f"{name}.txt")


@pytest.mark.parametrize("weights", ["samples", "bucketed", "equal"])
@simulated(seed=3)
async def test_sites_read_their_own_text_alone_and_weigh_what_the_manifest_says(
    network: SimulatedNetwork, weights: str, begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    sites = begin(network, TRAINING, private=PrivateSpec.model_validate({"weights": weights}))
    _write(sites)
    seen: dict[str, list[bytes]] = {}
    loss = Trainer._loss

    def observed(trainer: Trainer, batch: np.ndarray) -> torch.Tensor:
        name = next(name for name, each in sites.trainers.items() if each is trainer)
        seen.setdefault(name, []).extend(bytes(row.tolist()) for row in batch)
        return loss(trainer, batch)

    monkeypatch.setattr(Trainer, "_loss", observed)
    counts: dict[str, int] = {}

    def look(name: str, trainer: Trainer) -> None:
        counts[name] = (len(trainer._corpus.train) - 1) // 8

    sites.before_step = look
    for name in LETTERS:
        _start(sites, name, ROUNDS)
    await sites.end()
    assert len(sites.heads()) == 1
    assert not (sites.folder / "data").exists(), "no copy of a site's text is kept"
    for name, windows in seen.items():
        assert {chr(byte) for byte in b"".join(windows)} & LETTERS.keys() == {name}
        assert len(set(windows)) == len(windows), "a pass reads no window twice"
    for name, count in counts.items():
        step = {"samples": count, "bucketed": 1 << (count.bit_length() - 1), "equal": 1}[weights]
        trained, left_over = divmod(sites.sync(name).replica.trained_tokens, step)
        assert left_over == 0
        assert 2 * ROUNDS <= trained <= sites.trainers[name].optimizer.total_steps


@simulated(seed=3)
async def test_a_batch_that_was_dropped_is_not_read_again_until_the_next_pass(
    network: SimulatedNetwork, begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    sites = begin(network, TRAINING, private=PrivateSpec())
    _write(sites)
    loss, bad = Trainer._loss, list[bytes]()

    def spoiled(trainer: Trainer, batch: np.ndarray) -> torch.Tensor:
        found = loss(trainer, batch)
        if trainer is sites.trainers["c"] and trainer.optimizer.total_steps == 2:
            bad.append(batch.tobytes())
        return found * float("nan") if batch.tobytes() in bad[:1] else found

    monkeypatch.setattr(Trainer, "_loss", spoiled)
    for name in LETTERS:
        _start(sites, name, ROUNDS)
    await sites.end()
    assert sites.trainers["c"].optimizer.dropped_batches == 1
    assert sites.round("c") == ROUNDS


@simulated(seed=6)
async def test_a_fast_site_takes_no_more_steps_than_a_slow_one(network: SimulatedNetwork, begin: Begin) -> None:
    private = PrivateSpec(weights="equal")
    sites = begin(network, TRAINING, private=private, quorum=1.0, min_peers=3)
    _write(sites)
    sites.step_seconds.update(a=0.01, b=0.5, c=2.0)
    for name in LETTERS:
        _start(sites, name, ROUNDS)
    await sites.end()
    assert len(sites.heads()) == 1
    for name in LETTERS:
        replica = sites.sync(name).replica
        assert replica.trained_rounds == ROUNDS
        assert replica.trained_tokens == TRAINING["every"] * replica.trained_rounds


@pytest.mark.fault(1)
@simulated(seed=4)
async def test_a_killed_site_comes_back_with_its_own_layers(network: SimulatedNetwork, begin: Begin) -> None:
    sites = begin(network, TRAINING, private=PrivateSpec(personal=("*norm*",)))
    _write(sites)
    last: dict[str, dict[str, torch.Tensor]] = {}
    first_again: dict[str, torch.Tensor] = {}
    has_trained, was_killed = asyncio.Event(), asyncio.Event()

    def look(name: str, trainer: Trainer) -> None:
        own = trainer.optimizer.synchronizer.state.layout.read_personal(trainer.optimizer.module)
        if name == "c" and was_killed.is_set() and not first_again:
            first_again.update(own)
        last[name] = own
        if name == "c" and trainer.optimizer.round >= 2:
            has_trained.set()

    sites.before_step = look
    for name in LETTERS:
        _start(sites, name, 4 * ROUNDS)
    await has_trained.wait()
    await sites.kill("c")
    at_end = dict(last["c"])
    was_killed.set()
    await asyncio.sleep(10.0)
    _start(sites, "c", 4 * ROUNDS)
    await sites.end()
    assert len(sites.heads()) == 1
    start = {name: torch.ones_like(tensor) for name, tensor in at_end.items()}
    assert first_again.keys() == at_end.keys()
    assert at_end
    for name, tensor in first_again.items():
        # The checkpoint is of the round's end; at most a round of steps was lost.
        assert not torch.equal(tensor, start[name])
        assert torch.dist(tensor, at_end[name]) < torch.dist(start[name], at_end[name])
    assert any(not torch.equal(last["a"][name], last["c"][name]) for name in last["a"])


@simulated(seed=5)
async def test_a_site_whose_privacy_budget_is_spent_follows_and_the_others_train_on(
    network: SimulatedNetwork, begin: Begin
) -> None:
    privacy = PrivacySpec(epsilon=3.0, delta=1e-3, noise_multiplier=0.6)
    sites = begin(network, TRAINING, private=PrivateSpec(), differential_privacy=privacy)
    _write(sites)
    for name in LETTERS:
        _start(sites, name, 3 * ROUNDS)
    await sites.until(lambda: "c" in sites.trainers and sites.nodes["c"].record.state == "resting")
    spent = sites.trainers["c"].optimizer
    assert spent.site is not None
    assert spent.site.privacy is not None
    assert spent.total_steps == spent.site.privacy.budget.max_steps
    at_rest = spent.round
    record = sites.nodes["c"].record.describe()
    assert record.state == "resting"
    assert record.note == "its privacy budget is spent", "without the epsilon, which a policy may keep"
    assert record.privacy is not None
    assert record.privacy.epsilon <= privacy.epsilon
    assert record.loss is None, "a loss of training samples is not covered by the bound"
    await sites.end()  # The site at rest, too: nobody is left to follow.
    assert sites.round("a") == sites.round("b") == 3 * ROUNDS
    assert sites.round("c") > at_rest + 1, "it followed"
    assert spent.total_steps == spent.site.privacy.budget.max_steps
    assert all(sites.trainers[name].optimizer.total_steps > spent.total_steps for name in "ab")
    _start(sites, "c", 3 * ROUNDS)
    await sites.end()
    assert sites.trainers["c"].optimizer.is_spent, "a restart does not refill it"


@pytest.mark.fault(57)
@simulated(seed=8)
async def test_masked_sums_are_those_of_the_noised_updates_and_a_spent_site_leaves_the_others_masks_whole(
    network: SimulatedNetwork, begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    letters = {**LETTERS, "d": 3500}
    ids = {name: SimulatedSigner(network.seed, name, {}).peer_id for name in letters}
    sites = begin(
        network, TRAINING, private=PrivateSpec(weights="samples"), secure_aggregation=SECURE,
        differential_privacy=PrivacySpec(epsilon=3.0, delta=1e-3, noise_multiplier=0.6),
        admission=AdmissionSpec(mode="allowlist", members=tuple(ids.values())),
        aggregation="mean", codec="fp32", group_size=8, min_peers=3, quorum=1.0, spot_checks=0,
    )  # fmt: skip
    _write(sites, letters)
    given: dict[tuple[int, str], tuple[torch.Tensor, int]] = {}
    ended: list[RoundOutcome] = []
    average = Averager.average

    async def observed(averager: Averager, vector: torch.Tensor, tokens: int, *rest: int) -> RoundOutcome:
        given[averager.head.round, averager._context.rpc.peer_id] = vector.clone(), tokens
        outcome = await average(averager, vector, tokens, *rest)
        ended.append(outcome)
        return outcome

    def noised(values: torch.Tensor, *given: Any) -> None:
        before = values.clone()
        add_noise(values, *given)
        noise.append(torch.dist(values, before) > 0)

    noise = list[torch.Tensor]()
    monkeypatch.setattr(Averager, "average", observed)
    monkeypatch.setattr(gradients, "add_noise", noised)
    for name in letters:
        _start(sites, name, 2 * ROUNDS)
    await sites.until(lambda: "c" in sites.nodes and sites.nodes["c"].record.state == "resting")
    at_rest = sites.round("c")
    await sites.end()
    counted = dict[int, set[str]]()
    for outcome in ended:
        body = outcome.result.certificate.body
        updates, tokens = zip(*(given[body.round, peer] for peer in body.members), strict=True)
        mean = torch.zeros_like(updates[0])
        decode_means(sites.manifest.averaging, get_codec("fp32"), body, outcome.result.means, mean)
        assert torch.equal(mean, plain_mean(updates, tokens, [index for index, *_ in body.contributors]))
        counted[body.round] = set(body.contributing)
    assert counted.keys() == set(range(2 * ROUNDS))
    assert ids["c"] in counted[at_rest - 1]
    assert all(counted[number] == set(ids.values()) - {ids["c"]} for number in range(at_rest + 1, 2 * ROUNDS))
    assert all(noise)
    assert len(noise) == sum(
        trainer.optimizer.total_steps * len(trainer.optimizer._trained()) for trainer in sites.trainers.values()
    )
    assert [trainer.optimizer.is_spent for trainer in sites.trainers.values()] == [
        name == "c" for name in sites.trainers
    ]


@simulated(seed=9)
async def test_a_site_that_leaves_while_its_sum_is_known_does_not_average_the_update_again(
    network: SimulatedNetwork, begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    ids = {name: SimulatedSigner(network.seed, name, {}).peer_id for name in LETTERS}
    sites = begin(
        network, TRAINING, private=PrivateSpec(), secure_aggregation=SECURE,
        admission=AdmissionSpec(mode="allowlist", members=tuple(ids.values())),
        aggregation="mean", codec="fp32", group_size=8, min_peers=3, quorum=1.0, spot_checks=0,
    )  # fmt: skip
    _write(sites)
    open_sums, is_known, again = Unmasking.open_sums, asyncio.Event(), list[int]()

    async def lost(verifier: Unmasking) -> None:
        await open_sums(verifier)
        session = verifier._session
        if session.attempt.head.round == 2 and not again:
            if session.own.peer == ids["c"]:
                is_known.set()
                await asyncio.Event().wait()
            raise AttemptFailedError("the round was lost")

    def look(name: str, trainer: Trainer) -> None:
        if name == "c" and sites.signals["c"] is not before:
            again.append(trainer.optimizer.work.tokens)

    monkeypatch.setattr(Unmasking, "open_sums", lost)
    sites.before_step = look
    for name in LETTERS:
        _start(sites, name, ROUNDS)
    await asyncio.sleep(0)
    before = sites.signals["c"]
    await is_known.wait()
    await sites.drain("c")
    _start(sites, "c", ROUNDS)
    await sites.end()
    assert again[0] == 0
    assert len(sites.heads()) == 1


@pytest.mark.parametrize("end", ["rest", "leave", "kill"])
@simulated(seed=7)
async def test_a_founder_keeps_its_last_steps_until_others_can_go_on_without_it(
    network: SimulatedNetwork, end: str, begin: Begin
) -> None:
    privacy = PrivacySpec(epsilon=3.0, delta=1e-3, noise_multiplier=0.6)
    names = tuple(SimulatedSigner(network.seed, name, {}).peer_id for name in LETTERS)
    members = AdmissionSpec(mode="allowlist", members=names)
    sites = begin(network, TRAINING, private=PrivateSpec(), differential_privacy=privacy, admission=members)
    _write(sites)
    _start(sites, "c", 3 * ROUNDS)
    await asyncio.sleep(60.0)
    founder = sites.trainers["c"].optimizer
    assert founder.saves_budget
    assert not founder.is_spent
    alone = founder.total_steps
    record = sites.nodes["c"].record.describe()
    assert record.state == "training", "newcomers fetch its state"
    assert record.note == KEEPS_BUDGET
    _start(sites, "a", 3 * ROUNDS)
    await sites.until(lambda: sites.nodes["c"].record.state == "resting")
    assert founder.total_steps > alone
    if end == "leave":
        await sites.drain("c")
    elif end == "kill":
        await sites.kill("c")
    await sites.tasks["a"]
    assert sites.round("a") == 3 * ROUNDS
    assert sites.sync("a").head.table.row_of(network.peers["c"].peer_id), "they went on with the founder's lineage"


@simulated(seed=6)
async def test_a_killed_site_keeps_its_correction_of_drift(network: SimulatedNetwork, begin: Begin) -> None:
    sites = begin(network, TRAINING, private=PrivateSpec(drift_correction=True))
    _write(sites)
    has_trained = asyncio.Event()
    first_again: list[torch.Tensor] = []
    was_killed = False

    def look(name: str, trainer: Trainer) -> None:
        drift = trainer.optimizer.work.drift
        assert drift is not None
        if name == "c" and trainer.optimizer.round >= 2:
            has_trained.set()
        if name == "c" and was_killed and not first_again:
            first_again.append(drift.step.clone())

    sites.before_step = look
    for name in LETTERS:
        _start(sites, name, 4 * ROUNDS)
    await has_trained.wait()
    await sites.kill("c")
    was_killed = True
    await asyncio.sleep(10.0)
    _start(sites, "c", 4 * ROUNDS)
    await sites.end()
    assert len(sites.heads()) == 1
    assert first_again[0].any()
