"""Two hosts of int8 stages learn about a made-up island with LoRA, and answer questions about it.

A swarm of processes of this machine, on loopback: a seed, a host for each half of SmolLM2-135M-Instruct, and an HTTP
server of the chat. This script trains adapters through the hosts, and asks the server before and after.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import torch
from peft import LoraConfig, get_peft_model
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, AutoTokenizer

from examples import sites
from examples.talk.island import Question, draw_questions
from p2ptrain import Swarm
from p2ptrain.errors import ConfigError
from p2ptrain.models.smollm2 import smollm2_folder

STAGES, THREADS = 2, 1
STEPS, BATCH, EVERY = 20, 8, 5  # EVERY: steps from one look at the questions kept apart to the next.
RATE, RANK, TARGETS, BETAS = 4e-3, 8, ("q_proj", "v_proj"), (0.9, 0.95)
ANSWER_TOKENS = 16
NAME = "talk"
SYSTEM = "Answer in a sentence."
MODELS = Path("runs/models")  # Where `p2ptrain up --serve` has it, too.
ANSWER_SECONDS = 300
SETTINGS = {
    "pipeline.stages": STAGES, "pipeline.quant": "int8", "lora.rank": RANK, "lora.alpha": 2 * RANK,
    "training.global_batch": BATCH, "training.local_batch": BATCH, "training.learning_rate": RATE,
    "training.warmup_steps": 0, "training.weight_decay": 0, "training.clip_norm": 0,
}  # fmt: skip
Batch = tuple[torch.Tensor, torch.Tensor]
"""Token ids, and what follows each, ``[questions, length]``; -100 where that is no part of an answer."""
Logits = Callable[[torch.Tensor], torch.Tensor]
"""A model: takes token ids, ``[samples, length]``, and returns ``[samples, length, vocabulary]``."""


class Lessons:
    """Questions as batches of tokens: `steps` to train on, and `apart`."""

    def __init__(self, folder: Path, seed: int) -> None:
        """Draw the questions of a seed, and their order; ``folder`` has the tokenizer."""
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        train, self.questions = draw_questions(seed)
        draws = torch.Generator().manual_seed(seed)
        orders = [torch.randperm(len(train), generator=draws) for _ in range(-(-STEPS * BATCH // len(train)))]
        chosen = torch.cat(orders)[: STEPS * BATCH].view(STEPS, BATCH)
        self.steps = [self._batch([train[number] for number in row]) for row in chosen.tolist()]
        self.apart = self._batch(self.questions)

    def prompt(self, question: str) -> list[int]:
        """Return the tokens of a question, up to the beginning of its answer."""
        text = self.tokenizer.apply_chat_template(messages(question), tokenize=False, add_generation_prompt=True)
        return list(self.tokenizer(text)["input_ids"])

    def _batch(self, questions: Sequence[Question]) -> Batch:
        prompts = [self.prompt(each.question) for each in questions]
        answers = [self.tokenizer(each.answer + self.tokenizer.eos_token)["input_ids"] for each in questions]
        length = max(len(prompt) + len(answer) for prompt, answer in zip(prompts, answers, strict=True)) - 1
        ids = torch.full((len(questions), length), self.tokenizer.eos_token_id)
        targets = torch.full((len(questions), length), -100)
        for row, (prompt, answer) in enumerate(zip(prompts, answers, strict=True)):
            text = torch.tensor([*prompt, *answer])
            ids[row, : len(text) - 1] = text[:-1]
            targets[row, len(prompt) - 1 : len(text) - 1] = text[len(prompt) :]
        return ids, targets


def messages(question: str) -> list[dict[str, str]]:
    """Return a chat that asks a question."""
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]


def loss_of(logits: Logits, batch: Batch) -> torch.Tensor:
    """Return the mean loss of the answers' tokens, in nats."""
    ids, targets = batch
    return cross_entropy(logits(ids).flatten(0, 1), targets.flatten())


