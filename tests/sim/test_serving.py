"""Generation over simulated hosts: exact tokens under every fault, bounded drawing, and nothing left behind."""

from __future__ import annotations

import asyncio
import itertools
from argparse import Namespace
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest
import torch

from p2ptrain.cli.commands.serving.talking import answer
from p2ptrain.errors import P2PTrainError, PeerRefusedError, ProtocolError
from p2ptrain.models.exact import PAGE, ExactStage, NotFiniteError
from p2ptrain.models.tokenizers import byte_tokenizer
from p2ptrain.network.rpc import endpoint
from p2ptrain.network.simulated import LinkModel, SimulatedNetwork, simulate
from p2ptrain.serving import link
from p2ptrain.serving.errors import (
    GenerationFailedError,
    MixedHostsError,
    NoHostError,
    OverloadedError,
    PromptTooLongError,
)
from p2ptrain.serving.generation import Token
from p2ptrain.serving.host import service as hosting
from p2ptrain.serving.host import sessions
from p2ptrain.serving.host.session import BEAT_SECONDS
from p2ptrain.serving.host.sessions import LOOK_SECONDS, ORPHAN_SECONDS
from p2ptrain.serving.http.app import PROBE_SECONDS
from p2ptrain.serving.messages import (
    AHEAD,
    FEED,
    STALLED_SECONDS,
    Beat,
    Cause,
    Close,
    DrawnToken,
    Failed,
    Fed,
    FeedRequest,
    FromHost,
    Open,
    Step,
    service,
)
from p2ptrain.serving.sampling import Sampling
from p2ptrain.serving.text import Text
from tests.support.sim.peers import until
from tests.support.sim.serving import (
    ARITHMETIC,
    DRAWN,
    GREEDY,
    VOCABULARY,
    ServingSwarm,
    SmallStage,
    digest,
    golden,
    serve,
    served,
)

PROMPT = [5, 1, 4, 1, 5, 9, 2, 6]
LONG_PROMPT = [(7 * at) % 61 for at in range(700)]


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN], ids=["greedy", "drawn"])
@pytest.mark.parametrize("num_stages", [1, 2, 4])
def test_stages_draw_the_tokens_of_one_process(num_stages: int, sampling: Any) -> None:
    async def main(swarm: ServingSwarm, client: Any) -> Any:
        return await client.ask(PROMPT, 40, sampling)

    assert serve(main, *[1] * num_stages) == (golden(PROMPT, 40, num_stages, sampling), 0)


@served(1, 1, 1)
async def test_a_long_prompt_goes_through_in_chunks(swarm: ServingSwarm, client: Any) -> None:
    assert await client.ask(LONG_PROMPT, 3) == (golden(LONG_PROMPT, 3, 3), 0)


@served(1, 1, 1, 1, serve_seconds=0.0, row_seconds=0.001, model=LinkModel(latency_seconds=(0.001, 0.001)))
async def test_all_stages_compute_a_long_prompt_at_the_same_time(swarm: ServingSwarm, client: Any) -> None:
    start = asyncio.get_running_loop().time()
    await client.ask(LONG_PROMPT, 1)
    one_stage = 0.001 * len(LONG_PROMPT)
    assert asyncio.get_running_loop().time() - start < 1.5 * one_stage


@pytest.mark.fault(30)
@pytest.mark.parametrize("fault", ["crash", "stall"])
@pytest.mark.parametrize("victim", [0, 1, 2])
@pytest.mark.parametrize("at", [0, 1, 70])
def test_a_host_that_fails_is_replaced_with_the_same_tokens(fault: str, victim: int, at: int) -> None:
    async def main(swarm: ServingSwarm, client: Any) -> Any:
        def strike(generation: Any, token: Token) -> None:
            if token.position == len(PROMPT) + at:
                getattr(swarm.network, fault)(swarm.host_of(generation.route[victim]).peer)

        return await client.ask(PROMPT, 100, DRAWN, on_token=strike)

    tokens, failovers = serve(main, 2, 2, 2, seed=at)
    assert tokens == golden(PROMPT, 100, 3, DRAWN)
    assert failovers >= 1


@pytest.mark.fault(30)
@pytest.mark.parametrize("fault", ["crash", "stall", "silence"])
@pytest.mark.parametrize("victim", [1, 2])
@served(2, 2, 2)
async def test_a_failover_pauses_an_answer_for_less_than_two_seconds(
    swarm: ServingSwarm, client: Any, fault: str, victim: int
) -> None:
    """Also when the client still reaches the replaced host (``silence``: only its caller does not)."""
    times: list[float] = []

    def strike(generation: Any, token: Token) -> None:
        times.append(asyncio.get_running_loop().time())
        if token.position == len(PROMPT) + 20:
            caller, host = (swarm.host_of(generation.route[number]).peer for number in (victim - 1, victim))
            if fault == "silence":
                swarm.network.set_latency(caller, host, 1000.0)
            else:
                getattr(swarm.network, fault)(host)

    assert (await client.ask(PROMPT, 60, DRAWN, on_token=strike))[0] == golden(PROMPT, 60, 3, DRAWN)
    assert max(after - before for before, after in itertools.pairwise(times)) < 2.0


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_failover_repeats_a_page_of_rows_at_most(victim: int) -> None:
    """The shadow has computed all full pages but the newest when its host crashes, and computes no row twice."""
    at, num_tokens = 300, 340
    before: list[int] = []

    async def main(swarm: ServingSwarm, client: Any) -> None:
        def strike(generation: Any, token: Token) -> None:
            if token.position == len(PROMPT) + at:
                victims.append(swarm.host_of(generation.route[victim]))
                swarm.network.crash(victims[0].peer)
                before.extend(each.stage.rows for each in shadows())

        def shadows() -> list[Any]:
            return [each for each in swarm.hosts.values() if each.number == victim and each not in victims]

        victims: list[Any] = []
        tokens, _ = await client.ask(PROMPT, num_tokens, on_token=strike)
        assert tokens == golden(PROMPT, num_tokens, 3)
        (shadow,) = shadows()
        assert before[0] >= (len(PROMPT) + at) // PAGE * PAGE - PAGE
        assert shadow.stage.rows == len(PROMPT) + num_tokens - 1

    serve(main, *[2 if number == victim else 1 for number in range(3)], speculates=False)


