"""Rounds that peers certify without the voters, and trainers that go on from them all the same."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from p2ptrain.averaging.commit.attempt import Attempt
from p2ptrain.averaging.commit.round_log import Result
from p2ptrain.averaging.protocol.certificate import Certificate, Roster, vote
from tests.support.sim.trainers import SimulatedTrainer

LARGE = 10**9
"""As many tokens as a manifest allows for a contribution."""


def forge(
    trainer: SimulatedTrainer,
    *others: SimulatedTrainer,
    tokens: int = LARGE,
    is_reduced: bool = False,
    view: int = 0,
    signers: Sequence[SimulatedTrainer] | None = None,
) -> Result:
    """A round after a trainer's head that averages large values; its roster signs it, or else ``signers`` do."""
    head, averager = trainer.sync.head, trainer.sync.averager
    roster = sorted([trainer, *others], key=lambda each: each.peer.peer_id)
    tickets = []
    for each in roster:
        ticket = replace(each.sync.averager._ticket(head, tokens, 1, 0), view=view, stalled=is_reduced)
        tickets.append(ticket.signed(each.swarm, each.peer.signer))
    log = averager.round_log
    codec, num_values = log.codec_of(head.round), log.num_values(head.round)
    bounds = (0, *(num_values for _ in roster))
    attempt = Attempt(
        Roster(tuple(tickets), is_reduced), head, bounds, codec, trainer.swarm, trainer.manifest.averaging
    )
    mean = attempt.dense_codec.encode(torch.full((num_values,), 3.0))
    attempt.add_mean(0, mean, attempt.mean_root(0, mean))
    attempt.contributors = tuple(range(len(roster)))
    attempt.make_result(trainer.peer.signer)
    assert attempt.body is not None
    message = vote(attempt.body.body_hash)
    proofs = sorted((each.peer.peer_id, each.peer.signer.sign(message)) for each in (signers or roster))
    return Result(Certificate(attempt.body, tuple(proofs)), attempt.complete_means())


def go_on_from(trainer: SimulatedTrainer, result: Result) -> None:
    """Apply a round, whoever signed it."""
    replica, before = trainer.sync.replica, trainer.sync.head
    root = replica._take_step(result, None, False)
    table, path = before.table.after(result.certificate.body), before.path_through(result.certificate)
    replica._set_head(result.certificate.next_head(root, table, path))
    replica.averager.round_log.add(result, before)
