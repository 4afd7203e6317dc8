"""Choice of a version and of each stage's hosts for a session; pure."""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import median
from typing import NamedTuple

from p2ptrain.buffers import Bounded
from p2ptrain.models.exact import PAGE
from p2ptrain.network.records.serving import ServedStage
from p2ptrain.serving.messages import MAX_CANDIDATES, Version

UNKNOWN_ROW_SECONDS = 0.01
"""Time of a row of a batch while no host has told any."""
LEARNED, FORGET_SECONDS = 0.5, 600.0
"""Share of a route's excess that one answer tells, and the half-life of what was learned."""
MAX_PACES = 4096
LEAST_SECONDS, RESOLUTION = 0.001, 0.1
"""Times of a token below which hosts are equal, and the relative difference within which they are."""
ROW_SECONDS, MOST_GAIN_SECONDS = 0.0005, 0.2
"""Gain of a row that a host need not compute, and of all such rows at most: prefixes do not crowd a host."""
MAX_RECENT_PAGES = 16384


class Host(NamedTuple):
    """A peer that serves a stage.

    Attributes:
        seconds: The round trip to it; None if this client has not dialled it.
        excess: See `Paces`.
        drafts: Tokens that it drafted, and those of them that were drawn then.
    """

    peer: str
    served: ServedStage
    seconds: float | None = None
    excess: float = 0.0
    drafts: tuple[int, int] = (0, 0)


class Plan(NamedTuple):
    """The hosts of each stage, the best first; ``engine`` is that of the last ones' grammars, if they are needed."""

    version: Version
    route: tuple[tuple[str, ...], ...]
    engine: str = ""


class Prefix(NamedTuple):
    """The first ``rows`` tokens of a prompt; ``route`` has the host of each stage that computed them last."""

    rows: int
    route: tuple[str, ...]


class Needs(NamedTuple):
    """The demands of a session on its hosts.

    Attributes:
        positions: The context that it needs.
        engine: Of its grammar; empty for the one that most hosts have, and None if it has no grammar.
        prefix: Of its prompt.
        among: The only hosts that it may have; None for any.
        without: Hosts that it may not have.
    """

    positions: int = 1
    engine: str | None = None
    prefix: Prefix | None = None
    among: frozenset[str] | None = None
    without: frozenset[str] = frozenset()


ANY = Needs()


class RecentPrefixes:
    """Where this client's recent prompts were computed, by their pages; the least recently used are forgotten."""

    def __init__(self, most: int = MAX_RECENT_PAGES) -> None:
        self._routes = Bounded[tuple[bytes, bytes], tuple[str, ...]](most)

    def note(self, salt: bytes, pages: Sequence[bytes], route: tuple[str, ...]) -> None:
        """Remember the route of a prompt's pages, given by their hashes."""
        for page in reversed(pages):  # The first pages are of most use.
            self._routes[salt, page] = route

    def find(self, salt: bytes, pages: Sequence[bytes]) -> Prefix | None:
        """Return the longest known prefix of a prompt."""
        known = (number for number in range(len(pages), 0, -1) if (salt, pages[number - 1]) in self._routes)
        number = next(known, 0)
        return Prefix(number * PAGE, self._routes[salt, pages[number - 1]]) if number else None


class Paces:
    """By how much hosts are slower than they claim, from the pace of whole routes.

    A route's excess is spread over its hosts evenly (Kaczmarz's method), and honest ones lose it in other routes. So a
    claim is only what a client believes first.
    """

    def __init__(self) -> None:
        self._excess = Bounded[str, tuple[float, float]](MAX_PACES)

    def excess(self, peer: str, now: float) -> float:
        """Return the seconds that a token takes at a host beyond the expected ones."""
        seconds, at = self._excess.get(peer, (0.0, now))
        return seconds * math.exp2((at - now) / FORGET_SECONDS)

    def note(self, expected: Mapping[str, float], seconds: float, now: float) -> None:
        """Record the seconds of a token on a route; ``expected`` has those of each host, with its excess."""
        error = LEARNED * (seconds - sum(expected.values())) / len(expected)
        for peer in expected:
            self._excess[peer] = (max(0.0, self.excess(peer, now) + error), now)


def expected(hosts: Sequence[Host]) -> dict[str, float]:
    """Return the seconds that the next session's token takes at each host: round trip, batch and queue.

    A batch has a row of each session. A row waits for half of the batch before. What is unknown of a host is the median
    of the others', so nobody gains by telling nothing.
    """

    def usual(values: Sequence[float | None], default: float) -> float:
        return median(known) if (known := [each for each in values if each]) else default

    trip = usual([host.seconds for host in hosts], 0.0)
    base = usual([host.served.base_seconds for host in hosts], 0.0)
    row = usual([host.served.row_seconds for host in hosts], UNKNOWN_ROW_SECONDS)
    found: dict[str, float] = {}
    for host in hosts:
        served, round_trip = host.served, trip if host.seconds is None else host.seconds
        now = (served.base_seconds or base) + (served.row_seconds or row) * served.sessions
        batch = now + (served.row_seconds or row)
        found[host.peer] = round_trip + batch + (now / 2 if served.sessions else 0.0) + host.excess
    return found


