"""Choice of a version and of each stage's hosts for a session; pure."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from p2ptrain.network.records.serving import ServedStage
from p2ptrain.serving.messages import MAX_CANDIDATES, Version

WAITING_SECONDS = 0.01
"""Cost of one session at a host, in seconds of distance."""


class Host(NamedTuple):
    """A peer that serves a stage; ``seconds`` is the time to dial it, as far as it is known."""

    peer: str
    served: ServedStage
    seconds: float = 0.0


class Plan(NamedTuple):
    """The hosts of each stage, the best first; ``engine`` is that of the last ones' grammars, if they are needed."""

    version: Version
    route: tuple[tuple[str, ...], ...]
    engine: str = ""


def choose(
    hosts: Sequence[Host], num_stages: int, session: bytes, *, positions: int = 1, only: Version | None = None,
    engine: str | None = None,
) -> Plan | int:  # fmt: skip
    """Return the plan of a session, or the number of a stage that no host serves in a common version.

    The newest round counts that all stages have in one arithmetic. Near and idle hosts come first; the session's id
    spreads sessions over equal ones. ``positions`` is the context that the session needs. ``engine`` is that of its
    grammar; empty for the one that most hosts have, and None if it has no grammar.
    """
    able = [host for host in hosts if is_able(host, num_stages) and host.served.context >= positions]
    if engine is not None:
        engines = Counter(host.served.grammars for host in able if host.served.grammars)
        engine = engine or max(engines, key=lambda each: (engines[each], each), default="")
        able = [each for each in able if each.served.stage < num_stages - 1 or (each.served.grammars == engine != "")]
    versions: dict[tuple[int, str], dict[int, dict[bytes, list[Host]]]] = {}
    for host in able:
        for round_, digest in host.served.versions:
            stages = versions.setdefault((round_, host.served.arithmetic), {})
            stages.setdefault(host.served.stage, {}).setdefault(digest, []).append(host)
    for (round_, arithmetic), stages in sorted(versions.items(), reverse=True):
        if len(stages) < num_stages:
            continue
        # Of digests that differ, most hosts have the right one.
        digests = tuple(_agreed(stages[number]) for number in range(num_stages))
        version = Version(round_, digests, arithmetic)
        if only is not None and version != only:
            continue
        route = tuple(_ordered(stages[number][digest], session) for number, digest in enumerate(digests))
        return Plan(version, route, engine or "")
    served = {host.served.stage for host in able}
    return next((number for number in range(num_stages) if number not in served), 0)


def longest(hosts: Sequence[Host], num_stages: int) -> int:
    """Return the most positions of a session that each stage has a host for; 0 while a stage has none."""
    able = [host.served for host in hosts if is_able(host, num_stages)]
    return min(
        max((served.context for served in able if served.stage == number), default=0) for number in range(num_stages)
    )


def is_able(host: Host, num_stages: int) -> bool:
    """True if a host serves one of the model's stages."""
    return host.served.stage < host.served.num_stages == num_stages


def _agreed(hosts: dict[bytes, list[Host]]) -> bytes:
    return max(hosts, key=lambda digest: (len(hosts[digest]), digest))


def _ordered(hosts: Sequence[Host], session: bytes) -> tuple[str, ...]:
    def cost(host: Host) -> tuple[bool, float, bytes]:
        seconds = host.seconds + WAITING_SECONDS * host.served.sessions
        tie = hashlib.sha256(session + host.peer.encode()).digest()
        return not host.served.free_pages, round(seconds, 2), tie

    return tuple(host.peer for host in sorted(hosts, key=cost)[:MAX_CANDIDATES])
