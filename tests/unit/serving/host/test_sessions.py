"""A session's rows, draws and totals."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import msgspec
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from p2ptrain.errors import ProtocolError
from p2ptrain.manifest import ModelSpec
from p2ptrain.models.exact import PAGE, ExactStage, exact_stage
from p2ptrain.network.records.serving import ServingReport
from p2ptrain.serving.host.meter import Meter
from p2ptrain.serving.host.pool import PagePool, key_of
from p2ptrain.serving.host.session import KEPT_ROWS, HostSession
from p2ptrain.serving.messages import AHEAD, MAX_DRAFTS, Cause, Failed, Open, Ticket, Version
from p2ptrain.serving.prefix import page_hashes
from p2ptrain.serving.sampling import Drawn
from tests.support.coroutines import on_loop
from tests.support.exact import kernels, lively_model
from tests.support.sim.serving import ARITHMETIC, GREEDY, VOCABULARY, WIDTH, SmallStage, digest

PROMPT = [5, 1, 4, 1, 5]


def ticket(prompt: int = len(PROMPT), max_tokens: int = 40, stops: tuple[int, ...] = ()) -> Ticket:
    version = Version(5, (digest(5, 0),), ARITHMETIC)
    return Ticket(bytes(16), "client", version, prompt, prompt, max_tokens, GREEDY, 1e12, stops=stops)


def session(order: Ticket, meter: Meter | None = None, *, is_last: bool = True) -> HostSession:
    pages = PagePool(256).reserve(order.num_pages)
    stage = cast(ExactStage, SmallStage(0))
    return HostSession(order, (5, digest(5, 0)), pages, stage, (meter or Meter()) if is_last else None)


def put(held: HostSession, first: int, ids: list[int]) -> None:
    held.put(first, ids, torch.tensor(ids))


def compute(held: HostSession, rows: int) -> list[int]:
    """Compute rows as a batch does, and draw what is due; token ``at`` is ``at % VOCABULARY``."""
    draws = held.draws_after(rows)
    part, inputs = held.take(rows)
    assert (part.rows, part.first, len(inputs)) == (rows, held.computed, rows)
    held.done(torch.zeros(rows, WIDTH), {at: Drawn(at % VOCABULARY, 0.0, ()) for at in draws})
    return draws


@on_loop
async def test_rows_that_come_again_are_compared_and_skipped() -> None:
    held = session(ticket())
    put(held, 0, PROMPT[:3])
    put(held, 1, PROMPT[1:])
    put(held, 0, PROMPT)
    assert held.ids == PROMPT
    part, inputs = held.take(5)
    assert (part.first, part.rows, inputs.tolist()) == (0, 5, PROMPT)
    for first, ids, message in (
        (6, [1], "those from 5 on are missing"),
        (4, [6], "other tokens than before"),
        (5, [VOCABULARY], "of a vocabulary of 61"),
        (5, [1] * 40, "more rows than the 44 of its ticket"),
    ):
        with pytest.raises(ProtocolError, match=message):
            put(held, first, ids)
    assert held.ids == PROMPT


@given(steps=st.lists(st.tuples(st.integers(0, 30), st.integers(1, 12)), max_size=12), data=st.data())
@on_loop
async def test_rows_are_computed_once_and_in_order_however_they_come(steps: list[tuple[int, int]], data: Any) -> None:
    held, ids = session(ticket(1, 80), is_last=False), [at % VOCABULARY for at in range(80)]
    computed: list[int] = []
    for back, count in steps:
        first = max(0, len(held.ids) - back)
        put(held, first, ids[first : first + count])
        left = len(held.ids) - held.computed
        rows = data.draw(st.integers(0, left))
        computed += held.take(rows)[1].long().tolist()
        held.done(torch.full((rows, WIDTH), float(len(computed))), {})
    assert held.ids == ids[: len(held.ids)]
    assert computed == ids[: held.computed]
    assert held.journal.ids == computed


@on_loop
async def test_tokens_are_drawn_once_as_far_as_they_are_granted() -> None:
    held = session(ticket())
    put(held, 0, PROMPT)
    assert held.draws_after(4) == []
    assert compute(held, 5) == [5]
    assert held.draws_after(0) == []
    for at in range(5, 5 + AHEAD):
        put(held, at, [at])
        assert compute(held, 1) == ([at + 1] if at + 1 < 5 + AHEAD else [])
    held.grant(100, "first")
    assert compute(held, 0) == [5 + AHEAD]


@on_loop
async def test_nothing_is_drawn_after_a_stop_the_last_token_or_on_a_shadow() -> None:
    held = session(ticket(stops=(6,)))
    put(held, 0, [*PROMPT, 6])
    assert held.draws_after(6) == []
    held = session(ticket(max_tokens=2))
    put(held, 0, [*PROMPT, 6])
    assert held.draws_after(6) == [6]
    held.is_shadow = True
    assert held.draws_after(6) == []


@on_loop
async def test_a_substitute_draws_what_the_client_lacks_again_and_no_more() -> None:
    held, end = session(ticket(max_tokens=80)), 5 + AHEAD + 2
    put(held, 0, [*PROMPT, *range(5, end)])
    assert compute(held, end) == []  # The next token is beyond the first grant.
    held.listen(end - 4)
    assert compute(held, 0) == [*range(end - 4, end)]
    held.grant(end + 1, "first")
    assert compute(held, 0) == [end]


@on_loop
async def test_a_long_answer_costs_no_more_a_token_than_a_short_one() -> None:
    """Also if a client claims to lack all tokens: the outputs of only the newest rows are kept."""

    class Tokens(dict[int, Drawn]):
        looks = 0

        def __contains__(self, key: object) -> bool:
            self.looks += 1
            return super().__contains__(key)

    held = session(ticket(max_tokens=2000))
    held.tokens = tokens = Tokens()
    held.listen(0)
    held.grant(5000, "first")
    put(held, 0, PROMPT)
    compute(held, 5)
    for at in range(5, 1500):
        put(held, at, [at % VOCABULARY])
        tokens.looks = 0
        assert compute(held, 1) == [at + 1]
        assert tokens.looks <= KEPT_ROWS + 3


@on_loop
async def test_only_pages_of_the_prompt_that_the_client_signed_are_shared() -> None:
    """A host of the stage before could send rows of other tokens, to be found by the client's later sessions."""
    ids = [at % VOCABULARY for at in range(2 * PAGE + 9)]
    for signed, shared in ((ids, 2), ([*ids[:PAGE], 7, *ids[PAGE + 1 :]], 1), (ids[::-1], 0), ([], 2)):
        held = session(msgspec.structs.replace(ticket(len(ids), 3 * PAGE), pages=page_hashes(signed)))
        put(held, 0, ids[:-5])
        for rows in (PAGE + 3, len(ids) - PAGE - 8):
            compute(held, rows)
        assert len(held.pages.pool._shared) == shared
        put(held, len(ids) - 5, [*ids[-5:], *ids])
        compute(held, len(held.ids) - held.computed)
        assert len(held.pages.pool._shared) == shared  # The answer may yet be trimmed.
        held.share(held.computed)
        assert len(held.pages.pool._shared) == (4 if shared == 2 else shared)


