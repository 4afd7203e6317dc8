"""``p2ptrain announce DIR|FILE``

Make or renew the entry of a swarm in an index, from which 'p2ptrain list' shows public swarms. DIR is the organizer's
folder, as 'p2ptrain seed' left it: its key signs the link, the manifest, and what the swarm says of itself now. Without
--into, the entry is printed, for the host of an index; FILE is such an entry, which the host puts into an index.
An index is one JSON file: put it on any web server. An entry never holds an invite, and is shown until it expires:
renew it, such as every day. With --key the host signs the index, for readers who pin the host's key.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from p2ptrain.cli.commands.admission.invite import add_link
from p2ptrain.errors import ConfigError, UsageError

if TYPE_CHECKING:
    from p2ptrain.network.swarm_index import Entry, Index

LOOK_SECONDS = 45.0
"""Deadline of the look at the swarm; > the time in which a peer retries all bootstrap peers."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="DIR|FILE", help="the organizer's folder, or an entry that was printed")
    parser.add_argument("--into", type=Path, metavar="FILE", help="the index to write (default: print the entry)")
    parser.add_argument("--key", type=Path, metavar="FILE", help="sign the index with this key of its host")
    parser.add_argument("--expires", metavar="TIME", help="show the entry for so long, at most 30d (default 7d)")
    add_link(parser)


def run(arguments: argparse.Namespace) -> int:
    from p2ptrain.cli.running import run_async
    from p2ptrain.network.identity import Identity
    from p2ptrain.network.swarm_index import Index, read_index, to_text, with_entries

    source: str = arguments.source
    if source.startswith("p2ptrain:"):
        raise UsageError("a link cannot sign: give the organizer's folder, with --link if the link is not in it")
    if arguments.key is not None and arguments.into is None:
        raise UsageError("--key signs an index: give it with --into")
    entries: tuple[Entry, ...]
    if Path(source).is_dir():
        entries = (_announced(Path(source), arguments.link, _lifetime(arguments.expires or "7d")),)
    else:
        entries = run_async(read_index(source)).entries
        if arguments.expires or arguments.link:
            raise UsageError("--expires and --link are signed in an entry: give them with the organizer's folder")
    if arguments.into is None:
        with Identity.ephemeral() as verifier:
            index, _ = with_entries(Index(()), entries, time.time(), verifier)
        print(to_text(index).decode(), end="")
    else:
        _write(arguments.into, entries, arguments.key)
    return 0


def _lifetime(text: str) -> int:
    from p2ptrain.cli.commands.admission.invite import seconds
    from p2ptrain.network.swarm_index import MAX_LIFETIME_SECONDS

    found = seconds(text)
    if found > MAX_LIFETIME_SECONDS:
        raise UsageError(f"--expires {text}: give at most {MAX_LIFETIME_SECONDS // 86400}d, and renew the entry")
    return found


def _announced(folder: Path, link: str | None, lifetime: int) -> Entry:
    """Return a new entry of an organizer's swarm; raise `BootstrapError` if the swarm does not answer."""
    from p2ptrain.cli.commands.admission.organizer import Organizer
    from p2ptrain.cli.manifests import KEY_FILE
    from p2ptrain.cli.running import run_async
    from p2ptrain.cli.screen.swarm_view import look_once
    from p2ptrain.manifest import SIGNED_FILE
    from p2ptrain.network.identity import Identity
    from p2ptrain.network.swarm_index import Entry, sign_entry

    with Organizer.at(folder, link) as organizer:
        plain = organizer.link
    found = run_async(look_once(plain, LOOK_SECONDS)).headline
    now = int(time.time())
    entry = Entry(
        link=str(plain),
        manifest=(folder / SIGNED_FILE).read_bytes(),
        announced=now,
        expires=now + lifetime,
        health=found.health,
        peers=found.peers,
        training=found.training,
        round=found.round,
    )
    with Identity.create_or_load(folder / KEY_FILE) as key:
        return sign_entry(entry, key)


def _write(path: Path, entries: tuple[Entry, ...], key: Path | None) -> None:
    """Put entries into the index at ``path``, and sign it if its host's key is given."""
    from p2ptrain.cli.running import run_async
    from p2ptrain.disk import replace_file
    from p2ptrain.network.identity import Identity
    from p2ptrain.network.swarm_index import Index, check_host, read_index, sign_index, to_text, with_entries

    former = run_async(read_index(str(path))) if path.exists() else Index(())
    now = time.time()
    with Identity.create_or_load(key) if key is not None else Identity.ephemeral() as host:
        _check_key(path, former, host.peer_id if key is not None else "")
        check_host(former, "", host)
        index, reasons = with_entries(former, entries, now, host)
        if key is not None:
            index = sign_index(index, host, now)
    path.parent.mkdir(parents=True, exist_ok=True)
    replace_file(path, to_text(index))
    for reason in reasons:
        print(reason, file=sys.stderr)
    print(f"wrote {path}: {len(index.entries)} swarm{'s' if len(index.entries) != 1 else ''}")
    pin = f" --index-key {index.host}" if index.host else ""
    print(f"show it with: p2ptrain list --index {path}{pin}")


def _check_key(path: Path, former: Index, given: str) -> None:
    """Raise `ConfigError` if the index has a signature that this host cannot renew."""
    if former.host and former.host != given:
        does = f"--key is that of {given}" if given else "no --key is given"
        raise ConfigError(f"{path} is signed by {former.host!a}, and {does}: give its key, or begin another file")
