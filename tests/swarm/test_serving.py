"""Generation on real hosts: exact tokens also when hosts fail, the commands, and serving beside training."""

import asyncio
import os
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import httpx
import pytest
import torch
from openai import AsyncOpenAI
from pydantic import BaseModel, Field

from p2ptrain import Swarm
from p2ptrain.errors import ConfigError, TemporaryError, UsageError
from p2ptrain.manifest import ModelSpec
from p2ptrain.models import build_stage, export_hugging_face, model_blocks
from p2ptrain.models.blocks import Span
from p2ptrain.models.exact import PAGE, Part
from p2ptrain.models.tokenizers import END_OF_TEXT, byte_tokenizer
from p2ptrain.network.link import SwarmLink
from p2ptrain.node.serving.client import SwarmModel
from p2ptrain.node.serving.thread import ModelThread
from p2ptrain.runtime import TRAINING_NICENESS
from p2ptrain.serving.host.sessions import MAX_SESSIONS_PER_CALLER
from p2ptrain.serving.http.serve import serving_http
from p2ptrain.serving.sampling import Sampling
from tests.support.generators import TEMPLATE
from tests.support.processes import serving_soak
from tests.support.processes.daemons import ROOT, eventually, wait_until
from tests.support.processes.files import LOOPBACK, QUICK, TINY, set_options
from tests.support.processes.preloaded import HELD, LYING
from tests.support.processes.serving_hosts import CONTEXT, PROMPT, Hosts, golden, whole_model
from tests.support.processes.swarmlet import background_command, init, nothing_left_behind, run_command, seeding
from tests.support.processes.tellers import PATIENCE_SECONDS
from tests.support.seeds import base_seed

PYTHON_API = ROOT / "docs" / "reference" / "python-api.md"
DRAWN = Sampling(temperature=1.0, seed=3)


@pytest.fixture
def hosts(tmp_path: Path) -> Iterator[Hosts]:
    with nothing_left_behind(), ExitStack() as stack:
        yield Hosts(tmp_path, stack)


class Answer(BaseModel):
    names: list[Literal["fox", "dog", "owl"]] = Field(min_length=8, max_length=12)
    age: int = Field(ge=0, le=99)