@served(1, 1)
async def test_a_probe_draws_a_token_and_fails_where_a_host_with_a_live_record_draws_none(
    swarm: ServingSwarm, client: Any
) -> None:
    await client.generator.probe()
    assert swarm.hosts["s1a"].host.executor.num_drawn == 1
    swarm.network.stall(swarm.hosts["s1a"].peer)
    with pytest.raises((P2PTrainError, TimeoutError)):
        async with asyncio.timeout(PROBE_SECONDS):
            await client.generator.probe()
    gone = swarm.hosts.pop("s1a")
    with pytest.raises(NoHostError):
        async with asyncio.timeout(1.0):
            await client.generator.probe()
    swarm.hosts["s1a"] = gone


@served(2, serve_seconds=0.1, speculates=False)
async def test_a_shadow_that_was_lost_is_replaced_when_it_is_back(swarm: ServingSwarm, client: Any) -> None:
    """So a long answer has a spare again, and its next failover repeats a page of rows at most."""
    shadows: list[int] = []
    restarting: list[asyncio.Task[Any]] = []

    def strike(generation: Any, token: Token) -> None:
        name = next(each for each, host in swarm.hosts.items() if host.peer.peer_id not in generation.route)
        if token.position == len(PROMPT) + 10:
            swarm.network.crash(swarm.hosts[name].peer)
            restarting.append(asyncio.create_task(swarm.restart(name)))
        shadows.append(len(swarm.hosts[name].host.executor.sessions))

    assert (await client.ask(PROMPT, 220, on_token=strike))[0] == golden(PROMPT, 220, 1)
    await asyncio.wait(restarting)
    assert shadows[30] == 0
    assert shadows[-1] == 1


@pytest.mark.parametrize("victims", [(0, 1), (1, 2), (0, 1, 2)])
@served(2, 2, 2)
async def test_neighbours_that_fail_together_are_replaced(
    swarm: ServingSwarm, client: Any, victims: tuple[int, ...]
) -> None:
    def strike(generation: Any, token: Token) -> None:
        if token.position == len(PROMPT) + 20:
            for victim in victims:
                swarm.network.crash(swarm.host_of(generation.route[victim]).peer)

    tokens, failovers = await client.ask(PROMPT, 60, on_token=strike)
    assert tokens == golden(PROMPT, 60, 3)
    assert failovers >= len(victims)


def test_a_host_without_replica_is_waited_for() -> None:
    async def main(swarm: ServingSwarm, client: Any) -> Any:
        async def back() -> None:
            await crashed.wait()
            await asyncio.sleep(8.0)
            await swarm.restart("s1a")

        def strike(generation: Any, token: Token) -> None:
            if token.position == len(PROMPT) + 5:
                swarm.network.crash(swarm.hosts["s1a"].peer)
                crashed.set()

        crashed = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            group.create_task(back())
            return await client.ask(PROMPT, 30, on_token=strike)

    assert serve(main, 1, 1, 1)[0] == golden(PROMPT, 30, 3)


@served(1, 1)
async def test_a_session_goes_on_with_newer_weights_when_its_own_are_gone(swarm: ServingSwarm, client: Any) -> None:
    """The stages of all rounds are alike here, so the tokens show that none is lost or drawn twice."""
    versions: list[str] = []

    def renew(generation: Any, token: Token) -> None:
        versions.append(generation.version)
        if token.position == len(PROMPT) + 20:
            for each in swarm.hosts.values():
                for round_ in (6, 7):
                    each.host.serve((round_, digest(round_, each.number)), cast(ExactStage, each.stage))
            swarm.rounds = (6, 7)

    assert (await client.ask(PROMPT, 60, DRAWN, on_token=renew))[0] == golden(PROMPT, 60, 2, DRAWN)
    assert versions[0].startswith("5-")
    assert versions[-1].startswith("7-")


@served(2)
async def test_a_shadow_that_fails_is_no_failed_request(swarm: ServingSwarm, client: Any) -> None:
    """The shadow's host drops the weights: it has served no request, and its record still can be published."""

    def renew(generation: Any, token: Token) -> None:
        if token.position == len(PROMPT) + PAGE:
            shadow = next(each for each in swarm.hosts.values() if each.peer.peer_id not in generation.route)
            assert len(shadow.host.executor.sessions) == 1
            for round_ in (6, 7):
                shadow.host.serve((round_, digest(round_, 0)), cast(ExactStage, shadow.stage))

    assert (await client.ask(PROMPT, 80, on_token=renew))[0] == golden(PROMPT, 80, 1)


