"""A swarm that serves for minutes while hosts die and clients leave: what must be right, and what must not grow.

    python -m tests.support.processes.serving_soak --minutes 10 [--seed N]

One host of each of two stages is never harmed. The others are killed, stopped for a while and started again. Clients of
a real ``p2ptrain serve`` take whole answers, leave in the middle, and ask what cannot be answered. Each answer has the
tokens that one process computes. The program prints a line a minute. At the end the unharmed hosts have no session any
more, and neither their processes nor the server's have grown. The exit code is 1 if anything of that failed.
"""

import argparse
import asyncio
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import psutil

from p2ptrain.network.link import SwarmLink
from p2ptrain.node.serving.client import SwarmModel, generating
from p2ptrain.serving.client.routes import Host
from p2ptrain.serving.sampling import Sampling
from tests.support.processes.daemons import wait_until
from tests.support.processes.serving_hosts import CONTEXT, Hosts, golden
from tests.support.processes.soak import ALLOWANCES, SAMPLES, Record
from tests.support.processes.swarmlet import background_command
from tests.support.processes.tellers import PATIENCE_SECONDS
from tests.support.seeds import base_seed

CLIENTS = 4
PROMPTS = ("the quick brown fox", "jumps over", "the lazy dog. " * 20, "a")
TOKENS = 160
UNHARMED, HARMED = ("host0", "host1"), ("host2", "host3")
STAGES = (0, 1, 0, 1)
FAULT_SECONDS = (2.0, 10.0)
STOP_SECONDS = (1.0, 8.0)
LEAST_SAMPLE_SECONDS = 2.0
ANSWER_SECONDS = 60.0
SETTLE_SECONDS = 60