def golden_outputs(ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return logits and last states that this process computes: ``[tokens, vocabulary]``, ``[tokens, hidden]``."""
    stage = whole_model()
    return stage.head(stage.step([Part(len(ids), 0, [0])], ids, stage.new_pages(1)))


def niceness(process: subprocess.Popen[bytes]) -> set[int]:
    """Return the niceness of a process's threads, beyond its own; that of training threads where it can be no more."""
    own = os.getpriority(os.PRIO_PROCESS, process.pid)
    most = 19 - own  # No niceness is above 19.
    found = set()
    for task in Path(f"/proc/{process.pid}/task").iterdir():
        with suppress(ProcessLookupError):  # It has ended since.
            beyond = os.getpriority(os.PRIO_PROCESS, int(task.name)) - own
            found.add(TRAINING_NICENESS if beyond == most else beyond)
    return found


async def ask(
    model: SwarmModel, num_tokens: int, at: int, strike: Callable[[list[str]], None]
) -> tuple[list[int], int]:
    """Return the tokens, and how many hosts were replaced; call ``strike`` with the route at token ``at``."""
    found: list[int] = []
    async with model.generator.generate(list(PROMPT.encode()), DRAWN, max_tokens=num_tokens) as generation:
        async for token in generation:
            found.append(token.id)
            if len(found) == at:
                strike([model.name_of(peer) for peer in generation.route])
        return found, generation.failovers


@pytest.mark.fault(30)
@pytest.mark.parametrize(("number", "victim"), [(signal.SIGKILL, 1), (signal.SIGSTOP, 0)], ids=["killed", "stopped"])
def test_a_host_that_is_killed_or_stopped_is_replaced_with_the_same_tokens(
    hosts: Hosts, number: signal.Signals, victim: int
) -> None:
    processes = hosts.start_all(0, 0, 1, 1)
    struck: list[subprocess.Popen[bytes]] = []

    def strike(route: Sequence[str]) -> None:
        struck.append(processes[route[victim]])
        os.kill(struck[0].pid, number)

    try:
        with ModelThread(SwarmLink.parse(hosts.link)) as thread:
            tokens, failovers = thread.call(ask(thread.model, 400, 150, strike))
    finally:
        if number == signal.SIGSTOP and struck:
            os.kill(struck[0].pid, signal.SIGCONT)
    assert tokens == golden(400, DRAWN)
    assert failovers >= 1


@pytest.mark.fault(30)
def test_a_host_of_any_stage_that_is_stopped_or_killed_in_prefill_is_replaced_with_the_same_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host waits with a part of the prompt computed until it is struck, so each strike hits a prefill."""
    held = tmp_path / "held"
    monkeypatch.setenv("HELD", str(held))
    with nothing_left_behind(), ExitStack() as stack:
        hosts = Hosts(tmp_path / "swarm", stack, num_stages=3)
        processes = hosts.start_all(0, 0, 1, 1, 2, 2, program=HELD)

        async def ask(model: SwarmModel, prompt: str, stage: int, number: signal.Signals) -> tuple[list[int], int]:
            async with model.generator.generate(list(prompt.encode()), DRAWN, max_tokens=20) as generation:

                async def is_held() -> bool:
                    log = hosts.directory / f"{model.name_of(generation.route[stage])}.log"
                    return log.exists() and log.read_text().count("held before row") > before[log]

                before = {log: log.read_text().count("held before row") for log in hosts.directory.glob("*.log")}
                await eventually(is_held)
                victim = processes[model.name_of(generation.route[stage])]
                os.kill(victim.pid, number)
                held.unlink()
                stack.callback(victim.send_signal, signal.SIGCONT)
                assert not generation.drawn
                tokens = [token.id async for token in generation]
            victim.send_signal(signal.SIGCONT)
            return tokens, generation.failovers

        with ModelThread(SwarmLink.parse(hosts.link), PATIENCE_SECONDS) as thread:
            for number in (signal.SIGSTOP, signal.SIGKILL):
                for stage, name in enumerate(("first", "middle", "last")):
                    prompt = f"{number.name} {name} " + PROMPT * 36  # Another one each time: no host has its pages.
                    held.write_text(name)
                    tokens, failovers = thread.call(ask(thread.model, prompt, stage, number))
                    assert tokens == golden(20, DRAWN, prompt), (number, name)
                    assert failovers >= 1


def test_a_script_generates_as_with_transformers(
    hosts: Hosts, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Prompts of several lengths at once, a streamer, logits, and a host, or its shadow, that is killed meanwhile."""
    processes = hosts.start_all(0, 1, 1)
    ids = torch.tensor([list(PROMPT.encode()), [0] * 4 + list(PROMPT[4:].encode())])
    mask = torch.tensor([[1] * len(PROMPT), [0] * 4 + [1] * (len(PROMPT) - 4)])
    monkeypatch.setattr(Swarm, "join", partial(Swarm.join, listen=(LOOPBACK,)))
    with Swarm.join(hosts.link) as swarm:
        model = swarm.language_model()
        assert swarm.language_model() is model
        wanted = golden(60, Sampling(temperature=0.0))
        other = golden(60, Sampling(temperature=0.0), PROMPT[4:])
        found = model.generate(ids, attention_mask=mask, max_new_tokens=60)
        assert found.tolist() == [[*row, *more] for row, more in zip(ids.tolist(), (wanted, other), strict=True)]
        seen: list[int] = []
        streamer = SimpleNamespace(put=lambda some: seen.extend(some.flatten().tolist()), end=lambda: seen.append(-1))
        drawn = model.generate(
            ids[:1], max_new_tokens=9, do_sample=True, seed=3, eos_token_id=wanted[0], streamer=streamer
        )
        told = golden(9, DRAWN)
        told = told[: told.index(wanted[0]) + 1] if wanted[0] in told else told
        assert drawn[0].tolist() == seen[:-1] == [*ids[0].tolist(), *told]
        assert swarm.generate(PROMPT, max_new_tokens=60) == bytes(wanted).decode(errors="replace")

        outputs = model(ids, mask, output_hidden_states=True)
        assert outputs.hidden_states is not None
        for row, first in ((0, 0), (1, 4)):
            alone = golden_outputs(ids[row, first:])
            for ours, theirs in zip((outputs.logits, *outputs.hidden_states), alone, strict=True):
                assert torch.equal(ours[row, first:], theirs)
                assert not ours[row, :first].any()
        assert torch.equal(model(ids, mask).logits, outputs.logits)
        assert int(outputs.logits[0, -1].argmax()) == wanted[0]

        for settings, message in (
            ({"max_new_tokens": CONTEXT}, "do not fit the context"), ({"max_new_tokens": 0}, "max_new_tokens"),
            ({"do_sample": True, "temperature": 9.0}, "temperature"), ({"top_p": 0.0}, "top_p"),
        ):  # fmt: skip
            with pytest.raises(UsageError, match=message):
                model.generate(ids[:1], **settings)
        tokens, taken = model.stream(ids[0], max_new_tokens=400, do_sample=True, seed=3, eos_token_id=[]), list[int]()
        for token in tokens:
            taken.append(token)
            if len(taken) == 150:
                processes["host1"].kill()  # Perhaps the shadow; either way the answer is the same.
        assert taken == golden(400, DRAWN)
        next(unfinished := model.stream(ids[0], max_new_tokens=900))
        unfinished.close()
    with pytest.raises(TemporaryError, match="closed"):
        model.generate(ids)

    (code,) = re.findall(r"^```python\n(.*?)^```$", PYTHON_API.read_text(), flags=re.MULTILINE | re.DOTALL)
    exec(code.replace("p2ptrain://…", hosts.link), {})
    printed = capsys.readouterr().out
    story = golden(40, Sampling(temperature=0.0), "Once upon a time")
    assert printed.startswith(bytes(story).decode(errors="replace"))
    assert printed.endswith("torch.Size([1, 19, 256])\n")


def test_a_host_that_does_not_train_serves_with_one_that_does(hosts: Hosts) -> None:
    trainer = hosts.start("trainer", "--role", "stage", "--stage", "0")
    server = hosts.start("server", "--serve-only", "--stage", "1")
    for name in ("trainer", "server"):
        hosts.wait_until_serving(name)
    assert niceness(trainer) == {0, TRAINING_NICENESS}  # Its passes yield to tokens; the server has none.
    assert niceness(server) == {0}
    with ModelThread(SwarmLink.parse(hosts.link), PATIENCE_SECONDS) as thread:
        tokens, failovers = thread.call(ask(thread.model, 60, 0, lambda route: None))
    assert tokens == golden(60, DRAWN)
    assert not failovers


def test_the_commands_answer_with_the_tokens_of_one_process(hosts: Hosts) -> None:
    hosts.start_all(0, 1)
    drawn = golden(120, Sampling(temperature=0.0))
    wanted = bytes(drawn[:60]).decode(errors="replace")
    options = ["--max-tokens", "60", "--temperature", "0"]
    result = run_command("generate", hosts.link, PROMPT, *options)
    assert result.stdout == f"{PROMPT}{wanted}\n"
    assert "60 tokens" in result.stderr
    assert "by host0 → host1" in result.stderr

    log = hosts.directory / "serve.log"
    with background_command(log, "serve", hosts.link, "--port", "0") as process:
        wait_until(lambda: "API: http" in log.read_text(), PATIENCE_SECONDS)
        url = log.read_text().partition("API: ")[2].split()[0]
        request = {"model": "tiny", "prompt": PROMPT, "max_tokens": 60, "temperature": 0}
        reply = httpx.post(f"{url}/completions", json=request, timeout=60).json()
        assert reply["choices"][0]["text"] == wanted
        assert reply["usage"] == {
            "prompt_tokens": len(PROMPT),
            "completion_tokens": 60,
            "total_tokens": len(PROMPT) + 60,
            "prompt_tokens_details": {"cached_tokens": 0},
        }
        request |= {"prompt": [*PROMPT.encode(), *drawn[:60]], "return_token_ids": True}

        def is_cached() -> bool:
            reply = httpx.post(f"{url}/completions", json=request, timeout=60).json()
            assert reply["choices"][0]["token_ids"] == drawn[60:]
            return bool(reply["usage"]["prompt_tokens_details"]["cached_tokens"] == PAGE)

        wait_until(is_cached)
        metrics = httpx.get(f"{url}/../metrics", timeout=60).text
        assert re.search(r'p2ptrain_http_hosts_kv_pages{stage="1"} [1-9]', metrics)
        assert httpx.get(f"{url}/../health", timeout=60).json() == {"status": "ok"}
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0


def test_of_a_hundred_clients_at_once_each_is_answered_or_refused_and_no_page_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hosts take 64 sessions of one server. Their last stage waits until all others have been refused."""
    held = tmp_path / "held"
    monkeypatch.setenv("HELD", str(held))
    prompts = [f"{number} " + PROMPT * 18 for number in range(100)]

    async def ask(url: str) -> list[Any]:
        async with httpx.AsyncClient(timeout=PATIENCE_SECONDS, limits=httpx.Limits(max_connections=None)) as client:

            async def post(prompt: str) -> httpx.Response:
                body = {"model": "tiny", "prompt": prompt, "max_tokens": 8, "temperature": 0, "return_token_ids": True}
                return await client.post(f"{url}/completions", json=body)

            async def is_served() -> bool:
                return (await post(PROMPT)).status_code == 200

            await eventually(is_served)
            held.write_text("last")
            asking = [asyncio.create_task(post(prompt)) for prompt in prompts]

            async def are_refused() -> bool:
                return sum(each.done() for each in asking) >= 100 - MAX_SESSIONS_PER_CALLER

            await eventually(are_refused)
            for each in [each for each in asking if not each.done()][:10]:
                each.cancel()
            held.unlink()
            return await asyncio.gather(*asking, return_exceptions=True)

    with nothing_left_behind(), ExitStack() as stack:
        hosts = Hosts(tmp_path / "swarm", stack)
        hosts.start_all(0, 1, program=HELD)
        log = hosts.directory / "serve.log"
        options = ["--port", "0", "--wait", "0", "--audit-share", "0"]
        with background_command(log, "serve", hosts.link, *options), ModelThread(SwarmLink.parse(hosts.link)) as thread:
            wait_until(lambda: "API: http" in log.read_text(), PATIENCE_SECONDS)
            replies = asyncio.run(ask(log.read_text().partition("API: ")[2].split()[0]))
            answered = 0
            for prompt, reply in zip(prompts, replies, strict=True):
                if isinstance(reply, asyncio.CancelledError):
                    continue
                if reply.status_code == 200:
                    answered += 1
                    assert reply.json()["choices"][0]["token_ids"] == golden(8, Sampling(temperature=0.0), prompt)
                else:
                    assert reply.status_code == 429, reply.text
                    assert int(reply.headers["retry-after"]) >= 1
            assert answered == MAX_SESSIONS_PER_CALLER - 10
            wait_until(lambda: [host.served.sessions for host in thread.model.hosts()] == [0, 0])
            assert all(host.served.free_pages == host.served.pages for host in thread.model.hosts())


def test_a_draft_of_the_served_model_changes_no_answer(hosts: Hosts, monkeypatch: pytest.MonkeyPatch) -> None:
    hosts.start_all(0, 1)
    spec = ModelSpec(**{**TINY, "layers": 4, "context": CONTEXT})
    served, draft = hosts.directory / "served", hosts.directory / "draft"
    export_hugging_face(build_stage(spec, Span(0, len(model_blocks(spec)))), spec, served)
    order = ["--layers", "2", "--steps", "10", "--batch", "2", "--text", str(hosts.directory / "text")]
    assert "guesses" in run_command("draft", "train", str(served), "--out", str(draft), *order).stdout
    options = ["--max-tokens", "60", "--temperature", "0", "--draft", str(draft)]
    result = run_command("generate", hosts.link, PROMPT, *options)
    assert result.stdout == f"{PROMPT}{bytes(golden(60, Sampling(temperature=0.0))).decode(errors='replace')}\n"
    monkeypatch.setattr(Swarm, "join", partial(Swarm.join, listen=(LOOPBACK,)))
    with Swarm.join(hosts.link) as swarm:
        with pytest.raises(ConfigError, match=f"is it the folder of a Hugging Face model|{hosts.directory}"):
            swarm.language_model(draft=hosts.directory / "text")
        model = swarm.language_model(wait_seconds=PATIENCE_SECONDS, draft=draft)
        taken = model.generator.draft
        assert taken is not None
        assert taken.context == CONTEXT
        tokens = model.stream(list(PROMPT.encode()), max_new_tokens=400, do_sample=True, seed=3, eos_token_id=[])
        assert list(tokens) == golden(400, DRAWN)


@pytest.mark.fault(56)
def test_a_host_that_returns_garbage_is_left_out(hosts: Hosts) -> None:
    hosts.start("liar", "--role", "stage", "--stage", "0", program=LYING)
    hosts.wait_until_serving("liar")
    hosts.start_all(0, 0, 1)
    wanted = golden(40, Sampling(temperature=0.0))
    log = hosts.directory / "serve.log"
    with background_command(log, "serve", hosts.link, "--port", "0", "--audit-share", "1") as process:
        wait_until(lambda: "API: http" in log.read_text(), PATIENCE_SECONDS)
        url = log.read_text().partition("API: ")[2].split()[0]
        request = {"model": "tiny", "prompt": PROMPT, "max_tokens": 40, "temperature": 0, "return_token_ids": True}

        def answers() -> list[int]:
            reply = httpx.post(f"{url}/completions", json=request, timeout=60).json()
            return list(reply["choices"][0]["token_ids"])

        def is_found() -> bool:
            answers()
            return "left out" in log.read_text()

        wait_until(is_found, PATIENCE_SECONDS)
        for _ in range(5):
            assert answers() == wanted
        assert 'audits_total{result="differed"}' in httpx.get(f"{url.removesuffix('v1')}metrics").text
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0


def test_openai_s_client_parses_an_answer_whose_host_is_killed_meanwhile(hosts: Hosts) -> None:
    """The last stage's host dies in the middle of the JSON: it fits the class, and equals the one before."""
    processes = hosts.start_all(0, 1, 1)
    tokenizer = byte_tokenizer(CONTEXT)
    tokenizer.chat_template = TEMPLATE
    ask: Any = {"model": "tiny", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 600, "seed": 5}

    async def parse(model: SwarmModel) -> tuple[list[str | None], int]:
        found: list[str | None] = []
        serving = serving_http(model.generator, tokenizer, port=0, end_ids=[END_OF_TEXT])
        async with serving as (url, _), AsyncOpenAI(base_url=f"{url}v1", api_key="any", max_retries=0) as client:
            for is_struck in (False, True):
                async with client.chat.completions.stream(**ask, response_format=Answer) as stream:
                    number = 0
                    async for event in stream:
                        number += event.type == "content.delta"
                        if is_struck and number == 20 and event.type == "content.delta":
                            processes["host1"].kill()
                    final = await stream.get_final_completion()
                assert isinstance(final.choices[0].message.parsed, Answer)
                found.append(final.choices[0].message.content)
        return found, number

    with ModelThread(SwarmLink.parse(hosts.link), PATIENCE_SECONDS) as thread:
        found, number = thread.call(parse(thread.model))
    assert found[0] == found[1]
    assert number > 40


def test_a_trainer_serves_newer_weights_as_rounds_end(tmp_path: Path) -> None:
    """Two peers train the whole model and serve it; answers go on, and the version advances."""
    with nothing_left_behind(), ExitStack() as stack:
        text = tmp_path / "text"
        text.mkdir()
        (text / "some.txt").write_text("the quick brown fox jumps over the lazy dog. " * 2000)
        settings = set_options(
            name="tiny", model={**TINY, "context": 64}, data={"source": f"path:{text}"}, averaging=QUICK,
            training={"every": 2, "local_batch": 2},
        )  # fmt: skip
        link = stack.enter_context(seeding(init(tmp_path / "swarm", *settings))).link
        trainers = []
        for name in ("one", "two"):
            arguments = ["join", link, "--yes", "--serve", "--run-dir", str(tmp_path / name), "--listen", LOOPBACK]
            arguments += ["--threads", "1", "--allow-path", str(text)]
            trainers.append(stack.enter_context(background_command(tmp_path / f"{name}.log", *arguments)))
        rounds: set[int] = set()
        with ModelThread(SwarmLink.parse(link), PATIENCE_SECONDS) as thread:

            async def version() -> int:
                ids = list(PROMPT.encode())
                async with thread.model.generator.generate(ids, DRAWN, max_tokens=30) as generation:
                    assert len([token async for token in generation]) == 30
                    return int(generation.version.partition("-")[0])

            deadline = time.monotonic() + 2 * PATIENCE_SECONDS
            while len(rounds) < 2 and time.monotonic() < deadline:
                rounds.add(thread.call(version()))
        assert len(rounds) >= 2, f"only rounds {rounds} were served"
        assert [niceness(each) for each in trainers] == 2 * [{0, TRAINING_NICENESS}]


@pytest.mark.slow
def test_while_hosts_die_and_clients_leave_answers_stay_right(tmp_path: Path) -> None:
    """``make soak-serving`` does the same for longer, and judges whether anything grows."""
    with nothing_left_behind():
        chaos = serving_soak.run(tmp_path, 40.0, base_seed())
    assert not chaos.record.problems
    assert min(chaos.done[kind] for kind in ("whole", "streamed", "left", "impossible", "killed")) > 0
