"""Answers in a given form over simulated hosts: substitutes keep it, and hosts that cannot are not asked."""

from __future__ import annotations

import json
from typing import Any, cast

import msgspec
import pytest

from p2ptrain.models.exact import ExactStage
from p2ptrain.serving.errors import GenerationFailedError, NoGrammarError
from p2ptrain.serving.generation import Token
from p2ptrain.serving.grammar import AnswerForm
from p2ptrain.serving.sampling import Grammar
from tests.support.sim.serving import (
    CHARACTERS,
    DRAWN,
    END,
    ServingSwarm,
    digest,
    golden,
    serve,
    served,
    small_grammars,
)

PROMPT = [5, 1, 4, 1, 5, 9, 2, 6]
FORM = AnswerForm({
    "type": "object", "properties": {f"p{each}": {"type": "integer", "minimum": 0, "maximum": 99} for each in range(9)},
    "required": [f"p{each}" for each in range(9)], "additionalProperties": False,
}).encode()  # fmt: skip


@pytest.mark.fault(30)
@pytest.mark.parametrize("fault", ["crash", "stall"])
@pytest.mark.parametrize("at", [0, 1, 30])
def test_an_answer_in_a_form_keeps_it_when_the_host_that_draws_fails(fault: str, at: int) -> None:
    """The substitute has the tokens alone, and computes the same masks from them."""
    grammars = small_grammars()
    drawn = msgspec.structs.replace(DRAWN, grammar=Grammar(FORM))

    async def main(swarm: ServingSwarm, client: Any) -> Any:
        def strike(generation: Any, token: Token) -> None:
            if token.position == len(PROMPT) + at:
                getattr(swarm.network, fault)(swarm.host_of(generation.route[-1]).peer)

        return await client.ask(PROMPT, 300, drawn, on_token=strike, stops=[END])

    tokens, failovers = serve(main, 1, 2, seed=at, grammars=grammars)
    assert tokens == golden(PROMPT, 300, 2, drawn, grammars.compile(FORM, [END]))
    values = json.loads("".join(CHARACTERS[each] for each in tokens[:-1]))
    assert list(values) == [f"p{each}" for each in range(9)]
    assert failovers >= 1


def test_an_answer_in_a_form_goes_on_with_newer_weights() -> None:
    grammars = small_grammars()
    drawn = msgspec.structs.replace(DRAWN, grammar=Grammar(FORM))

    async def main(swarm: ServingSwarm, client: Any) -> Any:
        def renew(generation: Any, token: Token) -> None:
            if token.position == len(PROMPT) + 20:
                for each in swarm.hosts.values():
                    for round_ in (6, 7):
                        each.host.serve((round_, digest(round_, each.number)), cast(ExactStage, each.stage))
                swarm.rounds = (6, 7)

        answer = await client.ask(PROMPT, 300, drawn, on_token=renew, stops=[END])
        assert swarm.hosts["s0a"].host.report().totals.accepted_tokens  # The keys resemble each other.
        return answer

    tokens, _ = serve(main, 1, 1, grammars=grammars)
    assert tokens == golden(PROMPT, 300, 2, drawn, grammars.compile(FORM, [END]))


@served(1, 2)
async def test_only_hosts_with_grammars_draw_answers_in_a_form_and_without_one_the_client_is_told(
    swarm: ServingSwarm, client: Any
) -> None:
    drawn = msgspec.structs.replace(DRAWN, grammar=Grammar(FORM))
    with pytest.raises(NoGrammarError, match="generates in a given form"):
        await client.ask(PROMPT, 300, drawn, stops=[END])
    able = await swarm.start_host("able", 1, grammars=small_grammars())
    used = set[str]()
    tokens, _ = await client.ask(
        PROMPT, 300, drawn, stops=[END], on_token=lambda generation, token: used.add(generation.route[-1])
    )
    assert used == {able.peer.peer_id}
    assert tokens[-1] == END
    assert (await client.ask(PROMPT, 5))[0] == golden(PROMPT, 5, 2)


@pytest.mark.parametrize(
    ("text", "stops", "reason"),
    [
        (b"{}", [END], "grammar"),
        (AnswerForm({"type": "x"}).encode(), [END], "Invalid type"),
        (FORM, [1], "ends the answer"),
    ],
)
@served(1, 1, grammars=small_grammars())
async def test_a_form_that_a_host_cannot_use_is_refused_before_it_takes_pages(
    swarm: ServingSwarm, client: Any, text: bytes, stops: list[int], reason: str
) -> None:
    client.generator._wait_seconds = 0.0
    with pytest.raises(GenerationFailedError, match=reason):
        await client.ask(PROMPT, 3, msgspec.structs.replace(DRAWN, grammar=Grammar(text)), stops=stops)