@on_loop
async def test_drafts_are_not_shared_and_replace_no_shared_page() -> None:
    """A caller could mark rows of the prompt as drafts, and change them under the sessions that share their page."""
    ids = [at % VOCABULARY for at in range(2 * PAGE)]
    held = session(ticket(len(ids)))
    held.put(0, ids[: PAGE + 4], torch.tensor(ids[: PAGE + 4]), 5)
    compute(held, PAGE + 4)
    assert len(held.pages.pool._shared) == 0
    held.put(PAGE + 4, ids[PAGE + 4 :], torch.tensor(ids[PAGE + 4 :]), 3)
    compute(held, PAGE - 4)
    assert len(held.pages.pool._shared) == 1
    with pytest.raises(ProtocolError, match="other tokens than before"):
        held.put(0, [7] * PAGE, torch.tensor([7] * PAGE), MAX_DRAFTS)
    held.put(PAGE - 3, [7] * 3, torch.tensor([7] * 3), MAX_DRAFTS)
    assert held.ids == ids
    held.put(2 * PAGE - 3, [7] * 3, torch.tensor([7] * 3), 3)
    assert held.ids == [*ids[:-3], 7, 7, 7]


@on_loop
async def test_drafts_of_a_caller_that_knows_less_replace_no_known_token() -> None:
    """The last host's tokens and the client's drafts reach the first host by different ways."""
    held = session(ticket(max_tokens=20))
    put(held, 0, PROMPT)
    held.put_fed({5: 5})
    held.put(5, [5, 9, 9], torch.tensor([5, 9, 9]), 2)
    held.put_fed({6: 6})
    assert (held.ids, held.known) == ([*PROMPT, 5, 6], 7)
    held.put(8, [9], torch.tensor([9]), 3)  # They follow drafts that are gone.
    held.put(6, [9, 9, 9], torch.tensor([9, 9, 9]), 3)
    assert (held.ids, held.known) == ([*PROMPT, 5, 6], 7)
    held.put(6, [6, 7, 8], torch.tensor([6, 7, 8]), 2)
    assert (held.ids, held.known) == ([*PROMPT, 5, 6, 7, 8], 7)
    with pytest.raises(ProtocolError, match="those from 9 on are missing"):
        held.put(10, [9], torch.tensor([9]), 1)
    with pytest.raises(ProtocolError, match="other tokens than before"):
        put(held, 6, [9])


