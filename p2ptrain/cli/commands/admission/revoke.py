"""``p2ptrain revoke DIR INVITE|PEER``

Make an invite worthless, by its link or its id (see 'p2ptrain members'), or all passes of a peer. Peers that an invite
let in stay: they are looked up in the swarm. The seed publishes the signed list within seconds, if it runs in DIR;
other seeds need a copy of DIR/revoked.bin. Start the seed again after revoking the invite of its own link.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from p2ptrain.cli.commands.admission.invite import add_link


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, metavar="DIR", help="what 'p2ptrain init' wrote")
    parser.add_argument("target", metavar="INVITE|PEER", help="an invite link, an invite's id, or a peer's id")
    parser.add_argument("--undo", action="store_true", help="let it count again")
    parser.add_argument("--nobody-stays", action="store_true", help="throw out the peers that the invite let in")
    add_link(parser)


def run(arguments: argparse.Namespace) -> int:
    from p2ptrain.cli.commands.admission.organizer import Organizer, change, mark_of
    from p2ptrain.cli.running import run_async
    from p2ptrain.network.link import is_peer_id

    target = mark_of(arguments.target)
    stay: tuple[bytes, ...] = ()
    with Organizer.at(arguments.folder, arguments.link) as organizer:
        if not (is_peer_id(arguments.target) or arguments.undo or arguments.nobody_stays):
            stay = run_async(organizer.invited_by(target))
            print(f"{len(stay)} peers that the invite let in stay")
        old = organizer.revocations
        organizer.publish(revoked=change(old.revoked, (target,), arguments.undo), stay=change(old.stay, stay, False))
    return 0
