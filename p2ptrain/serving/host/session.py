"""One session's part on one host: its rows, its pages, and its present caller."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence

import torch

from p2ptrain.errors import ProtocolError
from p2ptrain.models.exact import PAGE, ExactStage, Part
from p2ptrain.network.rpc.channel import Channel
from p2ptrain.serving.host.meter import Meter
from p2ptrain.serving.host.pool import Pages, key_of
from p2ptrain.serving.host.scheduler import Waiting
from p2ptrain.serving.journal import Journal
from p2ptrain.serving.messages import AHEAD, Cause, DrawnToken, Failed, Moved, Open, Ticket
from p2ptrain.serving.prefix import MAX_PREFIX_PAGES, next_hash
from p2ptrain.serving.sampling import Drawn

BEAT_SECONDS = 0.25
"""Keepalive interval of a host; < `p2ptrain.serving.link.QUIET_SECONDS`."""
KEPT_ROWS = 2 * AHEAD
"""Outputs that the last stage keeps; > the tokens that the client may lack, which a substitute draws again."""

Key = tuple[int, bytes]
"""Round and digest of weights."""


class HostSession:
    """The state of one session on one stage. Rows are received in order, computed in order, and never twice.

    Attributes:
        key: The weights.
        ids: The tokens of all received rows.
        computed: Rows computed.
        cached: Rows of them that were found in prefix pages.
        epoch: Of the present or last caller.
        channel: The caller's; None while the session has no caller.
        is_shadow: True if another host serves the session: its rows wait for all others, and no token is drawn.
        later: Hosts of later stages, by stage.
        journal: Outputs for the next stage; without rows on the last stage.
        tokens: The last stage's tokens, by position.
        feed: The first stage's host.
        failure: Why the session is over; None while it lasts.
        linking: Supplies the next stage.
        ends: Called when the session ends.
        link_failure: Why the next stage has no host; None while it has one.
        news: Set by the next change that the caller is told, which replaces it.
        drawn: Set by the next token, grant or failure, which replaces it.
    """

    def __init__(self, ticket: Ticket, key: Key, pages: Pages, stage: ExactStage, meter: Meter | None) -> None:
        """``meter`` counts the last stage's tokens; None on other stages."""
        self.ticket = ticket
        self.key = key
        self.pages = pages
        self.is_last = meter is not None
        self.ids: list[int] = []
        self.epoch: tuple[int, ...] = ()
        self.channel: Channel | None = None
        self.is_shadow = False
        self.later: dict[int, str] = {}
        self.journal = Journal(width=0 if self.is_last else stage.hidden)
        self.tokens: dict[int, Drawn] = {}
        self.feed = ""
        self.failure: Failed | None = None
        self.linking: asyncio.Task[None] | None = None
        self.ends: list[Callable[[], object]] = []
        self.link_failure: Failed | None = None
        self.news = asyncio.Event()
        self.drawn = asyncio.Event()
        self._until = ticket.prompt + AHEAD
        self._wanted_from: int | None = None
        self._fed: dict[int, int] = {}
        self._rows: list[torch.Tensor] = []
        self._finals: dict[int, torch.Tensor] = {}
        self._meter = meter
        self._is_counted = False
        self._vocabulary = stage.vocabulary
        self._since = self._drawn_at = asyncio.get_running_loop().time()
        for page in pages.found:
            self.ids += page.ids
            if not self.is_last:
                self.journal.append(page.ids, page.outputs)
        self.cached = self.computed = len(self.ids)
        self._num_shared = len(pages.found)
        self._hash = pages.found[-1].key.hash if pages.found else b""

    # Rows

    def put(self, first: int, ids: Sequence[int], rows: torch.Tensor) -> None:
        """Take rows from position ``first`` on, less those that it has.

        ``rows`` are ids ``[rows]`` on the first stage, hidden states ``[rows, hidden]`` on later ones.

        Raises:
            ProtocolError: Rows before them are missing, they exceed ticket or vocabulary, or differ from those it has.
        """
        end, peer = len(self.ids), self.ticket.client
        if first > end:
            raise ProtocolError(peer, f"rows from position {first} on, and those from {end} on are missing")
        if first + len(ids) > self.ticket.num_positions:
            raise ProtocolError(peer, f"more rows than the {self.ticket.num_positions} of its ticket")
        if max(ids) >= self._vocabulary:
            raise ProtocolError(peer, f"token {max(ids)} of a vocabulary of {self._vocabulary}")
        if list(ids[: end - first]) != self.ids[first : first + len(ids)]:
            raise ProtocolError(peer, "other tokens than before at the same positions")
        for position, id in enumerate(ids[end - first :], end):
            if position in self.tokens and self.tokens[position].id != id:
                raise ProtocolError(peer, f"another token at position {position} than was drawn")
        if first + len(ids) > end:
            if end == self.computed:
                self._since = asyncio.get_running_loop().time()
            self._rows.append(rows[end - first :])
            self.ids += ids[end - first :]

    def put_fed(self, fed: Mapping[int, int]) -> None:
        """Take drawn tokens on the first stage, which may arrive before the rows before them."""
        self._fed.update((at, id) for at, id in fed.items() if len(self.ids) <= at < len(self.ids) + 2 * AHEAD)
        while len(self.ids) < self.ticket.num_positions and (id := self._fed.pop(len(self.ids), None)) is not None:
            self.put(len(self.ids), [id], torch.tensor([id]))

    def waiting(self) -> Waiting | None:
        """Return what is to be computed; None if nothing is."""
        rows = len(self.ids) - self.computed
        if self.failure is not None or not (rows or self.draws_after(0)):
            return None
        return Waiting(rows, rows > 1, self._since, self.is_shadow)

    def take(self, rows: int) -> tuple[Part, torch.Tensor]:
        """Remove ``rows`` rows for a batch; `done` follows before the next `take`."""
        taken: list[torch.Tensor] = []
        left = rows
        while left:
            head = self._rows.pop(0)
            if len(head) > left:
                self._rows.insert(0, head[left:])
            taken.append(head[:left])
            left -= len(taken[-1])
        return Part(rows, self.computed, self.pages.numbers), torch.cat(taken) if taken else torch.empty(0)

    def draws_after(self, rows: int) -> list[int]:
        """Return the positions of the tokens that the last stage draws once ``rows`` more rows are computed.

        That is the token after all rows, if it is granted, and those that a host before this one drew and the client
        lacks.
        """
        if not self.is_last or self.is_shadow:
            return []
        ticket, computed = self.ticket, self.computed + rows
        again: list[int] = []
        if self._wanted_from is not None:
            first = max(self._wanted_from, ticket.prompt, self.computed - KEPT_ROWS + 1)
            known = range(first, min(computed + 1, len(self.ids)))
            again = [each for each in known if each not in self.tokens and self._has_final(each - 1)]
        is_next = computed == len(self.ids) and computed not in self.tokens
        is_granted = ticket.prompt <= computed < min(self._until, ticket.prompt + ticket.max_tokens)
        if is_next and is_granted and not (computed > ticket.prompt and self.ids[-1] in ticket.stops):
            return [*again, computed]
        return again

    def final(self, position: int) -> torch.Tensor | None:
        """Return the last stage's output ``[1, hidden]`` of a row; None if it is computed next."""
        return self._finals.get(position)

    def _has_final(self, position: int) -> bool:
        return position >= self.computed or position in self._finals

    def done(self, rows: int, outputs: torch.Tensor, drawn: Mapping[int, Drawn]) -> None:
        """Record computed rows with their outputs, and the tokens drawn after them."""
        first, self.computed = self.computed, self.computed + rows
        self._since = now = asyncio.get_running_loop().time()
        if not self.is_last and rows:
            self.journal.append(self.ids[first : self.computed], outputs.numpy().tobytes())
        elif rows:
            kept = range(max(first, self.computed - KEPT_ROWS), self.computed)
            self._finals.update((at, outputs[at - first : at - first + 1].clone()) for at in kept)
            self._finals = {at: row for at, row in self._finals.items() if at >= self.computed - KEPT_ROWS}
        for position, token in drawn.items():
            if position < len(self.ids) and self.ids[position] != token.id:
                self.fail(Failed(len(self.epoch) - 1, Cause.BROKEN, "this host draws other tokens than one before it"))
            if self._meter is not None and position >= len(self.ids):
                self._meter.count_token(now - self._drawn_at, is_first=position == self.ticket.given)
                self._drawn_at = now
            self.tokens[position] = token
        if drawn:
            self._tell_drawn()
        self.tell()
        if self.failure is None:
            self.share(self.ticket.prompt)  # Nothing trims a session to less than its prompt.

    def share(self, stop: int) -> None:
        """Share the full pages of the computed rows before ``stop`` with later sessions; they do not change again.

        A caller that sent other tokens of the prompt than the client's ticket names leaves no page behind.
        """
        signed = self.ticket.pages
        for index in range(self._num_shared, min(stop, self.computed, MAX_PREFIX_PAGES * PAGE) // PAGE):
            first = index * PAGE
            ids = self.ids[first : first + PAGE]
            page_hash = next_hash(self._hash, ids)
            if index < len(signed) and signed[index] != page_hash:
                return
            outputs = self.journal.rows(first, first + PAGE)
            self.pages.pool.share(self.pages, index, key_of(self.ticket, page_hash), ids, outputs)
            self._hash, self._num_shared = page_hash, index + 1

    # The client, on the last stage

    def listen(self, start: int) -> None:
        """Set the first token that the client lacks."""
        self._wanted_from = start

    def grant(self, until: int, feed: str) -> None:
        """Permit the last stage to draw the tokens before ``until``, and feed them to ``feed``."""
        self._until = max(self._until, until)
        self.feed = feed
        self._tell_drawn()

    def message(self, position: int) -> DrawnToken:
        drawn = self.tokens[position]
        return DrawnToken(position, drawn.id, drawn.logprob, drawn.top)

    # Callers

    def attach(self, channel: Channel, request: Open) -> None:
        """Serve a newer caller, and end the channel of the one before."""
        before, self.channel, self.epoch, self.is_shadow = self.channel, channel, request.epoch, request.is_shadow
        if self._meter is not None and not self.is_shadow and not self._is_counted:
            self._meter.count_request(self.ticket.prompt, self.cached)
            self._is_counted, self._drawn_at = True, asyncio.get_running_loop().time()
        if before is not None:
            before.abort()

    def count_end(self) -> None:
        """Count the end of a failed request; one that was a shadow's alone is none."""
        if self._meter is not None and self._is_counted and self.failure is not None:
            self._meter.failed_requests += 1

    def note_later(self, stage: int, host: str) -> None:
        self.later[stage] = host
        self.tell()

    def places(self) -> list[Moved]:
        """Return the known hosts of later stages."""
        return [Moved(stage, host) for stage, host in sorted(self.later.items())]

    def fail(self, failure: Failed) -> None:
        """End the session; its caller is told."""
        if self.failure is None:
            self.failure = failure
            self._tell_drawn()
            self.tell()

    def tell(self) -> None:
        self.news.set()
        self.news = asyncio.Event()

    def _tell_drawn(self) -> None:
        self.drawn.set()
        self.drawn = asyncio.Event()