@served(1)
async def test_a_client_that_takes_no_tokens_meanwhile_gets_those_of_newer_weights(
    swarm: ServingSwarm, client: Any
) -> None:
    """The newer session's host may draw `AHEAD` tokens beyond those that the client has, before any grant."""
    async with client.generator.generate(PROMPT, GREEDY, max_tokens=90) as generation:
        tokens = aiter(generation)
        found = [(await anext(tokens)).id]
        await asyncio.sleep(5.0)
        assert generation._next == len(PROMPT) + 1 + AHEAD
        host, stage = swarm.hosts["s0a"].host, cast(ExactStage, swarm.hosts["s0a"].stage)
        for round_ in (6, 7):
            host.serve((round_, digest(round_, 0)), stage)
        swarm.rounds = (6, 7)
        await asyncio.sleep(5.0)
        assert generation._next == len(PROMPT) + 1 + 2 * AHEAD
        assert found + [token.id async for token in tokens] == golden(PROMPT, 90, 1)


@pytest.mark.parametrize("num_failures", [1, 3])
@served(1, 1)
async def test_a_host_whose_computation_fails_is_asked_again(
    swarm: ServingSwarm, client: Any, num_failures: int
) -> None:
    """A failed session does not stay: the only host serves the caller's next opening from the start."""
    failures = iter(range(num_failures))
    stage = swarm.hosts["s1a"].stage
    step = stage.step

    def fail(parts: Any, inputs: Any, store: Any) -> Any:
        if parts[0].first > len(PROMPT) and next(failures, None) is not None:
            raise NotFiniteError([0])
        return step(parts, inputs, store)

    stage.step = fail  # type: ignore[method-assign]
    assert (await client.ask(PROMPT, 30))[0] == golden(PROMPT, 30, 2)


def test_an_invalid_bias_is_refused_before_it_takes_pages(caplog: pytest.LogCaptureFixture) -> None:
    biased = Sampling(temperature=0.0, logit_bias=((VOCABULARY, 1.0),))

    async def main(swarm: ServingSwarm, client: Any) -> None:
        client.generator._wait_seconds = 0.0
        with pytest.raises(GenerationFailedError, match="logit_bias"):
            await client.ask(PROMPT, 3, biased)
        assert swarm.hosts["s1a"].host.executor.num_drawn == 0

    serve(main, 1, 1)
    assert not [record for record in caplog.records if record.exc_info]


@served(1, 1)
async def test_a_defect_of_the_client_ends_its_answer_at_once(swarm: ServingSwarm, client: Any) -> None:
    def fail() -> None:
        raise ZeroDivisionError("a defect")

    def strike(generation: Any, token: Token) -> None:
        client.generator._hosts = fail
        if swarm.hosts["s0a"].peer.alive:
            swarm.network.crash(swarm.hosts["s0a"].peer)

    async with asyncio.timeout(20.0):
        with pytest.raises(GenerationFailedError, match="a defect"):
            await client.ask(PROMPT, 60, on_token=strike)


@served(1, 0, wait_seconds=2.0)
async def test_a_stage_without_host_is_named(swarm: ServingSwarm, client: Any) -> None:
    with pytest.raises(NoHostError, match="serves stage 1"):
        await client.ask(PROMPT, 3)


