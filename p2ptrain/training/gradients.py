"""Gradients as torch leaves them: dense, or sparse for embeddings with ``sparse=True``."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor


def is_sparse(gradient: Tensor) -> bool:
    return gradient.layout != torch.strided


def gradient_values(parameters: Iterable[Tensor]) -> list[Tensor]:
    """Return the memory of the gradients' values, each value once; of sparse gradients, the stored values.

    Coalesces sparse gradients in place.
    """
    values = []
    for parameter in parameters:
        if parameter.grad is None:
            continue
        if is_sparse(parameter.grad):
            parameter.grad = parameter.grad.coalesce()
        values.append(parameter.grad._values() if is_sparse(parameter.grad) else parameter.grad)
    return values


@torch.no_grad()
def clip_gradients(parameters: list[Tensor], max_norm: float) -> float:
    """Scale gradients in place to a total norm of at most ``max_norm``; return the norm before.

    As `torch.nn.utils.clip_grad_norm_`, but also for sparse gradients. Synchronises once with the device. If the norm
    is not finite, the gradients are useless afterwards.
    """
    values = gradient_values(parameters)
    if not values:
        return 0.0
    if max_norm < math.inf and not any(
        parameter.grad is not None and is_sparse(parameter.grad) for parameter in parameters
    ):
        return float(torch.nn.utils.clip_grad_norm_(parameters, max_norm))
    norms = [torch.linalg.vector_norm(value).to(values[0].device) for value in values]
    norm = torch.linalg.vector_norm(torch.stack(norms))
    if max_norm == math.inf:
        return float(norm)
    scale = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for value in values:
        value.mul_(scale.to(value.device))
    return float(norm)
