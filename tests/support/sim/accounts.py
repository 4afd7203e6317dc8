"""Bookkeeping over simulated trainers: whose tokens are in which lineage, checked whenever a head moves.

Every token that a trainer made is at any time in exactly one place: in a certified round, waiting with its trainer, or
dropped for a reason that the trainer gives. `tests.support.sim.conservation` does the same for the values.
"""

from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise

import torch

from p2ptrain.averaging.protocol.certificate import Body, Certificate
from p2ptrain.training.state.layout import Fragment
from tests.support.sim.conservation import Conservation
from tests.support.sim.heads import watch_head
from tests.support.sim.trainers import InvariantError, SimulatedSwarm, SimulatedTrainer


@dataclass
class Book:
    """Where the tokens of one process are; a crash ends the book.

    Attributes:
        counted: By the lineage that a certified round led to: the tokens in it, as far as this process saw it end.
        late: By the lineage that a round led to: tokens made between an attempt that broke here and the news that it
            was completed elsewhere. The round has the tokens before them, and they are given up; another lineage may
            have them.
        dropped: Tokens given up, among them those that may be in a downloaded state already.
        began_with: Tokens that its peer had made before it.
    """

    began_with: int = 0
    counted: dict[bytes, int] = field(default_factory=dict)
    late: dict[bytes, int] = field(default_factory=dict)
    dropped: int = 0


