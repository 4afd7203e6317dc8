"""``p2ptrain invite DIR``

Print a new link that lets people into the swarm that DIR/run.toml describes, and the invite's id, by which 'p2ptrain
revoke' knows it. Everybody who has the link is let in, until it expires or is revoked. With --peer, the link carries a
pass for that peer alone, and is no secret. An issuer whose key the manifest names runs it with the organizer's
manifest.bin and its own organizer.key in DIR.
"""

from __future__ import annotations

import argparse
import re
import time
from pathlib import Path

from p2ptrain.errors import UsageError

_UNITS = {"m": 60, "h": 3600, "d": 86400, "w": 604800}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folder", type=Path, metavar="DIR", help="what 'p2ptrain init' wrote, once 'seed' has signed it"
    )
    parser.add_argument(
        "--expires", metavar="TIME", default="", help="admit for so long, such as 12h or 7d (default: until revoked)"
    )
    parser.add_argument(
        "--cap", type=int, default=0, metavar="TOKENS", help="the most that a contribution weighs (default: no limit)"
    )
    parser.add_argument("--peer", default="", metavar="ID", help="admit this peer alone")
    add_link(parser)


def add_link(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--link", metavar="LINK", help="a link of the swarm (default: DIR/bootstrap/link.txt)")


def run(arguments: argparse.Namespace) -> int:
    import secrets
    from dataclasses import replace

    from p2ptrain.cli.commands.admission.organizer import Organizer
    from p2ptrain.network.admission import mark
    from p2ptrain.network.link import is_peer_id
    from p2ptrain.network.schema import to_bytes

    if arguments.peer and not is_peer_id(arguments.peer):
        raise UsageError(f"--peer {arguments.peer!r}: give a whole peer id, which begins with Qm")
    if arguments.cap < 0:
        raise UsageError(f"--cap {arguments.cap}: give a number of tokens above 0")
    expires = int(time.time()) + seconds(arguments.expires) if arguments.expires else 0
    with Organizer.at(arguments.folder, arguments.link) as organizer:
        if not arguments.peer and organizer.manifest.admission.mode != "invite":
            raise UsageError(
                f"admission.mode is {organizer.manifest.admission.mode!r}: an invite would admit nobody; give --peer"
            )
        if arguments.peer:
            print(f"admits peer {arguments.peer}:\n")
            invite = to_bytes(organizer.issuer.pass_for(arguments.peer, expires, arguments.cap))
        else:
            found = organizer.issuer.invite(secrets.token_bytes(32), expires, arguments.cap)
            print(f"invite {mark(found.key).hex()} admits everybody who has this link:\n")
            invite = to_bytes(found)
        print(replace(organizer.link, invite=invite))
    return 0


def seconds(text: str) -> int:
    """Return the seconds of a text such as ``7d``; raise `UsageError` if it is none."""
    match = re.fullmatch(r"(\d{1,6})([mhdw])", text)
    if match is None or not int(match[1]):
        raise UsageError(f"--expires {text!r}: give a time such as 30m, 12h, 7d or 4w")
    return int(match[1]) * _UNITS[match[2]]
