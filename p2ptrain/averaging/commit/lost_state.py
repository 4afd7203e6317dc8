"""When a voter may give up a state: all that could hold it deny that, or it stays unseen for long.

A voter that holds no state knows a head by certificates alone: its *tip*. All peers that could hold the state there may
have restarted from older checkpoints. Only then may the voter vote for another result of an earlier round.

* **At once** if every peer that may hold a later state answers, and holds none. Those are the members of the tip's
  table that are awake or were on a later roster, newcomers on its last rosters, and peers whose records tell of one.
  Members that left in order are not asked.
* **After a wait** that counts from the first request, if some do not answer. Repeated requests do not renew it. Only a
  vote for a new result does, which takes members with the state.
* **After a longer wait** if a member shows a later head that certificates prove, or cannot be reached and keeps up a
  record of one. Neither proves that it has the state. So a liar delays the swarm, and does not stop it.

**Two certificates of one round** have votes of two thirds of one electorate each, and share more than a third of it.
While less than a third lies, an honest voter signed both. It did not hold the first result: a holder goes back from no
state of its own. So it signed the second one because every other member denied the first one, or because none that
answered showed it for the whole wait. An honest member that holds the first result and answers is waited for, and
meanwhile leads the voters on. Two certificates thus need that all holders of the first one lie, or that none can be
reached. A hostile pair that is a roster by itself can hide its result from a seed that is the only voter. Then no
honest peer holds that result, and `Head.outranks` decides if the pair shows it later. Members that do not hear of a
full result may leave it out by reduced rounds; for a full one after those, the same holds.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection
from enum import Enum, auto

from p2ptrain.averaging.context import PeerContext
from p2ptrain.averaging.protocol.certificate import MAX_ROOT_BYTES, MAX_STARTS, Body, Head, fetch_certificates
from p2ptrain.averaging.protocol.table import Table
from p2ptrain.averaging.timing.deadlines import silence_seconds
from p2ptrain.errors import DeadlineError, IntegrityError, PeerError, PeerRefusedError
from p2ptrain.network.schema import Message
from p2ptrain.tasks import to_its_end, together

logger = logging.getLogger(__name__)

HELD = "ballot.held"
WAITS_BEFORE_FOUNDING, WAITS_BEFORE_GOING_BACK, WAITS_FOR_A_HOLDER = 3, 9, 90
"""In `matchmaking_seconds`: how long a state stays unseen before a voter lets the swarm begin again, or go on from an
older head; and how long it believes a peer that says that it holds the state. The second is longer than the first: the
new lineage soon outranks one that comes back."""
ANSWER_SECONDS = 6.0
"""How long answers count; > the longest pause between attempts, for a caller that did not wait for them."""
MAX_ASKED = 64
"""Peers asked at once; of more possible holders, not all can answer."""
LEAST_VOTE_SECONDS = 2.0
ROSTER_SHARE = 0.75
"""Most of a near caller's timeout that a voter spends on questions to others: else it never answers."""


class AskHeld(Message, frozen=True):
    """Question for the head of the receiver's state."""


class Held(Message, frozen=True):
    """The head of the sender's state, with its proof; None if it holds no state."""

    head: Head | None = None


class Answer(Enum):
    """A peer's answer to the question whether it holds a later state."""

    DENIES = auto()
    HOLDS = auto()
    UNCLEAR = auto()
    """It does not answer, proves nothing, or is no member."""


