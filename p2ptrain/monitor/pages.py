"""HTML pages from templates, complete without scripts; scripts only refresh them."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from functools import cache

import jinja2
import segno
from starlette.responses import HTMLResponse, Response

from p2ptrain._version import __version__
from p2ptrain.monitor.store import Store
from p2ptrain.status import formats
from p2ptrain.status.stages import coverage
from p2ptrain.status.views import PeerView, Snapshot

PLAIN_ROWS = 200
"""Rows per page of the table of peers without scripts."""
EVENTS = 30
MAX_SEARCH_CHARS = 100
LEADERS = 20
SHOWN_ROUNDS = 12
MAX_NAMED_MEMBERS = 400
"""Largest number of peers in the groups at which the picture names them."""


TEMPLATES = jinja2.Environment(
    loader=jinja2.PackageLoader("p2ptrain.monitor"), autoescape=True, undefined=jinja2.StrictUndefined,
    trim_blocks=True, lstrip_blocks=True,
)  # fmt: skip
TEMPLATES.filters.update(formats.FILTERS)
TEMPLATES.globals["version"] = __version__


class Pages:
    def __init__(self, store: Store) -> None:
        self._store = store
        self._plain: tuple[Snapshot, str] | None = None

    async def index(self, snapshot: Snapshot, asked: Mapping[str, str]) -> Response:
        """Return the status page for the query parameters ``page``, counted from 1, and ``search``."""
        is_plain = not {"search", "page"} & set(asked)
        if is_plain and self._plain is not None and self._plain[0] is snapshot:
            return _html(self._plain[1])  # Cached until the next snapshot.
        search = asked.get("search", "")[:MAX_SEARCH_CHARS]
        peers = matching(snapshot.peers, search)
        pages = max(1, -(-len(peers) // PLAIN_ROWS))
        text = asked.get("page", "1")
        page = min(pages, max(1, int(text) if text.isascii() and text.isdigit() and len(text) < 8 else 1))
        text_of_page = await asyncio.to_thread(  # Rendering would block the event loop for long.
            TEMPLATES.get_template("index.html").render,
            snapshot=snapshot,
            peers=peers[(page - 1) * PLAIN_ROWS : page * PLAIN_ROWS],
            found=len(peers),
            coverage=coverage(snapshot),
            rounds=snapshot.rounds[:SHOWN_ROUNDS],
            num_grouped=sum(len(group.members) for group in snapshot.groups),
            max_named=MAX_NAMED_MEMBERS,
            names={peer.record.peer: peer.name for peer in snapshot.peers},
            page=page,
            pages=pages,
            search=search,
            events=await self._store.events(0.0, EVENTS),
            leaders=await self._store.leaders(LEADERS),
            qr_code=qr_code(snapshot.swarm.link),
        )
        if is_plain:
            self._plain = (snapshot, text_of_page)
        return _html(text_of_page)

    async def peer(self, snapshot: Snapshot, peer: PeerView) -> Response:
        contribution = await self._store.contribution(peer.record.peer)
        values = {"snapshot": snapshot, "peer": peer, "contribution": contribution}
        return _html(TEMPLATES.get_template("peer.html").render(values))

    async def departed(self, snapshot: Snapshot, peer: str) -> Response | None:
        """Return a page about a departed peer; None if the history does not know it."""
        contribution = await self._store.contribution(peer)
        events = await self._store.events_of(peer, EVENTS)
        if contribution is None and not events:
            return None
        name = contribution.name if contribution else peer[-8:]
        values = {"snapshot": snapshot, "peer": peer, "name": name, "contribution": contribution, "events": events}
        return _html(TEMPLATES.get_template("departed.html").render(values))


def matching(peers: Sequence[PeerView], search: str) -> list[PeerView]:
    """Return the peers whose name, id, role or state contains a text, ignoring case."""
    wanted = search.casefold()
    return [
        peer
        for peer in peers
        if wanted in f"{peer.name} {peer.record.peer} {peer.record.role} {peer.record.state}".casefold()
    ]


def _html(text: str) -> Response:
    return HTMLResponse(text, headers={"cache-control": "no-cache"})


@cache
def qr_code(text: str) -> str:
    """Return a QR code as SVG, as large as its parent; empty if the text is too long."""
    try:
        code = segno.make(text, error="l", micro=False)
    except segno.DataOverflowError:
        return ""
    markup: str = code.svg_inline(light="white", svgclass=None, lineclass=None, omitsize=True)
    return markup