@pytest.mark.parametrize(("hosts", "named"), [((1, 0), "stage 1 (blocks "), ((0, 0), "the model: ")])
def test_a_client_tells_for_what_and_how_long_it_waits(
    hosts: tuple[int, int], named: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def main(swarm: ServingSwarm, client: Any) -> None:
        with pytest.raises(NoHostError):
            await client.ask(PROMPT, 3)

    serve(main, *hosts, wait_seconds=2.0)
    (told,) = [text for text in caplog.messages if "waiting" in text]
    assert told.startswith(f"no host serves {named}")
    assert told.endswith("waiting for up to 2 s")


def test_an_answer_fits_the_context_of_hosts_that_come_later() -> None:
    async def main(swarm: ServingSwarm, client: Any) -> str:
        async def come() -> None:
            await asyncio.sleep(3.0)
            await swarm.start(1)

        model: Any = SimpleNamespace(generator=client.generator, name_of=str)
        async with asyncio.TaskGroup() as group:
            group.create_task(come())
            return await answer(model, Text(byte_tokenizer(64)), PROMPT, GREEDY, Namespace(max_tokens=256, stop=[]))

    assert serve(main, 0, context=64) == bytes(golden(PROMPT, 64 - len(PROMPT), 1)).decode()


@pytest.mark.parametrize("other", ["small-1/int8", "torch-1/fp32"])
def test_hosts_that_compute_differently_are_named_and_waited_for(other: str) -> None:
    """No host is missing: the client is told which stages differ, and goes on once one of them has its like."""

    async def run(network: SimulatedNetwork) -> None:
        swarm = ServingSwarm(network, 2)
        await swarm.start_host("s0a", 0)
        swarm.arithmetic = other
        await swarm.start_host("s1a", 1)
        client = await swarm.start_client(wait_seconds=2.0)
        with pytest.raises(MixedHostsError) as caught:
            await client.ask(PROMPT, 3)
        for side in (f"{ARITHMETIC} in stage 0", f"{other} in stage 1", "'wire'"):
            assert side in str(caught.value)
        swarm.arithmetic = ARITHMETIC
        await swarm.start_host("s1b", 1)
        assert (await client.ask(PROMPT, 3))[0] == golden(PROMPT, 3, 2)
        await swarm.end(client)

    simulate(run, 0)


@served(1, num_pages=1, wait_seconds=0.0)
async def test_a_full_host_refuses_at_once_and_serves_when_pages_are_free(swarm: ServingSwarm, client: Any) -> None:
    async with client.generator.generate(PROMPT, GREEDY, max_tokens=20) as generation:
        with pytest.raises(OverloadedError) as caught:
            await client.ask(PROMPT, 3)
        assert caught.value.retry_after > 0
        assert [token.id async for token in generation] == golden(PROMPT, 20, 1)
    assert (await client.ask(PROMPT, 3))[0] == golden(PROMPT, 3, 1)


@pytest.mark.parametrize("num_stages", [1, 2])
def test_all_of_many_answers_at_once_come_within_the_hosts_streams(num_stages: int) -> None:
    """Each session takes two streams at a host of a one-stage model; of two clients at the first host's next one."""

    async def main(swarm: ServingSwarm, client: Any) -> list[list[int]]:
        other = await swarm.start_client("other")
        asking = [each.peer.spawn(each.ask(PROMPT, 12)) for each in (client, other) for _ in range(70)]
        answers = await asyncio.gather(*asking)
        await other.rpc.close()
        await other.peer.close()
        return [tokens for tokens, _ in answers]

    assert serve(main, *[1] * num_stages, num_pages=512) == [golden(PROMPT, 12, num_stages)] * 140


@served(2, serve_seconds=0.05)
async def test_a_shadow_is_no_answer_in_progress(swarm: ServingSwarm, client: Any) -> None:
    asking = client.peer.spawn(client.ask(PROMPT, 100))
    await until(lambda: all(each.host.executor.sessions for each in swarm.hosts.values()), 5.0)
    assert sum(each.host.report().sessions for each in swarm.hosts.values()) == 1
    assert (await asking)[0] == golden(PROMPT, 100, 1)


def test_a_shadow_takes_no_session_from_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sessions, "MAX_SESSIONS_PER_CALLER", 8)

    async def main(swarm: ServingSwarm, client: Any) -> list[list[int]]:
        def num_shadows() -> int:
            return sum(each.is_shadow for host in swarm.hosts.values() for each in host.host.executor.sessions.values())

        first = [client.peer.spawn(client.ask(PROMPT, 100)) for _ in range(7)]
        await until(lambda: num_shadows() == 7, 5.0)
        more = [client.peer.spawn(client.ask(PROMPT, 12)) for _ in range(6)]
        return [tokens for tokens, _ in await asyncio.gather(*first, *more)]

    wanted = [golden(PROMPT, 100, 1)] * 7 + [golden(PROMPT, 12, 1)] * 6
    assert serve(main, 2, num_pages=512, wait_seconds=0.0, serve_seconds=0.05) == wanted


