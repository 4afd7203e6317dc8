"""``p2ptrain list --index FILE|URL``

Show the public swarms of an index: model, what a peer needs, members and health, admission, organizer. The organizer of
each swarm signed its entry; one that is changed, expired or not signed is shown as refused. Members and health are as
the organizer last announced them; with --live each swarm is asked itself, as 'p2ptrain status' does, and joined by
nobody. To take part, run the 'p2ptrain join' that is printed: it shows what it will do, and asks. No link here lets
anybody into a swarm by invite: ask its organizer for one.
The address is https, or http on this machine. --index-key is the key of the index's host: what the host did not sign
is then refused.
"""

from __future__ import annotations

import argparse
import json
import time
from typing import TYPE_CHECKING, Any

from p2ptrain.errors import IntegrityError, P2PTrainError, UsageError

if TYPE_CHECKING:
    from p2ptrain.cli.terms import Needs
    from p2ptrain.network.swarm_index import Index, Listed
    from p2ptrain.status.views import Headline

MAX_TEXT_CHARS, MAX_REASON_CHARS = 80, 400
LIVE_SECONDS, LIVE_AT_ONCE = 20.0, 4
"""Deadline of the look at one swarm, and how many looks run at a time."""
ALL_LIVE_SECONDS = 120.0
"""Deadline of all looks together; swarms beyond it are not asked."""