class Accounts:
    """Every certified round that any trainer of a swarm applied.

    ``bodies`` has the result by the lineage that it leads to, ``books`` that of each trainer's current process,
    ``crashed`` the trainers that crashed at least once, and ``values`` the same for the values of contributions.
    """

    def __init__(self, swarm: SimulatedSwarm) -> None:
        self.bodies: dict[bytes, Body] = {}
        self.books: dict[str, Book] = {}
        self.crashed: set[str] = set()
        self.values = Conservation(swarm.manifest.averaging)
        self._swarm = swarm
        self._totals: dict[bytes, Counter[str]] = {}
        self._of_roster: dict[bytes, bytes] = {}
        self._adopted: dict[str, tuple[bytes, int]] = {}
        launch = swarm._launch

        def launch_and_watch(*args: object) -> SimulatedTrainer:
            trainer: SimulatedTrainer = launch(*args)  # type: ignore[arg-type]
            self._watch(trainer)
            return trainer

        swarm._launch = launch_and_watch  # type: ignore[method-assign, assignment]

    def _watch(self, trainer: SimulatedTrainer) -> None:
        name, work = trainer.peer.name, trainer.work
        if trainer.peer.incarnation:
            self.crashed.add(name)
        book = self.books[name] = Book(self._swarm.ledger.produced.get(name, 0))
        self._adopted.pop(name, None)
        self.values.watch(trainer)
        adopt = work.adopt

        def watched_adopt(
            contributed: bool,
            carry: torch.Tensor | None,
            fragment: Fragment | None = None,
            counted: tuple[int, int] = (0, 0),
        ) -> None:
            before, lineage = work.tokens, trainer.sync.head.lineage
            adopt(contributed, carry, fragment, counted)
            forgotten = before - work.tokens
            if contributed:
                self._adopted[name] = (lineage, forgotten)
            else:
                book.dropped += forgotten

        work.adopt = watched_adopt  # type: ignore[method-assign]
        watch_head(trainer.sync.replica, lambda: self.check(trainer))

    def totals(self, lineage: bytes) -> Counter[str]:
        """By peer id: the tokens that it contributed to a lineage, over all its rounds."""
        missing: list[Body] = []
        at = lineage
        while at not in self._totals and at in self.bodies:
            missing.append(self.bodies[at])
            at = self.bodies[at].lineage
        for body in reversed(missing):
            self._totals[body.next_lineage] = self._totals.get(body.lineage, Counter()) + self.contributions(body)
        return self._totals.get(lineage, Counter())

    def contributions(self, body: Body) -> Counter[str]:
        """By peer id: the tokens in a result, through all levels of its tree."""
        found: Counter[str] = Counter()
        for index, tokens, _ in body.contributors:
            if body.level == 0:
                found[body.members[index]] += tokens
            else:
                found += self.contributions(self.values.results[body.children[index]])
        if found.total() != body.tokens:
            raise InvariantError(f"a result of round {body.round} counts {body.tokens} tokens, not {found.total()}")
        return found

    def is_within(self, lineage: bytes, later: bytes) -> bool:
        while later != lineage and later in self.bodies:
            later = self.bodies[later].lineage
        return later == lineage

    def check(self, trainer: SimulatedTrainer) -> None:
        """No token is in a lineage twice, nor in it and still waiting to be contributed; and heads count right."""
        head, name = trainer.sync.head, trainer.peer.name
        if head.certificate:
            self._enter(Certificate.from_bytes(head.certificate, trainer.swarm, trainer.peer.signer).body)
        self._settle(trainer)
        totals = self.totals(head.lineage)
        if head.tokens != totals.total():
            raise InvariantError(f"{name}: the head at round {head.round} counts {head.tokens}, not {totals.total()}")
        counted, produced = totals[trainer.peer.peer_id], self._swarm.ledger.produced.get(name, 0)
        if counted + trainer.work.tokens > produced:
            raise InvariantError(
                f"{name} made {produced} tokens, {counted} are in its lineage and {trainer.work.tokens} wait still:"
                f" something counts twice at round {head.round}"
            )
        if not bool(torch.isfinite(trainer.state.vector).all()):
            raise InvariantError(f"{name}: the state is not finite at round {head.round}")

    def _enter(self, body: Body) -> None:
        self.bodies[body.next_lineage] = body
        if self._of_roster.setdefault(body.group_id, body.body_hash) != body.body_hash:
            raise InvariantError(f"a roster of round {body.round} has two certificates")

    def _settle(self, trainer: SimulatedTrainer) -> None:
        """Book what this trainer took for contributed: the certificate that it moved on to has to say so, too."""
        name, head = trainer.peer.name, trainer.sync.head
        before, tokens = self._adopted.get(name, (head.lineage, 0))
        if head.lineage == before:
            return
        del self._adopted[name]
        body = self.bodies[head.lineage]
        told = self.contributions(body)[trainer.peer.peer_id]
        book = self.books[name]
        if body.lineage != before or (body.levels == 1 and not told):
            raise InvariantError(f"{name} forgot work of {tokens} tokens that round {body.round} does not list")
        if tokens < told and name not in self.crashed:
            raise InvariantError(f"{name} had {tokens} tokens, and round {body.round} has {told} of it")
        book.counted[body.next_lineage] = min(told, tokens)
        book.late[body.next_lineage] = max(0, tokens - told)

    def check_conservation(self) -> None:
        """Every token is in a certified round, waits, or was seen to be dropped; and so is every value."""
        for trainer in self._swarm.honest:
            name, book = trainer.peer.name, self.books[trainer.peer.name]
            produced = self._swarm.ledger.produced.get(name, 0) - book.began_with
            counted = sum(book.counted.values())
            late = sum(book.late.values())
            found = counted + late + book.dropped + trainer.work.tokens
            if found != produced:
                raise InvariantError(
                    f"{name} made {produced} tokens; {counted} are in certified rounds, {late} came too late,"
                    f" {book.dropped} were dropped and {trainer.work.tokens} wait: {produced - found} are nowhere"
                )
            if name in self.crashed:
                continue
            lineage = trainer.sync.head.lineage
            seen = sum(tokens for after, tokens in book.counted.items() if self.is_within(after, lineage))
            unseen = self.totals(lineage)[trainer.peer.peer_id] - seen
            # It missed the end of a round, and then skipped it with a download, or saw it end in another way, too.
            elsewhere = sum(tokens for after, tokens in book.late.items() if not self.is_within(after, lineage))
            if not 0 <= unseen <= book.dropped + counted - seen + elsewhere:
                raise InvariantError(f"{name} saw {seen} of its tokens counted; its lineage has {unseen} more")
        self.values.check()

    def check_left_out(self, peers: set[str]) -> None:
        """Nothing of these peers is in a mean of which somebody else owned a share."""
        for body in self.values.results.values():
            for index, *_ in body.contributors:
                others = sum(high - low for i, (low, high) in enumerate(pairwise(body.bounds)) if i != index)
                if body.members[index] in peers and others:
                    raise InvariantError(f"round {body.round} counts the broken parts of {body.members[index]}")
