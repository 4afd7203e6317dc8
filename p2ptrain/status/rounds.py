"""The history of rounds: peers' reports, merged with certificates.

The hosts of a stage average among themselves, so each stage has a `RoundBook`. Round r of a pipeline is committed once
every stage has committed its round r. Its times are those of the slowest stage.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from p2ptrain.averaging.grouping.cells import Cells, Key
from p2ptrain.averaging.protocol.certificate import Body
from p2ptrain.network.records.record import MAX_REPORTS, PeerRecord, RoundReport
from p2ptrain.status.stages import WHOLE, reports_of
from p2ptrain.status.views import Absence, GroupView, RoundView

MAX_ROUNDS = 48
OPEN_ROUNDS = MAX_REPORTS + 4
"""Newest rounds that accept reports; > `MAX_REPORTS`, the rounds in a record. Older rounds keep only their view, since
the reports of thousands of peers take much memory."""
MAX_ABSENCES = 20
MAX_REPORTS_PER_ROUND = 10_000


@dataclass
class _Entry:
    """The reports and the certificate of one round."""

    round: int
    at: float
    reports: dict[str, RoundReport] = field(default_factory=dict)
    broken: dict[str, tuple[RoundReport, ...]] = field(default_factory=dict)
    """By peer: its failed attempts, from the record with the most."""
    body: Body | None = None
    is_known: bool = False
    """True once the round is known as committed, at second ``at``."""
    view: RoundView | None = None
    """None if stale."""
    is_closed: bool = False
    """True once its reports are dropped; only a certificate changes its view then."""


class RoundBook:
    """The last rounds of one stage, as peers report them.

    No single peer's report is trusted. A round counts as committed by the majority of its reports or by a certificate.
    Reports ahead of the median trainer and of the newest certificate wait.
    """

    def __init__(self, group_size: int) -> None:
        self._cells = Cells(group_size)
        self._entries: dict[int, _Entry] = {}
        self._names: dict[str, str] = {}
        self._told: dict[str, tuple[RoundReport, ...]] = {}

    def learn(self, record: PeerRecord, at: float, median_round: int) -> bool:
        """Record a peer's reports of its last rounds; return True if the swarm restarted from an old checkpoint.

        Args:
            at: Wall-clock second of the record's publication.
            median_round: The round that most trainers work towards.
        """
        if record.role != "trainer":
            return False
        went_back = self._go_back(median_round)
        if self._told.get(record.peer) == record.last_rounds:
            return went_back
        self._names[record.peer] = record.label
        certified = [entry.round for entry in self._entries.values() if entry.body is not None]
        horizon = max([median_round, *(number + 1 for number in certified)])
        skipped, ended = False, at
        broken: dict[int, list[RoundReport]] = defaultdict(list)
        for report in record.last_rounds:
            if not report.committed:
                broken[report.round].append(report)
        for report in reversed(record.last_rounds):
            if report.round > horizon - report.committed:
                skipped = True  # Retried once the other peers have reached it.
            else:
                self._learn_report(record.peer, report, broken[report.round], ended)
            ended = max(0.0, ended - report.seconds - report.compute_seconds)
        if not skipped:
            self._told[record.peer] = record.last_rounds
        self._forget()
        return went_back

    def _go_back(self, median_round: int) -> bool:
        """Drop the rounds of an abandoned lineage; return True if there is one."""
        if max(self._entries, default=0) <= median_round + MAX_ROUNDS:
            return False
        self._entries = {number: entry for number, entry in self._entries.items() if number < median_round}
        self._told.clear()
        return True

    def _learn_report(self, peer: str, report: RoundReport, broken: Sequence[RoundReport], at: float) -> None:
        entry = self._entries.get(report.round)
        if entry is not None and entry.is_closed:
            return
        if entry is None:
            newest = max(self._entries, default=report.round)
            if report.round <= newest - MAX_ROUNDS:
                return
            entry = self._entries[report.round] = _Entry(report.round, at)
        known = entry.reports.get(peer)
        if known == report or (known is None and len(entry.reports) >= MAX_REPORTS_PER_ROUND):
            return
        entry.view = None
        if known is None or report.committed or not known.committed:
            entry.reports[peer] = report
        if len(broken) > len(entry.broken.get(peer, ())):
            entry.broken[peer] = tuple(broken)
        self._note_commit(entry, at)

    def certify(self, body: Body, at: float) -> None:
        """Record a majority-signed result.

        The caller passes only lineages that most trainers follow, since any peer can sign for a group of its own.
        """
        entry = self._entries.setdefault(body.round, _Entry(body.round, at))
        entry.body, entry.view = body, _proven(entry.view, body) if entry.is_closed and entry.view else None
        self._forget()
        if entry.reports or entry.is_closed:
            self._note_commit(entry, at)

    def _note_commit(self, entry: _Entry, at: float) -> None:
        if not entry.is_known and _is_committed(entry):
            entry.is_known, entry.at = True, at

    def __contains__(self, number: int) -> bool:
        """True if a round is remembered; one of an abandoned lineage is not."""
        return number in self._entries

    def _forget(self) -> None:
        for number in sorted(self._entries)[:-MAX_ROUNDS]:
            del self._entries[number]
        for number in sorted(self._entries)[:-OPEN_ROUNDS]:
            entry = self._entries[number]
            if entry.reports:
                self._view(entry)
                entry.is_closed = True
                entry.reports.clear()
                entry.broken.clear()

    def forget_peers(self, present: Iterable[str]) -> None:
        """Forget absent peers that have no report in an open round."""
        needed = set(present).union(*(entry.reports for entry in self._entries.values()))
        self._names = {peer: name for peer, name in self._names.items() if peer in needed}
        self._told = {peer: told for peer, told in self._told.items() if peer in needed}

    def views(self) -> list[RoundView]:
        """Return all rounds, newest first, except rounds known only by a certificate."""
        known = sorted(self._entries.values(), key=lambda entry: -entry.round)
        return [self._view(entry) for entry in known if entry.reports or entry.is_closed]

    def _view(self, entry: _Entry) -> RoundView:
        if entry.view is not None:
            return entry.view
        reports = list(entry.reports.values())
        done = [report for report in reports if report.committed] or reports
        digests = Counter(report.digest.hex() for report in done if report.committed and any(report.digest))
        members, contributors = _median_size(done)
        reasons = Counter(report.reason for attempts in entry.broken.values() for report in attempts)
        view = RoundView(
            round=entry.round,
            committed=_is_committed(entry),
            verified=False,
            at=entry.at,
            seconds=statistics.median(report.seconds for report in done),
            compute_seconds=statistics.median(report.compute_seconds for report in done),
            matchmaking_seconds=statistics.median(report.matchmaking_seconds for report in done),
            transfer_seconds=statistics.median(report.transfer_seconds for report in done),
            members=members,
            contributors=contributors,
            tokens=None,
            levels=1,
            lineage="",
            agrees=len(digests) == 1 if digests.total() > 1 else None,
            digests=tuple(digests.most_common(4)),
            absences=tuple(self._absences(entry)),
            broken_tries=statistics.median_high(map(len, entry.broken.values())) if entry.broken else 0,
            broken_peers=len(entry.broken),
            broken_reason=min(reasons, key=lambda reason: (-reasons[reason], reason), default=""),
        )
        entry.view = view if entry.body is None else _proven(view, entry.body)
        return entry.view

    def _absences(self, entry: _Entry) -> list[Absence]:
        missing = [peer for peer, each in entry.reports.items() if not (each.committed and each.contributed)]
        return [
            Absence(peer, self._names.get(peer, peer[-8:]), _absence(entry.reports[peer]), entry.reports[peer].reason)
            for peer in sorted(missing)[:MAX_ABSENCES]
        ]

    def proven(self) -> frozenset[str] | None:
        """Return the members of the last certified rounds; None without any, or if one names delegates alone."""
        bodies = [entry.body for entry in self._entries.values() if entry.body is not None]
        if not bodies or any(body.levels > 1 for body in bodies):
            return None
        return frozenset(peer for body in bodies for peer in body.members)

    def groups(self, peers: Sequence[str]) -> list[GroupView]:
        """Return the last certified round's groups, by cell of the lowest level; empty if too little is known.

        They follow from the previous head, as members compute them. ``peers`` are the present trainers.
        """
        newest = max((entry.round for entry in self._entries.values() if entry.body is not None), default=None)
        if newest is None:
            return []
        entry = self._entries[newest]
        assert entry.body is not None
        body = entry.body
        if body.levels == 1:
            contributors = set(body.contributing)
            members = [(peer, "counted" if peer in contributors else "late") for peer in sorted(body.members)]
            return [GroupView(0, tuple(members))]
        before = self._entries.get(newest - 1)
        if before is None or before.body is None or before.body.next_lineage != body.lineage:
            return []
        place = Key(newest, body.lineage, before.body.present)
        cells: dict[int, list[tuple[str, str]]] = defaultdict(list)
        for peer in sorted({*peers, *body.members}):
            part = _part(entry.reports.get(peer), peer in body.members)
            cells[self._cells.key_of(place, peer).cell].append((peer, part))
        return [GroupView(cell, tuple(cells[cell])) for cell in sorted(cells)]


def _part(report: RoundReport | None, is_member: bool) -> str:
    if is_member:
        return "delegate"
    if report is None or not report.committed:
        return "absent"
    return "counted" if report.contributed else "late"


def _absence(report: RoundReport) -> Literal["late", "dropped", "aborted"]:
    if not report.committed:
        return "aborted"
    return "dropped" if "dropped" in report.reason else "late"


def _median_size(reports: Sequence[RoundReport]) -> tuple[int, int]:
    """Return the median of the reported group sizes: (members, contributors)."""
    sizes = [(report.members, report.contributors) for report in reports]
    return statistics.median_high([size for size in sizes if size[0]] or sizes)


def _is_committed(entry: _Entry) -> bool:
    """True if a certificate or most reporting peers say that the round is committed."""
    committed = sum(report.committed for report in entry.reports.values())
    return entry.body is not None or 2 * committed > len(entry.reports)


def _proven(view: RoundView, body: Body) -> RoundView:
    """Return a view with the certificate's values, which override reports."""
    return replace(
        view, verified=True, committed=True, members=sum(body.peers), tokens=body.tokens, levels=body.levels,
        contributors=sum(body.peers[index] for index, *_ in body.contributors), lineage=body.lineage.hex(),
    )  # fmt: skip


