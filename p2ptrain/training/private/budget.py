"""`PrivacyBudget`: a site's privacy loss (epsilon, delta) under DP-SGD, kept over restarts."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path

import msgspec
from opacus.accountants import RDPAccountant
from opacus.accountants.analysis.rdp import compute_rdp, get_privacy_spent

from p2ptrain.averaging.protocol.table import ESTABLISHED
from p2ptrain.disk import replace_file
from p2ptrain.errors import CheckpointError, ResourceError
from p2ptrain.manifest import PrivacySpec
from p2ptrain.network.records.evaluation import PrivacyLoss

logger = logging.getLogger(__name__)

PRIVACY_FILE = "privacy.json"


class Steps(msgspec.Struct, array_like=True):
    """Steps of one kind.

    Attributes:
        noise_multiplier: Standard deviation of the noise, in multiples of the clipping norm.
        sample_rate: Probability with which each sample is in a step's batch.
    """

    noise_multiplier: float
    sample_rate: float
    steps: int = 0


class PrivacyBudget:
    """Counts steps, and refuses the first one that would exceed the manifest's epsilon.

    The accountant is Opacus's by Renyi differential privacy (Mironov et al., arXiv 1908.10530), for Gaussian noise on
    Poisson samples. Neighbouring data sets differ by one sample, added or removed.

    The file is on the disk before a step is taken. It counts up to ``reserve`` steps ahead of them, so a restart loses
    at most these steps, and no step is uncounted.

    Attributes:
        loss: What the steps in the file amount to: at least those taken.
    """

    def __init__(self, spec: PrivacySpec, sample_rate: float, path: Path | None, reserve: int) -> None:
        """Read the file, if there is one; raise `CheckpointError` if it cannot be read.

        Args:
            sample_rate: Probability with which each sample is in a step's batch.
            path: None counts in memory alone, for a simulation.
            reserve: Steps of one round.
        """
        self._spec, self._path, self._reserve = spec, path, reserve
        self._history = [] if path is None else _read(path)
        kind = (spec.noise_multiplier, sample_rate)
        if not self._history or (self._history[-1].noise_multiplier, self._history[-1].sample_rate) != kind:
            self._history.append(Steps(*kind))
        self._orders = RDPAccountant.DEFAULT_ALPHAS
        self._one_step = compute_rdp(q=sample_rate, noise_multiplier=kind[0], steps=1, orders=self._orders)
        self._before = sum(
            compute_rdp(
                q=each.sample_rate, noise_multiplier=each.noise_multiplier, steps=each.steps, orders=self._orders
            )
            for each in self._history[:-1]
        )
        self._ahead = 0
        self.max_steps = self._most_steps()
        self.loss = self._loss()

    @property
    def is_spent(self) -> bool:
        """True if one more step would exceed the budget."""
        return self.steps_left <= 0

    @property
    def is_low(self) -> bool:
        """True if no more is left than a newcomer's first rounds take, until it votes."""
        return self.steps_left <= ESTABLISHED * self._reserve

    @property
    def steps_left(self) -> int:
        return self.max_steps - self._history[-1].steps + self._ahead

    def spend(self) -> None:
        """Count one step; call before its gradient is used, and only if the budget `is_spent` not.

        Raises:
            ResourceError: The file cannot be written, so the step must not be taken.
        """
        if not self._ahead:
            now = self._history[-1]
            self._ahead = min(self._reserve, self.max_steps - now.steps)
            now.steps += self._ahead
            try:
                if self._path is not None:
                    replace_file(self._path, msgspec.json.encode(self._history), synced=True)
            except OSError as error:
                now.steps, self._ahead = now.steps - self._ahead, 0
                raise ResourceError(
                    f"cannot count a step in {self._path}, so none is taken: {error.strerror}"
                ) from error
            self.loss = self._loss()
        self._ahead -= 1

    def epsilon_of(self, steps: int) -> float:
        """Return epsilon after so many steps of the present kind, and all earlier ones of other kinds."""
        if not steps and len(self._history) == 1:
            return 0.0
        with warnings.catch_warnings():  # A bound by the first or last order is not the tightest, and holds.
            warnings.simplefilter("ignore")
            return float(get_privacy_spent(
                orders=self._orders, rdp=self._before + steps * self._one_step, delta=self._spec.delta
            )[0])  # fmt: skip

    def _most_steps(self) -> int:
        low, high = -1, 1
        while self.epsilon_of(high) <= self._spec.epsilon and high < 1 << 40:
            low, high = high, 2 * high
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (middle, high) if self.epsilon_of(middle) <= self._spec.epsilon else (low, middle)
        return max(low, 0)

    def _loss(self) -> PrivacyLoss:
        return PrivacyLoss(self.epsilon_of(self._history[-1].steps), self._spec.epsilon, self._spec.delta)


def _read(path: Path) -> list[Steps]:
    try:
        return msgspec.json.decode(path.read_bytes(), type=list[Steps])
    except FileNotFoundError:
        return []
    except (OSError, msgspec.DecodeError) as error:
        raise CheckpointError(f"{path}, which counts the privacy that is spent, cannot be read: {error}") from error
