"""Speculation over simulated hosts: the tokens of plain generation under every fault, sooner where text repeats."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import torch

from p2ptrain.models.exact import PAGE, Part
from p2ptrain.network.simulated import LinkModel
from p2ptrain.serving.generation import Token
from p2ptrain.serving.journal import Journal
from p2ptrain.serving.link import StageLink
from p2ptrain.serving.messages import AHEAD, FLOAT_BYTES
from p2ptrain.serving.sampling import Drawn, Sampling
from tests.support.pairs import pairs
from tests.support.sim.peers import until
from tests.support.sim.serving import GREEDY, WIDTH, CopyingStage, ServingSwarm, SmallStage, golden_draws, serve, served

CYCLE = [*range(9)] * 3
TOLD = Sampling(temperature=0.0, logprobs=2)
WARM = Sampling(temperature=0.8, top_p=0.95, seed=3, want_logprob=True, frequency_penalty=0.05, presence_penalty=0.1)
NOISE = Sampling(temperature=1.0, seed=5)
NEAR, FAR, SHAKY = (
    LinkModel(latency_seconds=(each, each), jitter=jitter) for each, jitter in ((0.001, 0.0), (0.1, 0.0), (0.1, 0.1))
)


def copied(prompt: list[int], num_tokens: int, num_stages: int, sampling: Sampling) -> list[Drawn]:
    return golden_draws(prompt, num_tokens, num_stages, sampling, CopyingStage)


async def told(client: Any, prompt: list[int], num_tokens: int, sampling: Sampling, **settings: Any) -> list[Drawn]:
    """Return an answer's tokens with their log probabilities."""
    found: list[Drawn] = []
    strike = settings.pop("on_token", lambda generation, token: None)

    def note(generation: Any, token: Token) -> None:
        found.append(Drawn(token.id, token.logprob, token.top))
        strike(generation, token)

    await client.ask(prompt, num_tokens, sampling, on_token=note, **settings)
    return found


def drafts(swarm: ServingSwarm) -> tuple[int, int]:
    """Return how many tokens were drafted, and how many of them accepted."""
    totals = [each.host.book.meter.totals() for each in swarm.hosts.values()]
    return sum(each.drafted_tokens for each in totals), sum(each.accepted_tokens for each in totals)


@pytest.mark.parametrize("sampling", [TOLD, WARM], ids=["greedy", "warm"])
@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
def test_drafts_change_no_token_and_no_probability(num_stages: int, sampling: Sampling) -> None:
    async def main(swarm: ServingSwarm, client: Any) -> Any:
        found = await told(client, CYCLE, 150, sampling)
        drafted, accepted = drafts(swarm)
        assert 0 < accepted < drafted
        return found

    model = LinkModel(latency_seconds=(0.01, 0.01))
    found = serve(main, *[1] * num_stages, kind=CopyingStage, model=model)
    assert found == copied(CYCLE, 150, num_stages, sampling)


@pytest.mark.fault(30)
@pytest.mark.parametrize(("at", "victim", "fault"), pairs([30, 41, 52], [0, 1, 2], ["crash", "stall"]))
def test_a_host_that_fails_with_drafts_in_flight_is_replaced(fault: str, victim: int, at: int) -> None:
    async def main(swarm: ServingSwarm, client: Any) -> Any:
        struck: list[int] = []

        def strike(generation: Any, token: Token) -> None:
            hosts = [swarm.host_of(peer) for peer in generation.route]
            (held,) = hosts[victim].host.executor.sessions.values()
            if not struck and token.position >= len(CYCLE) + at and held.known < len(held.ids):
                struck.append(token.position)
                getattr(swarm.network, fault)(hosts[victim].peer)

        found = await told(client, CYCLE, 120, WARM, on_token=strike)
        assert struck
        return found

    assert serve(main, 2, 2, 2, kind=CopyingStage, seed=at) == copied(CYCLE, 120, 3, WARM)


@served(1, 1, 1, kind=CopyingStage)
async def test_a_next_host_that_returns_gets_the_rows_that_drafts_had(swarm: ServingSwarm, client: Any) -> None:
    """Its caller replaced drafts while it was away: the host says what it has without them."""
    breaks = 0

    def strike(generation: Any, token: Token) -> None:
        nonlocal breaks
        (held,) = swarm.hosts["s1a"].host.executor.sessions.values()
        if held.known < len(held.ids) and held.channel is not None and breaks < 5:
            breaks += 1
            held.channel.abort()

    found = await told(client, CYCLE, 150, WARM, on_token=strike)
    assert breaks == 5
    assert found == copied(CYCLE, 150, 3, WARM)


