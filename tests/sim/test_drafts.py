"""A client's draft over simulated hosts: the tokens of plain generation under every fault, sooner where it is right."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, cast

import pytest
import torch

from p2ptrain.models.exact import ExactStage, NotFiniteError, Part
from p2ptrain.network.simulated import LinkModel
from p2ptrain.serving.client.draft import Draft
from p2ptrain.serving.sampling import Sampling
from tests.sim.test_speculation import FAR, NEAR, SHAKY, TOLD, WARM, SteadyStage, drafts, told
from tests.support.pairs import pairs
from tests.support.sim.serving import (
    GREEDY,
    CopyingStage,
    ServingSwarm,
    SmallStage,
    digest,
    golden_draws,
    serve,
    served,
)

PROMPT = [*range(9)] * 3


class LongCycleStage(CopyingStage):
    """A stage whose tokens follow a cycle that is longer than the answer, so that nothing repeats."""

    breaks = 11

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        found = SmallStage.logits(self, hidden)
        for row, values in zip(hidden, found, strict=True):
            if int(row[0]) % self.breaks:
                values[(7 * int(row[-1]) + int(row[0]) % 3) % 61] += 12
        return found


class Guesser(LongCycleStage):
    """A model of one stage that knows the rule of the served one, and a third of what it adds."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        found = torch.zeros(len(hidden), 61)
        for row, values in zip(hidden, found, strict=True):
            values[7 * int(row[-1]) % 61] += 12
        return found


class LastStage(SmallStage):
    """The third of three stages computes as the first one of others does; those before it pass their input on."""

    def __init__(self, number: int) -> None:
        super().__init__(0)
        self.is_last = number == 2

    def step(self, parts: Sequence[Part], inputs: torch.Tensor, store: torch.Tensor) -> torch.Tensor:
        if self.is_last:
            return super().step(parts, inputs, store)
        return inputs[:, None].repeat(1, 4).float() if inputs.dim() == 1 else inputs


