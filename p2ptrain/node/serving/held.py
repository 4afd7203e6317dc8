"""The part of the model that a peer holds, as it is served: a hosted stage, or the whole model of a trainer."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from p2ptrain.averaging.protocol.certificate import Head
from p2ptrain.models import build_model
from p2ptrain.models.stage import Stage
from p2ptrain.node.peer import Peer
from p2ptrain.pipeline.plan import PipelinePlan
from p2ptrain.pipeline.stage.hosted_stage import HostedStage
from p2ptrain.serving.host.session import Key
from p2ptrain.training.state.shared_state import SharedState
from p2ptrain.training.sync.synchronizer import Synchronizer


def key_of(heads: Sequence[Head]) -> Key:
    """Return round and digest of a stage's version, from the heads of its units."""
    digests = b"".join(head.digest for head in heads)
    return heads[0].round, heads[0].digest if len(heads) == 1 else hashlib.sha256(digests).digest()


class Held(ABC):
    """The part of the model that a peer holds; ``number`` is the stage's."""

    number: int
    num_stages: int

    @property
    @abstractmethod
    def states(self) -> list[SharedState]:
        """The shared state of each of its units, the stage's own first."""

    @property
    def key(self) -> Key:
        """Round and digest of the state."""
        return key_of([state.head for state in self.states])

    @abstractmethod
    def is_whole(self) -> bool:
        """True unless a round is between its step and its head; the caller runs on the state's thread."""

    @abstractmethod
    def module(self) -> Stage | None:
        """Return the module with the state of `key`; None between a round's step and its head.

        The caller runs on the state's thread, and copies it there.
        """


class HeldStage(Held):
    """A hosted stage, whose parameters only rounds change."""

    def __init__(self, hosted: HostedStage, num_stages: int) -> None:
        self.hosted = hosted
        self.number = hosted.number
        self.num_stages = num_stages

    @property
    def states(self) -> list[SharedState]:
        return [unit.state for unit in self.hosted.units]

    def is_whole(self) -> bool:
        return all(unit.state.is_settled and unit.work.is_adopted() for unit in self.hosted.units)

    def module(self) -> Stage | None:
        return self.hosted.worker.compute.stage if self.is_whole() else None


class HeldModel(Held):
    """A trained model. Local steps change the trainer's own parameters, so the shared ones are copied to another."""

    number = 0
    num_stages = 1

    def __init__(self, synchronizer: Synchronizer, peer: Peer) -> None:
        self._state = synchronizer.state
        self._model = peer.manifest.model
        self._module: torch.nn.Module | None = None

    @property
    def states(self) -> list[SharedState]:
        return [self._state]

    def is_whole(self) -> bool:
        return self._state.is_settled

    def module(self) -> Stage | None:
        if not self._state.is_settled:
            return None
        if self._module is None:
            self._module = build_model(self._model.model_copy(update={"weights": "", "weight_digests": ()}))
        self._state.layout.write(self._state.vector, self._module)
        assert isinstance(self._module, Stage)
        return self._module


def newest(peer: Peer, before: Held | None) -> Held | None:
    """Return what a peer holds now, ``before`` if that is the same; None while it holds nothing."""
    if peer.held.stages:
        hosted = peer.held.stages[-1]
        if isinstance(before, HeldStage) and before.hosted is hosted:
            return before
        return HeldStage(hosted, PipelinePlan(peer.manifest).num_stages) if hosted.reports() else None
    synchronizer = peer.held.synchronizer
    if synchronizer is None or not synchronizer.state.is_settled:
        return None
    return before or HeldModel(synchronizer, peer)
