"""Rounds of a whole swarm: of a model that is cut into stages, each stage's own rounds put together by number.

The hosts of a stage average among themselves, so each stage has a `RoundBook`. Round r of a pipeline is committed when
every stage has committed its round r, and as fast as the stage that took longest.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from p2ptrain.averaging.protocol.certificate import Body
from p2ptrain.network.records.record import PeerRecord
from p2ptrain.status.rounds import MAX_ABSENCES, MAX_ROUNDS, RoundBook
from p2ptrain.status.stages import WHOLE, reports_of
from p2ptrain.status.views import GroupView, RoundView


class SwarmRounds:
    """The last rounds of a swarm, of however many stages.

    Attributes:
        committed, aborted: Since the first look, as `RoundBook` counts them.
    """

    def __init__(self, group_size: int, num_stages: int) -> None:
        """
        Args:
            group_size: Of the manifest.
            num_stages: 1 where the model is not cut.
        """
        self.committed = 0
        self.aborted = 0
        self._num_stages = num_stages
        self._books = {stage: RoundBook(group_size) for stage in (range(num_stages) if num_stages > 1 else [WHOLE])}
        self._hosted = set(range(num_stages))
        self._first: int | None = None
        self._has_news = False
        self._done: set[int] = set()
        self._broken: set[int] = set()

    def learn(self, record: PeerRecord, at: float, usual: Mapping[int, int]) -> None:
        """Take in what a peer says of its last rounds.

        Args:
            record: Its newest record.
            at: Wall-clock second at which it was published.
            usual: By stage (`WHOLE` where there is one): the round that most of its hosts work towards.
        """
        if self._num_stages == 1:
            self._has_news |= bool(self._books[WHOLE].learn(record, at, usual.get(WHOLE, 0)))
            return
        stage = told_of(record, self._num_stages)
        if stage is not None and (seen := record.of_unit(stage)) is not None:
            self._books[stage].learn(seen, at, usual.get(stage, 0))

    def certify(self, body: Body, at: float) -> bool:
        """See `RoundBook.certify`; of stages nobody asks for certificates."""
        newly = self._books[WHOLE].certify(body, at)
        self.settle({})
        return newly

    def settle(self, usual: Mapping[int, int]) -> bool:
        """Count what was learnt since the last call; whether a round turned out to be committed.

        Args:
            usual: As for `learn`.
        """
        if self._num_stages == 1:
            book, has_news = self._books[WHOLE], self._has_news
            self.committed, self.aborted, self._has_news = book.committed, book.aborted, False
            return has_news
        self._hosted = {stage for stage in self._books if stage in usual}
        stages = [usual[stage] for stage in self._hosted]
        if self._first is None and stages:
            self._first = min(stages)  # What was before, this monitor did not see.
        views = [view for view in self.views() if self._first is not None and view.round >= self._first]
        done = {view.round for view in views if view.committed} - self._done
        broken = {view.round for view in views if view.broken_tries} - self._broken
        self.committed += len(done)
        self.aborted += len(broken)
        kept = max((view.round for view in views), default=0) - MAX_ROUNDS
        self._done = {number for number in self._done | done if number >= kept}
        self._broken = {number for number in self._broken | broken if number >= kept}
        return bool(done)

    def forget_peers(self, present: Iterable[str]) -> None:
        """See `RoundBook.forget_peers`."""
        here = set(present)
        for book in self._books.values():
            book.forget_peers(here)

    def views(self) -> list[RoundView]:
        """Newest first. Of several stages: as far as each of them has told of that has hosts, or had some."""
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

    def groups(self, peers: Sequence[str]) -> list[GroupView]:
        """See `RoundBook.groups`; none of several stages, whose groups are not computed."""
        return self._books[WHOLE].groups(peers) if self._num_stages == 1 else []


def told_of(record: PeerRecord, num_stages: int) -> int | None:
    """Which stage's rounds are those that a host tells of; None where it tells of none."""
    own = [stage for stage in reports_of(record, num_stages) if stage.unit < num_stages]
    if len(own) > 1:  # Such as while it moves.
        own = [stage for stage in own if (stage.lineage, stage.round) == (record.lineage, record.round)]
    return own[0].unit if own else None


def merged(stages: Mapping[int, RoundView]) -> RoundView:
    """One round of a pipeline, from what it was for each stage; at least one.

    The times are those of the stage that averaged longest: the others waited for it.
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
