"""Speculation: the first stage drafts the next tokens, and all stages compute their rows with those of the last one.

The last stage draws each position as ever, given the ids before it. A drawn token that equals its draft makes the next
position's row valid, so one way down the chain yields several tokens (Leviathan et al., 2023). No token changes, at any
temperature. Drafts repeat the tokens after an earlier occurrence of the last ones (prompt lookup, Saxena, 2023).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from p2ptrain.serving.host.meter import Meter
from p2ptrain.serving.messages import MAX_DRAFTS
from p2ptrain.serving.sampling import Drawn

MAX_OTHER_ROWS = 4
"""Rows of other sessions in a batch, above which drafts would delay them for little."""
MAX_MATCH, MAX_CANDIDATES, ALIKE = 32, 16, 24
"""Tokens to compare with those at an earlier place, and places: they bound the time of a look-up. Tokens alike before
the last one, from which on that may have replaced another."""
STAKE = 0.01
"""Share of the time that drafts may lose while they find nothing."""
MAX_SAVED = 4.0
"""Most of the balance, in plain waves: text that drafts fit no more may lose so much."""
TRIAL_EVERY, FIRST_TRIAL, TRIAL_PART = 1024, 16, 8
"""Tokens from one trial of others' drafts to the next, before the first one, and of a trial."""
PACE_SHARE = 0.2
"""Weight of the newest wave in the averages."""


def accept(drafted: Sequence[int], draws: Iterable[Drawn]) -> list[Drawn]:
    """Return the drawn tokens up to the first one that differs from its draft, or has none; draw no further."""
    found: list[Drawn] = []
    for number, token in enumerate(draws):
        found.append(token)
        if number >= len(drafted) or drafted[number] != token.id:
            break
    return found


class Lookup:
    """The earlier occurrences of each pair of tokens in a growing text, the latest first."""

    def __init__(self) -> None:
        self._latest: dict[tuple[int, int], int] = {}
        self._earlier: list[int] = [-1]

    def draft(self, ids: Sequence[int], count: int, least: int = 2) -> list[int]:
        """Return up to ``count`` tokens that followed the place most like the end: the last two tokens are equal there.

        It needs ``least`` equal ones of the last `MAX_MATCH`, and returns more the more are equal. If the last token
        replaced another one in text that was equal, what followed that one is returned. ``ids`` begins with those of
        the call before. The time is linear in the new ids and in ``count``.
        """
        end = len(ids)
        for at in range(len(self._earlier), end):
            pair = (ids[at - 1], ids[at])
            self._earlier.append(self._latest.get(pair, -1))
            self._latest[pair] = at
        for skipped, enough in ((0, least), (1, ALIKE)) if count else ():
            alike, at = self._closest(ids, end - skipped)
            if alike >= enough:
                first, most = at + 1 + skipped, alike // 4 if skipped else 3 * alike
                return [ids[first + step % (end - first)] for step in range(min(count, most))]
        return []

    def _closest(self, ids: Sequence[int], end: int) -> tuple[int, int]:
        """Return how many tokens are equal at the place most like those before ``end``, and its last position."""
        places, at = list[tuple[int, int]](), self._earlier[end - 1]
        while at >= 0 and len(places) < MAX_CANDIDATES:
            alike = sum(ids[at - back] == ids[end - 1 - back] for back in range(min(at + 1, MAX_MATCH)))
            places.append((alike, at))
            at = self._earlier[at]
        return max(places, default=(0, -1))


class Account:
    """Chooses how many tokens to draft, by the seconds that drafts have saved and lost so far.

    A wave is one way of rows round the chain. It yields a token, and one more for each accepted draft. The account
    compares its seconds with those of plain waves, and of a `rival`. While it is overdrawn nothing is drafted; a share
    of all time is paid in, so that other text is noticed. So text that drafts do not fit loses that share.

    Attributes:
        balance: Seconds saved.
        plain: Seconds of a wave without drafts.
        rival: Seconds of a token by the drafts of others, which are in use while these are not.
        until_trial: Tokens until others show their pace.
    """

    def __init__(self) -> None:
        self.balance = self.plain = 0.0
        self.rival, self.until_trial = math.inf, FIRST_TRIAL
        self._row = 0.0
        self._accepted, self._judged = 1.0, 2.0

    def note(self, drafted: int, accepted: int, seconds: float) -> None:
        """Record a wave."""
        if not drafted:
            self._row = self._row or seconds / (MAX_DRAFTS + 1)
            self.plain += (seconds - self.plain) * (PACE_SHARE if self.plain else 1.0)
            self.balance += STAKE * seconds
        elif self.plain:
            row = max(0.0, seconds - self.plain) / drafted
            if not accepted or row < self._row:  # Else a client's drafts also took a hop more, however many they are.
                self._row += PACE_SHARE * (row - self._row)
            self.balance += (1 + accepted) * min(self.plain, self.rival) - seconds
            self.plain += PACE_SHARE * min(0.0, seconds - self.plain)  # Drafts save no time within a wave.
            self._accepted = (1 - PACE_SHARE) * self._accepted + accepted
            self._judged = (1 - PACE_SHARE) * self._judged + min(drafted, accepted + 1)
        self.balance = min(self.balance, MAX_SAVED * self.plain)

    def choose(self) -> int:
        """Return how many tokens the next wave may draft: the fastest number that risks no more than the balance."""
        if not self.plain or self.balance < 0:
            return 0
        hit, row, plain = self._accepted / self._judged, self._row, self.plain
        counts = [count for count in range(1, MAX_DRAFTS + 1) if count == 1 or count * row <= self.balance]
        return max(counts, key=lambda count: sum(hit**at for at in range(count + 1)) / (plain + count * row))


class Speculation:
    """The drafts of one session on the first stage."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._lookup, self._account = Lookup(), Account()
        self._end = self._drafted = 0
        self._since: float | None = None
        self._is_client = False

    def leave_to_client(self, drafts: int) -> None:
        """Take the client's drafts in a wave, and draft none in the next: while it sends some, they are better."""
        self._is_client = True
        self._drafted = max(self._drafted, drafts)

    def next_drafts(self, ids: Sequence[int], most: int | None, others: int, now: float) -> list[int]:
        """Return drafts of the tokens after ``ids``, all of which are known; they begin a wave.

        Args:
            most: Tokens that have room; None while the stage has more than the last id's row to compute.
            others: Rows of other sessions in a batch.
        """
        if len(ids) == self._end:
            return []
        if self._since is not None:
            accepted = min(self._drafted, len(ids) - self._end - 1)
            if not self._is_client:  # Else its luck and its way here are the client's.
                self._account.note(self._drafted, accepted, now - self._since)
            self._meter.count_drafts(self._drafted, accepted)
        is_idle, self._is_client = self._is_client or others > MAX_OTHER_ROWS, False
        count = min(most or 0, 0 if is_idle else self._account.choose())
        drafts = self._lookup.draft(ids, count)
        self._end, self._drafted, self._since = len(ids), len(drafts), None if most is None else now
        return drafts