def choose(
    hosts: Sequence[Host], num_stages: int, session: bytes, needs: Needs = ANY, *, only: Version | None = None
) -> Plan | int:
    """Return the plan of a session, or the number of a stage that no host serves in a common version.

    The newest round counts that all stages have in one arithmetic; where the model has one stage, the newest that most
    hosts have reached, because nothing else holds against a single record of a huge round. Hosts come first that are
    `expected` to take least for a token; the session's id spreads sessions over equal ones. A host that computed the
    prompt's prefix comes before others that are not much better.
    """
    able = [host for host in hosts if is_able(host, num_stages) and host.served.context >= needs.positions]
    able = [host for host in able if host.peer not in needs.without]
    if needs.among is not None:
        able = [host for host in able if host.peer in needs.among]
    if (engine := needs.engine) is not None:
        engines = Counter(host.served.grammars for host in able if host.served.grammars)
        engine = engine or max(engines, key=lambda each: (engines[each], each), default="")
        able = [each for each in able if each.served.stage < num_stages - 1 or (each.served.grammars == engine != "")]
    versions: dict[tuple[int, str], dict[int, dict[bytes, list[Host]]]] = {}
    for host in able:
        for round_, digest in host.served.versions:
            stages = versions.setdefault((round_, host.served.arithmetic), {})
            stages.setdefault(host.served.stage, {}).setdefault(digest, []).append(host)
    most = _reached(able) if num_stages == 1 else math.inf
    seconds = expected(able)
    newest = sorted(versions.items(), key=lambda each: (each[0][0] <= most, each[0]), reverse=True)
    for (round_, arithmetic), stages in newest:
        if len(stages) < num_stages:
            continue
        # Of digests that differ, most hosts have the right one.
        digests = tuple(_agreed(stages[number]) for number in range(num_stages))
        version = Version(round_, digests, arithmetic)
        if only is not None and version != only:
            continue
        found = (stages[number][digest] for number, digest in enumerate(digests))
        return Plan(version, tuple(_ordered(each, session, needs.prefix, seconds) for each in found), engine or "")
    served = {host.served.stage for host in able}
    return next((number for number in range(num_stages) if number not in served), 0)


def sides(hosts: Sequence[Host], num_stages: int) -> list[set[str]]:
    """Return the arithmetics of each stage's hosts if all stages have some, and none in common; else nothing."""
    found: list[set[str]] = [set() for _ in range(num_stages)]
    for host in hosts:
        if is_able(host, num_stages) and host.served.versions:
            found[host.served.stage].add(host.served.arithmetic)
    return found if all(found) and not set.intersection(*found) else []


def longest(hosts: Sequence[Host], num_stages: int) -> int:
    """Return the most positions of a session that each stage has a host for; 0 while a stage has none."""
    able = [host.served for host in hosts if is_able(host, num_stages)]
    return min(
        max((served.context for served in able if served.stage == number), default=0) for number in range(num_stages)
    )


def is_able(host: Host, num_stages: int) -> bool:
    """True if a host serves one of the model's stages."""
    return host.served.stage < host.served.num_stages == num_stages


def _reached(hosts: Sequence[Host]) -> int:
    """Return the newest round that most hosts serve, or one beyond it; of two hosts, both."""
    rounds = sorted(max(round_ for round_, _ in host.served.versions) for host in hosts if host.served.versions)
    return rounds[(len(rounds) - 1) // 2] if rounds else 0


def _agreed(hosts: dict[bytes, list[Host]]) -> bytes:
    return max(hosts, key=lambda digest: (len(hosts[digest]), digest))


def _ordered(
    hosts: Sequence[Host], session: bytes, prefix: Prefix | None, expected: Mapping[str, float]
) -> tuple[str, ...]:
    def cost(host: Host) -> tuple[bool, int, bytes]:
        seconds = expected[host.peer]
        if prefix is not None and host.peer in prefix.route:
            seconds -= min(ROW_SECONDS * prefix.rows, MOST_GAIN_SECONDS)
        tie = hashlib.sha256(session + host.peer.encode()).digest()
        return not host.served.free_pages, round(math.log(max(seconds, LEAST_SECONDS)) / RESOLUTION), tie

    return tuple(host.peer for host in sorted(hosts, key=cost)[:MAX_CANDIDATES])