@given(
    events=st.lists(st.tuples(st.sampled_from(["step", "take", "done"]), st.integers(0, 9)), max_size=60),
    data=st.data(),
)
@on_loop
async def test_replaced_drafts_leave_nothing_behind(events: list[tuple[str, int]], data: Any) -> None:
    """However drafts are replaced, also while a batch computes their rows: a host's outputs follow from its ids."""
    held, truth = session(ticket(1, 80), is_last=False), [at % 7 for at in range(80)]
    known, taken = 0, None
    for event, number in events:
        if event == "step":
            first = data.draw(st.integers(max(0, known - 3), known))
            known = min(known + number, 70)
            drafts = [each + data.draw(st.integers(0, 1)) for each in truth[known : known + number % MAX_DRAFTS]]
            if ids := truth[first:known] + drafts:
                held.put(first, ids, torch.tensor(ids), len(drafts))
                assert held.ids[: first + len(ids)] == truth[:known] + drafts
                assert held.known == known
        elif event == "take" and taken is None:
            taken = held.take(min(number, len(held.ids) - held.computed))
        elif taken is not None:
            part, inputs = taken
            held.done(inputs.float()[:, None].repeat(1, WIDTH) if part.rows else torch.empty(0, WIDTH), {})
            taken = None
        journal = held.journal
        assert journal.ids == held.ids[: journal.end]
        assert journal.end == held.computed
        rows = torch.frombuffer(bytearray(journal.rows(0, journal.end) or bytes(4)), dtype=torch.float32)
        assert rows.view(-1, WIDTH if journal.end else 1)[: journal.end, 0].tolist() == held.ids[: journal.end]
        assert journal.known == min(held.known, journal.end) or journal.known < held.known


@pytest.mark.skipif(not kernels(), reason="there is no library of exact kernels")
@pytest.mark.parametrize("family", ["llama", "gpt2"])
@on_loop
async def test_sessions_of_a_shared_prefix_have_the_bits_that_they_have_alone(family: str) -> None:
    spec = ModelSpec(family=family, layers=2, hidden=48, heads=4, intermediate=84, vocabulary=VOCABULARY, context=256)
    stage = exact_stage(lively_model(spec), spec)
    prefix = [7 * at % VOCABULARY for at in range(2 * PAGE + 20)]
    prompts = [[*prefix, *(11 * at * number % VOCABULARY for at in range(40))] for number in range(1, 4)]

    def begin(pool: PagePool, ids: list[int]) -> HostSession:
        order = msgspec.structs.replace(ticket(len(ids)), pages=page_hashes(ids))
        pages = pool.reserve(order.num_pages, [key_of(order, each) for each in order.pages])
        held = HostSession(order, (5, digest(5, 0)), pages, stage, None)
        put(held, held.cached, ids[held.cached :])
        return held

    def compute(store: Any, *some: HostSession, rows: int) -> None:
        taken = [each.take(min(rows, len(each.ids) - each.computed)) for each in some]
        outputs = stage.step([part for part, _ in taken], torch.cat([inputs for _, inputs in taken]), store)
        split = torch.split(outputs, [part.rows for part, _ in taken])
        for held, mine in zip(some, split, strict=True):
            held.done(mine, {})

    pool, store, alone = PagePool(20), stage.new_pages(20), {}
    for each in (store.keys, store.values):
        each.fill_(torch.nan)
    for number, ids in enumerate(prompts):
        compute(stage.new_pages(6), held := begin(PagePool(6), ids), rows=300)
        alone[number] = held.journal.rows(0, len(ids))
    first = begin(pool, prompts[0])
    compute(store, first, rows=100)
    compute(store, first, rows=100)
    later = [begin(pool, ids) for ids in prompts[1:]]
    assert [held.cached for held in later] == [2 * PAGE] * 2
    pool.free(first.pages)
    for rows in (1, 30, 40):
        compute(store, *later, rows=rows)
    for number, held in enumerate([first, *later]):
        assert held.journal.rows(0, len(prompts[number])) == alone[number]