class SwarmRounds:
    """The last rounds of a swarm with ``num_stages`` stages, 1 for an uncut model.

    Attributes:
        committed: Rounds since the first look that are known to be committed; ``aborted``: rounds since then with a
            failed attempt of at least one peer.
    """

    def __init__(self, group_size: int, num_stages: int) -> None:
        self.committed = 0
        self.aborted = 0
        self._num_stages = num_stages
        self._books = {stage: RoundBook(group_size) for stage in (range(num_stages) if num_stages > 1 else [WHOLE])}
        self._hosted = set(range(num_stages))
        self._first: int | None = None
        self._done: set[int] = set()
        self._broken: set[int] = set()

    def learn(self, record: PeerRecord, at: float, medians: Mapping[int, int]) -> None:
        """Record a peer's reports of its last rounds.

        Args:
            at: Wall-clock second of the record's publication.
            medians: By stage (`WHOLE` if there is one): the round that most of its hosts work towards.
        """
        seen, stage = record, WHOLE
        if self._num_stages > 1:
            if (hosted := told_of(record, self._num_stages)) is None or (of_unit := record.of_unit(hosted)) is None:
                return
            seen, stage = of_unit, hosted
        median = medians.get(stage, 0)
        if self._books[stage].learn(seen, at, median) and self._first is not None:
            self._first = min(self._first, median)

    def certify(self, body: Body, at: float) -> bool:
        """See `RoundBook.certify`; only for a model that is not cut. Return True if its round is newly committed."""
        self._books[WHOLE].certify(body, at)
        return self._count()

    def settle(self, medians: Mapping[int, int]) -> bool:
        """Count newly committed and aborted rounds; return True if one was committed. ``medians`` as for `learn`."""
        self._hosted = {stage for stage in self._books if stage in medians}
        if self._first is None and self._hosted:
            self._first = min(medians[stage] for stage in self._hosted)  # Earlier rounds do not count.
        return self._count()

    def _count(self) -> bool:
        for counted in (self._done, self._broken):  # Rounds that are redone count again.
            counted.difference_update([each for each in counted if not any(each in b for b in self._books.values())])
        views = [view for view in self.views() if self._first is not None and view.round >= self._first]
        done = {view.round for view in views if view.committed} - self._done
        broken = {view.round for view in views if view.broken_tries} - self._broken
        self.committed += len(done)
        self.aborted += len(broken)
        self._done |= done
        self._broken |= broken
        return bool(done)

    def forget_peers(self, present: Iterable[str]) -> None:
        """See `RoundBook.forget_peers`."""
        here = set(present)
        for book in self._books.values():
            book.forget_peers(here)

    def views(self) -> list[RoundView]:
        """Return all rounds, newest first; in a pipeline, only up to a round that every hosted stage has reported."""
        if self._num_stages == 1:
            return self._books[WHOLE].views()
        by_stage = {stage: {view.round: view for view in book.views()} for stage, book in self._books.items()}
        by_stage = {stage: views for stage, views in by_stage.items() if views or stage in self._hosted}
        newest = min((max(views, default=-1) for views in by_stage.values()), default=-1)
        numbers = {number for views in by_stage.values() for number in views if number <= newest}
        return [
            merged({stage: views[number] for stage, views in by_stage.items() if number in views})
            for number in sorted(numbers, reverse=True)
        ]

    def proven(self) -> frozenset[str] | None:
        """See `RoundBook.proven`; None in a pipeline."""
        return self._books[WHOLE].proven() if self._num_stages == 1 else None

    def groups(self, peers: Sequence[str]) -> list[GroupView]:
        """See `RoundBook.groups`; empty in a pipeline."""
        return self._books[WHOLE].groups(peers) if self._num_stages == 1 else []


