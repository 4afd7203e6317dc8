"""A generation in one process is that of a session alone, whatever the others do."""

import asyncio
from collections.abc import Sequence

import pytest
import torch

from p2ptrain.manifest import ModelSpec
from p2ptrain.models import build_stage, model_blocks
from p2ptrain.models.exact import ExactStage, NotFiniteError, Part, exact_stage
from p2ptrain.serving.errors import GenerationFailedError, OverloadedError, PromptTooLongError
from p2ptrain.serving.generation import Generator, Token
from p2ptrain.serving.local import LocalGenerator, choose
from p2ptrain.serving.sampling import Sampling, draw
from tests.support.coroutines import on_loop
from tests.support.exact import kernels, lively_model
from tests.support.models import parts
from tests.support.tools import needed

pytestmark = needed("" if kernels() else "there is no library of exact kernels", "kernels")
SPEC = ModelSpec(layers=2, hidden=32, heads=4, kv_heads=2, intermediate=48, vocabulary=60, context=400)
REQUESTS = [(list(range(1 + 23 * number % 59)) * (1 + number % 3), Sampling(seed=number)) for number in range(8)]


@pytest.fixture(scope="module")
def stage() -> ExactStage:
    return exact_stage(lively_model(SPEC), SPEC)


def alone(stage: ExactStage, ids: Sequence[int], settings: Sampling, number: int) -> list[int]:
    """Tokens of a session that is computed in one batch a token, without a generator."""
    known, store = list(ids), stage.new_pages(7)
    hidden = stage.step([Part(len(known), 0, range(7))], torch.tensor(known), store)
    for position in range(len(ids), len(ids) + number):
        known.append(draw(stage.logits(hidden[-1:])[0], position, known, settings, len(ids)).id)
        hidden = stage.step([Part(1, position, range(7))], torch.tensor(known[-1:]), store)
    return known[len(ids) :]


async def collect(generator: Generator, ids: Sequence[int], settings: Sampling, number: int) -> list[Token]:
    async with generator.generate(ids, settings, max_tokens=number) as generation:
        return [token async for token in generation]


@pytest.mark.parametrize("max_rows", [1, 10, 256])
@on_loop
async def test_sessions_that_come_and_go_get_the_tokens_that_they_get_alone(stage: ExactStage, max_rows: int) -> None:
    generator = LocalGenerator([stage], num_pages=40, max_rows=max_rows)

    async def one(number: int) -> list[Token]:
        for _ in range(5 * number):  # begin at other times
            await asyncio.sleep(0)
        return await collect(generator, *REQUESTS[number], 5 + 7 * number)

    found = await asyncio.gather(*map(one, range(8)))
    for number, tokens in enumerate(found):
        ids, settings = REQUESTS[number]
        assert [token.id for token in tokens] == alone(stage, ids, settings, 5 + 7 * number)
        assert [token.position for token in tokens] == list(range(len(ids), len(ids) + 5 + 7 * number))
    assert generator.pool.num_free == 40


@on_loop
async def test_stages_one_after_another_give_the_tokens_of_one(stage: ExactStage) -> None:
    from p2ptrain.models import build_model

    stages = [exact_stage(build_stage(SPEC, span), SPEC) for span in parts({1, 2}, len(model_blocks(SPEC)))]
    generator = LocalGenerator(stages)
    expected = alone(exact_stage(build_model(SPEC), SPEC), [1, 2, 3], Sampling(seed=4), 20)
    assert [token.id for token in await collect(generator, [1, 2, 3], Sampling(seed=4), 20)] == expected
    async with generator.generate([1], Sampling(), max_tokens=1) as generation:
        assert (len(generation.route), generation.failovers) == (3, 0)
    with pytest.raises(ValueError, match="not all stages"):
        LocalGenerator(stages[1:])