@on_loop
async def test_a_draft_that_is_not_drawn_ends_the_draws_until_it_is_replaced() -> None:
    held = session(ticket(max_tokens=20))
    put(held, 0, PROMPT)
    assert compute(held, 5) == [5]
    held.put(5, [5, 6, 9, 8], torch.tensor([5, 6, 9, 8]), 3)
    assert held.waiting() == (4, False, held._since, False, 0)  # Verified with the tokens of other sessions.
    assert held.draws_after(4) == [6, 7, 8, 9]
    held.take(4)
    held.done(torch.zeros(4, WIDTH), {6: Drawn(6, 0.0, ()), 7: Drawn(7, 0.0, ())})
    assert held.failure is None
    assert held.draws_after(0) == []
    with pytest.raises(ProtocolError, match="another token at position 7"):
        put(held, 6, [6, 9])
    held.put(6, [6, 7, 8], torch.tensor([6, 7, 8]), 1)
    assert (held.ids, held.known, held.computed) == ([*PROMPT, 5, 6, 7, 8], 8, 7)
    assert compute(held, 2) == [8, 9]


@on_loop
async def test_a_token_after_ids_that_were_replaced_meanwhile_is_dropped() -> None:
    held = session(ticket(max_tokens=20))
    held.put(0, [*PROMPT, 9, 8], torch.tensor([*PROMPT, 9, 8]), 2)
    draws = held.draws_after(7)
    held.take(7)
    held.put(5, [7], torch.tensor([7]), 0)
    held.done(torch.zeros(7, WIDTH), {at: Drawn(7, 0.0, ()) for at in draws})
    assert list(held.tokens) == [5]
    assert compute(held, 1) == [6]


def attach(held: HostSession, epoch: int, *, is_shadow: bool = False) -> None:
    class Caller:
        def abort(self) -> None: ...

    held.attach(cast(Any, Caller()), Open(held.ticket, (epoch,), "first", is_shadow))


@given(events=st.lists(st.sampled_from(["put", "compute", "serve", "shadow", "fail", "end"]), max_size=30))
@on_loop
async def test_totals_are_valid_whatever_befalls_sessions(events: list[str]) -> None:
    meter, epoch = Meter(), 1
    held = session(ticket(), meter)
    attach(held, epoch, is_shadow=True)
    for event in [*events, "end"]:
        if event == "put" and len(held.ids) < held.ticket.num_positions:
            put(held, len(held.ids), [len(held.ids) % VOCABULARY])
        elif event == "compute" and held.failure is None:
            compute(held, len(held.ids) - held.computed)
        elif event in ("serve", "shadow"):
            attach(held, epoch := epoch + 1, is_shadow=event == "shadow")
        elif event == "fail":
            held.fail(Failed(0, Cause.BROKEN, ""))
        elif event == "end":
            held.count_end()
            ServingReport(0, meter.totals())
            held = session(ticket(), meter)
            attach(held, epoch := 1, is_shadow=True)
        ServingReport(0, meter.totals())


@on_loop
async def test_a_shadow_that_takes_over_in_mid_answer_counts_no_first_token() -> None:
    meter = Meter()
    held = session(ticket(), meter)
    attach(held, 1, is_shadow=True)
    put(held, 0, [*PROMPT, *range(5, 9)])
    compute(held, 9)
    await asyncio.sleep(0.05)
    attach(held, 2)
    assert compute(held, 0) == [9]
    assert meter.first_token.seconds == 0.0
    assert (sum(meter.first_token.counts), sum(meter.token.counts), meter.requests) == (0, 1, 1)
    assert meter.token.seconds < 0.05
