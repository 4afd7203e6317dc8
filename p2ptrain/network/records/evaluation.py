"""A site's measurement of the model on its own held-out data, and the measurement over several sites.

The samples stay at the site. Its record carries the mean over them, the mean's standard error, and how many there are,
rounded down to a power of two.
"""

from __future__ import annotations

import math
import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from p2ptrain.network.schema import MAX_NUMBER, Amount, Count, Number


@dataclass(frozen=True)
class PrivacyLoss:
    """A site's loss of privacy of each training sample, under differential privacy.

    Attributes:
        epsilon: Spent; at most ``limit``.
        delta: Probability with which the bound may fail.
    """

    epsilon: Amount
    limit: Amount
    delta: Amount

    def __str__(self) -> str:
        return f"ε {math.ceil(100 * self.epsilon) / 100:.2f} of {self.limit:g}, δ {self.delta:g}"


CONFIDENCE = 1.96
"""Standard errors of a 95 % confidence interval."""
MAX_METRIC_CHARS = 32


@dataclass(frozen=True)
class Evaluation:
    """A mean over held-out samples.

    Attributes:
        metric: What was measured, such as ``loss`` or ``accuracy``.
        round: The round in progress when it was.
        error: Standard error of ``mean``; None if it is unknown, as from a single sample.
        samples: Held-out samples, rounded down to a power of two.
    """

    metric: Annotated[str, Meta(min_length=1, max_length=MAX_METRIC_CHARS)]
    round: Count
    mean: Number
    error: Amount | None
    samples: Annotated[int, Meta(ge=1, le=1 << 40)]

    @classmethod
    def of(cls, metric: str, round: int, mean: float, error: float, samples: int) -> Evaluation | None:
        """Return a measurement to publish; None if its mean is no `Number`. ``error`` may be infinite."""
        if not abs(mean) <= MAX_NUMBER:
            return None
        bucket = 1 << min(40, samples.bit_length() - 1)
        return cls(metric[:MAX_METRIC_CHARS], round, mean, error if error <= MAX_NUMBER else None, bucket)

    @property
    def interval(self) -> float | None:
        """Half of the 95 % confidence interval; None if it is unknown."""
        return None if self.error is None else CONFIDENCE * self.error


def measured_part(values: Sequence[float]) -> list[float]:
    """Return as many of a site's values as the largest power of two in their number, the same ones each time.

    A mean of yes and no, such as 11/13, tells the number of samples, and so do mean and error together. Those of this
    part tell its own number alone, which a record carries anyway.
    """
    return random.Random(0).sample(values, 1 << (len(values).bit_length() - 1))


def pooled(evaluations: Collection[Evaluation]) -> Evaluation | None:
    """Return the mean over the samples of all sites that measured the same metric as most; None without any.

    A site counts by its rounded number of samples. Its samples are taken as independent of other sites'. The round is
    the earliest.
    """
    metrics = sorted(each.metric for each in evaluations)
    if not metrics:
        return None
    metric = max(dict.fromkeys(metrics), key=metrics.count)
    alike = [each for each in evaluations if each.metric == metric]
    total = sum(each.samples for each in alike)
    mean = sum(each.mean * each.samples for each in alike) / total
    squares = [None if each.error is None else (each.error * each.samples / total) ** 2 for each in alike]
    error = None if None in squares else math.sqrt(sum(square for square in squares if square is not None))
    return Evaluation(metric, min(each.round for each in alike), mean, error, min(total, 1 << 40))
