"""How samples are dealt to sites: equally, unlike (Dirichlet), or unequally (Zipf)."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from p2ptrain.errors import UsageError

FORMS = "iid, dirichlet:ALPHA or sizes:zipf"
LEAST = 3
"""Samples of a site: one to train on, two held out. A site that drew fewer takes them from the largest."""

Indices = npt.NDArray[np.int64]


def partition(form: str, labels: npt.NDArray[np.integer], num_sites: int, seed: int) -> list[Indices]:
    """Return the samples of each site; each sample is at one site.

    Args:
        form: ``iid``: equal sizes, drawn at random. ``sizes:zipf``: site k has samples in proportion to 1 / k, drawn at
            random. ``dirichlet:ALPHA``: each label's samples are dealt in proportions of a symmetric Dirichlet
            distribution; the smaller ALPHA, the more unlike the sites (Hsu et al., arXiv 1909.06335).
        labels: The label of each sample, ``[num_samples]``.

    Raises:
        UsageError: The form is unknown, or there are too few samples.
    """
    if num_sites < 1 or len(labels) < LEAST * num_sites:
        most = len(labels) // LEAST
        hint = f"give 1 to {most} sites" if most else "give more data"
        raise UsageError(f"{num_sites} sites with {len(labels)} samples: each needs {LEAST}; {hint}")
    rng = np.random.default_rng(seed)
    match form.split(":"):
        case ["iid"]:
            dealt = np.array_split(rng.permutation(len(labels)), num_sites)
        case ["sizes", "zipf"]:
            shares = 1 / np.arange(1, num_sites + 1)
            dealt = _deal(rng.permutation(len(labels)), shares / shares.sum())
        case ["dirichlet", text]:
            piles: list[list[Indices]] = [[] for _ in range(num_sites)]
            alphas = np.full(num_sites, _alpha(text))
            for label in np.unique(labels):
                mine = rng.permutation(np.flatnonzero(labels == label))
                for pile, part in zip(piles, _deal(mine, rng.dirichlet(alphas)), strict=True):
                    pile.append(part)
            dealt = [rng.permutation(np.concatenate(pile)) for pile in piles]
        case _:
            raise UsageError(f"--partition {form!r} is unknown: use {FORMS}")
    return _with_least(dealt)


def _alpha(text: str) -> float:
    try:
        alpha = float(text)
    except ValueError:
        alpha = 0.0
    if not 1e-3 <= alpha <= 1e6:
        raise UsageError(f"--partition dirichlet:{text}: ALPHA is a number from 0.001 to 1e6, such as 0.3")
    return alpha


def _deal(indices: Indices, shares: npt.NDArray[np.float64]) -> list[Indices]:
    ends = np.round(np.cumsum(shares)[:-1] * len(indices)).astype(np.int64)
    return np.split(indices, ends)


def _with_least(dealt: list[Indices]) -> list[Indices]:
    for number in range(len(dealt)):
        while len(dealt[number]) < LEAST:
            largest = max(range(len(dealt)), key=lambda index: len(dealt[index]))
            dealt[largest], one = dealt[largest][:-1], dealt[largest][-1:]
            dealt[number] = np.concatenate([dealt[number], one])
    return dealt
