"""Helpers of commands: the event loop, a peer with its live view, confirmation."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from p2ptrain.errors import UsageError

if TYPE_CHECKING:
    from p2ptrain.cli.screen.peer_view import PeerScreen
    from p2ptrain.config import PeerConfig
    from p2ptrain.manifest import SignedManifest

T = TypeVar("T")


def run_async(coroutine: Coroutine[Any, Any, T]) -> T:
    import uvloop

    return uvloop.run(coroutine)


def run_configured_peer(
    config: PeerConfig, signed: SignedManifest | None = None, announce: str = "", link_file: Path | None = None
) -> int:
    """Run a peer until it ends, with a live view on a terminal; return the exit code.

    The peer's link is printed and written to ``link.txt`` in its run directory.

    Args:
        signed: The manifest, if already known.
        announce: Text before the printed link; if given, the link is quoted for a shell.
        link_file: Another path for the link.
    """
    from p2ptrain.cli.manifests import LINK_FILE
    from p2ptrain.disk import replace_file
    from p2ptrain.network.link import SwarmLink
    from p2ptrain.node.run import run_peer

    view: PeerScreen | None = None

    def on_ready(link: str) -> None:
        for path in (config.run_dir / LINK_FILE, *([link_file] if link_file else [])):
            path.parent.mkdir(parents=True, exist_ok=True)
            replace_file(path, f"{link}\n".encode(), mode=0o600)  # An invite is in it.
        # A link with two addresses contains an ampersand.
        text = f"{announce}{shlex.quote(link)}\n" if announce else link
        if announce and (plain := str(SwarmLink.parse(link).plain)) != link:
            text += (
                f"\nthat link lets people in; this one only shows the swarm:\n\np2ptrain status {shlex.quote(plain)}\n"
            )
        if view is not None and sys.stdout.isatty():
            view.screen.say(text)
        else:
            print(text, flush=True)

    async def run() -> int:
        nonlocal view
        if sys.stderr.isatty():
            from p2ptrain.cli.screen.peer_view import view_for

            view = view_for(config.name or "this peer", config.log.format)
        if view is None:
            return await run_peer(config, signed_manifest=signed, on_ready=on_ready)
        async with view:
            return await run_peer(
                config, signed_manifest=signed, signals=view.signals, on_start=view.follow, on_ready=on_ready
            )

    return run_async(run())


def confirm(question: str, *, assume_yes: bool) -> bool:
    """Ask a yes-or-no question once; raise `UsageError` if there is neither a terminal nor ``assume_yes``."""
    if assume_yes:
        return True
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        raise UsageError("there is no terminal to ask at: read the above, then add --yes")
    try:
        return input(f"{question} [y/N] ").strip().lower() in ("y", "yes")
    except EOFError:  # Ctrl-D
        print()
        return False


def default_run_dir(kind: str) -> Path:
    return Path("runs") / kind