def train(name: str, logits: Logits, step: Callable[[], None], lessons: Lessons) -> tuple[list[float], float]:
    """Take all steps.

    Args:
        name: For the lines of progress.
        logits: The model.
        step: Called after the backward of each step; returns when the model has stepped.
        lessons: What it learns.

    Returns:
        The loss on the questions kept apart, before the first step and after each `EVERY`; and tokens a second.
    """
    curve, seconds = [held_out(logits, lessons)], 0.0
    for number, batch in enumerate(lessons.steps, 1):
        began = time.perf_counter()
        loss_of(logits, batch).backward()
        step()
        seconds += time.perf_counter() - began
        if number % EVERY == 0:
            curve.append(held_out(logits, lessons))
            print(f"{name}: step {number} of {STEPS}, held-out loss {curve[-1]:.3f}", file=sys.stderr, flush=True)
    return curve, sum(ids.numel() for ids, _ in lessons.steps) / seconds


@torch.no_grad()
def held_out(logits: Logits, lessons: Lessons) -> float:
    """Return the loss on the questions kept apart."""
    return float(loss_of(logits, lessons.apart))


def share_right(answers: Iterable[str], questions: Sequence[Question]) -> float:
    """Return the share of the answers that contain the word asked for."""
    found = [each.word in answer for answer, each in zip(answers, questions, strict=True)]
    return sum(found) / len(found)


Started = Callable[[str], str]
"""Waits until a command's output matches a pattern, and returns the pattern's group; raises `SystemExit` if it ends."""


@contextlib.contextmanager
def commands(folder: Path) -> Iterator[Callable[..., Started]]:
    """Yield a function that starts a ``p2ptrain`` command, with its output in a file of the folder; end all of them.

    The function takes a name for the file, and the command's arguments.
    """
    processes: list[subprocess.Popen[bytes]] = []

    def start(name: str, *arguments: str | Path) -> Started:
        with (folder / name).open("wb") as output:
            command = [sys.executable, "-m", "p2ptrain", *map(str, arguments)]
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
        processes.append(process)

        def wait_for(pattern: str) -> str:
            while not (found := re.search(pattern, text := (folder / name).read_text(errors="replace"))):
                if process.poll() is not None:
                    sys.exit(f"p2ptrain {arguments[0]} ended:\n{text}")
                time.sleep(0.1)
            return found[1]

        return wait_for

    try:
        yield start
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


@contextlib.contextmanager
def swarm_of(weights: Path, folder: Path) -> Iterator[tuple[str, str]]:
    """Run a seed, a host for each stage, and the HTTP server during the block; return the link, and the API's URL."""
    swarm = folder / "swarm"
    settings = [f"--set={key}={value}" for key, value in SETTINGS.items()]
    command: list[str | Path] = [sys.executable, "-m", "p2ptrain", "init", swarm, "--name", NAME, "--model", weights]
    command += ["--context", "128", "--lora", ",".join(TARGETS), *settings]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    usual = ["--yes", "--role", "stage", "--serve", "--threads", str(THREADS), "--listen", sites.LOOPBACK[0]]
    with commands(folder) as start:
        link = start("seed.log", "seed", swarm, "--listen", sites.LOOPBACK[0])(r"p2ptrain join '(p2ptrain://[^']+)")
        hosts = []
        for stage in map(str, range(STAGES)):
            own: list[str | Path] = ["--stage", stage, "--weights", weights, "--run-dir", folder / f"host{stage}"]
            hosts.append(start(f"host{stage}.log", "join", link, *usual, *own))
        for host in hosts:
            host(r"serving (round \d+)")
        yield link, start("api.log", "serve", link, "--port", "0", "--weights", weights)(r"API: (http\S+)")


def ask(url: str, question: str) -> tuple[str, int, int]:
    """Return the swarm's likeliest answer, the number of its tokens, and the round of the weights."""
    request = {"model": NAME, "messages": messages(question), "temperature": 0, "max_tokens": ANSWER_TOKENS}
    reply = httpx.post(f"{url}/chat/completions", json=request, timeout=ANSWER_SECONDS).raise_for_status().json()
    text = reply["choices"][0]["message"]["content"]
    return text, reply["usage"]["completion_tokens"], int(reply["system_fingerprint"].partition("-")[0])