def told_of(record: PeerRecord, num_stages: int) -> int | None:
    """Return the stage whose rounds a host reports; None if it reports none."""
    own = [stage for stage in reports_of(record, num_stages) if stage.unit < num_stages]
    if len(own) > 1:  # For instance during a migration.
        own = [stage for stage in own if (stage.lineage, stage.round) == (record.lineage, record.round)]
    return own[0].unit if own else None


def merged(stages: Mapping[int, RoundView]) -> RoundView:
    """Return one view of a pipeline's round, from the views of at least one stage.

    The times are those of the slowest stage, since the other stages wait for it.
    """
    views = list(stages.values())
    slowest = max(views, key=lambda view: view.seconds)
    astray = next((view for view in views if view.agrees is False), None)
    worst = max(stages, key=lambda stage: (stages[stage].broken_tries, stages[stage].broken_peers, -stage))
    reason = stages[worst].broken_reason
    return replace(
        slowest,
        committed=all(view.committed for view in views),
        verified=all(view.verified for view in views),
        at=max(view.at for view in views),
        members=sum(view.members for view in views),
        contributors=sum(view.contributors for view in views),
        levels=max(view.levels for view in views),
        lineage="",
        agrees=False if astray is not None else True if any(view.agrees for view in views) else None,
        digests=astray.digests if astray is not None else (),
        absences=tuple(absence for stage in sorted(stages) for absence in stages[stage].absences)[:MAX_ABSENCES],
        broken_tries=stages[worst].broken_tries,
        broken_peers=sum(view.broken_peers for view in views),
        broken_reason=f"stage {worst}: {reason}" if reason else "",
    )
