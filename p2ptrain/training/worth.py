"""Audits of worth: whether the update of another peer fits the samples that the peer says that it read.

The form and arithmetic of an update prove no work. After a round each owner keeps one other member's part of its share,
and the lineage tells which samples that member had to read. An update that was trained on these samples points more
along their gradient than along that of other samples: the difference of the two cosines is the audit's result. Zeros,
noise, an old mean and a copy of another peer's update have a difference of about 0. A peer cannot know who audits it:
an owner draws once all updates have arrived.

A single difference is mostly noise. `Score.deviations` tells how surely the mean of a peer's audits is above 0. A
peer that takes many more steps than the others needs more audits, since each sample is a smaller part of its update.

Gauntlet (Lidin et al. 2025) compares losses on assigned and other samples before and after an update, and needs the
whole update. A cosine needs the owner's part alone: an audit sends no byte.
"""

from __future__ import annotations

import math
import random
import statistics
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from p2ptrain.averaging.commit.attempt import PeerPart
from p2ptrain.buffers import Bounded
from p2ptrain.training.data.windows import Place, Sampler
from p2ptrain.training.state.layout import Fragment

MAX_SCORES = 256
LEAST_AUDITS = 64
LEAST_DEVIATIONS = 3.0
"""Above it, work is proved: an update without work gets there by chance in one of 740 cases."""
MAX_SAMPLES = 16
"""Samples of each gradient."""


@dataclass(frozen=True)
class ClaimedWork:
    """A part of another peer's update, and which samples it had to read.

    Attributes:
        fragment: What of the state the round averaged.
        cursor: Positions of the data that the lineage consumed before the round.
        place: The peer's, among the readers; None for a newcomer.
    """

    part: PeerPart
    fragment: Fragment
    round: int
    cursor: int
    place: Place | None


@dataclass
class Score:
    """The last `LEAST_AUDITS` audits of a peer, so that one that stops to work is doubted later.

    Attributes:
        audits: Number of all its audits.
        deviations: How many standard errors the mean of the last ones is above 0; 0 before the second, and if all are
            equal.
    """

    audits: int = 0
    deviations: float = 0.0
    _last: deque[float] = field(default_factory=lambda: deque(maxlen=LEAST_AUDITS))

    def add(self, difference: float) -> None:
        self.audits += 1
        self._last.append(difference)
        spread = statistics.stdev(self._last) if len(self._last) > 1 else 0.0
        self.deviations = statistics.fmean(self._last) / spread * math.sqrt(len(self._last)) if spread else 0.0

    @property
    def is_proved(self) -> bool:
        return self.deviations >= LEAST_DEVIATIONS


class WorthAudits:
    """Audits other peers with the live model, right after a round, on the training thread.

    ``loss_of`` returns the mean loss of the model on at most ``batch`` samples, token ids ``[batch, context + 1]``.
    ``generator`` draws the samples of an audit.

    Attributes:
        scores: By peer.
    """

    def __init__(
        self,
        module: nn.Module,
        sampler: Sampler,
        loss_of: Callable[[npt.NDArray[np.int64]], Tensor],
        batch: int,
        generator: random.Random,
    ) -> None:
        self.scores: Bounded[str, Score] = Bounded(MAX_SCORES)
        self._module = module
        self._sampler = sampler
        self._loss_of = loss_of
        self._batch = min(batch, MAX_SAMPLES)
        self._random = generator

    @property
    def doubtful(self) -> list[str]:
        """The peers whose work `LEAST_AUDITS` did not prove, while they proved that of another peer.

        Where all samples are alike, audits prove nothing.
        """
        scores = list(self.scores.items())
        if not any(score.is_proved for _, score in scores):
            return []
        return [peer for peer, score in scores if score.audits >= LEAST_AUDITS and not score.is_proved]

    def audit(self, work: ClaimedWork) -> float:
        """Return how much better an update fits the samples of its peer than others; 0 for one without samples."""
        peer, difference = work.part.peer, self._difference(work)
        score = self.scores.get(peer) or Score()
        score.add(difference)
        self.scores[peer] = score
        return difference

    def _difference(self, work: ClaimedWork) -> float:
        part = work.part
        size = min(part.samples, self._batch)
        if not size:
            return 0.0
        first = self._random.randrange(part.samples - size + 1)
        assigned = self._sampler.batch(work.cursor, work.place, part.peer, work.round, first, size)
        others = self._sampler.batch(0, None, "nobody", work.round, self._random.getrandbits(62), size)
        values = part.decode()
        return self._cosine(work, values, assigned) - self._cosine(work, values, others)

    def _cosine(self, work: ClaimedWork, values: Tensor, samples: npt.NDArray[np.int64]) -> float:
        """Return the cosine between a part and the gradient of samples, over the parameters of the share."""
        start, stop = work.part.start, work.part.start + len(values)
        found = [
            (entry, tensor)
            for entry, tensor in work.fragment.layout.parameters_of(self._module)
            if entry.offset < stop and start < entry.end
        ]
        if not found:
            return 0.0
        gradients = torch.autograd.grad(self._loss_of(samples), [tensor for _, tensor in found], allow_unused=True)
        product = ours = theirs = 0.0
        for (entry, _), gradient in zip(found, gradients, strict=True):
            low, high = max(entry.offset, start), min(entry.end, stop)
            piece = values[low - start : high - start]
            theirs += float(piece @ piece)
            if gradient is not None:
                own = gradient.to("cpu", torch.float32).reshape(-1)[low - entry.offset : high - entry.offset]
                product += float(piece @ own)
                ours += float(own @ own)
        return product / math.sqrt(ours * theirs) if ours and theirs else 0.0