class LostState:
    """Decides whether a voter gives up a state; ``head`` returns the head of this peer's own state, if it holds one."""

    def __init__(self, context: PeerContext, head: Callable[[], Head | None]) -> None:
        self._context = context
        self._head = head
        self._unseen: tuple[float, float] | None = None  # seconds without a sign of the state; time of the last request
        self._seen_at = asyncio.get_running_loop().time()
        self._asked = b"", -LEAST_VOTE_SECONDS  # lineages of the tip and the earlier head, and the time
        self._answers = b"", 0.0, ("", False)  # the same, and the result of `_holder_after`
        self._told = set[str]()
        context.rpc.serve(HELD, AskHeld, self._serve)

    async def _serve(self, peer: str, request: AskHeld) -> Held:
        return Held(self._head())

    def seen(self) -> None:
        """End the wait: members voted on a new result, or this peer has gone back."""
        self._unseen, self._seen_at = None, asyncio.get_running_loop().time()
        self._told.clear()

    def tell_once(self, text: str, *values: object) -> None:
        """Log a warning with this text unless it was logged since the wait began."""
        if text not in self._told:
            self._told.add(text)
            logger.warning(text, *values)

    def seconds_left(self, waits: int) -> float:
        """Return how many seconds are left of so many waits; the first call begins to count.

        A gap between two calls counts for at most one wait: this process may have been suspended, or cut off.
        """
        now, pause = asyncio.get_running_loop().time(), self._context.spec.matchmaking_seconds
        seconds, asked_at = self._unseen or (0.0, now)
        seconds += min(now - asked_at, pause)
        self._unseen = seconds, now
        return waits * pause - seconds

    async def check(self, tip: Head, earlier: Head, body: Body) -> None:
        """Return if the state at the tip may be given up for a result at an earlier head.

        Raises:
            PeerRefusedError: It must wait.
        """
        own, pause = self._context.rpc.peer_id, self._context.spec.matchmaking_seconds
        waits = WAITS_BEFORE_GOING_BACK if earlier.round else WAITS_BEFORE_FOUNDING
        left, what = self.seconds_left(waits), f"go on from round {earlier.round}" if earlier.round else "begin again"
        now = asyncio.get_running_loop().time()
        if not earlier.round:  # Rounds had time to come since the last vote; and a lost lineage wins if it comes back.
            left = min(left, waits * pause - (now - self._seen_at))
        key, (known, answered_at, answers) = tip.lineage + earlier.lineage, self._answers
        if known != key or now - answered_at > ANSWER_SECONDS:
            if self._asked[0] == key and now - self._asked[1] < LEAST_VOTE_SECONDS:
                raise PeerRefusedError(own, f"this voter asks others for the state of round {tip.round}")
            self._asked = key, now
            answers = await to_its_end(self._ask(key, tip, earlier, body))  # A caller that lost patience asks again.
        holder, denied = answers
        if holder:
            if self.seconds_left(WAITS_FOR_A_HOLDER) > 0:
                raise PeerRefusedError(own, f"peer {holder[-8:]} says that it holds a later state")
        elif left > 0 and not denied:
            if waits * pause - left >= pause:
                self.tell_once(
                    "peers want to %s, and this voter knows round %d: they may in %.0f s, unless a peer shows it",
                    what, tip.round, left,
                )  # fmt: skip
            raise PeerRefusedError(own, f"this voter knows round {tip.round}: nobody may {what} for {left:.0f} s more")
        logger.warning("no peer shows the state of round %d: this voter lets the swarm %s", tip.round, what)

    async def _ask(self, key: bytes, tip: Head, earlier: Head, body: Body) -> tuple[str, bool]:
        """Return the result of `_holder_after`, and keep it."""
        answers = await self._holder_after(tip, earlier, body)
        self._answers = key, asyncio.get_running_loop().time(), answers
        return answers

    async def _holder_after(self, tip: Head, earlier: Head, body: Body) -> tuple[str, bool]:
        """Return a member that claims a head after ``earlier``, if any; and True if all possible holders deny one.

        A peer at round 0 may still restore a checkpoint, unless it is on the roster of the result.
        """
        context = self._context
        members, possible = possible_holders(context, tip, earlier)
        at = (earlier.full, earlier.returned, earlier.round, earlier.tokens)
        claims = {
            record.peer
            for record in context.membership.records()
            if (record.lineage_full, record.lineage_returned, record.round, record.lineage_tokens) > at
        }
        asked = (possible | claims) - {context.rpc.peer_id}
        peers, is_all = sorted(asked), len(asked) <= MAX_ASKED
        if not is_all:
            peers = context.runtime.random.sample(peers, MAX_ASKED)

        async def ask(peer: str) -> Answer:
            try:
                async with asyncio.timeout(ask_seconds(context, peer)):
                    reply = await context.rpc.call(
                        peer, HELD, AskHeld(), Held, vote_seconds(context.spec.grace_seconds),
                        max_reply_bytes=MAX_ROOT_BYTES,
                    )  # fmt: skip
                if (head := reply.head) is None:
                    return Answer.UNCLEAR
                if not head.outranks(earlier):
                    return Answer.DENIES if head.round or peer in body.members else Answer.UNCLEAR
                is_tip = head.lineage == tip.lineage or await is_proved(context, tip, head)
                return Answer.HOLDS if is_tip and peer in members else Answer.UNCLEAR
            except (PeerError, DeadlineError, IntegrityError, TimeoutError) as error:
                logger.debug("peer %s does not tell what it holds: %s", peer[-8:], error)
                return Answer.HOLDS if peer in members & claims else Answer.UNCLEAR

        answers = await together("held", map(ask, peers))
        holder = next((peer for peer, each in zip(peers, answers, strict=True) if each is Answer.HOLDS), "")
        return holder, is_all and all(each is Answer.DENIES for each in answers)

    async def shown(
        self, peers: Collection[str], lineages: Collection[bytes], table: Table, body: Body
    ) -> tuple[str, tuple[bytes, ...]]:
        """Return a peer that shows another full result after one of these lineages, and the lineage after that.

        The peers are of earlier rosters, and enough voters of ``table`` must have signed the result. One that does not
        answer may hold a result unseen: then there are two lineages.
        """
        context, starts = self._context, dict.fromkeys([*lineages][:MAX_STARTS])

        async def ask(peer: str) -> tuple[str, tuple[bytes, ...]]:
            try:
                async with asyncio.timeout(ask_seconds(context, peer)):
                    chain = await fetch_certificates(context.rpc, peer, starts, context.certificate, proofs=True)
            except (PeerError, DeadlineError, TimeoutError) as error:
                logger.debug("peer %s shows no result of round %d: %s", peer[-8:], body.round, error)
                return "", ()
            is_lost = not context.ballots.lost.isdisjoint(each.body.next_lineage for each in chain)
            if not chain or is_lost or (first := chain[0].body).is_reduced or first.body_hash == body.body_hash:
                return "", ()
            return (peer, (first.next_lineage,)) if table.believes(chain[0]) else ("", ())

        asked = sorted(peers)
        if len(asked) > MAX_ASKED:
            asked = context.runtime.random.sample(asked, MAX_ASKED)
        return next(filter(lambda each: each[0], await together("result", map(ask, asked))), ("", ()))