Live = dict[bytes, "Headline | str"]
"""By digest: a swarm's headline, or why there is none."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--index", required=True, metavar="FILE|URL", help="the index: a file, or an https address")
    parser.add_argument("--index-key", default="", metavar="ID", help="the peer id of the key that must have signed it")
    parser.add_argument("--live", action="store_true", help="ask each swarm how it is now")
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    from p2ptrain.cli.running import run_async
    from p2ptrain.network.identity import Identity
    from p2ptrain.network.link import is_peer_id
    from p2ptrain.network.swarm_index import check_host, read_index, verify_entry

    if arguments.index_key and not is_peer_id(arguments.index_key):
        raise UsageError(f"--index-key {arguments.index_key[:80]!a}: give a whole peer id, which begins with Qm")
    index, now = run_async(read_index(arguments.index)), time.time()
    found: list[Listed] = []
    refused: list[tuple[int, str]] = []
    with Identity.ephemeral() as verifier:
        check_host(index, arguments.index_key, verifier)
        for number, entry in enumerate(index.entries, 1):
            try:
                found.append(verify_entry(entry, now, verifier))
            except IntegrityError as error:
                refused.append((number, str(error)[:MAX_REASON_CHARS]))
    live = run_async(_ask_all(found)) if arguments.live else {}
    if arguments.json:
        print(json.dumps(_values(index, found, refused, live), indent=2))
    else:
        print("\n".join(_lines(index, found, refused, live, now)))
    return 0


async def _ask_all(found: list[Listed]) -> Live:
    """Return the state of each swarm now, asked `LIVE_AT_ONCE` at a time."""
    import asyncio
    import contextlib

    from p2ptrain.cli.screen.swarm_view import look_once
    from p2ptrain.tasks import together

    live: Live = {each.link.digest: "not asked: too many swarms before it" for each in found}
    places = asyncio.Semaphore(LIVE_AT_ONCE)

    async def ask(listed: Listed) -> None:
        async with places:
            try:
                live[listed.link.digest] = (await look_once(listed.link, LIVE_SECONDS)).headline
            except P2PTrainError as error:
                live[listed.link.digest] = str(error)[:MAX_REASON_CHARS]

    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(ALL_LIVE_SECONDS):
            await together("look", map(ask, found))
    return live


def _needs(listed: Listed) -> Needs | str:
    """Return what a peer needs, or why this machine cannot tell."""
    from p2ptrain.cli.commands.join import check_compatible
    from p2ptrain.cli.terms import needs_of

    try:
        check_compatible(listed.manifest)
        return needs_of(listed.manifest)
    except P2PTrainError as error:
        return str(error)[:MAX_REASON_CHARS]


def _lines(index: Index, found: list[Listed], refused: list[tuple[int, str]], live: Live, now: float) -> list[str]:
    from p2ptrain.cli.screen.table import printable
    from p2ptrain.status.formats import human_seconds

    by = f", signed by {index.host} {human_seconds(max(0, now - index.issued))} ago" if index.host else ""
    lines = [f"{len(found)} swarm{'s' if len(found) != 1 else ''}{by}", ""]
    for each in found:
        lines += [*_swarm_lines(each, live.get(each.link.digest), now), ""]
    lines += [f"refused: entry {number}: {reason}" for number, reason in refused]
    return [printable(line) for line in lines]


def _swarm_lines(listed: Listed, live: Headline | str | None, now: float) -> list[str]:
    import shlex

    from p2ptrain.status.formats import human_count, human_seconds

    manifest, entry = listed.manifest, listed.entry
    needs = _needs(listed)
    size = f", {human_count(needs.parameters)} parameters" if not isinstance(needs, str) else ""
    cut = " in stages" if manifest.in_stages else ""
    begins = f", begins with {manifest.model.weights[:MAX_TEXT_CHARS]!a}" if manifest.model.weights else ""
    age = human_seconds(max(0, now - entry.announced))
    lines = [
        f"{manifest.name}",
        f"  model      {manifest.model.family}{cut}{size}{begins}; reads {manifest.data.source[:MAX_TEXT_CHARS]!a}",
        f"  announced  {_state(entry.health, entry.training, entry.peers, entry.round)}; {age} ago",
    ]
    if live is not None:
        now_it_is = live if isinstance(live, str) else _state(live.health, live.training, live.peers, live.round)
        lines.append(f"  now        {now_it_is}")
    return [
        *lines,
        f"  needs      {needs if isinstance(needs, str) else _needs_text(needs, listed)}",
        f"  admission  {_ADMISSION[manifest.admission.mode]}",
        f"  organizer  {manifest.organizer}",
        *([] if manifest.admission.mode == "invite" else [f"  p2ptrain join {shlex.quote(str(listed.link))}"]),
    ]


_ADMISSION = {
    "open": "open: everybody, after a puzzle",
    "invite": "invite: ask the organizer for a link that lets you in",
    "allowlist": "allowlist: ask the organizer to name your peer",
}


def _state(health: str, training: int, peers: int, round_: int) -> str:
    return f"{health}: {training} of {peers} peer{'s' if peers != 1 else ''} train, round {round_}"


def _needs_text(needs: Needs, listed: Listed) -> str:
    from p2ptrain.status.formats import human_bytes

    manifest = listed.manifest
    steps = (
        "after each global batch"
        if manifest.training.every == 1
        else f"every {manifest.training.steps_per_round} steps"
    )
    traffic = (
        f"{human_bytes(needs.round_bytes)} each way {steps}" if needs.round_bytes is not None
        else f"{manifest.averaging.codec} updates {steps}"
    )  # fmt: skip
    if manifest.in_stages:
        traffic += f", and {manifest.pipeline.codec} activations"
    return (
        f"{human_bytes(needs.memory)} of memory, {human_bytes(needs.disk)} of disk, no GPU needed;"
        f" downloads {human_bytes(needs.download)}, then {traffic}"
    )


def _values(index: Index, found: list[Listed], refused: list[tuple[int, str]], live: Live) -> dict[str, Any]:
    """Return the output of --json."""
    return {
        "host": index.host,
        "issued": index.issued,
        "swarms": [_swarm_values(each, live.get(each.link.digest)) for each in found],
        "refused": [{"entry": number, "reason": reason} for number, reason in refused],
    }


def _swarm_values(listed: Listed, live: Headline | str | None) -> dict[str, Any]:
    from dataclasses import asdict

    from p2ptrain.status.views import plain

    manifest, entry, needs = listed.manifest, listed.entry, _needs(listed)
    return {
        "name": manifest.name,
        "digest": listed.link.digest.hex(),
        "link": str(listed.link),
        "organizer": manifest.organizer,
        "admission": manifest.admission.mode,
        "manifest": manifest.model_dump(mode="json"),
        "needs": asdict(needs) if not isinstance(needs, str) else None,
        "unfit": needs if isinstance(needs, str) else "",
        "announced": {
            "at": entry.announced, "expires": entry.expires, "health": entry.health, "peers": entry.peers,
            "training": entry.training, "round": entry.round,
        },
        "live": {"error": live} if isinstance(live, str) else plain(live) if live is not None else None,
    }  # fmt: skip
