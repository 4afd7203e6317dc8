"""Bookkeeping over simulated trainers: whose tokens are in which lineage, checked whenever a head moves."""

from __future__ import annotations

from collections import Counter

import torch

from p2ptrain.averaging.certificate import Body, Certificate
from p2ptrain.training.fragments import Fragment
from tests.support.trainers import InvariantError, SimulatedSwarm, SimulatedTrainer


class Accounts:
    """Every certified round that any trainer of a swarm applied.

    Attributes:
        bodies: By the lineage that it leads to: the result.
        dropped: By peer: tokens of work that a trainer gave up or that may have been counted already.
        crashed: Names of trainers that crashed at least once.
    """

    def __init__(self, swarm: SimulatedSwarm) -> None:
        self.bodies: dict[bytes, Body] = {}
        self.dropped: Counter[str] = Counter()
        self.crashed: set[str] = set()
        self._swarm = swarm
        self._totals: dict[bytes, Counter[str]] = {}
        launch = swarm._launch

        def launch_and_watch(*args: object) -> SimulatedTrainer:
            trainer: SimulatedTrainer = launch(*args)  # type: ignore[arg-type]
            self._watch(trainer)
            return trainer

        swarm._launch = launch_and_watch  # type: ignore[method-assign, assignment]

    def _watch(self, trainer: SimulatedTrainer) -> None:
        name, work, changed = trainer.peer.name, trainer.work, trainer.sync.on_change
        adopt = work.adopt
        if trainer.peer.incarnation:
            self.crashed.add(name)

        def watched_adopt(
            contributed: bool,
            carry: torch.Tensor | None,
            fragment: Fragment | None = None,
            counted: tuple[int, int] = (0, 0),
        ) -> None:
            if not contributed and carry is None:
                self.dropped[name] += work.tokens if fragment is None else work.tokens_of(fragment)
            adopt(contributed, carry, fragment, counted)

        def watched_change() -> None:
            changed()
            self.check(trainer)

        work.adopt = watched_adopt  # type: ignore[method-assign]
        trainer.sync.on_change = watched_change

    def totals(self, lineage: bytes) -> Counter[str]:
        """By peer id: the tokens that it contributed to a lineage, over all its rounds."""
        missing: list[Body] = []
        at = lineage
        while at not in self._totals and at in self.bodies:
            missing.append(self.bodies[at])
            at = self.bodies[at].lineage
        for body in reversed(missing):
            totals = Counter(self._totals.get(body.lineage, Counter()))
            for index, tokens, _ in body.contributors:
                totals[body.members[index]] += tokens
            self._totals[body.next_lineage] = totals
        return self._totals.get(lineage, Counter())

    def check(self, trainer: SimulatedTrainer) -> None:
        """No token is in a lineage twice, nor in it and still waiting to be contributed; and heads count right."""
        head, name = trainer.sync.head, trainer.peer.name
        if head.certificate:
            body = Certificate.from_bytes(head.certificate, trainer.swarm, trainer.peer.signer).body
            self.bodies[body.next_lineage] = body
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

    @property
    def num_forks(self) -> int:
        """How many lineages were continued in more than one way."""
        return sum(count - 1 for count in Counter(body.lineage for body in self.bodies.values()).values())

    def check_conservation(self) -> None:
        """Without forks and crashes every token is in the lineage, waits, or was seen to be dropped."""
        if self.num_forks:
            return
        for trainer in self._swarm.alive:
            name = trainer.peer.name
            if name in self.crashed:
                continue
            counted = self.totals(trainer.sync.head.lineage)[trainer.peer.peer_id]
            produced = self._swarm.ledger.produced.get(name, 0)
            if counted + trainer.work.tokens + self.dropped[name] < produced - self._late(trainer):
                raise InvariantError(
                    f"{name} made {produced} tokens; {counted} are in its lineage, {trainer.work.tokens} wait,"
                    f" {self.dropped[name]} were dropped: the rest is lost"
                )

    def _late(self, trainer: SimulatedTrainer) -> int:
        """Tokens made between an attempt that looked broken here and the news that it was completed elsewhere."""
        told = self._swarm.ledger.contributed.get(trainer.peer.name, 0)
        counted = self.totals(trainer.sync.head.lineage)[trainer.peer.peer_id]
        return self._swarm.ledger.produced.get(trainer.peer.name, 0) - counted if told != counted else 0