@on_loop
async def test_a_batch_has_a_row_of_each_session_that_generates_and_chunks_of_prompts(stage: ExactStage) -> None:
    generator = LocalGenerator([stage], max_rows=100)
    async with (
        generator.generate([1] * 2, Sampling(), max_tokens=50),
        generator.generate([1] * 150, Sampling(), max_tokens=50),
        generator.generate([1] * 60, Sampling(), max_tokens=50),
    ):
        sessions = generator._sessions
        assert [rows for _, rows in choose(sessions, 100)] == [2, 98]
        await generator.advance()
        assert [rows for _, rows in choose(sessions, 100)] == [1, 52, 47]
        await generator.advance()
        assert [(rows, session.done) for session, rows in choose(sessions, 100)] == [(1, 3), (1, 150), (13, 47)]


@on_loop
async def test_a_slow_consumer_pauses_its_session_and_no_other(stage: ExactStage) -> None:
    generator = LocalGenerator([stage])
    async with generator.generate([1, 2], Sampling(), max_tokens=100) as slow:
        assert len(await collect(generator, [3], Sampling(), 60)) == 60
        assert len(generator._sessions[0].waiting) == 8
        assert [token.id async for token in slow] == alone(stage, [1, 2], Sampling(), 100)


@on_loop
async def test_a_consumer_that_is_cancelled_returns_its_pages_and_disturbs_nobody(stage: ExactStage) -> None:
    generator = LocalGenerator([stage], num_pages=10)

    async def cancelled(number: int) -> None:
        task = asyncio.current_task()
        assert task
        async with generator.generate([number], Sampling(), max_tokens=80) as generation:
            async for token in generation:
                if token.position == 5 + number:
                    task.cancel()  # at the next wait, which may be that for the batch of all

    others = (collect(generator, [number], Sampling(), 80) for number in (2, 3))
    found = await asyncio.gather(cancelled(0), cancelled(1), *others, return_exceptions=True)
    assert [isinstance(each, asyncio.CancelledError) for each in found[:2]] == [True, True]
    for number in (2, 3):
        tokens = found[number]
        assert isinstance(tokens, list)
        assert [token.id for token in tokens] == alone(stage, [number], Sampling(), 80)
    assert generator.pool.num_free == 10


@on_loop
async def test_what_does_not_fit_is_refused_at_once(stage: ExactStage) -> None:
    generator = LocalGenerator([stage], num_pages=4)
    await generator.probe()
    with pytest.raises(PromptTooLongError, match="300 tokens of the prompt and 101 new ones exceed the model's 400"):
        await collect(generator, [1] * 300, Sampling(), 101)
    async with generator.generate([1] * 100, Sampling(), max_tokens=92):
        with pytest.raises(OverloadedError, match="1 of 4 are free") as raised:
            await collect(generator, [1] * 60, Sampling(), 5)
        assert raised.value.retry_after > 0
    for ids in ([], [60], [-1]):
        with pytest.raises(ValueError, match="below 60"):
            await collect(generator, ids, Sampling(), 5)
    assert generator.pool.num_free == 4


@on_loop
async def test_a_session_whose_numbers_are_not_finite_fails_alone(
    stage: ExactStage, monkeypatch: pytest.MonkeyPatch
) -> None:
    generator, real = LocalGenerator([stage]), stage.step

    def step(parts: Sequence[Part], inputs: torch.Tensor, store: object) -> torch.Tensor:
        bad = [number for number, part in enumerate(parts) if part.first == 13]
        if bad:
            raise NotFiniteError(bad)
        return real(parts, inputs, store)  # type: ignore[arg-type]

    monkeypatch.setattr(stage, "step", step)
    good, failed = await asyncio.gather(
        collect(generator, [1] * 20, Sampling(), 30), collect(generator, [1], Sampling(), 30), return_exceptions=True
    )
    assert isinstance(failed, GenerationFailedError)
    monkeypatch.undo()
    assert isinstance(good, list)
    assert [token.id for token in good] == alone(stage, [1] * 20, Sampling(), 30)
    assert generator.pool.num_free == generator.pool.num_pages
