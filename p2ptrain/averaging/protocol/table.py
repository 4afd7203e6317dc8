"""The member table of a lineage: who is in the swarm, and who votes on its next certificate.

Each certificate changes the table, and its body names the hash of the table after it. All holders of a lineage thus
compute the same table. A *voter* signs the bodies of results. The *electorate* is the voters after the newest full
certificate. A certificate is full if two thirds of the electorate signed it. Otherwise it is *reduced*: its roster
closed the round without the electorate. All members that were not there then sleep until they come back.

This is reconfiguration as in viewstamped replication (Liskov and Cowling, MIT-CSAIL-TR-2012-021) and Raft.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache
from statistics import median_high
from typing import TYPE_CHECKING, Annotated, NamedTuple

from msgspec import Meta

from p2ptrain.errors import IntegrityError
from p2ptrain.hashing import bulk_hash
from p2ptrain.network.schema import to_bytes

if TYPE_CHECKING:
    from p2ptrain.averaging.protocol.certificate import Body, Certificate, Ticket

MAX_ROWS = 1 << 16
MAX_COUNT = (1 << 62) - 1
MOST_VIEWS = 1 << 20
"""Views that one member can use up in an attempt."""
MAX_ELECTORATE = 256
"""Of more voters than this, as many are drawn anew at each `EPOCH_ROUNDS`."""
EPOCH_ROUNDS = 64
SLEEP_ROUNDS = 8
"""Rounds without a place on a roster after which a voter's signature is not waited for."""
FORGET_ROUNDS = 4096
ESTABLISHED, ESTABLISHED_AMONG_STRANGERS = 4, EPOCH_ROUNDS
"""Counted rounds after which a member votes."""
LEAST_LEADERS = 8
FULL_TRUST = 8
"""Among strangers, a newcomer has an eighth of its weight in a mean, and one more after each round it counts in."""
LEAST_GUESTS = 2
NEW_VOTERS_PART, NEW_MEMBERS_PART, MAX_NEW_MEMBERS = 16, 16, 64
"""Among strangers, one in so many of the voters may be new in an epoch, and of the members in a round."""
MAX_ACCUSED, LEAST_ACCUSERS = 64, 2
MAX_MISSES = 15
"""An epoch halves a member's misses: one is forgotten after an epoch, the most after four."""
Count = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
Name = Annotated[str, Meta(max_length=128)]  # a peer's id, or a codec's name
Bits = Annotated[bytes, Meta(max_length=MAX_ROWS // 8)]


class Row(NamedTuple):
    """One member.

    Attributes:
        since: Round in which it joined.
        counted: Rounds that include a contribution of it.
        last: Last round on whose roster it was.
        votes: True once it is established.
        elects: True if it was an awake voter after the newest full certificate.
        returned: True if it elects, and was on a roster since that certificate.
        is_witness: True for a founder that never contributed: it votes on bodies without the result, and never sleeps
            while the lineage is full.
        misses: Full rounds in which it went before their leader, and did not lead; halved in each epoch.
        is_banned: True once enough voters had evidence against it; it sleeps from then on, and never votes or joins.
    """

    peer: Name
    since: Count = 0
    counted: Count = 0
    last: Count = 0
    votes: bool = False
    sleeps: bool = False
    elects: bool = False
    returned: bool = False
    is_witness: bool = False
    is_banned: bool = False
    misses: Count = 0


class Census(NamedTuple):
    """A round's news of members: bits by row of the table before it, and the peers on rosters without a row.

    Attributes:
        accused: (row, members of the electorate on the rosters that have evidence against it), in order.
    """

    roster: Bits = b""
    contributed: Bits = b""
    leaving: Bits = b""
    joining: Annotated[tuple[Name, ...], Meta(max_length=MAX_ROWS)] = ()
    accused: Annotated[tuple[tuple[Count, Count], ...], Meta(max_length=MAX_ACCUSED)] = ()

    def merged(self, other: Census) -> Census:
        """Return the census of two disjoint groups together."""
        return Census(
            _either(self.roster, other.roster),
            _either(self.contributed, other.contributed),
            _either(self.leaving, other.leaving),
            tuple(sorted({*self.joining, *other.joining})),
            _most_accused(Counter(dict(self.accused)) + Counter(dict(other.accused))),
        )


def _either(one: bytes, other: bytes) -> bytes:
    size = max(len(one), len(other))
    return (int.from_bytes(one, "little") | int.from_bytes(other, "little")).to_bytes(size, "little")


def _most_accused(accusers: Counter[int]) -> tuple[tuple[int, int], ...]:
    """Return the rows that most voters accuse: liars that accuse many others hide none of which more voters know."""
    ordered = sorted(accusers.items(), key=lambda each: (-each[1], each[0]))
    return tuple(sorted(ordered[:MAX_ACCUSED]))


@dataclass(frozen=True)
class Table:
    """The members of a lineage at one head.

    Attributes:
        rows: In the order of joining.
        is_open: True for a swarm of strangers, in which voters come slowly.
        full_round: Round of the head after the newest full certificate.
        is_reduced: True if a reduced certificate followed it.
        draw: The lineage that draws the electorate of a large swarm; empty before the first epoch.
    """

    rows: Annotated[tuple[Row, ...], Meta(max_length=MAX_ROWS)] = ()
    is_open: bool = False
    full_round: Count = 0
    is_reduced: bool = False
    draw: Annotated[bytes, Meta(max_length=32)] = b""

    @cached_property
    def hash(self) -> bytes:
        return bulk_hash(b"p2ptrain table", to_bytes(self))

    @cached_property
    def _index(self) -> dict[str, int]:
        return {row.peer: index for index, row in enumerate(self.rows)}

    def row_of(self, peer: str) -> Row | None:
        index = self._index.get(peer)
        return None if index is None else self.rows[index]

    @cached_property
    def electorate(self) -> frozenset[str]:
        """The peers of whose signatures a full certificate needs `quorum`; empty before the founding certificate."""
        voters = [row.peer for row in self.rows if row.elects]
        if len(voters) > MAX_ELECTORATE:
            voters.sort(key=lambda peer: hashlib.sha256(self.draw + peer.encode()).digest())
        return frozenset(voters[:MAX_ELECTORATE])

    @property
    def quorum(self) -> int:
        return quorum_of(len(self.electorate))

    @cached_property
    def banned(self) -> frozenset[str]:
        return frozenset(row.peer for row in self.rows if row.is_banned)

    @property
    def least_accusers(self) -> int:
        """Members of the electorate that ban a peer together: more than a third, so that one of them is honest."""
        return max(LEAST_ACCUSERS, len(self.electorate) // 3 + 1)

    @cached_property
    def awake(self) -> frozenset[str]:
        """The voters that do not sleep; in a reduced lineage, these are not the electorate."""
        return frozenset(row.peer for row in self.rows if row.votes and not row.sleeps)

    @cached_property
    def leading(self) -> frozenset[str]:
        """The members that may lead a round: all that do not sleep, but for witnesses.

        Among strangers, voters lead, and those that counted most until they are `LEAST_LEADERS`: one alone could stop
        the rounds.
        """
        return self._leaders_of(row for row in self.rows if not row.sleeps)

    @cached_property
    def standing_in(self) -> frozenset[str]:
        """The members that may lead once no full round was possible: `leading`, and those like them that sleep."""
        return self.leading | self._leaders_of(self.rows)

    def _leaders_of(self, rows: Iterable[Row]) -> frozenset[str]:
        there = [row for row in rows if not (row.is_witness or row.is_banned)]
        if self.is_open:
            there.sort(key=lambda row: (not row.votes, -row.counted, row.since, row.peer))
            there = [row for index, row in enumerate(there) if row.votes or index < LEAST_LEADERS]
        return frozenset(row.peer for row in there)

    def order(self, peer: str, lineage: bytes, level: int = 0, cell: int = 0) -> tuple[int, bytes]:
        """Return a peer's sort key among the leaders of a group in the round after ``lineage``; the smallest leads.

        Who missed more turns than the median of them comes after the others. Among alike ones `rank` decides, so no
        member leads all rounds because the others missed a turn: some may not reach it.
        """
        row = self.row_of(peer)
        return max(0, row.misses - self._usual_misses) if row else 0, rank(peer, lineage, level, cell)

    @cached_property
    def _usual_misses(self) -> int:
        return median_high(row.misses for row in self.rows if row.peer in self.leading) if self.leading else 0

    @cached_property
    def num_awake(self) -> int:
        """Number of members that take part in rounds: all that do not sleep, but for witnesses."""
        return sum(not row.sleeps and not row.is_witness for row in self.rows)

    def undrawn(self, lineage: bytes, share: float, least: int) -> frozenset[str]:
        """Return the members that sit out the round after the head of this table.

        Members that sleep come back, and all others take part in a reduced lineage.
        """
        draws = share < 1 and not self.is_reduced
        return self.leading - draw(lineage, self.leading, share, least) if draws else frozenset()

    def is_led_by(self, peers: Collection[str], undrawn: frozenset[str] = frozenset()) -> bool:
        """True if these are more than a third of the members that may lead, so that one of them is honest.

        A third of all, or of those that are drawn.
        """
        leading = (self.leading, self.leading - undrawn)
        return any(not each or 3 * len(each.intersection(peers)) > len(each) for each in leading)

    def view(self, tickets: Iterable[Ticket]) -> int:
        """Return the view of an attempt: the highest that a leading member claims, after those that it voted in.

        It is at most `MOST_VIEWS` more than what more than a third of them claim: voters never go back to an earlier
        view, and a liar would use up all views. A member may have voted in many while it was alone.
        """
        highest, common = self._claimed_views(tickets)
        return min(highest, common + MOST_VIEWS)

    def num_attempts(self, tickets: Iterable[Ticket]) -> int:
        """Return how many attempts there were: as many as more than a third of those that lead claim, or one more."""
        highest, common = self._claimed_views(tickets)
        return min(highest, common + 1)

    def _claimed_views(self, tickets: Iterable[Ticket]) -> tuple[int, int]:
        """Return the highest view that a leading member claims, and the highest that more than a third reach."""
        claims = {ticket.peer: ticket.view for ticket in tickets}
        views = sorted((claims[peer] for peer in self.leading & claims.keys() or claims), reverse=True)
        return views[0], views[max(len(views) // 3, min(1, len(views) - 1))]

    def is_stopped_without(self, peers: Collection[str]) -> bool:
        """True if no full certificate is possible without these peers: they are more than a third of the electorate."""
        return len(self.electorate.difference(peers)) < self.quorum

    @cached_property
    def num_returned(self) -> int:
        """Members of the electorate that were on rosters since the newest full certificate; 0 while it is the last."""
        return sum(row.returned for row in self.rows)

    @cached_property
    def begins(self) -> bool:
        """True while the founders are the only members: then no member is before a newcomer, even among strangers."""
        return all(row.is_witness for row in self.rows)

    @property
    def least_of_electorate(self) -> int:
        """Members of the electorate that must sign a reduced certificate; 0 among peers that were invited."""
        return -(-len(self.electorate) // 3) if self.is_open else 0

    def most_guests(self, peers: Collection[str], min_peers: int) -> int:
        """Return how many of ``peers`` may be in one group without being members.

        Among strangers at most as many as the others, so that a crowd has an eighth of the weight of established
        members; but `LEAST_GUESTS`, and as many as the round needs.
        """
        known = len(self._index.keys() & set(peers))
        return max(LEAST_GUESTS, known, min_peers - known) if self.is_open and not self.begins else len(peers)

    def group_of(self, peers: Sequence[str], size: int, min_peers: int) -> list[str]:
        """Return ``size`` of these peers: members that are awake, those that wake, and no more than `most_guests`.

        A crowd keeps out no voter. But a few places are for others than awake members, so that a full group can grow.
        """
        rows, guests = [row for peer in peers if (row := self.row_of(peer))], self.guests(peers)
        awake, asleep = ([row.peer for row in rows if row.sleeps is sleeps] for sleeps in (False, True))
        members = awake[: size - min(LEAST_GUESTS, len(asleep) + len(guests), size // 2)]
        members += asleep[: size - len(members)]
        return members + guests[: min(self.most_guests(peers, min_peers), size - len(members))]

    def guests(self, peers: Iterable[str]) -> list[str]:
        """Return those of these peers that are no members, in their order."""
        return [peer for peer in peers if peer not in self._index]

    def trust_of(self, peer: str) -> int:
        """Return how many eighths of its weight a peer has in a mean."""
        row = self.row_of(peer)
        return min(1 + (row.counted if row else 0), FULL_TRUST) if self.is_open else FULL_TRUST

    # --- a round ----------------------------------------------------------------------------------------------------

    def accused_by(self, peers: Iterable[str]) -> tuple[int, ...]:
        """Return the rows of the members among ``peers`` that are not banned yet; bounded."""
        rows = sorted(self._index[peer] for peer in peers if peer in self._index)
        return tuple(row for row in rows if not self.rows[row].is_banned)[:MAX_ACCUSED]

    def census(self, tickets: Iterable[Ticket], contributing: Collection[str]) -> Census:
        """Return what these tickets tell; above level 0, what their groups' results tell."""
        census, joining, accusers = Census(), list[str](), Counter[int]()
        roster, contributed, leaving = (bytearray(-(-len(self.rows) // 8)) for _ in range(3))
        for ticket in tickets:
            if ticket.census is not None:
                census = census.merged(ticket.census) if ticket.peer in contributing else census
                continue
            if ticket.peer in self.electorate:
                accusers.update({row for row in ticket.accuses if row < len(self.rows)})
            index = self._index.get(ticket.peer)
            if index is None:
                joining += [ticket.peer] if not ticket.leaves else []
                continue
            for bits, holds in (
                (roster, True),
                (contributed, ticket.peer in contributing),
                (leaving, ticket.leaves),
            ):
                bits[index // 8] |= holds << index % 8
        accused = _most_accused(accusers)
        own = Census(bytes(roster), bytes(contributed), bytes(leaving), tuple(sorted(joining)), accused)
        return own.merged(census)

    def leaving(self, census: Census) -> set[str]:
        """Return the members that leave with a round's result."""
        return {row.peer for index, row in enumerate(self.rows) if _has(census.leaving, index)}

    def after(self, body: Body) -> Table:
        """Return the table after a round's result; the caller checks the result."""
        census, round_, founds = body.census, body.round, not self.electorate
        rows, banned, passed = list[Row](), self._banned_by(body), self._passed_over(body)
        is_epoch = round_ % EPOCH_ROUNDS == 0
        for index, row in enumerate(self.rows):
            here, counted, leaves = (_has(bits, index) for bits in census[:3])
            if self._is_forgotten(row, round_):
                continue
            if row.is_banned or index in banned:
                rows.append(row._replace(votes=False, sleeps=True, is_witness=False, is_banned=True))
                continue
            if leaves:
                continue
            misses = 0 if row.peer == body.leader else min(row.misses + (row.peer in passed), MAX_MISSES)
            row = row._replace(
                counted=row.counted + counted,
                misses=misses // 2 if is_epoch else misses,
                last=round_ if here else row.last,
                is_witness=row.is_witness and not counted,
            )
            if body.is_reduced:
                row = row._replace(sleeps=not here, returned=row.elects and (row.returned or here))
            else:
                tired = not row.is_witness and round_ - row.last >= SLEEP_ROUNDS
                row = row._replace(sleeps=not here and (tired or (row.sleeps and not row.is_witness)))
            if not self.is_open:
                row = row._replace(votes=row.votes or row.counted >= ESTABLISHED)
            rows.append(row)
        new = sorted({*census.joining} - self._index.keys())
        new.sort(key=lambda peer: hashlib.sha256(body.lineage + peer.encode()).digest())
        if self.is_open and not self.begins:
            new = new[: min(MAX_NEW_MEMBERS, max(2, len(rows) // NEW_MEMBERS_PART))]
        rows += [Row(peer, round_, 0, round_, votes=founds) for peer in new[: MAX_ROWS - len(rows)]]
        if is_epoch and self.is_open:
            rows = _promoted(rows)
        if body.is_reduced:
            return replace(self, rows=tuple(rows), is_reduced=True)
        draw = body.lineage if is_epoch else self.draw
        rows = _with_voters(rows)
        rows = [row._replace(elects=row.votes and not row.sleeps, returned=False) for row in rows]
        return Table(tuple(rows), self.is_open, round_ + 1, draw=draw)

    def _banned_by(self, body: Body) -> set[int]:
        """Return the rows that a result bans: reduced ones none, because a few members alone may make them."""
        accused = () if body.is_reduced else body.census.accused
        return {row for row, accusers in accused if accusers >= self.least_accusers}

    def _passed_over(self, body: Body) -> frozenset[str]:
        """Return the members that went before a full round's leader; none in a tree, whose groups have leaders each."""
        if not body.is_full or body.levels > 1 or body.leader not in self.leading:
            return frozenset()
        own = self.order(body.leader, body.lineage)
        return frozenset(peer for peer in self.leading if self.order(peer, body.lineage) < own)

    def completed(self, body: Body) -> Body:
        """Return the result that ends a round, with what follows from it: the table, and its awake members' number."""
        after = self.after(body)
        return replace(body, table=after.hash, present=after.num_awake)

    def _is_forgotten(self, row: Row, round_: int) -> bool:
        if round_ % EPOCH_ROUNDS or row.is_witness or row.elects:
            return False
        return round_ - row.last >= (FORGET_ROUNDS if row.votes or row.is_banned else EPOCH_ROUNDS)

    # --- certificates -----------------------------------------------------------------------------------------------

    def why_invalid(self, body: Body, signers: Collection[str]) -> str:
        """Return why these signatures make no certificate of the next round's result; empty if they do."""
        voted = len(self.electorate.intersection(signers))
        if not body.is_reduced:
            if voted >= self.quorum:
                return ""
            return f"{voted} of the {len(self.electorate)} voters signed, and {self.quorum} are needed"
        signed = len(set(body.members).intersection(signers))
        if signed < quorum_of(len(body.members)):
            return f"{signed} of {len(body.members)} members signed, and a reduced round needs two thirds"
        if voted < self.least_of_electorate:
            return f"{voted} of the {len(self.electorate)} voters signed, and {self.least_of_electorate} are needed"
        if self._index.keys().isdisjoint(signers):
            return "no member of the lineage signed"
        return ""

    def is_vouched(self, members: Iterable[str], signers: Collection[str]) -> bool:
        """True if half of the members on a roster signed; a liar has as many keys of newcomers as it likes."""
        known = self._index.keys() & set(members)
        return 2 * len(known.intersection(signers)) >= len(known)

    def check(self, certificate: Certificate) -> Table:
        """Return the table after a certificate; raise `IntegrityError` unless it is valid after this one.

        The certificate's signatures are verified before (`Certificate.from_bytes`).
        """
        if reason := self.why_invalid(certificate.body, certificate.signers):
            raise IntegrityError(f"a certificate does not count: {reason}")
        return self.check_body(certificate.body)

    def check_body(self, body: Body) -> Table:
        """Return the table after a result; raise `IntegrityError` unless its members and table follow from this one."""
        if not body.is_last:
            raise IntegrityError("a result of a part of the swarm does not end a round")
        if body.levels == 1 and not self.fits(body):
            raise IntegrityError("a certificate tells other members than its roster")
        after = self.after(body)
        if after.hash != body.table or after.num_awake != body.present:
            raise IntegrityError("a certificate names another member table or tree than follows from it")
        return after

    def fits(self, body: Body) -> bool:
        """True if the census of a result on level 0 has the members and contributors of its roster."""
        told = [{row.peer for i, row in enumerate(self.rows) if _has(bits, i)} for bits in body.census[:3]]
        members, contributing = set(body.members), set(body.contributing)
        known, new = members & self._index.keys(), members - self._index.keys()
        return (
            told[0] == known
            and told[1] == known & contributing
            and told[2] <= known
            and new >= {*body.census.joining}
            and known.isdisjoint(self.banned)
        )  # A newcomer that leaves at once does not join.

    def leaves_out_most(self, census: Census, undrawn: frozenset[str] = frozenset()) -> bool:
        """True if those that contributed to a round's result are too few; see `is_too_few`."""
        contributed = {row.peer for index, row in enumerate(self.rows) if _has(census.contributed, index)}
        return self.is_too_few(contributed, undrawn)

    def is_too_few(self, peers: Collection[str], undrawn: frozenset[str] = frozenset()) -> bool:
        """True if these are less than half of the awake voters, or a third of the members before any vote.

        Then somebody may keep the others out. Half of those that are drawn are enough, too.
        """
        if undrawn and not self.is_too_few(peers):
            return False
        awake = [row for row in self.rows if not (row.sleeps or row.is_witness) and row.peer not in undrawn]
        voters, share = [row.peer for row in awake if row.votes], 2
        if not voters:
            voters, share = [row.peer for row in awake], 3
        return share * sum(peer in peers for peer in voters) < len(voters)

    def believes(self, certificate: Certificate) -> bool:
        """True if enough of this table's voters signed a later certificate of whatever round.

        A table without voters believes any: a newcomer's, where nobody founded the swarm.
        """
        return len(self.electorate.intersection(certificate.signers)) >= self.quorum


NOTHING_TOLD = Census()
NO_MEMBERS = Table()
"""Before the first round of a swarm without founders, and in heads without proof."""


@lru_cache(maxsize=64)
def draw(lineage: bytes, members: frozenset[str], share: float, least: int) -> frozenset[str]:
    """Return the members that take part in the round after a head: a share of them, rounded up, and at least so many.

    Nobody can tell the draw before the round before it has ended, and everybody can then.
    """
    order = sorted(members, key=lambda peer: hashlib.sha256(b"p2ptrain draw" + lineage + peer.encode()).digest())
    return frozenset(order[: max(least, math.ceil(round(share * len(order), 6)))])


def stands(drawn: Collection[str], there: Collection[str], least: int) -> bool:
    """True if half of the ``drawn`` members, and at least ``least``, are ``there``: without these, all take part."""
    num_there = len(set(drawn).intersection(there))
    return 2 * num_there >= len(drawn) and num_there >= least


def rank(peer: str, lineage: bytes, level: int = 0, cell: int = 0) -> bytes:
    """Return a peer's rank in a group of the round after ``lineage``, 32 bytes; it differs in each round."""
    return hashlib.sha256(lineage + level.to_bytes(8, "big") + cell.to_bytes(8, "big") + peer.encode()).digest()


def quorum_of(num_voters: int) -> int:
    """Return how many of ``num_voters`` decide: two thirds. Two such sets share more than a third of the voters."""
    return -(-2 * num_voters // 3)


def founding_table(founders: Iterable[str], *, is_open: bool = False) -> Table:
    """Return the table before the first round; without founders, the first round's members found the swarm."""
    rows = (Row(peer, votes=True, elects=True, is_witness=True) for peer in dict.fromkeys(founders))
    return Table(tuple(rows), is_open)


def _has(bits: bytes, index: int) -> bool:
    return index // 8 < len(bits) and bool(bits[index // 8] >> index % 8 & 1)


def _with_voters(rows: list[Row]) -> list[Row]:
    """Return the rows with a voter that does not sleep; without any, signatures of strangers would be enough.

    So the voters do not all fall asleep. When all have left, the members vote.
    """
    if any(row.votes and not row.sleeps for row in rows):
        return rows
    if any(row.elects for row in rows):
        return [row._replace(sleeps=row.sleeps and not row.elects) for row in rows]
    return [row._replace(votes=row.votes or not row.sleeps) for row in rows]


def _promoted(rows: list[Row]) -> list[Row]:
    """Return the rows with an epoch's new voters: those that counted most, and at most one for 16 voters."""
    voters = sum(row.votes and not row.sleeps for row in rows)
    waiting = [row for row in rows if not row.votes and not row.sleeps and row.counted >= ESTABLISHED_AMONG_STRANGERS]
    waiting.sort(key=lambda row: (-row.counted, row.since, row.peer))
    chosen = {row.peer for row in waiting[: -(-voters // NEW_VOTERS_PART)]}
    return [row._replace(votes=row.votes or row.peer in chosen) for row in rows]