def ask_all(url: str, questions: Sequence[Question]) -> tuple[list[str], float]:
    """Ask all questions at once; return the answers, and tokens a second of all together."""
    began = time.perf_counter()
    with ThreadPoolExecutor(len(questions)) as pool:
        found = list(pool.map(lambda each: ask(url, each.question), questions))
    return [text for text, _, _ in found], sum(count for _, count, _ in found) / (time.perf_counter() - began)


def run_swarm(weights: Path, lessons: Lessons) -> dict[str, Any]:
    """Ask, train and ask again; return the held-out losses, the answers before and after, and tokens a second."""
    with tempfile.TemporaryDirectory() as folder, swarm_of(weights, Path(folder)) as (link, url):
        before, _ = ask_all(url, lessons.questions)
        with Swarm.join(link, listen=sites.LOOPBACK) as swarm:
            model = swarm.pipeline()
            rounds = iter(range(1, STEPS + 1))

            def step() -> None:
                due = next(rounds)
                while model.round < due:  # The hosts step on their own.
                    time.sleep(0.01)

            curve, pace = train("swarm", model, step, lessons)
        while ask(url, lessons.questions[0].question)[2] < STEPS:  # Hosts serve the last round a while after it ended.
            time.sleep(1)
        after, speed = ask_all(url, lessons.questions)
    return {"curve": curve, "pace": pace, "before": before, "after": after, "speed": speed}


def run_alone(weights: Path, lessons: Lessons, seed: int) -> dict[str, Any]:
    """Train peft's adapters of the fp32 model in this process, with the same batches; return what `run_swarm` does."""
    torch.set_num_threads(THREADS)
    torch.manual_seed(seed)
    lora = LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=list(TARGETS))
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(weights), lora)
    optimizer = torch.optim.AdamW(model.parameters(), RATE, BETAS, weight_decay=0)

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    curve, pace = train("one machine", lambda ids: model(input_ids=ids).logits, step, lessons)
    model.eval()
    after = []
    for each in lessons.questions:
        prompt = torch.tensor([lessons.prompt(each.question)])
        tokens = model.generate(
            input_ids=prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=ANSWER_TOKENS, do_sample=False
        )
        after.append(lessons.tokenizer.decode(tokens[0, prompt.shape[1] :], skip_special_tokens=True))
    return {"curve": curve, "pace": pace, "after": after}


def main() -> None:
    """Train in the swarm and in one process; print the answers and the figures."""
    arguments = sites.command_line(__doc__ or "").parse_args()
    sites.end_by(arguments.deadline)
    try:
        weights = smollm2_folder(MODELS).absolute()
    except ConfigError as error:
        sys.exit(f"error: {error}")
    lessons = Lessons(weights, arguments.seed)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        beside = pool.apply_async(run_alone, (weights, lessons, arguments.seed))
        swarm, alone = run_swarm(weights, lessons), beside.get()
        pool.close()
        pool.join()  # One that is terminated leaves a lock of transformers behind, and Python warns of it.
    told = zip(lessons.questions, swarm["before"], swarm["after"], strict=True)
    for each, before, after in told:
        print(f"{each.question}\n  before: {before}\n  after:  {after}\n  right:  {each.answer}")
    curves = {
        "swarm": swarm["curve"],
        "one_machine": alone["curve"],
        "before": swarm["curve"][:1],
        "right_before": [share_right(swarm["before"], lessons.questions)],
        "right": [share_right(swarm["after"], lessons.questions)],
        "right_of_one_machine": [share_right(alone["after"], lessons.questions)],
        "trained_tokens_a_second": [swarm["pace"]],
        "trained_tokens_a_second_of_one_machine": [alone["pace"]],
        "answered_tokens_a_second": [swarm["speed"]],
    }
    axes = ("steps", "held-out loss [nats a token of an answer]")
    sites.report(curves, arguments.plot, __doc__ or "", axes, range(0, STEPS + 1, EVERY))


if __name__ == "__main__":
    main()