class Chaos:
    """Clients of one server, and what befalls hosts meanwhile.

    Attributes:
        done: How often which kind of request ended, and which fault there was.
    """

    def __init__(self, hosts: Hosts, url: str, server: int, seed: int) -> None:
        self.record = Record()
        self.done: Counter[str] = Counter()
        self._hosts = hosts
        self._url = url
        self._server = server
        self._random = random.Random(seed)
        self._wanted = {prompt: golden(TOKENS, Sampling(temperature=0.0), prompt) for prompt in PROMPTS}
        self._up: dict[str, subprocess.Popen[bytes]] = {}

    async def run(self, seconds: float) -> None:
        """Let clients ask and hosts fail for so long, then wait until nothing is in progress."""
        self._up = await asyncio.to_thread(self._hosts.start_all, *STAGES)
        link = SwarmLink.parse(self._hosts.link)
        async with generating(link) as model, httpx.AsyncClient(timeout=ANSWER_SECONDS) as client:
            began = time.monotonic()
            until = began + seconds
            async with asyncio.TaskGroup() as tasks:
                for _ in range(CLIENTS):
                    tasks.create_task(self._ask_on(client, until))
                tasks.create_task(self._harm_on(until))
                tasks.create_task(self._sample_on(began, until))
                tasks.create_task(self._tell_on(began, until))
            await self._check_end(client, model)

    # --- clients

    async def _ask_on(self, client: httpx.AsyncClient, until: float) -> None:
        kinds = (self._whole, self._streamed, self._left, self._impossible)
        while time.monotonic() < until and not self.record.problems:
            kind = self._random.choice(kinds)
            try:
                await kind(client, self._random.choice(PROMPTS))
            except (httpx.HTTPError, AssertionError) as error:
                self.record.problems.append(f"{kind.__name__.strip('_')}: {error!r}")
            self.done[kind.__name__.strip("_")] += 1

    def _request(self, prompt: str, **more: Any) -> dict[str, Any]:
        return {"model": "tiny", "prompt": prompt, "temperature": 0, "return_token_ids": True, **more}

    async def _whole(self, client: httpx.AsyncClient, prompt: str) -> None:
        number = self._random.randint(1, TOKENS)
        reply = await client.post(f"{self._url}/completions", json=self._request(prompt, max_tokens=number))
        assert reply.status_code == 200, reply.text
        assert reply.json()["choices"][0]["token_ids"] == self._wanted[prompt][:number], "other tokens"

    async def _streamed(self, client: httpx.AsyncClient, prompt: str) -> None:
        request = self._request(prompt, max_tokens=TOKENS, stream=True)
        async with client.stream("POST", f"{self._url}/completions", json=request) as reply:
            assert reply.status_code == 200
            lines = [line async for line in reply.aiter_lines() if line]
        assert lines[-1] == "data: [DONE]", lines[-1][:200]
        choices = [choice for line in lines[:-1] for choice in json.loads(line.removeprefix("data: "))["choices"]]
        ids = [id for choice in choices for id in choice.get("token_ids") or ()]
        assert ids == self._wanted[prompt], "other tokens"

    async def _left(self, client: httpx.AsyncClient, prompt: str) -> None:
        """Leave after some pieces of an answer, or before the first."""
        left, request = self._random.randint(0, 30), self._request(prompt, max_tokens=TOKENS, stream=True)
        async with client.stream("POST", f"{self._url}/completions", json=request) as reply:
            async for _ in reply.aiter_lines():
                left -= 1
                if left < 0:
                    return

    async def _impossible(self, client: httpx.AsyncClient, prompt: str) -> None:
        bad = self._random.choice(({"max_tokens": 2 * CONTEXT}, {"temperature": -1}, {"prompt": prompt * CONTEXT}))
        reply = await client.post(f"{self._url}/completions", json={**self._request(prompt, max_tokens=9), **bad})
        assert reply.status_code in (400, 422), reply.text

    # --- faults

    async def _harm_on(self, until: float) -> None:
        while time.monotonic() < until - STOP_SECONDS[1] and not self.record.problems:
            await asyncio.sleep(self._random.uniform(*FAULT_SECONDS))
            name = self._random.choice(HARMED)
            process = self._up[name]
            if process.poll() is not None:
                stage = STAGES[int(name.removeprefix("host"))]
                self._up[name] = self._hosts.start(name, "--role", "stage", "--stage", str(stage))
                self.done["started again"] += 1
            elif self._random.random() < 0.5:
                os.kill(process.pid, signal.SIGSTOP)
                await asyncio.sleep(self._random.uniform(*STOP_SECONDS))
                os.kill(process.pid, signal.SIGCONT)
                self.done["stopped"] += 1
            else:
                process.kill()
                await asyncio.to_thread(process.wait)
                self.done["killed"] += 1

    # --- what is measured

    async def _sample_on(self, began: float, until: float) -> None:
        every = max(LEAST_SAMPLE_SECONDS, (until - began) / SAMPLES)
        while time.monotonic() < until and not self.record.problems:
            await asyncio.sleep(every)
            totals = dict.fromkeys(ALLOWANCES, 0.0)  # Only the peers themselves could tell their tasks.
            for pid in (self._server, *(self._up[name].pid for name in UNHARMED)):
                process = psutil.Process(pid)
                family = [process, *process.children(recursive=True)]
                totals["processes"] += len(family)
                for each in family:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        totals["memory"] += each.memory_info().rss / (1 << 20)
                        totals["files"] += each.num_fds()
                        totals["threads"] += each.num_threads()
            self.record.add(time.monotonic() - began, **totals)

    async def _tell_on(self, began: float, until: float) -> None:
        while time.monotonic() < until and not self.record.problems:
            await asyncio.sleep(min(60.0, max(1.0, until - time.monotonic())))
            last = {name: values[-1] for name, values in self.record.values.items() if values}
            shown = ", ".join(f"{name} {value:.0f}" for name, value in last.items())
            counts = ", ".join(f"{count} {what}" for what, count in sorted(self.done.items()))
            sys.stdout.write(f"{(time.monotonic() - began) / 60:6.1f} min: {counts}; {shown}\n")
            sys.stdout.flush()

    async def _check_end(self, client: httpx.AsyncClient, model: SwarmModel) -> None:
        """Nothing is in progress any more, neither at the server nor at the hosts."""

        def left() -> list[str]:
            return [self._left_at(host) for host in self._unharmed(model) if host.served.sessions]

        for _ in range(SETTLE_SECONDS):
            if not left():
                break
            await asyncio.sleep(1.0)
        self.record.problems += left()
        metrics = (await client.get(f"{self._url.removesuffix('/v1')}/metrics")).text
        for name in ("generations", "waiting_generations"):
            if f"p2ptrain_http_{name} 0.0" not in metrics:
                self.record.problems.append(f"the server still counts {name}")
        if len(self._unharmed(model)) < len(UNHARMED):
            self.record.problems.append("an unharmed host serves no more")

    def _unharmed(self, model: SwarmModel) -> list[Host]:
        return [host for host in model.hosts() if model.name_of(host.peer) in UNHARMED]

    def _left_at(self, host: Host) -> str:
        return (
            f"stage {host.served.stage}: {host.served.sessions} sessions are open, {host.served.free_pages} pages free"
        )


def run(folder: Path, seconds: float, seed: int) -> Chaos:
    """Run it in an empty folder."""
    with ExitStack() as stack:
        hosts, log = Hosts(folder, stack), folder / "serve.log"
        serve = stack.enter_context(background_command(log, "serve", hosts.link, "--port", "0"))
        wait_until(lambda: "API: http" in log.read_text(), PATIENCE_SECONDS)
        chaos = Chaos(hosts, log.read_text().partition("API: ")[2].split()[0], serve.pid, seed)
        asyncio.run(chaos.run(seconds))
    return chaos


def main() -> int:
    """Run it; the exit code says whether all that must hold has held."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.processes.serving_soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=base_seed(), help="of requests and faults")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="p2ptrain-soak-") as folder:
        record = run(Path(folder), 60 * options.minutes, options.seed).record
    sys.stdout.write(f"seed {options.seed}\n" + "".join(f"{line}\n" for line in record.judge()))
    for problem in record.problems:
        sys.stdout.write(f"FAILED: {problem}\n")
    return int(bool(record.problems))


if __name__ == "__main__":
    sys.exit(main())
