"""Save and restore of a training peer: the shared state, and the peer's own.

The peer's own are the inner optimizer's state, the error-feedback residual, its step count, and its pending work. All
are restored at the checkpoint's head, before the peer follows the swarm. Catching up then drops the work and residual
that later rounds already include, as their certificates tell.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from p2ptrain.errors import CheckpointError, IntegrityError, ResourceError
from p2ptrain.training.checkpoints import SavePolicy
from p2ptrain.training.checkpoints.files import CheckpointInfo, LoadedCheckpoint, save_checkpoint
from p2ptrain.training.checkpoints.tensor_file import CODES
from p2ptrain.training.state.layout import Layout
from p2ptrain.training.state.shared_state import SharedState

if TYPE_CHECKING:
    from p2ptrain.training.optimizer import SwarmOptimizer

logger = logging.getLogger(__name__)

LAYOUT = "layout"
"""Key of the description of the model's tensors, by which a checkpoint is exported without the model's code."""
OPTIMIZER = "optimizer"
"""Prefix of the names of the inner optimizer's tensors."""
RETRY_SECONDS = 60.0
"""Time after a save that failed, such as on a full disk, in which none is due."""


class Saver:
    """Saves one training peer, and restores it; ``directory`` holds one folder per checkpoint.

    All methods but `save_shared` run on the training thread.
    """

    def __init__(self, directory: Path, policy: SavePolicy, optimizer: SwarmOptimizer, swarm: bytes) -> None:
        self._directory = directory
        self._policy = policy
        self._synchronizer = optimizer.synchronizer
        self._optimizer = optimizer
        self._swarm = swarm
        self._saved_round = optimizer.round
        self._saved_at = time.monotonic()
        self._retry_at = 0.0
        self._writer: ThreadPoolExecutor | None = None
        self._writing: Future[Path] | None = None
        self._disk = threading.Lock()

    def restore(self, checkpoint: LoadedCheckpoint) -> None:
        """Restore the peer's own parts; call after `restore_shared`, before the peer follows the swarm.

        Parts that do not fit this model or optimizer are dropped with a warning.
        """
        work, extra, local = self._optimizer.work, checkpoint.extra, checkpoint.local
        self._saved_round = checkpoint.head.round
        self._optimizer.total_steps = int(extra.get("steps", 0))
        moments = {name: tensor for name, tensor in local.items() if name.startswith(OPTIMIZER)}
        if "optimizer_state" in extra and _is_finite("the inner optimizer's state", moments):
            try:
                state = _unflatten(extra["optimizer_state"], local)
                self._optimizer.load_state_dict({**self._optimizer.inner.state_dict(), "state": state})
            except (ValueError, KeyError, RuntimeError) as error:
                logger.warning(
                    "the inner optimizer in %s does not fit this one, and begins anew: %s", checkpoint.path, error
                )
        self._restore_personal(checkpoint)
        if "residual" in local and _is_finite("the residual", {"residual": local["residual"]}):
            self._synchronizer.replica.restore_residual(local["residual"])
        drift = work.drift
        if drift is not None and "drift" in local and local["drift"].shape == drift.step.shape:
            drift.step.copy_(local["drift"])
        waiting = {name: tensor for name, tensor in local.items() if name in ("live", "accumulated")}
        if self._synchronizer.replica.context.secure_aggregation is not None:
            waiting = {}  # A group may know a sum with it by now.
        if waiting and _is_finite("the work that waits", waiting) and work.restore(extra["work"], waiting):
            self._synchronizer.averager.contributions.forget(range(len(work.pending)))
        else:
            work.state.layout.write(work.state.vector, work.module)

    def _restore_personal(self, checkpoint: LoadedCheckpoint) -> None:
        layout, module = self._synchronizer.state.layout, self._optimizer.module
        try:
            layout.write_personal(checkpoint.local, module)
        except ValueError as error:
            logger.warning("%s in %s: this site's own layers begin anew", error, checkpoint.path)

    # --- saving

    def is_due(self) -> bool:
        every, minutes = self._policy.every_rounds, self._policy.every_minutes
        rounds_due = every and self._synchronizer.head.round - self._saved_round >= every
        is_due = rounds_due or (minutes and time.monotonic() - self._saved_at >= 60 * minutes)
        return bool(is_due) and time.monotonic() >= self._retry_at

    def save(self) -> Path:
        """Write a checkpoint now; return its folder.

        Raises:
            ResourceError: The disk is full or cannot be written.
            CheckpointError: The shared state in memory is damaged, or the inner optimizer's state cannot be written.
        """
        self.wait()
        self._retry_at = time.monotonic() + RETRY_SECONDS
        local, extra = self._own()
        path = self._write(self._synchronizer.head, self._synchronizer.state.tensors(), local, extra)
        self._mark()
        return path

    def save_shared(self) -> Path:
        """Write the shared state alone, while the training thread is stuck; return the checkpoint's folder.

        Call it on the thread that changes the shared state. Raises as `save` does; a state between two rounds counts as
        damaged.
        """
        state = self._synchronizer.state
        return self._write(state.head, state.tensors(), {}, {"steps": self._optimizer.total_steps})

    def save_in_background(self) -> None:
        """Copy the state, and write the copy while training continues; failures are logged.

        Does nothing while the last checkpoint is still being written.
        """
        if self._writing is not None and not self._writing.done():
            return
        self.wait()
        self._mark()
        try:
            local, extra = self._own()
            tensors = [(name, tensor.clone()) for name, tensor in self._synchronizer.state.tensors()]
            local = {name: tensor.clone() for name, tensor in local.items()}
        except (CheckpointError, RuntimeError) as error:  # torch raises RuntimeError when memory is short.
            logger.error("cannot save: %s", error)
            return
        if self._writer is None:
            self._writer = ThreadPoolExecutor(1, thread_name_prefix="p2ptrain-save")
        self._writing = self._writer.submit(self._write, self._synchronizer.head, tensors, local, extra)

    def save_if_due(self) -> None:
        if self.is_due():
            self.save_in_background()

    def save_last(self) -> None:
        """Write a checkpoint and close the writer; a failure is logged."""
        _log(self.save)
        self.close()

    def wait(self) -> None:
        writing, self._writing = self._writing, None
        if writing is not None:
            _log(writing.result)

    def close(self) -> None:
        """Wait for a background save, and close the writer; idempotent."""
        self.wait()
        if self._writer is not None:
            self._writer.shutdown()

    def _write(self, head: Any, tensors: Any, local: dict[str, torch.Tensor], extra: dict[str, Any]) -> Path:
        extra = {**extra, LAYOUT: self._synchronizer.state.layout.describe()}
        with self._disk:
            return save_checkpoint(
                self._directory, head=head, tensors=tensors, local=local, extra=extra, swarm=self._swarm,
                keep_last=self._policy.keep_last,
            )  # fmt: skip

    def _mark(self) -> None:
        self._saved_round, self._saved_at = self._synchronizer.head.round, time.monotonic()
        self._retry_at = 0.0

    def _own(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """Return the peer's own tensors, most of them live memory, and its plain values."""
        optimizer, residual = self._optimizer, self._synchronizer.feedback.residual
        local: dict[str, torch.Tensor] = {}
        extra: dict[str, Any] = {"steps": optimizer.total_steps}
        if residual is not None and _is_finite("the residual", {"residual": residual}):
            local["residual"] = residual
        if optimizer.work.accumulated is None:  # Else the inner optimizer's state is in the shared state.
            flat: dict[str, torch.Tensor] = {}
            layout = _flatten(optimizer.inner.state_dict()["state"], flat)
            if _is_finite("the inner optimizer's state", flat):
                extra["optimizer_state"] = layout
                local |= flat
        own = self._synchronizer.state.layout.read_personal(optimizer.module)
        if _is_finite("a personal tensor", own):
            local |= own
        if optimizer.work.drift is not None and _is_finite("the correction", {"drift": optimizer.work.drift.step}):
            local["drift"] = optimizer.work.drift.step
        try:
            counts, waiting = optimizer.work.to_save()
        except ValueError as error:
            logger.warning("the work that waits is not saved: %s", error)
            counts, waiting = {}, {}
        if _is_finite("the work that waits", waiting):
            extra["work"] = counts
            local |= waiting
        return local, extra


def _log(save: Callable[[], Path]) -> None:
    try:
        logger.info("saved %s", save())
    except (ResourceError, CheckpointError) as error:
        logger.error("%s", error)


def restore_shared(state: SharedState, checkpoint: LoadedCheckpoint) -> None:
    """Load the shared state of a checkpoint; raise `IntegrityError` if it does not have its digest."""
    state.replace(checkpoint.tensors, checkpoint.head)
    if state.tree().root != checkpoint.head.digest:
        raise IntegrityError(f"the state in {checkpoint.path} does not have its digest: delete that checkpoint")


def saved_layout(checkpoint: CheckpointInfo) -> Layout:
    """Return the layout of the model in a checkpoint; raise `CheckpointError` if it does not hold it."""
    try:
        return Layout.of_description(checkpoint.extra[LAYOUT])
    except (KeyError, ValueError) as error:
        raise CheckpointError(
            f"{checkpoint.path} does not name the tensors of its model, because an earlier version saved it: start the"
            " script again, which saves when it ends"
        ) from error


def _is_finite(what: str, tensors: dict[str, torch.Tensor]) -> bool:
    """True if all tensors of ``what`` are finite; else log a warning."""
    if all(bool(tensor.isfinite().all()) for tensor in tensors.values()):
        return True
    logger.warning("%s has values that are not finite: a checkpoint does not carry it on", what)
    return False


def _flatten(value: Any, tensors: dict[str, torch.Tensor], path: str = OPTIMIZER) -> Any:
    """Replace the tensors of a state dict by references into ``tensors``, so that the rest is JSON."""
    if isinstance(value, torch.Tensor) and value.dtype in CODES:
        tensors[path] = value.detach().cpu().contiguous()
        return {"tensor": path}
    if isinstance(value, dict):
        return {"dict": [[key, _flatten(item, tensors, f"{path}.{key}")] for key, item in value.items()]}
    if isinstance(value, (list, tuple)):
        return {"list": [_flatten(item, tensors, f"{path}.{i}") for i, item in enumerate(value)]}
    if value is None or isinstance(value, (bool, int, float, str)):
        return {"value": value}
    kind = f"has dtype {value.dtype}" if isinstance(value, torch.Tensor) else f"is of type {type(value).__name__}"
    raise CheckpointError(f"{path} {kind}, which a checkpoint cannot hold")


def _unflatten(value: Any, tensors: dict[str, torch.Tensor]) -> Any:
    """Invert `_flatten`; raise `KeyError` for a missing tensor."""
    if "tensor" in value:
        return tensors[value["tensor"]]
    if "dict" in value:
        return {key: _unflatten(item, tensors) for key, item in value["dict"]}
    if "list" in value:
        return [_unflatten(item, tensors) for item in value["list"]]
    return value["value"]