@pytest.mark.fault(30)
@pytest.mark.parametrize("unknown", [1, 2, 5])
@served(2, 1, kind=CopyingStage)
async def test_a_caller_that_came_late_replaces_no_row_by_drafts_of_before(
    swarm: ServingSwarm, client: Any, unknown: int
) -> None:
    """It took the session over with drafts that others know to be wrong, and what follows them is what they know."""
    wanted = copied(CYCLE, 120, 2, WARM)
    truth = [*CYCLE, *(drawn.id for drawn in wanted)]
    host = swarm.hosts["s1a"]
    asking = asyncio.create_task(told(client, CYCLE, 120, WARM))
    sessions = host.host.executor.sessions
    await until(lambda: any(each.known == len(each.ids) > len(CYCLE) + 12 for each in sessions.values()))
    (held,) = sessions.values()
    late = next(each for each in swarm.hosts.values() if each.peer.peer_id not in (held.feed, host.peer.peer_id))
    known = held.known - unknown
    ids = [*truth[:known], (truth[known] + 1) % 9, *truth[known + 1 : held.known + 3]]
    stage, pages = CopyingStage(0), range(-(-len(ids) // PAGE))
    rows = stage.step([Part(len(ids), 0, pages)], torch.tensor(ids), stage.new_pages(len(pages)))
    journal = Journal(row_bytes=FLOAT_BYTES * WIDTH)
    journal.append(ids, rows.numpy().tobytes(), known)
    link = StageLink(late.rpc, 1, journal, lambda stage, host: None)
    link._openings = held.epoch[-1]
    taking = late.peer.spawn(link.run(held.ticket, held.epoch[:-1], held.feed))
    await until(lambda: link.host != "")
    found = await asking
    taking.cancel()
    await asyncio.wait({taking})
    assert found == wanted


@pytest.mark.parametrize("num_stages", [1, 3])
def test_nothing_is_drawn_after_a_stop_or_the_last_token(num_stages: int) -> None:
    async def main(swarm: ServingSwarm, client: Any) -> None:
        last = swarm.hosts[f"s{num_stages - 1}a"].host.executor
        for num_tokens in range(20, 34):
            before = last.num_drawn
            assert await told(client, CYCLE, num_tokens, GREEDY) == copied(CYCLE, num_tokens, num_stages, GREEDY)
            assert last.num_drawn - before == num_tokens
        whole = [drawn.id for drawn in copied(CYCLE, 60, num_stages, GREEDY)]
        for stop in set(whole[20:]):
            before, wanted = last.num_drawn, whole.index(stop) + 1
            assert (await client.ask(CYCLE, 60, stops=[stop]))[0] == whole[:wanted]
            assert last.num_drawn - before == wanted

    serve(main, *[1] * num_stages, kind=CopyingStage)


@served(1, 1, kind=CopyingStage)
async def test_drafts_run_no_further_than_a_client_permits(swarm: ServingSwarm, client: Any) -> None:
    """So no more than `AHEAD` tokens are drawn after a stop string that the client finds."""
    async with client.generator.generate(CYCLE, GREEDY, max_tokens=100) as generation:
        tokens = aiter(generation)
        for _ in range(40):
            await anext(tokens)
        await asyncio.sleep(20.0)
        assert swarm.hosts["s1a"].host.executor.num_drawn == 40 + AHEAD


class SteadyStage(CopyingStage):
    breaks = 53


class NoisyStage(SmallStage):
    """A stage that draws few different tokens: each pair occurred before, and what follows it is chance."""

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        found = super().logits(hidden)
        found[:, :6] = 0.3 * found[:, :6] + 9
        return found


def seconds(kind: type[SmallStage], num_stages: int, model: LinkModel, speculates: bool, num_clients: int = 1) -> float:
    """Return how long answers of 200 tokens take, in virtual time; a row costs a fifth of a batch of one."""

    async def main(swarm: ServingSwarm, client: Any) -> float:
        loop, sampling = asyncio.get_running_loop(), NOISE if kind is NoisyStage else GREEDY
        start = loop.time()
        answers = await asyncio.gather(*[client.ask(CYCLE, 200, sampling) for _ in range(num_clients)])
        assert all(tokens == answers[0][0] for tokens, _ in answers)
        return loop.time() - start

    found: float = serve(
        main, *[1] * num_stages, kind=kind, speculates=speculates, model=model, serve_seconds=0.008, row_seconds=0.002,
        num_pages=256,
    )  # fmt: skip
    return found


@pytest.mark.parametrize(
    ("kind", "num_stages", "model", "num_clients", "goal"),
    [
        (SteadyStage, 4, FAR, 1, 4.0),
        (SteadyStage, 4, SHAKY, 1, 4.0),
        (SteadyStage, 1, NEAR, 1, 1.5),
        (NoisyStage, 4, FAR, 1, 0.98),
        (NoisyStage, 4, SHAKY, 1, 0.98),
        (NoisyStage, 1, NEAR, 1, 0.98),
        (SteadyStage, 1, NEAR, 16, 0.98),
    ],
)
def test_text_that_repeats_comes_sooner_and_noise_as_before(
    kind: type[SmallStage], num_stages: int, model: LinkModel, num_clients: int, goal: float
) -> None:
    """With hops of 100 ms, on one near host, and in batches that are full without drafts."""
    plain, drafted = (seconds(kind, num_stages, model, each, num_clients) for each in (False, True))
    assert plain / drafted >= goal
