"""What the peers of an averaging benchmark start with, and how good what they end with is; needs torch alone."""

from __future__ import annotations

import hashlib
from typing import Any

import torch


def initial_vector(peer: int, num_values: int) -> torch.Tensor:
    """What a peer starts with, fp32, shape ``[num_values]``; the same in all contenders."""
    return torch.randn(num_values, generator=torch.Generator().manual_seed(peer))


def quality(result: torch.Tensor, num_peers: int) -> dict[str, Any]:
    """The relative L2 distance between ``result`` and the mean of the initial vectors, and a hash of its bits."""
    mean = initial_vector(0, len(result))
    for peer in range(1, num_peers):
        mean.add_(initial_vector(peer, len(result)))
    mean.div_(num_peers)
    return {
        "relative_error": float(mean.sub(result).norm() / mean.norm()),
        "sha256": hashlib.sha256(result.numpy().data).hexdigest(),
    }
