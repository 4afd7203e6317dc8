"""The part of the model that a peer holds, as it is served: a hosted stage, or the whole model of a trainer."""

from __future__ import annotations

import hashlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from p2ptrain.averaging.protocol.certificate import Head
from p2ptrain.config import PeerConfig
from p2ptrain.errors import P2PTrainError
from p2ptrain.models import build_model
from p2ptrain.models.pretrained import end_marks, manifest_tokenizer
from p2ptrain.models.stage import Stage
from p2ptrain.pipeline.plan import PipelinePlan
from p2ptrain.pipeline.stage.hosted_stage import HostedStage
from p2ptrain.serving.grammar import Grammars
from p2ptrain.serving.host.session import Key
from p2ptrain.training.state.shared_state import SharedState

if TYPE_CHECKING:
    from p2ptrain.node.peer import Peer

logger = logging.getLogger(__name__)


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
    def is_training(self) -> bool:
        """True if the machine computes for training now."""

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

    def is_training(self) -> bool:
        return self.hosted.worker.device.is_in_use

    def module(self) -> Stage | None:
        return self.hosted.worker.compute.stage if self.is_whole() else None


class HeldModel(Held):
    """A trained model. Local steps change the trainer's own parameters, so the shared ones are copied to another."""

    number = 0
    num_stages = 1

    def __init__(self, state: SharedState, peer: Peer) -> None:
        self._state = state
        self._record = peer.record
        self._model = peer.manifest.model
        self._module: torch.nn.Module | None = None

    @property
    def states(self) -> list[SharedState]:
        return [self._state]

    def is_whole(self) -> bool:
        return self._state.is_settled

    def is_training(self) -> bool:
        return self._record.state == "training"

    def module(self) -> Stage | None:
        if not self._state.is_settled:
            return None
        if self._module is None:
            self._module = build_model(self._model.model_copy(update={"weights": "", "weight_digests": ()}))
        self._state.layout.write(self._state.vector, self._module)
        assert isinstance(self._module, Stage)
        return self._module


def load_grammars(peer: Peer, config: PeerConfig, vocabulary: int) -> Grammars | None:
    """Return the grammars of the model's tokenizer; None, which the log explains, if something is missing."""
    try:
        tokenizer = manifest_tokenizer(peer.manifest, config.weights, config.allow_path)
        return Grammars(tokenizer, vocabulary, end_marks(peer.manifest))
    except P2PTrainError as error:
        logger.info("no answers in a given form (JSON, tool calls): %s", error)
        return None


def newest(peer: Peer, before: Held | None) -> Held | None:
    """Return what a peer holds now, ``before`` if that is the same; None while it holds nothing."""
    if peer.held.stages:
        hosted = peer.held.stages[-1]
        if isinstance(before, HeldStage) and before.hosted is hosted:
            return before
        return HeldStage(hosted, PipelinePlan(peer.manifest).num_stages) if hosted.reports() else None
    if before is not None or (synchronizer := peer.held.synchronizer) is None:
        return before
    return HeldModel(synchronizer.state, peer) if synchronizer.state.is_settled else None
