"""`Auditor`: generates some finished answers again on other hosts, and leaves out hosts that compute other tokens.

Tokens are a function of prompt, version and sampling, so two honest hosts never differ. A repetition is a session like
any other: no host can tell that it is one.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from p2ptrain.errors import P2PTrainError
from p2ptrain.runtime import Runtime
from p2ptrain.serving.client.routes import Host, is_able
from p2ptrain.serving.messages import Version
from p2ptrain.serving.sampling import Sampling

logger = logging.getLogger(__name__)

MAX_WITNESSES = 4
"""Other hosts of one stage that are asked about an answer, at most."""
LEFT_OUT_SECONDS = 3600.0

Tokens = tuple[int, ...]


class Answer(NamedTuple):
    """An answer that ``route`` computed alone, one host a stage."""

    version: Version
    ids: Tokens
    sampling: Sampling
    stops: Tokens
    tokens: Tokens
    route: tuple[str, ...]


class Auditor:
    """Checks one answer at a time in `run`.

    Attributes:
        counts: Audits by their result: ``agreed``; ``differed`` left a host out; ``undecided`` has no majority;
            ``failed`` lost a host.
    """

    def __init__(
        self,
        runtime: Runtime,
        share: float,
        again: Callable[[Answer, Sequence[str]], Awaitable[Tokens]],
        hosts: Callable[[], Sequence[Host]],
    ) -> None:
        """``share`` of the answers are checked; ``again`` generates one on a route."""
        self._runtime = runtime
        self._share = share
        self._again = again
        self._hosts = hosts
        self._answers: asyncio.Queue[Answer] = asyncio.Queue(1)
        self._left_out: dict[str, float] = {}
        self.counts: Counter[str] = Counter()

    @property
    def num_differences(self) -> int:
        """Audits in which hosts differed."""
        return self.counts["differed"] + self.counts["undecided"]

    def offer(self, answer: Answer) -> None:
        """Check an answer later, or not: by chance, and never two at a time."""
        is_exact = not answer.version.arithmetic.startswith("torch")
        if is_exact and answer.tokens and not self._answers.full() and self._runtime.random.random() < self._share:
            self._answers.put_nowait(answer)

    def trusted(self, hosts: Iterable[Host]) -> list[Host]:
        """Return hosts less those that are left out."""
        now = self._runtime.now()
        return [host for host in hosts if self._left_out.get(host.peer, 0.0) <= now]

    async def run(self) -> None:
        """Check answers until cancelled."""
        while True:
            answer = await self._answers.get()
            try:
                result = await self._check(answer)
            except P2PTrainError as error:
                logger.info("an audit was given up: %s", error)
                result = "failed"
            if result:
                self.counts[result] += 1

    async def _check(self, answer: Answer) -> str:
        """Return an audit's result; empty if no stage has another host."""
        route, others = answer.route, [self._others(answer, stage) for stage in range(len(answer.route))]
        witnesses = tuple(some[0] if some else host for host, some in zip(route, others, strict=True))
        if witnesses == route:
            return ""
        known = {route: answer.tokens, witnesses: await self._again(answer, witnesses)}
        if known[witnesses] == answer.tokens:
            return "agreed"
        wrong: dict[str, int] = {}
        for stage, some in enumerate(others):
            # A host that lies now and then could cast suspicion on one of another stage, in its own route only.
            odd = [
                await self._odd_ones(answer, context, stage, [route[stage], *some[:MAX_WITNESSES]], known)
                for context in (route, witnesses)
            ]
            wrong |= dict.fromkeys(frozenset.intersection(*odd), stage)
        for host, stage in wrong.items():
            logger.warning("audit: host %s of stage %d computes other tokens than most: left out for an hour",
                           host[-8:], stage)  # fmt: skip
            self._left_out[host] = self._runtime.now() + LEFT_OUT_SECONDS
        if not wrong:
            logger.warning("audit: hosts %s and %s differ, and no majority shows who is right",
                           *(", ".join(host[-8:] for host in hosts) for hosts in (route, witnesses)))  # fmt: skip
        return "differed" if wrong else "undecided"

    async def _odd_ones(
        self, answer: Answer, route: tuple[str, ...], stage: int, hosts: Sequence[str],
        known: dict[tuple[str, ...], Tokens],
    ) -> frozenset[str]:  # fmt: skip
        """Return the hosts of one stage that most others contradict, on a route; ``known`` has answers of routes."""
        results: dict[str, Tokens] = {}
        for host in hosts:
            its = (*route[:stage], host, *route[stage + 1 :])
            with contextlib.suppress(P2PTrainError):  # A host that is lost says nothing about others.
                if its not in known:
                    known[its] = await self._again(answer, its)
                results[host] = known[its]
        return odd_ones(results)

    def _others(self, answer: Answer, stage: int) -> list[str]:
        """Return further hosts of one stage in the answer's version, in random order."""
        version, num_stages = answer.version, len(answer.route)
        found = [
            host.peer
            for host in self.trusted(self._hosts())
            if is_able(host, num_stages) and host.served.stage == stage and host.peer != answer.route[stage]
            and host.served.arithmetic == version.arithmetic
            and (version.round, version.digests[stage]) in host.served.versions
        ]  # fmt: skip
        self._runtime.random.shuffle(found)
        return found


def odd_ones(results: Mapping[str, Tokens]) -> frozenset[str]:
    """Return the hosts whose tokens are not those of more than half of them; none if no tokens are."""
    if not results:
        return frozenset()
    tokens, number = Counter(results.values()).most_common(1)[0]
    return frozenset(host for host, its in results.items() if its != tokens and 2 * number > len(results))
