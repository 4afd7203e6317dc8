"""An aggregation rule that lets the majority choose each value's sign."""

from __future__ import annotations

import torch

from p2ptrain.averaging.vector.rules import VotingRule
from p2ptrain.manifest import AveragingSpec


class Majority(VotingRule):
    """The mean of the contributions with the sign that most have, value by value; of all if no sign has a majority.

    Source: the election of signs in TIES-Merging (Yadav et al., 2023, arXiv 2306.01708).
    """

    name = "majority"
    by_coordinate = True

    def combine(self, spec: AveragingSpec, parts: list[torch.Tensor]) -> torch.Tensor:
        """See `VotingRule`. Sums are in double: exact for some hundred contributions of like size."""
        votes = torch.zeros_like(parts[0])
        for part in parts:
            votes += part.sign()
        total = torch.zeros_like(votes, dtype=torch.float64)
        count = torch.zeros_like(votes, dtype=torch.float64)
        for part in parts:
            kept = (part * votes.sign() >= 0).double()
            total += kept * part
            count += kept
        return (total / count.clamp_(min=1)).float().add_(0.0)
