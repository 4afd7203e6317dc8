"""Stages for serving whose bits depend on a row and its session's earlier rows alone.

`program` writes a stage's layers down as a list of operations. `runners` has the two ways to run such a list: the
kernels of `p2ptrain.native`, on the CPU or, by `gpu`, on a GPU; and torch, without the promise. `stage` cuts batches,
checks results and holds pages. `elementary` has exp, log, sine and cosine that are equal on all machines. `check`
compares a tiny model's bits with those in the repository.
"""

from p2ptrain.models.exact.check import checked_kernels, self_check
from p2ptrain.models.exact.program import WeightFormat
from p2ptrain.models.exact.runners import PageStore
from p2ptrain.models.exact.stage import ExactStage, NotFiniteError, Part, exact_stage
from p2ptrain.native.exact import PAGE

__all__ = [
    "PAGE",
    "ExactStage",
    "NotFiniteError",
    "PageStore",
    "Part",
    "WeightFormat",
    "checked_kernels",
    "exact_stage",
    "self_check",
]
