"""``p2ptrain ban DIR PEER``

Throw a peer out of a swarm, whatever pass it has: members drop its records and refuse its streams as soon as they have
read the signed list, which the seed publishes within seconds. A new identity needs a new pass, so also revoke the
invite that let it in ('p2ptrain members').
"""

from __future__ import annotations

import argparse
from pathlib import Path

from p2ptrain.errors import UsageError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, metavar="DIR", help="what 'p2ptrain init' wrote")
    parser.add_argument("peer", metavar="PEER", help="the peer's id, as 'p2ptrain members' shows it")
    parser.add_argument("--undo", action="store_true", help="take the ban back")


def run(arguments: argparse.Namespace) -> int:
    from p2ptrain.cli.commands.admission.organizer import Organizer, change
    from p2ptrain.network.admission import mark
    from p2ptrain.network.link import is_peer_id

    if not is_peer_id(arguments.peer):
        raise UsageError(f"{arguments.peer!r}: give a whole peer id, which begins with Qm")
    with Organizer.at(arguments.folder) as organizer:
        organizer.publish(banned=change(organizer.revocations.banned, (mark(arguments.peer),), arguments.undo))
    return 0