class Seer(CopyingStage):
    """A model of one stage that is nearly always right about a `CopyingStage`."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        found = torch.zeros(len(hidden), 61)
        for row, values in zip(hidden, found, strict=True):
            values[(int(row[-1]) + 1) % 9] += 12
        return found


def draft(kind: type[SmallStage] = Seer, context: int = 4096, has_trials: bool = True) -> Draft:
    made = Draft(cast(ExactStage, kind(0)), context)
    made.account.until_trial = made.account.until_trial if has_trials else 1000
    return made


@pytest.mark.parametrize("model", [NEAR, SHAKY], ids=["near", "shaky"])
@pytest.mark.parametrize("sampling", [TOLD, WARM], ids=["greedy", "warm"])
@pytest.mark.parametrize("num_stages", [1, 2, 4])
def test_a_draft_changes_no_token_and_no_probability(num_stages: int, sampling: Sampling, model: LinkModel) -> None:
    async def main(swarm: ServingSwarm, client: Any) -> Any:
        client.generator.draft = draft(Guesser)
        found = await told(client, PROMPT, 150, sampling)
        drafted, accepted = drafts(swarm)
        assert 0 < accepted < drafted or num_stages == 1  # One stage has drawn the tokens before guesses come.
        return found

    found = serve(main, *[1] * num_stages, kind=LongCycleStage, model=model)
    assert found == golden_draws(PROMPT, 150, num_stages, sampling, LongCycleStage)


@pytest.mark.fault(30)
@pytest.mark.parametrize(("at", "victim", "fault"), pairs([30, 41], [0, 1, 2], ["crash", "stall"]))
def test_a_host_that_fails_with_a_client_s_drafts_in_flight_is_replaced(fault: str, victim: int, at: int) -> None:
    async def main(swarm: ServingSwarm, client: Any) -> Any:
        client.generator.draft = draft(has_trials=False)
        struck: list[int] = []

        def strike(generation: Any, token: Any) -> None:
            hosts = [swarm.host_of(peer) for peer in generation.route]
            if not struck and token.position >= len(PROMPT) + at and generation.journal.known < generation.journal.end:
                struck.append(token.position)
                getattr(swarm.network, fault)(hosts[victim].peer)

        found = await told(client, PROMPT, 240, WARM, on_token=strike)
        assert struck
        return found

    wanted = golden_draws(PROMPT, 240, 3, WARM, CopyingStage)
    assert serve(main, 2, 2, 2, kind=CopyingStage, seed=at) == wanted


def test_drafts_of_replaced_weights_are_forgotten() -> None:
    async def main(swarm: ServingSwarm, client: Any) -> list[int]:
        client.generator.draft = draft(has_trials=False)
        struck: list[int] = []

        def renew(generation: Any, token: Any) -> None:
            if not struck and token.position > len(PROMPT) + 40 and generation.journal.known < generation.journal.end:
                struck.append(token.position)
                swarm.rounds = (6,)
                for each in swarm.hosts.values():
                    each.host.serve((6, digest(6, each.number)), cast(ExactStage, each.stage))
                    each.host.keep(1)

        found = await told(client, PROMPT, 120, GREEDY, on_token=renew)
        assert struck
        return [token.id for token in found]

    wanted = [token.id for token in golden_draws(PROMPT, 120, 2, GREEDY, CopyingStage)]
    assert serve(main, 1, 1, kind=CopyingStage) == wanted


@pytest.mark.parametrize("num_stages", [1, 3])
def test_nothing_is_drawn_after_a_stop_or_the_last_token(num_stages: int) -> None:
    async def main(swarm: ServingSwarm, client: Any) -> None:
        client.generator.draft = draft()
        last = swarm.hosts[f"s{num_stages - 1}a"].host.executor
        whole = [drawn.id for drawn in golden_draws(PROMPT, 60, num_stages, GREEDY, CopyingStage)]
        for num_tokens in (1, 2, 27, 28, 29):
            before = last.num_drawn
            assert (await client.ask(PROMPT, num_tokens))[0] == whole[:num_tokens]
            assert last.num_drawn - before == num_tokens
        stop = whole[30]
        assert (await client.ask(PROMPT, 60, stops=[stop]))[0] == whole[: whole.index(stop) + 1]

    serve(main, *[1] * num_stages, kind=CopyingStage)


class FailingStage(SmallStage):
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.rows > 40:
            raise NotFiniteError([0])
        return super().logits(hidden)


@pytest.mark.parametrize("made", [draft(FailingStage), draft(context=40)], ids=["failing", "short"])
@served(1, 1, kind=LongCycleStage)
async def test_an_answer_goes_on_without_a_draft_that_fails_or_ends(
    swarm: ServingSwarm, client: Any, made: Draft, caplog: pytest.LogCaptureFixture
) -> None:
    client.generator.draft = made
    assert await told(client, PROMPT, 150, WARM) == golden_draws(PROMPT, 150, 2, WARM, LongCycleStage)
    assert ("going on without the draft" in caplog.text) == isinstance(made.stage, FailingStage)


def seconds(
    kind: type[SmallStage], num_stages: int, model: LinkModel, made: Draft | None, speculates: bool, most: int = 200
) -> float:
    """Return how long an answer takes, in virtual time."""

    async def main(swarm: ServingSwarm, client: Any) -> float:
        client.generator.draft = made
        loop = asyncio.get_running_loop()
        start = loop.time()
        await client.ask(PROMPT, most)
        return loop.time() - start

    found: float = serve(main, *[1] * num_stages, kind=kind, speculates=speculates, model=model, row_seconds=0.002)
    return found


@pytest.mark.parametrize(
    ("kind", "guesser", "num_stages", "model", "goal"),
    [
        (CopyingStage, Seer, 4, FAR, 2.5),
        (CopyingStage, Seer, 4, SHAKY, 2.5),
        (LongCycleStage, Guesser, 4, FAR, 1.2),
        (SmallStage, Guesser, 4, FAR, 0.98),
        (SmallStage, Guesser, 4, SHAKY, 0.97),
        (SmallStage, Guesser, 1, NEAR, 0.98),
    ],
)
def test_answers_come_sooner_with_a_right_draft_and_as_before_with_a_wrong_one(
    kind: type[SmallStage], guesser: type[SmallStage], num_stages: int, model: LinkModel, goal: float
) -> None:
    plain, drafted = (seconds(kind, num_stages, model, made, made is not None) for made in (None, draft(guesser)))
    assert plain / drafted >= goal


@pytest.mark.parametrize(
    ("kind", "num_stages", "model"), [(SteadyStage, 4, FAR), (CopyingStage, 4, FAR), (SteadyStage, 2, NEAR)]
)
def test_a_draft_that_is_worse_than_the_hosts_own_leaves_it_to_them(
    kind: type[SmallStage], num_stages: int, model: LinkModel
) -> None:
    """Although it is better than none."""
    theirs, drafted = (seconds(kind, num_stages, model, made, True, 2000) for made in (None, draft(Guesser)))
    assert theirs / drafted >= 0.9


def test_a_perfect_draft_pays_within_the_first_short_answer() -> None:
    plain, drafted = (seconds(LastStage, 3, FAR, made, made is not None, 40) for made in (None, draft(SmallStage)))
    assert plain / drafted >= 2.2


@pytest.mark.parametrize("sampling", [GREEDY, WARM], ids=["greedy", "warm"])
@served(1, 1, 1, kind=LastStage, model=FAR)
async def test_a_served_model_is_its_own_perfect_draft(swarm: ServingSwarm, client: Any, sampling: Sampling) -> None:
    """Also at a temperature: guesses have the noise of the last stage's draws."""
    client.generator.draft = draft(SmallStage, has_trials=False)  # Hosts' drafts would be among those counted.
    await told(client, PROMPT, 100, sampling)
    drafted, accepted = drafts(swarm)
    assert accepted > 0.95 * drafted > 60


class RepeatingStage(CopyingStage):
    breaks = 65521


@served(1, 1, kind=RepeatingStage)
async def test_a_repeated_part_is_drafted_without_the_model(swarm: ServingSwarm, client: Any) -> None:
    stage = SmallStage(0)
    client.generator.draft = Draft(cast(ExactStage, stage), 4096)
    await told(client, PROMPT, 60, GREEDY)
    assert stage.rows == len(PROMPT)