@served(1, wait_seconds=0.0)
async def test_a_client_without_a_free_stream_is_told_to_ask_again_later(swarm: ServingSwarm, client: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(endpoint, "MAX_INBOUND_STREAMS_PER_PEER", 0)
        with pytest.raises(OverloadedError, match="too many streams"):
            await client.ask(PROMPT, 3)


def test_a_session_beyond_a_hosts_memory_is_refused_and_evicts_nothing() -> None:
    """Shadows make room only for sessions that fit then; one that never fits is no reason to retry."""

    async def run(network: SimulatedNetwork) -> None:
        swarm = ServingSwarm(network, 1, num_pages=4)
        await swarm.start(2)
        client = await swarm.start_client(wait_seconds=0.0)
        async with client.generator.generate(PROMPT, GREEDY, max_tokens=2 * PAGE - 8) as generation:
            tokens = aiter(generation)
            for _ in range(PAGE + 10):
                await anext(tokens)
            shadow = next(each for each in swarm.hosts.values() if each.peer.peer_id not in generation.route)
            (held,) = shadow.host.executor.sessions.values()
            assert held.is_shadow
            with pytest.raises(GenerationFailedError, match="exceed the context of 256"):
                await client.ask(PROMPT, 5 * PAGE - 8)
            assert shadow.host.book.holds(held)
            (busy,) = (each for each in swarm.hosts.values() if each is not shadow)
            busy.host.book.pool.reserve(1)
            own = shadow.host.book.pool.reserve(2)
            with pytest.raises(OverloadedError):
                await client.ask(PROMPT, 3 * PAGE - 8)
            assert shadow.host.book.holds(held)
            shadow.host.book.pool.free(own)
            assert len((await client.ask(PROMPT, 3 * PAGE - 8))[0]) == 3 * PAGE - 8
            assert not shadow.host.book.holds(held)
        await swarm.end(client)

    simulate(run, 0)


def test_a_host_that_closes_admits_nobody() -> None:
    """Its executor has ended: a session admitted now would get keepalives and no row for ever."""

    async def run(network: SimulatedNetwork) -> None:
        swarm = ServingSwarm(network, 1)
        (first,) = [await swarm.start_host("s0a", 0)]
        client = await swarm.start_client(wait_seconds=0.0)
        verifying, go_on, runtime = asyncio.Event(), asyncio.Event(), first.rpc.runtime
        offload = runtime.offload

        async def slow(function: Any, *args: Any, **kwargs: Any) -> Any:
            verifying.set()
            await go_on.wait()
            return await offload(function, *args, **kwargs)

        runtime.offload = slow  # type: ignore[method-assign]
        asking = client.peer.spawn(client.ask(PROMPT, 3))
        await verifying.wait()
        await first.host.close()
        go_on.set()
        with pytest.raises(GenerationFailedError, match=r"stage 0: .* stopped serving"):
            await asking
        assert first.is_clean
        await swarm.end(client)

    simulate(run, 0)


@served(1, 1)
async def test_a_host_that_names_the_client_as_a_later_host_is_not_believed(swarm: ServingSwarm, client: Any) -> None:
    def lie(generation: Any, token: Token) -> None:
        if token.position == len(PROMPT) + 10:
            (session,) = swarm.hosts["s0a"].host.executor.sessions.values()
            session.note_later(1, client.rpc.peer_id)

    assert await client.ask(PROMPT, 40, DRAWN, on_token=lie) == (golden(PROMPT, 40, 2, DRAWN), 0)


def test_one_client_does_not_keep_all_pages_from_another() -> None:
    """Its further sessions are refused beyond half of the pages while another client waits."""

    async def run(network: SimulatedNetwork) -> None:
        swarm = ServingSwarm(network, 1, num_pages=4)
        await swarm.start(1)
        greedy, modest = [await swarm.start_client(name, wait_seconds=60.0) for name in ("greedy", "modest")]

        async def ask_for_ever() -> None:
            while True:
                assert (await greedy.ask(PROMPT, 50))[0] == golden(PROMPT, 50, 1)

        asking = [greedy.peer.spawn(ask_for_ever()) for _ in range(8)]
        pool = swarm.hosts["s0a"].host.book.pool
        await until(lambda: pool.num_free == 0, 10.0)
        async with asyncio.timeout(10.0):
            assert (await modest.ask(PROMPT, 2 * PAGE - 8))[0] == golden(PROMPT, 2 * PAGE - 8, 1)
        await until(lambda: pool.num_free == 0, 10.0)
        for each in asking:
            each.cancel()
        await asyncio.wait(asking)
        await swarm.end(greedy, modest)

    simulate(run, 0)


@served(1)
async def test_a_superseded_caller_does_not_close_the_session(swarm: ServingSwarm, client: Any) -> None:
    """Its `Close` may have arrived before the newer caller did, and be read after it."""

    class Superseded:
        remote = "before"

        async def receive(self, schema: object, seconds: float) -> Close:
            return Close()

    host = swarm.hosts["s0a"].host

    async with client.generator.generate(PROMPT, GREEDY, max_tokens=20) as generation:
        tokens = aiter(generation)
        await anext(tokens)
        (session,) = host.executor.sessions.values()
        with pytest.raises(PeerRefusedError, match="newer caller"):
            await host._hear(session, cast(Any, Superseded()))
        assert host.book.holds(session)
        assert [token.id async for token in tokens] == golden(PROMPT, 20, 1)[1:]


@served(1)
async def test_the_newest_weights_are_served_though_their_round_is_lower(swarm: ServingSwarm, client: Any) -> None:
    """A stage that goes back to an earlier round serves it, instead of copying it again for ever."""
    host, stage = swarm.hosts["s0a"].host, cast(ExactStage, swarm.hosts["s0a"].stage)
    for round_ in (8, 9, 3):
        host.serve((round_, digest(round_, 0)), stage)
    assert [round_ for round_, _ in host.keys] == [3, 9]


@served(1)
async def test_a_host_that_sends_more_tokens_than_were_granted_is_left(swarm: ServingSwarm, client: Any) -> None:
    """A client's memory does not grow by what a hostile host sends."""
    async with client.generator.generate(PROMPT, GREEDY, max_tokens=40) as generation:
        await anext(aiter(generation))
        for position in range(generation._next, generation._taken + AHEAD):
            generation._take("host", DrawnToken(position, 1, 0.0))
        with pytest.raises(ProtocolError, match="not granted"):
            generation._take("host", DrawnToken(generation._next, 1, 0.0))


@served(1, 1, context=64)
async def test_the_context_bounds_prompt_and_answer(swarm: ServingSwarm, client: Any) -> None:
    with pytest.raises(PromptTooLongError, match="do not fit the context of 64"):
        await client.ask(PROMPT, 57)
    assert (await client.ask(PROMPT, 56))[0] == golden(PROMPT, 56, 2)


@served(2, 1)
async def test_one_host_with_a_short_context_does_not_shorten_all_answers(swarm: ServingSwarm, client: Any) -> None:
    first, *others = swarm.known(client.rpc)
    liar = first._replace(served=msgspec.structs.replace(first.served, context=1))
    client.generator._hosts = lambda: [liar, *others]
    assert (await client.ask(PROMPT, 20))[0] == golden(PROMPT, 20, 2)


@served(1, 1)
async def test_a_client_that_takes_no_tokens_stops_the_drawing(swarm: ServingSwarm, client: Any) -> None:
    async with client.generator.generate(PROMPT, GREEDY, max_tokens=60) as generation:
        tokens = aiter(generation)
        for _ in range(5):
            await anext(tokens)
        await asyncio.sleep(20.0)
        assert swarm.hosts["s1a"].host.executor.num_drawn == 5 + AHEAD
        rest = [token.id async for token in tokens]
        assert rest == golden(PROMPT, 60, 2)[5:]


@served(1, 1)
async def test_nothing_is_drawn_after_a_stop_token(swarm: ServingSwarm, client: Any) -> None:
    whole = golden(PROMPT, 30, 2)
    stop = whole[12]
    wanted = whole[: whole.index(stop) + 1]
    assert (await client.ask(PROMPT, 30, stops=[stop]))[0] == wanted
    assert swarm.hosts["s1a"].host.executor.num_drawn == len(wanted)


@pytest.mark.fault(31)
def test_pages_of_a_client_that_vanishes_are_freed() -> None:
    async def run(network: SimulatedNetwork) -> None:
        swarm = ServingSwarm(network, 2)
        await swarm.start(1, 1)
        client = await swarm.start_client()
        asking = client.peer.spawn(client.ask(PROMPT, 400))
        await asyncio.sleep(1.0)
        assert not any(each.is_clean for each in swarm.hosts.values())
        network.crash(client.peer)
        await until(lambda: all(each.is_clean for each in swarm.hosts.values()), 2 * ORPHAN_SECONDS + 5.0)
        await asyncio.wait({asking})
        await swarm.end()

    simulate(run, 0)


@served(1)
async def test_a_host_caps_the_lifetime_of_a_ticket(swarm: ServingSwarm, client: Any) -> None:
    """Its clock and the client's differ, so that a ticket of the usual lifetime is too long, or has expired."""
    client.generator._wait_seconds = 0.0
    for hours, reason in ((-7, r"stage 0: .* lasts longer than 21600 s"), (7, r"stage 0: .* has expired")):
        swarm.hosts["s0a"].rpc.runtime.clock_offset_seconds = hours * 3600.0
        with pytest.raises(GenerationFailedError, match=reason):
            await client.ask(PROMPT, 3)


def test_an_answer_that_outlives_its_ticket_goes_on_in_another_session() -> None:
    """The hosts end the first one: its pages are free for others meanwhile."""
    sessions: list[bytes] = []

    async def main(swarm: ServingSwarm, client: Any) -> Any:
        async with client.generator.generate(PROMPT, DRAWN, max_tokens=60) as generation:
            found = []
            async for token in generation:
                found.append(token.id)
                sessions.append(generation.ticket.session)
                if len(found) == 20:
                    for each in swarm.hosts.values():
                        (held,) = each.host.executor.sessions.values()
                        held.ticket = msgspec.structs.replace(held.ticket, expires=0.0)
                    generation.ticket = msgspec.structs.replace(generation.ticket, expires=0.0)
                    await asyncio.sleep(3 * LOOK_SECONDS)
            return found

    assert serve(main, 1, 1) == golden(PROMPT, 60, 2, DRAWN)
    assert len(set(sessions)) == 2


@served(1, 1)
async def test_a_session_without_progress_is_ended_and_its_pages_are_freed(swarm: ServingSwarm, client: Any) -> None:
    """Its client is there, and takes no tokens: it is told why, and does not open the session again."""
    async with client.generator.generate(PROMPT, GREEDY, max_tokens=200) as generation:
        tokens = aiter(generation)
        for _ in range(5):
            await anext(tokens)
        await asyncio.sleep(STALLED_SECONDS - 2 * LOOK_SECONDS)
        assert not any(each.is_clean for each in swarm.hosts.values())
        await asyncio.sleep(6 * LOOK_SECONDS)
        assert all(each.is_clean for each in swarm.hosts.values())
        with pytest.raises(GenerationFailedError, match="nobody takes"):
            [token async for token in tokens]


@served(1)
async def test_rows_that_come_again_keep_no_session_alive(swarm: ServingSwarm, client: Any) -> None:
    async with client.generator.generate(PROMPT, GREEDY, max_tokens=200) as generation:
        await anext(aiter(generation))
        (held,) = swarm.hosts["s0a"].host.executor.sessions.values()
        for _ in range(int(STALLED_SECONDS)):
            await asyncio.sleep(1.0)
            held.put(0, PROMPT, torch.tensor(PROMPT))
        await asyncio.sleep(2 * LOOK_SECONDS)
        assert held.failure is not None
        assert held.failure.cause is Cause.STALLED


@pytest.mark.parametrize("stage", [0, 1])
@served(1, 1)
async def test_a_ticket_serves_nobody_but_its_client_and_the_hosts_that_it_names(
    swarm: ServingSwarm, client: Any, stage: int
) -> None:
    """Another peer that got hold of a ticket opens no session with it, and takes none over."""
    stranger = await swarm.start_client("stranger")
    async with client.generator.generate(PROMPT, GREEDY, max_tokens=60) as generation:
        tokens = aiter(generation)
        found = [(await anext(tokens)).id]
        victim = swarm.hosts[f"s{stage}a"]
        (held,) = victim.host.executor.sessions.values()
        ticket, peer = held.ticket, victim.peer.peer_id
        again = msgspec.structs.replace(ticket, session=bytes(16))
        moved = msgspec.structs.replace(ticket, route=tuple((*hosts, stranger.rpc.peer_id) for hosts in ticket.route))
        said = "did not sign" if stage else "choose this caller"
        for wrong, reason in ((ticket, "choose this caller"), (again, "choose this caller"), (moved, said)):
            request = Open(wrong, (99,) * (stage + 1), ticket.route[0][0])
            async with stranger.rpc.open(peer, service(stage), request, 5.0) as channel:
                answer = await channel.receive(FromHost, 5.0)
                assert isinstance(answer, Failed)
                assert reason in answer.reason
        found += [token.id async for token in tokens]
        assert (found, generation.failovers) == (golden(PROMPT, 60, 2), 0)
    await stranger.rpc.close()
    await stranger.peer.close()


@served(1, 1)
async def test_a_ticket_is_of_no_use_at_a_host_that_it_does_not_name(swarm: ServingSwarm, client: Any) -> None:
    """So a host that has seen it cannot fill others with its client's sessions."""
    async with client.generator.generate(PROMPT, GREEDY, max_tokens=60) as generation:
        await anext(aiter(generation))
        first = swarm.hosts["s0a"]
        (held,) = first.host.executor.sessions.values()
        other = await swarm.start_host("s1b", 1)
        request = Open(held.ticket, (1, 99), held.ticket.route[0][0])
        async with first.rpc.open(other.peer.peer_id, service(1), request, 5.0) as channel:
            answer = await channel.receive(FromHost, 5.0)
        assert isinstance(answer, Failed)
        assert "choose this host" in answer.reason


@served(1, 1)
async def test_only_a_host_of_the_last_stage_feeds_a_session(swarm: ServingSwarm, client: Any) -> None:
    """A peer that knows the session's id could have its first host compute another token than was drawn."""
    stranger = await swarm.start_client("stranger")
    async with client.generator.generate(PROMPT, GREEDY, max_tokens=60) as generation:
        tokens = aiter(generation)
        found = [(await anext(tokens)).id]
        (held,) = swarm.hosts["s0a"].host.executor.sessions.values()
        request = FeedRequest(held.ticket.session)
        async with stranger.rpc.open(swarm.hosts["s0a"].peer.peer_id, FEED, request, 5.0) as channel:
            for position in range(held.known, held.known + AHEAD):
                await channel.send(Fed(position, 0))
            with pytest.raises(PeerRefusedError, match="may feed"):
                await channel.receive(FromHost, 5.0)
        found += [token.id async for token in tokens]
        assert (found, generation.failovers) == (golden(PROMPT, 60, 2), 0)
    await stranger.rpc.close()
    await stranger.peer.close()


@pytest.mark.parametrize("replicas", [(2,), (1, 2, 1), (1, 1, 2)])
def test_a_host_that_sends_keepalives_and_computes_nothing_is_left(replicas: tuple[int, ...]) -> None:
    """Long before an answer times out: other rows of this host told how long a step takes."""
    times: list[float] = []
    victim = replicas.index(2)

    async def main(swarm: ServingSwarm, client: Any) -> Any:
        def strike(generation: Any, token: Token) -> None:
            times.append(asyncio.get_running_loop().time())
            if token.position == len(PROMPT) + 20:
                hung = swarm.host_of(generation.route[victim])
                hung.rpc.runtime.serve = hang  # type: ignore[assignment, method-assign]

        async def hang(function: Any, *arguments: Any) -> Any:
            await is_over.wait()
            return function(*arguments)

        is_over = asyncio.Event()
        found = await client.ask(PROMPT, 60, DRAWN, on_token=strike)
        is_over.set()
        return found

    tokens, failovers = serve(main, *replicas)
    assert tokens == golden(PROMPT, 60, len(replicas), DRAWN)
    assert failovers >= 1
    assert 5.0 < max(after - before for before, after in itertools.pairwise(times)) < 15.0


@pytest.mark.parametrize("num_stages", [1, 2, 4])
def test_a_last_host_that_draws_no_token_is_left(num_stages: int) -> None:
    """It computes all rows, so that no host before it finds fault with it: only the client does."""
    times: list[float] = []

    async def main(swarm: ServingSwarm, client: Any) -> Any:
        def strike(generation: Any, token: Token) -> None:
            times.append(asyncio.get_running_loop().time())
            if token.position == len(PROMPT) + 20:
                mute = swarm.host_of(generation.route[-1])
                (held,) = mute.host.executor.sessions.values()
                held.draws_after = lambda rows: []  # type: ignore[method-assign]

        return await client.ask(PROMPT, 60, DRAWN, on_token=strike)

    tokens, failovers = serve(main, *[1] * (num_stages - 1), 2)
    assert tokens == golden(PROMPT, 60, num_stages, DRAWN)
    assert failovers == 1
    assert max(after - before for before, after in itertools.pairwise(times)) < 15.0


@pytest.mark.fault(56)
@served(1, 1)
async def test_an_answer_whose_only_last_host_draws_nothing_fails_after_a_while(
    swarm: ServingSwarm, client: Any
) -> None:
    """It sends keepalives, and is taken again once, since there is no other."""

    def strike(generation: Any, token: Any) -> None:
        for held in swarm.hosts["s1a"].host.executor.sessions.values():
            held.draws_after = lambda rows: []  # type: ignore[method-assign]

    async with asyncio.timeout(120.0):
        with pytest.raises(NoHostError):
            await client.ask(PROMPT, 60, GREEDY, on_token=strike)


@pytest.mark.parametrize("victim", [0, 1])
def test_two_hosts_that_stop_at_once_cost_less_than_two_seconds(victim: int) -> None:
    times: list[float] = []

    async def main(swarm: ServingSwarm, client: Any) -> None:
        def strike(generation: Any, token: Token) -> None:
            times.append(asyncio.get_running_loop().time())
            if token.position == len(PROMPT) + 100:
                hosts = [each for each in swarm.hosts.values() if each.number == victim]
                stopped = [each for each in hosts if each.host.executor.sessions]
                assert len(stopped) == 2
                for each in stopped:
                    swarm.network.stall(each.peer)

        assert (await client.ask(PROMPT, 130, DRAWN, on_token=strike))[0] == golden(PROMPT, 130, 2, DRAWN)

    serve(main, *[3 if number == victim else 1 for number in range(2)])
    assert max(after - before for before, after in itertools.pairwise(times)) < 2.0


@served(1, 1)
async def test_a_first_host_that_takes_no_tokens_is_dialled_again_and_again_later(
    swarm: ServingSwarm, client: Any
) -> None:
    num_dials = 0
    rpc = swarm.hosts["s0a"].rpc

    async def refuse(channel: Any, request: FeedRequest) -> None:
        nonlocal num_dials
        num_dials += 1
        raise PeerRefusedError(rpc.peer_id, "not now")

    rpc.withdraw(FEED)
    rpc.serve_channel(FEED, FeedRequest, refuse)
    assert (await client.ask(PROMPT, 200, DRAWN))[0] == golden(PROMPT, 200, 2, DRAWN)
    assert 2 <= num_dials <= 10


@pytest.mark.parametrize("one_way", [0.05, 0.1])
def test_a_token_costs_one_hop_a_stage(one_way: float) -> None:
    """Tokens a second reach 95 % of 1 / (N · L + C), with N stages, a one-way delay L and C for computing."""
    num_stages, num_tokens, batch = 4, 60, 0.005

    async def main(swarm: ServingSwarm, client: Any) -> float:
        loop, times = asyncio.get_running_loop(), []
        await client.ask(PROMPT, num_tokens, on_token=lambda generation, token: times.append(loop.time()))
        return (len(times) - 20) / (times[-1] - times[19])

    model = LinkModel(latency_seconds=(one_way, one_way), jitter=0.0)
    rate = serve(main, *[1] * num_stages, model=model, serve_seconds=batch)
    assert rate >= 0.95 / (num_stages * (one_way + batch))


class CountedStage(SmallStage):
    """A stage that notes how many sessions each of its batches has."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.batches: list[int] = []

    def step(self, parts: Any, inputs: torch.Tensor, store: torch.Tensor) -> torch.Tensor:
        self.batches.append(len(parts))
        return super().step(parts, inputs, store)


def test_rows_that_were_computed_together_are_computed_together_at_the_next_host() -> None:
    """They arrive one by one; a batch that began with the first ones would leave the rest to another one."""
    number, num_tokens = 8, 60

    async def main(swarm: ServingSwarm, client: Any) -> float:
        asking = [client.peer.spawn(client.ask(PROMPT, num_tokens)) for _ in range(number)]
        answers = await asyncio.gather(*asking)
        assert answers == [(golden(PROMPT, num_tokens, 2), 0)] * number
        batches = cast(CountedStage, swarm.hosts["s1a"].stage).batches
        return sum(batches) / len(batches)

    model = LinkModel(latency_seconds=(0.002, 0.002), jitter=4.0)
    mean = serve(main, 1, 1, model=model, kind=CountedStage, serve_seconds=0.02, speculates=False)
    assert mean > 0.4 * number


@pytest.mark.parametrize("num_stages", [1, 3])
def test_a_client_sends_no_token_that_the_first_host_has_from_the_last_one(
    monkeypatch: pytest.MonkeyPatch, num_stages: int
) -> None:
    num_tokens, steps, beats, times = 200, [], [], []

    def step(first: int, ids: tuple[int, ...], drafts: int, together: int) -> Step:
        steps.append((first, len(ids), together))
        return Step(first, ids, drafts, together)

    def beat(position: int, fed: int) -> Beat:
        beats.append(position)
        return Beat(position, fed)

    monkeypatch.setattr(link, "Step", step)
    monkeypatch.setattr(hosting, "Beat", beat)

    async def main(swarm: ServingSwarm, client: Any) -> None:
        def note(generation: Any, token: Token) -> None:
            times.append(asyncio.get_running_loop().time())

        assert (await client.ask(PROMPT, num_tokens, on_token=note))[0] == golden(PROMPT, num_tokens, num_stages)

    serve(main, *[1] * num_stages, speculates=False)
    of_client = [first for first, _, together in steps if not together]
    assert len(of_client) < num_tokens / 4
    assert len(beats) <= num_stages * ((times[-1] - times[0]) / BEAT_SECONDS + num_tokens / hosting.BEAT_ROWS + 4)


@served(1, 1, 1)
async def test_a_short_cut_that_breaks_pauses_an_answer_for_less_than_a_second(
    swarm: ServingSwarm, client: Any
) -> None:
    """The client has left the tokens to the last host. It sends them again once the first one does not have them."""
    times: list[float] = []

    def note(generation: Any, token: Token) -> None:
        times.append(asyncio.get_running_loop().time())
        if token.position == len(PROMPT) + 60:
            swarm.network.set_latency(swarm.hosts["s2a"].peer, swarm.hosts["s0a"].peer, 1000.0)

    assert await client.ask(PROMPT, 120, on_token=note) == (golden(PROMPT, 120, 3), 0)
    pauses = [after - before for before, after in itertools.pairwise(times)]
    assert max(pauses) < 1.0
    assert sum(each > 0.4 for each in pauses) == 1
