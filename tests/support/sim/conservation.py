"""Conservation of values: what peers computed is contributed, carried on, decayed or dropped, and nothing else.

`Values` follows one trainer from outside: what it computed, and what should be waiting after each change of its state,
by the rules of the design and in double precision. `Conservation` compares what the owners of shares made of a round
with what its contributors sent.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from p2ptrain.averaging.averager import RoundOutcome
from p2ptrain.averaging.protocol.certificate import Body
from p2ptrain.averaging.protocol.table import Table
from p2ptrain.averaging.vector.error_feedback import Encoded
from p2ptrain.buffers import Buffer
from p2ptrain.codecs import Codec
from p2ptrain.manifest import AveragingSpec
from tests.support.sim.trainers import InvariantError, SimulatedTrainer

MOST_ROUNDS_MISSED = 16
TOLERANCE = 2e-5
"""What roundings of fp32 may add up to, beside values that are around 0.1."""

Key = tuple[bytes, str]
"""A contribution: the id of the group, and its peer."""


def decoded(codec: Codec, data: Buffer, low: int, high: int) -> Tensor:
    out = torch.empty(high - low, dtype=torch.float32)
    codec.part(low, high).decode_into(data, out)
    return out.double()


class Values:
    """The values of one process, all fp64, ``[num_values]``.

    At any time ``computed`` + ``returned`` = ``contributed`` + ``decayed`` + ``dropped`` + what waits.

    Attributes:
        computed: By its local steps.
        returned: What encoding means dropped, which their owner adds to its next contribution.
        contributed: As it was sent, in certified rounds.
        decayed: Of what missed a round, and of what encoding dropped.
        dropped: Given up.
        work, residual: What should be waiting in the model, and in error feedback.
        is_replaced: Whether the shared state is being replaced by one that was downloaded.
    """

    def __init__(self, trainer: SimulatedTrainer, everybody: "Conservation") -> None:
        self.trainer = trainer
        self._everybody = everybody
        size = trainer.state.layout.num_values
        self.computed, self.returned, self.contributed = (torch.zeros(size, dtype=torch.float64) for _ in range(3))
        self.decayed, self.dropped = (torch.zeros(size, dtype=torch.float64) for _ in range(2))
        self.work, self.residual = (torch.zeros(size, dtype=torch.float64) for _ in range(2))
        self._offered: dict[tuple[bytes, int], Tensor] = {}
        self._booked_round = b""
        self.is_replaced = False

    # --- what the trainer does ------------------------------------------------------------------------------------

    def step(self, step: Callable[[], None]) -> None:
        self.is_replaced = False  # There may have been no work to carry.
        before = self._waiting_work()
        step()
        change = self._waiting_work() - before
        self.computed += change
        self.work += change

    def offers(self, vector: Tensor, tokens: int) -> None:
        """This vector goes into a round."""
        self._compare("offers something else than its work and its residual", vector, self.work + self.residual)
        self._offered[self.trainer.sync.head.lineage, tokens] = vector.double()

    def was_in(self, outcome: RoundOutcome, tokens: int, stages: list[Body]) -> None:
        """The vector that was offered last is in a round of which this process saw the end.

        ``stages`` are the results that it had a part in, from its own group's up the tree.
        """
        vector = self._offered[outcome.result.certificate.body.lineage, tokens]
        sent, lost, scale = vector, torch.zeros_like(vector), 1.0
        for body, encoded in zip(stages, outcome.encoded, strict=False):
            arrived = self._arrived(encoded)
            lost += scale * (encoded.vector.double() - arrived)
            lost_with_mean = self._lost_with_mean(body, encoded)
            if body is stages[0]:
                sent = arrived
                self._everybody.sent[body.group_id, self.trainer.peer.peer_id] = sent
            if self._everybody.spec.aggregation in ("median", "trimmed"):
                break  # They would drop what one member alone brings; so it is given up.
            place = [body.members[index] for index, *_ in body.contributors].index(self.trainer.peer.peer_id)
            if self._everybody.eighths_in(body)[place] < 8:
                break  # It would weigh more than it did.
            scale /= self._everybody.weights_in(body)[place]
            lost += scale * lost_with_mean
        self.contributed += sent
        self.returned += lost - (vector - sent)
        self.residual = self._everybody.spec.feedback_decay * lost
        self.decayed += lost - self.residual
        self.work = torch.zeros_like(self.work)
        self._booked_round = outcome.result.certificate.body.lineage

    def _arrived(self, encoded: Encoded) -> Tensor:
        """What the owners of shares got of a contribution."""
        arrived = encoded.vector.double()
        for index, (low, high) in enumerate(pairwise(encoded.bounds)):
            part = encoded.sent_parts.get(index)
            # The own part counts as it is, unless the codec is sparse: then it is encoded like all others.
            if low < high and (part is not None or index != encoded.own_index):
                if part is None:  # It was received as a whole all the same; encoding is repeatable on one machine.
                    part = encoded.part_codec.part(low, high).encode(encoded.vector[low:high])
                arrived[low:high] = decoded(encoded.part_codec, part, low, high)
        return arrived

    def _lost_with_mean(self, body: Body, encoded: Encoded) -> Tensor:
        """What encoding the mean of the own share dropped."""
        lost, own = torch.zeros_like(self.work), encoded.own_index
        low, high = encoded.bounds[own], encoded.bounds[own + 1]
        if encoded.own_mean_exact is not None and low < high:
            exact = torch.cat([piece.double() for _, _, piece in encoded.own_mean_exact])
            self._everybody.exact[body.body_hash, own] = exact
            lost[low:high] = exact - decoded(encoded.mean_codec, encoded.own_mean, low, high)
        return lost

    def forgets(self, contributed: bool, carry: Tensor | None) -> None:
        """The model is about to be set anew: with all of this on top of the shared state, or nothing."""
        if contributed:
            if self._booked_round != self.trainer.sync.head.lineage:
                self._was_in_unseen()
            return
        if carry is None:
            self.dropped += self.work
            self.work = torch.zeros_like(self.work)
        else:  # What missed a round decays; onto a state that was downloaded, for as many rounds as are known to it.
            rounds = range(MOST_ROUNDS_MISSED + 1) if self.is_replaced else (1,)
            powers = [self._everybody.spec.late_decay**number for number in rounds]
            left = min((self.work * power for power in powers), key=lambda kept: float((kept - carry).abs().max()))
            self._compare("carries something else than what missed the round", carry, left)
            self.decayed += self.work - left
            self.work = left
        self.is_replaced = False

    def _was_in_unseen(self) -> None:
        """An attempt that broke here was completed elsewhere: what was offered is in it, and what came later is not."""
        lineage = self.trainer.sync.head.lineage
        offers = [vector for (at, _), vector in self._offered.items() if at == lineage]
        if not offers:  # Its predecessor, which crashed, had offered it.
            self.dropped += self.work
        else:
            self.contributed += offers[-1]
            self.dropped += self.work + self.residual - offers[-1]
            self.residual = torch.zeros_like(self.residual)
        self.work = torch.zeros_like(self.work)

    def lost_residual(self) -> None:
        self.dropped += self.residual
        self.residual = torch.zeros_like(self.residual)

    # --- what must hold -------------------------------------------------------------------------------------------

    def check(self) -> None:
        """What waits is what should, and everything is accounted for."""
        self._compare("has other work waiting than it should", self._waiting_work(), self.work)
        residual = self.trainer.sync.feedback.residual
        self._compare("has another residual than it should", torch.zeros(1) if residual is None else residual,
                      self.residual)  # fmt: skip
        found = self.contributed + self.decayed + self.dropped + self.work + self.residual
        self._compare("does not account for all that it computed", found, self.computed + self.returned)

    def _waiting_work(self) -> Tensor:
        out = torch.empty(len(self.work), dtype=torch.float32)
        self.trainer.work.collect(out)
        return out.double()

    def _compare(self, what: str, actual: Tensor, expected: Tensor) -> None:
        error = float((actual.double() - expected).abs().max())
        if not error <= TOLERANCE:
            head = self.trainer.sync.head
            raise InvariantError(f"{self.trainer.peer.name} {what}: {error:.3g} off at round {head.round}")


def weights_of(spec: AveragingSpec, tokens: list[int], eighths: list[int]) -> list[float]:
    """What a contribution counts, as the manifest says: a vote each, or its tokens up to a multiple of the median.

    In the median, a newcomer has as many votes as it has eighths of its weight.
    """
    if spec.aggregation in ("median", "trimmed", "centered_clip"):
        return [1 / len(tokens)] * len(tokens)
    votes = sorted(count for count, number in zip(tokens, eighths, strict=True) for _ in range(number))
    usual = votes[(len(votes) - 1) // 2]
    capped = [min(count, spec.max_weight_ratio * usual) if len(tokens) > 2 else count for count in tokens]
    weights = [count * number for count, number in zip(capped, eighths, strict=True)]
    return [weight / sum(weights) for weight in weights]


@dataclass
class Conservation:
    """The values of all processes of a simulation, and of the rounds that they shared.

    Attributes:
        sent: What arrived at the owners of shares, for rounds of which the sender saw the end.
        exact: By result and index of the owner: the mean of its share before it was encoded.
        results: By hash: what any group on any level certified.
        tables: By hash: the member table before it.
        num_checked: How many shares were compared with their contributions.
        hostile: Ids of peers that send something else than they say.
    """

    spec: AveragingSpec
    sent: dict[Key, Tensor] = field(default_factory=dict)
    exact: dict[tuple[bytes, int], Tensor] = field(default_factory=dict)
    results: dict[bytes, Body] = field(default_factory=dict)
    tables: dict[bytes, Table] = field(default_factory=dict)
    of: dict[str, Values] = field(default_factory=dict)
    num_checked: int = 0
    hostile: set[str] = field(default_factory=set)

    def watch(self, trainer: SimulatedTrainer) -> None:
        """Follow this trainer from now on: not its values if rounds have some of them only, or more come meanwhile."""
        sync, work = trainer.sync, trainer.work
        stages: list[Body] = []
        average_group = sync.averager._average_group

        async def watched_group(*args: Any) -> Any:
            stage = await average_group(*args)
            stages.append(stage.certificate.body)
            self.results[stages[-1].body_hash] = stages[-1]
            self.tables[stages[-1].body_hash] = stage.attempt.head.table
            return stage

        sync.averager._average_group = watched_group  # type: ignore[method-assign, assignment]
        training = trainer.manifest.training
        if training.fragments > 1 or training.overlap_steps:
            return
        values = self.of[trainer.peer.name] = Values(trainer, self)
        step, average, adopt, reset = trainer._step, sync.averager.average, work.adopt, sync.feedback.reset
        patch = trainer.state.patch

        def watched_step() -> None:
            values.step(step)

        async def watched_average(vector: Tensor, tokens: int, samples: int, bandwidth: int = 0) -> RoundOutcome:
            values.check()
            values.offers(vector, tokens)
            stages.clear()
            outcome = await average(vector, tokens, samples, bandwidth)
            if outcome.contributed:
                values.was_in(outcome, tokens, stages)
            return outcome

        def watched_adopt(contributed: bool, carry: Tensor | None, *rest: Any) -> None:
            values.forgets(contributed, carry)
            adopt(contributed, carry, *rest)

        def watched_patch(*args: Any) -> None:
            values.is_replaced = True
            patch(*args)

        def watched_reset() -> None:
            values.lost_residual()
            reset()

        trainer.state.patch = watched_patch  # type: ignore[method-assign, assignment]
        trainer._step = watched_step  # type: ignore[method-assign]
        sync.averager.average = watched_average  # type: ignore[method-assign]
        work.adopt = watched_adopt  # type: ignore[method-assign, assignment]
        sync.feedback.reset = watched_reset  # type: ignore[method-assign]

    def weights_in(self, body: Body) -> list[float]:
        """What each contribution counts in a result."""
        return weights_of(self.spec, [tokens for _, tokens, _ in body.contributors], self.eighths_in(body))

    def eighths_in(self, body: Body) -> list[int]:
        """How much of its weight each contributor has."""
        table = self.tables[body.body_hash]
        if not table.is_open or body.level:
            return [8] * len(body.contributors)
        counted = {row.peer: row.counted for row in table.rows}
        return [min(8, 1 + counted.get(peer, 0)) for peer in body.contributing]

    def check(self) -> None:
        """Every process accounts for its values, and every result for those of its contributors."""
        for values in self.of.values():
            if values.trainer.peer.alive and values.trainer.status == "training":
                values.check()
        for body in self.results.values():
            if body.level == 0:
                self._check_result(body)

    def _check_result(self, body: Body) -> None:
        keys = [(body.group_id, body.members[index]) for index, *_ in body.contributors]
        if any(key not in self.sent or key[1] in self.hostile for key in keys):
            return
        weights = self.weights_in(body)
        for owner, (low, high) in enumerate(pairwise(body.bounds)):
            exact = self.exact.get((body.body_hash, owner))
            if exact is None or low == high:
                continue
            parts = torch.stack([self.sent[key][low:high] for key in keys])
            self.num_checked += 1
            if self.spec.aggregation == "mean":
                mean = (parts * torch.tensor(weights, dtype=torch.float64)[:, None]).sum(0)
                error = float((exact - mean).abs().max())
                if not error <= TOLERANCE:
                    raise InvariantError(f"round {body.round}: a mean is {error:.3g} off that of its contributions")
            # Whatever the rule, no value is beyond what the contributors brought; clipping may shorten it.
            least, most = parts.amin(0).clamp(max=0), parts.amax(0).clamp(min=0)
            if bool(((exact < least - TOLERANCE) | (exact > most + TOLERANCE)).any()):
                raise InvariantError(f"round {body.round}: a mean is beyond all of its contributions")