def possible_holders(context: PeerContext, tip: Head, earlier: Head) -> tuple[set[str], set[str]]:
    """Return the members at a head, newcomers on the last rosters included, and those that may hold a later state.

    Raises:
        IntegrityError: The head's certificate is not valid.
    """
    rows = [row for row in tip.table.rows if not row.is_witness]
    joining = context.any_certificate(tip.certificate).body.census.joining if tip.certificate else ()
    roster, left = context.ballots.roster_after(tip.lineage)
    there = {row.peer for row in rows if not row.sleeps or row.last >= earlier.round}
    return {*(row.peer for row in rows), *joining, *roster}, there.union(joining, roster) - left


async def is_proved(context: PeerContext, tip: Head, head: Head) -> bool:
    """True if enough voters of the tip signed a head; or enough founders, if it is before the tip.

    Raises:
        IntegrityError: The head's certificate is not valid.
    """
    proof = await context.runtime.offload(context.certificate, head.certificate)
    if proof.next_head(head.digest, head.table) != head:
        return False
    founding = context.founding
    is_founded = bool(founding.electorate) and founding.believes(proof) and not head.outranks(tip)
    return is_founded or tip.table.believes(proof)


def ask_seconds(context: PeerContext, peer: str) -> float:
    """Return the timeout of a voter's question to a peer, while a caller waits for its vote."""
    grace = context.spec.grace_seconds
    return min(silence_seconds(grace, context.rpc.dial_seconds.get(peer, 0.0)), ROSTER_SHARE * vote_seconds(grace))


def vote_seconds(grace_seconds: float, round_trip_seconds: float = 0.0) -> float:
    """Return the timeout of a request for a vote; the voter may have to ask others before it answers."""
    return max(LEAST_VOTE_SECONDS, 2 * silence_seconds(grace_seconds, round_trip_seconds))
