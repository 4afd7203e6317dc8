"""Construction of a served stage from its units' vectors, or from the manifest's initial values."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from p2ptrain.averaging.context import PeerContext, founding_of
from p2ptrain.config import PeerConfig
from p2ptrain.models import blank_stage, build_model, whole
from p2ptrain.models.pretrained import weights_folder
from p2ptrain.models.stage import Stage
from p2ptrain.node.peer import Peer
from p2ptrain.node.serving.kept import KeptWeights
from p2ptrain.pipeline.stage.contribution import Part, unit_state
from p2ptrain.pipeline.view import PipelineView
from p2ptrain.training.state.initial_state import initial_state
from p2ptrain.training.state.layout import Layout
from p2ptrain.training.sync.lineage import FollowedLineage


@dataclass(frozen=True)
class ServedUnit:
    """Parameters that are averaged together.

    Attributes:
        lineage: What this peer believes of its rounds.
        kept: Its newest weights.
        names: See `p2ptrain.pipeline.plan.PipelinePlan.local_names`; None for the whole model.
        layout: Of its vector.
    """

    lineage: FollowedLineage
    kept: KeptWeights
    names: Mapping[str, str] | None
    layout: Layout

    def part(self, stage: Stage) -> torch.nn.Module:
        """Return the module of the unit's parameters in a stage."""
        return stage if self.names is None else Part(stage, self.names)


class Blueprint:
    """A stage to be served, and its units; without a view it is the whole model. Slow to make with adapters.

    Raises `ConfigError` or `TemporaryError` if the frozen base of adapters is not available.
    """

    def __init__(self, peer: Peer, config: PeerConfig, view: PipelineView | None, stage: int) -> None:
        self.number, self.num_stages = stage, 1 if view is None else view.plan.num_stages
        self._peer = peer
        self._config = config
        self._view = view
        manifest = peer.manifest
        self.spec = manifest.model
        self.span = whole(self.spec) if view is None else view.plan.spans[stage]
        has_base = manifest.lora is not None or bool(manifest.pipeline.quant)
        self._base = self._build() if has_base else None
        stage_module = self._base or blank_stage(self.spec, self.span)
        if view is None:
            self.units = [self._unit(stage_module)]
        else:
            self.units = [
                self._unit(stage_module, unit.number, view.plan.local_names(stage, unit))
                for unit in view.plan.units(stage)
            ]

    def close(self) -> None:
        """Tell no other peer about the units any more."""
        for unit in () if self._view is None else self._view.plan.units(self.number):
            self._peer.rpc.withdraw(f"unit{unit.number}")

    def _unit(self, stage: Stage, number: int = 0, names: Mapping[str, str] | None = None) -> ServedUnit:
        peer, view = self._peer, self._view
        rpc, swarm, membership = peer.rpc, peer.swarm, peer.membership
        if view is not None:
            rpc, swarm, membership = rpc.scoped(f"unit{number}"), view.plan.swarm_of(number), view.membership(number)
        manifest = peer.manifest
        context = PeerContext(
            rpc, peer.runtime, peer.identity, swarm, manifest.averaging, membership, founding=founding_of(manifest)
        )
        layout = Layout.from_module(stage if names is None else Part(stage, names))
        kept = KeptWeights(peer.runtime.scratch, swarm.hex()[:16], 4 * layout.num_values)
        return ServedUnit(FollowedLineage(context), kept, names, layout)

    def _build(self) -> Stage:
        weights = weights_folder(self.spec, self.span, self._config.weights, self._peer.jobs)
        if self._view is None:
            return build_model(self.spec, weights, jobs=self._peer.jobs)
        return self._view.plan.build(self.number, weights, self._peer.jobs)

    def initial(self) -> tuple[Stage, list[bytes]]:
        """Return the stage before the first round, and the digest of each unit; raises as the constructor."""
        stage, manifest = self._base or self._build(), self._peer.manifest
        if self._view is None:
            return stage, [initial_state(stage, None, manifest, self._peer.swarm).head.digest]
        digests = []
        for unit in self.units:
            part = unit.part(stage)
            assert isinstance(part, Part)
            state = unit_state(part, manifest.training, unit.lineage.context.swarm, manifest.pipeline.moments)
            digests.append(state.head.digest)
        return stage, digests

    @torch.no_grad()
    def assemble(self, vectors: Sequence[memoryview]) -> Stage:
        """Return the stage with these bytes of its units' vectors; it refers to their memory."""
        stage = self._base or blank_stage(self.spec, self.span)
        for unit, memory in zip(self.units, vectors, strict=True):
            vector, part = torch.frombuffer(memory, dtype=torch.float32), unit.part(stage)
            if self._base is not None:
                unit.layout.write(vector, part)
                continue
            parameters = dict(part.named_parameters())
            for entry in unit.layout.parameter_entries:
                parameters[entry.name].data = vector[entry.offset : entry.end].view(entry.shape)
            unit.layout.write(vector, part, kind="buffer")
        return stage
