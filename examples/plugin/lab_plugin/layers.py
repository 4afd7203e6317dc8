"""The modules of the family, apart from it, so that a peer can read the sizes of its models without torch."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn.functional import pad


class Layer(nn.Module):
    """Adds to each position what a linear layer makes of it and of an earlier one."""

    def __init__(self, hidden: int, distance: int) -> None:
        """Make a layer of width ``hidden`` that reads ``distance`` tokens back, and zeros before the first."""
        super().__init__()
        self.distance = distance
        self.mix = nn.Linear(2 * hidden, hidden)

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Return the next hidden states, ``[batch, length, hidden]``."""
        earlier = pad(states, (0, 0, self.distance, 0))[:, : states.shape[1]]
        mixed: torch.Tensor = self.mix(torch.cat([states, earlier], dim=-1))
        return states + mixed.relu()
