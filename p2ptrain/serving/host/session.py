"""One session's part on one host: its rows, its pages, and its present caller."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Mapping, Sequence

import torch

from p2ptrain.errors import ProtocolError
from p2ptrain.models.exact import PAGE, ExactStage, Part
from p2ptrain.network.rpc.channel import Channel
from p2ptrain.serving.grammar import Matcher
from p2ptrain.serving.host.meter import Meter
from p2ptrain.serving.host.pool import Pages, key_of
from p2ptrain.serving.host.scheduler import Waiting
from p2ptrain.serving.host.speculation import Speculation
from p2ptrain.serving.journal import Journal, Wire, wire_of
from p2ptrain.serving.messages import AHEAD, Cause, DrawnToken, Failed, Moved, Open, Ticket
from p2ptrain.serving.prefix import MAX_PREFIX_PAGES, next_hash
from p2ptrain.serving.sampling import Drawn

BEAT_SECONDS = 0.25
"""Keepalive interval of a host; < `p2ptrain.serving.link.QUIET_SECONDS`."""
KEPT_ROWS = 3 * AHEAD
"""Outputs that the last stage keeps; > the tokens that the client may lack, which a substitute draws again, and drafts.
"""

Key = tuple[int, bytes]
"""Round and digest of weights."""


class HostSession:
    """The state of one session on one stage. Rows are received in order, computed in order, and never twice.

    The last few rows may be drafts: the caller replaces those that turn out wrong, and what follows them.

    Attributes:
        key: The weights.
        vocabulary, hidden: Number of token ids, and of a row's hidden values.
        wire: Of the rows that it receives, where those are no ids.
        ids: The tokens of all received rows; a list that grows, until another one replaces it.
        known: How many of them are no drafts.
        computed: Rows computed.
        cached: Rows of them that were found in prefix pages.
        others: Rows of other sessions in its last batch.
        together: Sessions whose rows come with its next one.
        fed: End of the tokens that the last stage fed.
        speculation: Drafts tokens; None except on a first stage that does.
        progressed_at: When it last computed a row of its tokens, drew one, or was granted more.
        decoded_at: When it last computed a row after its prompt's.
        return_seconds: From then to its next row, the last time.
        epoch: Of the present or last caller.
        channel: The caller's; None while the session has no caller.
        is_shadow: True if another host serves the session: its rows wait for all others, and no token is drawn.
        later: Hosts of later stages, by stage.
        journal: Outputs for the next stage; on the last one for a client that wants logits, else without rows.
        tokens: The last stage's tokens, by position.
        feed: The first stage's host.
        failure: Why the session is over; None while it lasts.
        linking: Supplies the next stage.
        ends: Called when the session ends.
        link_failure: Why the next stage has no host; None while it has one.
        news: Set by the next change that the caller is told, which replaces it.
        drawn: Set by the next token, other ``feed`` or failure, which replaces it.
    """

    def __init__(
        self, ticket: Ticket, key: Key, pages: Pages, stage: ExactStage, meter: Meter | None,
        matcher: Matcher | None = None,
    ) -> None:  # fmt: skip
        """``meter`` counts the last stage's tokens; None on other stages. ``matcher`` is of its grammar."""
        self.matcher = matcher
        self.ticket = ticket
        self.key = key
        self.pages = pages
        self.is_last = meter is not None
        self.ids: list[int] = []
        self.others = self.together = self.fed = 0
        self.speculation: Speculation | None = None
        self.epoch: tuple[int, ...] = ()
        self.channel: Channel | None = None
        self.is_shadow = False
        self.later: dict[int, str] = {}
        self.wire = wire_of(ticket.version.arithmetic, stage.hidden)
        self._outputs = Wire(stage.hidden) if self.is_last else self.wire
        self.journal = Journal(row_bytes=0 if self.is_last and not ticket.wants_logits else self._outputs.row_bytes)
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
        self._batch = range(0)
        self._finals: dict[int, torch.Tensor] = {}
        self._meter = meter
        self._is_counted = False
        self.vocabulary, self.hidden = stage.vocabulary, stage.hidden
        self._since = self._drawn_at = self.progressed_at = asyncio.get_running_loop().time()
        self.decoded_at, self.return_seconds = -math.inf, math.inf
        self._progress = (0, 0, 0)
        for page in pages.found:
            self.ids += page.ids
            if not self.is_last:
                self.journal.append(page.ids, page.outputs)
        self.cached = self.known = self.computed = len(self.ids)
        self._num_shared = len(pages.found)
        self._hash = pages.found[-1].key.hash if pages.found else b""

    # Rows

    def put(self, first: int, ids: Sequence[int], rows: torch.Tensor, drafts: int = 0) -> None:
        """Take rows from position ``first`` on, less those that it has; a draft that differs is replaced with the rest.

        ``rows`` are ids ``[rows]`` on the first stage, hidden states ``[rows, hidden]`` on later ones. The last
        ``drafts`` positions before their end are drafts. Those of a caller that knows fewer tokens than this host may
        differ from the known ones, or follow such drafts; they are skipped, and the caller replaces them.

        Raises:
            ProtocolError: Rows before them are missing, they exceed ticket or vocabulary, or differ from those it has.
        """
        end, peer, known = len(self.ids), self.ticket.client, first + len(ids) - drafts
        if first > end and known <= self.known:
            return  # Drafts after those that were not taken.
        if first > end:
            raise ProtocolError(peer, f"rows from position {first} on, and those from {end} on are missing")
        if first + len(ids) > self.ticket.num_positions:
            raise ProtocolError(peer, f"more rows than the {self.ticket.num_positions} of its ticket")
        if max(ids) >= self.vocabulary:
            raise ProtocolError(peer, f"token {max(ids)} of a vocabulary of {self.vocabulary}")
        same = zip(ids, self.ids[first : first + len(ids)], strict=False)
        if (other := next((at for at, (new, old) in enumerate(same, first) if new != old), None)) is not None:
            if other < min(known, self.known):
                raise ProtocolError(peer, "other tokens than before at the same positions")
            if other < self.known:
                return  # A caller that knows less drafted this; its next rows replace them.
            self._trim(other)
            end = other
        for position, id in enumerate(ids[: max(0, known - first)], first):
            if position in self.tokens and self.tokens[position].id != id:
                raise ProtocolError(peer, f"another token at position {position} than was drawn")
        self.known = max(self.known, known)
        if first + len(ids) > end:
            if end == self.computed:
                self._since = asyncio.get_running_loop().time()
                self.return_seconds = self._since - self.decoded_at
            self._rows.append(rows[end - first :])
            self.ids += ids[end - first :]

    def _trim(self, end: int) -> None:
        """Remove the rows from ``end`` on; those of a running batch are of no use."""
        pending = end - max(self.computed, self._batch.stop)
        self._rows = [torch.cat(self._rows)[:pending]] if pending > 0 else []
        self.ids = self.ids[:end]
        self.known, self.computed = min(self.known, end), min(self.computed, end)
        self._batch = range(self._batch.start, min(self._batch.stop, end))
        self._finals = {at: row for at, row in self._finals.items() if at < end}
        self.journal.trim(end)

    def put_fed(self, fed: Mapping[int, int]) -> None:
        """Take drawn tokens on the first stage, which may arrive before the rows before them; draft those after."""
        self._fed.update((at, id) for at, id in fed.items() if self.known <= at < self.known + 2 * AHEAD)
        while self.known < self.ticket.num_positions and (id := self._fed.pop(self.known, None)) is not None:
            self.put(self.known, [id], torch.tensor([id]))
            self.fed = self.known
        # Once all drafts are drawn, the token after them is on its way.
        if self.speculation is not None and self.computed < self.known == len(self.ids) and not self.is_shadow:
            room = self.ticket.num_positions - self.known
            is_next = self.computed == self.known - 1 >= self.ticket.prompt
            now = asyncio.get_running_loop().time()
            if drafts := self.speculation.next_drafts(self.ids, room if is_next else None, self.others, now):
                self.put(self.known, drafts, torch.tensor(drafts), len(drafts))

    def waiting(self) -> Waiting | None:
        """Return what is to be computed; None if nothing is."""
        rows = len(self.ids) - self.computed
        if self.failure is not None or not (rows or self.draws_after(0)):
            return None
        return Waiting(rows, self.known - self.computed > 1, self._since, self.is_shadow, self.together)

    def take(self, rows: int) -> tuple[Part, torch.Tensor]:
        """Remove ``rows`` rows for a batch; `done` follows before the next `take`."""
        self._batch = range(self.computed, self.computed + rows)
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

        That is the token after all known rows and those after drafts, if they are granted, and those that a host before
        this one drew and the client lacks.
        """
        if not self.is_last or self.is_shadow:
            return []
        ticket, computed = self.ticket, self.computed + rows
        draws: list[int] = []
        if self._wanted_from is not None:
            first = max(self._wanted_from, ticket.prompt, self.computed - KEPT_ROWS + 1)
            again = range(first, min(computed + 1, self.known))
            draws = [each for each in again if each not in self.tokens and self._has_final(each - 1)]
        until = min(computed + 1, self._until, ticket.prompt + ticket.max_tokens)
        for at in range(max(self.known, ticket.prompt), until):
            is_stopped = at > ticket.prompt and self.ids[at - 1] in ticket.stops
            if is_stopped or not (at in self.tokens or self._has_final(at - 1)):
                break
            if at not in self.tokens:
                draws.append(at)
            elif at < len(self.ids) and self.ids[at] != self.tokens[at].id:
                break  # A draft that was not drawn, and will be replaced.
        return draws

    def final(self, position: int) -> torch.Tensor | None:
        """Return the last stage's output ``[1, hidden]`` of a row; None if it is computed next."""
        return self._finals.get(position)

    def _has_final(self, position: int) -> bool:
        return position >= self.computed or position in self._finals

    def done(self, outputs: torch.Tensor, drawn: Mapping[int, Drawn]) -> None:
        """Record computed rows with their outputs, and the tokens drawn after them, less those replaced meanwhile."""
        first, end, rows = self._batch.start, self._batch.stop, len(self._batch)
        self.computed = end if rows else self.computed
        self._since = now = asyncio.get_running_loop().time()
        if rows and end > self.ticket.prompt:
            self.decoded_at = now
        if self.journal.row_bytes and rows:
            try:
                self.journal.append(self.ids[first:end], self._outputs.encode(outputs[:rows]), self.known)
            except ValueError as error:
                return self.fail(Failed(len(self.epoch) - 1, Cause.BROKEN, str(error)))
        if self.is_last and rows:
            kept = range(max(first, self.computed - KEPT_ROWS), self.computed)
            self._finals.update((at, outputs[at - first : at - first + 1].clone()) for at in kept)
            self._finals = {at: row for at, row in self._finals.items() if at >= self.computed - KEPT_ROWS}
        for position, token in drawn.items():
            if position > end:
                break  # Other ids before it.
            if position < self.known and self.ids[position] != token.id:
                self.fail(Failed(len(self.epoch) - 1, Cause.BROKEN, "this host draws other tokens than one before it"))
            if self._meter is not None and position >= self.known:
                self._meter.count_token(now - self._drawn_at, is_first=position == self.ticket.given)
                self._drawn_at = now
            self.tokens[position] = token
        if drawn:
            self._tell_drawn()
        self.tell()
        self._note_progress()
        if self.failure is None:
            self.share(self.ticket.prompt)  # Nothing trims a session to less than its prompt.

    def share(self, stop: int) -> None:
        """Share the full pages of the computed rows before ``stop`` with later sessions; they do not change again.

        A caller that sent other tokens of the prompt than the client's ticket names leaves no page behind.
        """
        signed = self.ticket.pages
        for index in range(self._num_shared, min(stop, self.computed, self.known, MAX_PREFIX_PAGES * PAGE) // PAGE):
            first = index * PAGE
            ids = self.ids[first : first + PAGE]
            page_hash = next_hash(self._hash, ids)
            if index < len(signed) and signed[index] != page_hash:
                return
            outputs = b"" if self.is_last else self.journal.rows(first, first + PAGE)
            self.pages.pool.share(self.pages, index, key_of(self.ticket, page_hash), ids, outputs)
            self._hash, self._num_shared = page_hash, index + 1

    # The client, on the last stage

    def listen(self, start: int) -> None:
        """Set the first token that the client lacks."""
        self._wanted_from = start

    def grant(self, until: int, feed: str) -> None:
        """Permit the last stage to draw the tokens before ``until``, and feed them to ``feed``."""
        self._until = max(self._until, until)
        self._note_progress()
        if feed != self.feed:
            self.feed = feed
            self._tell_drawn()

    def _note_progress(self) -> None:
        progress = (min(self.known, self.computed), len(self.tokens), self._until)
        if progress != self._progress:
            self._progress, self.progressed_at = progress, asyncio.get_running_loop().time()

    def message(self, position: int) -> DrawnToken:
        drawn = self.tokens[position]
        return DrawnToken(position, drawn.id, drawn.logprob, drawn.top)

    # Callers

    def is_of(self, caller: str) -> bool:
        """True if this peer is the present caller."""
        return self.channel is not None and self.channel.remote == caller

    def attach(self, channel: Channel, request: Open) -> None:
        """Serve a newer caller, and end the channel of the one before."""
        if self.is_shadow and not request.is_shadow:
            self.progressed_at = asyncio.get_running_loop().time()
        self.ticket = request.ticket
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

    @property
    def next_host(self) -> str:
        """The host that gets its outputs, or the last stage's tokens; empty while there is none."""
        return self.feed if self.is_last else self.later.get(len(self.epoch), "")

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
