"""The stages of a manifest's model, and its averaging units.

Planning is a pure function. It imports torch only for adapters.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from p2ptrain.errors import ManifestError
from p2ptrain.manifest import Manifest
from p2ptrain.models import (
    FROZEN_BYTES,
    PROCESS_BYTES,
    SERVED_BYTES,
    build_stage,
    estimate_memory_bytes,
    estimate_serving_bytes,
    get_family,
    model_blocks,
    trained_bytes,
)
from p2ptrain.models.blocks import Shape, Span, stage_shapes, stage_ties
from p2ptrain.pipeline.messages import IDS, Payload
from p2ptrain.pipeline.partition import equal_work, explicit, within_memory
from p2ptrain.pipeline.placement import StageNeed
from p2ptrain.progress import Progress, no_progress

if TYPE_CHECKING:
    from p2ptrain.models.stage import Stage


@dataclass(frozen=True)
class Unit:
    """Parameters that are averaged together: by the hosts of one stage, or of two for tied embeddings.

    Attributes:
        number: The stage's; for the tied unit, the number of stages.
        stages: Stages whose hosts average it.
        names: Parameter names of their owners; see `PipelinePlan.local_names`.
        scale: Factor for the mean gradient: each of the unit's stages counts every token.
    """

    number: int
    stages: tuple[int, ...]
    names: tuple[str, ...]
    scale: float = 1.0


class PipelinePlan:
    """The stages of a manifest's model; ``spans`` are the blocks of each.

    Raises:
        ManifestError: The cuts or weight digests do not fit the model.
        IncompatibleError, UsageError: As `get_family`.
    """

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self._family = get_family(manifest.model)
        self._blocks = model_blocks(manifest.model)
        digests = len(manifest.model.weight_digests)
        if digests not in (0, len(self._blocks)):
            raise ManifestError(f"model.weight_digests has {digests} entries, and the model {len(self._blocks)} blocks")
        self.spans = self._spans()

    @property
    def num_stages(self) -> int:
        return len(self.spans)

    def _spans(self) -> tuple[Span, ...]:
        spec, pipeline = self.manifest.model, self.manifest.pipeline
        if pipeline.cuts:
            return explicit(pipeline.cuts, len(self._blocks))
        if pipeline.stages == "auto":
            return self._within_memory(pipeline.stage_memory)
        return equal_work(self._family.work(spec), pipeline.stages)

    def _memory(self, span: Span) -> int:
        if self.manifest.lora is None:
            return estimate_memory_bytes(self.manifest, span) - PROCESS_BYTES
        frozen = FROZEN_BYTES[self.manifest.pipeline.quant]
        adapters = sum(math.prod(self._adapters[name]) for name in self._adapters_in(span))
        return (
            estimate_memory_bytes(self.manifest, span, frozen) - PROCESS_BYTES + trained_bytes(self.manifest) * adapters
        )

    @cached_property
    def _adapters(self) -> dict[str, Shape]:
        if self.manifest.lora is None:
            return {}
        from p2ptrain.models.adapters import adapter_shapes

        return adapter_shapes(self.manifest.model, self.manifest.lora)

    def _adapters_in(self, span: Span) -> tuple[str, ...]:
        from p2ptrain.models.adapters import adapter_layer

        held = stage_shapes(self._blocks, span)
        return tuple(name for name in self._adapters if f"{adapter_layer(name)}.weight" in held)

    def _within_memory(self, max_bytes: int) -> tuple[Span, ...]:
        sizes = [self._memory(Span(number, number + 1)) for number in range(len(self._blocks))]
        largest = max(range(len(sizes)), key=lambda number: sizes[number])
        if sizes[largest] + PROCESS_BYTES > max_bytes:
            raise ManifestError(
                f"pipeline.stage_memory = {max_bytes} bytes is not enough for a stage of block {largest} alone"
                f" ({self._blocks[largest].name}), which takes {sizes[largest] + PROCESS_BYTES}: {PROCESS_BYTES} of it"
                " by a process that has loaded torch"
            )
        return within_memory(sizes, max_bytes - PROCESS_BYTES)

    @cached_property
    def needs(self) -> tuple[StageNeed, ...]:
        """Work of one sample, and host memory, for each stage."""
        return tuple(StageNeed(self.work_of(span), self._memory(span) + PROCESS_BYTES) for span in self.spans)

    @cached_property
    def tied(self) -> Unit | None:
        """The unit of trained parameters that two stages share; None without any."""
        if self.manifest.lora is not None:
            return None
        holders: dict[str, set[int]] = {}
        for stage in range(self.num_stages):
            for owner in self._owners(stage).values():
                holders.setdefault(owner, set()).add(stage)
        shared = {name: tuple(sorted(stages)) for name, stages in holders.items() if len(stages) > 1}
        if not shared:
            return None
        stages = next(iter(shared.values()))
        if any(other != stages for other in shared.values()):
            raise ManifestError("this model ties parameters of several pairs of stages: cut it elsewhere")
        return Unit(self.num_stages, stages, tuple(sorted(shared)), float(len(stages)))

    def shapes(self, unit: Unit) -> dict[str, Shape]:
        """Return the shapes of a unit's parameters, in their order."""
        blocks = {name: shape for block in self._blocks for name, shape in block.shapes.items()}
        return {name: self._adapters.get(name) or blocks[name] for name in unit.names}

    def own(self, stage: int) -> Unit:
        """Return the unit of one stage alone; with LoRA, its adapters."""
        if self.manifest.lora is not None:
            return Unit(stage, (stage,), self._adapters_in(self.spans[stage]))
        tied = self.tied.names if self.tied is not None else ()
        return Unit(stage, (stage,), tuple(name for name, owner in self._owners(stage).items() if owner not in tied))

    def local_names(self, stage: int, unit: Unit) -> dict[str, str]:
        """Map a unit's parameter names from the owners' to those in a stage's module."""
        if self.manifest.lora is not None:
            from p2ptrain.models.adapters import local_adapter_name

            return {name: local_adapter_name(name) for name in unit.names}
        local = {owner: name for name, owner in self._owners(stage).items()}
        return {name: local[name] for name in unit.names}

    def _owners(self, stage: int) -> dict[str, str]:
        """Map the parameter names of a stage's module to those of their owners, which differ for tied ones."""
        ties = stage_ties(self._blocks, self.spans[stage])
        return {name: ties.get(name, name) for name in stage_shapes(self._blocks, self.spans[stage])}

    def state_bytes(self, stage: int) -> int:
        """Return the size of a newcomer's download: trained parameters and AdamW's moments, in bytes."""
        values = sum(math.prod(shape) for unit in self.units(stage) for shape in self.shapes(unit).values())
        return values * (4 + (2 if self.manifest.pipeline.moments == "8bit" else 8))

    def units(self, stage: int) -> tuple[Unit, ...]:
        """Return the units that a host of a stage averages, the stage's own first."""
        tied = self.tied
        return (self.own(stage), *([tied] if tied is not None and stage in tied.stages else []))

    @property
    def num_blocks(self) -> int:
        """Blocks of the whole model."""
        return len(self._blocks)

    @property
    def inner_shape(self) -> tuple[int, int, int]:
        """Shape of activations between stages: ``[local_batch, positions, hidden]``."""
        spec = self.manifest
        return spec.training.local_batch, self._family.tokens(spec.model), spec.model.hidden

    def work_of(self, span: Span) -> float:
        """Return the work of one sample in a span, in the unit of `needs`."""
        return float(sum(self._family.work(self.manifest.model)[slice(*span)]))

    def build(self, stage: int, weights: Path | None = None, jobs: Progress = no_progress) -> Stage:
        """Return a stage on the CPU in its initial state; arguments and errors as in `build_stage`."""
        return self.build_span(self.spans[stage], weights, jobs)

    def build_span(self, span: Span, weights: Path | None = None, jobs: Progress = no_progress) -> Stage:
        """Return any span of blocks, built as by `build`."""
        spec = self.manifest
        built = build_stage(spec.model, span, weights, spec.pipeline.quant or None, jobs)
        if spec.lora is not None:
            from p2ptrain.models.adapters import add_adapters

            add_adapters(built, spec.model, spec.lora)
        return built

    @cached_property
    def unit_numbers(self) -> tuple[int, ...]:
        """Numbers of all units."""
        return tuple(range(self.num_stages + (self.tied is not None)))

    def swarm_of(self, unit: int) -> bytes:
        """Return the id of the swarm that averages a unit: 32 bytes."""
        return hashlib.sha256(b"p2ptrain unit" + unit.to_bytes(4, "big") + self.manifest.digest).digest()

    def check(self, stage: int, inputs: Payload, targets: Payload, samples: int, tokens: int) -> None:
        """Check a request against the stage.

        Raises:
            ValueError: The input's shape or codec, the targets' shape, or the token count is invalid.
        """
        spec, family, shape = self.manifest.model, self._family, tuple(inputs.shape)
        sample, length = family.inputs(spec), family.tokens(spec)
        if family.reads_text:
            length = targets.shape[1] if len(targets.shape) == 2 else 0
            sample = (length,)
            good = tuple(targets.shape) == (samples, length) and 0 < length <= spec.context
        else:
            good = tuple(targets.shape) == (samples,)
        expected = (samples, *sample) if stage == 0 else (samples, length, spec.hidden)
        if not good or tokens != math.prod(targets.shape):
            raise ValueError(f"targets of shape {list(targets.shape)} for {samples} samples and {tokens} tokens")
        if shape != expected:
            raise ValueError(f"stage {stage} takes an input of shape {list(expected)}, not {list(shape)}")
        codec = IDS if stage == 0 and family.reads_text else self.manifest.pipeline.codec
        if inputs.codec != codec:
            raise ValueError(f"stage {stage} takes {codec}: it does not take {inputs.codec}")

    @property
    def num_classes(self) -> int:
        """Exclusive upper bound of the targets."""
        return self._family.outputs(self.manifest.model)

    @property
    def num_ids(self) -> int:
        """Exclusive upper bound of the first stage's token ids; 0 if its inputs are not ids."""
        return self.manifest.model.vocabulary if self._family.reads_text else 0


def stage_blocks(manifest: Manifest) -> tuple[tuple[int, int], ...]:
    """Return the blocks of each stage, the first and the one after its last; one stage if the model is not cut."""
    if not manifest.in_stages:
        return ((0, len(model_blocks(manifest.model))),)
    return tuple((span.start, span.stop) for span in PipelinePlan(manifest).spans)


def serving_bytes(manifest: Manifest, weights: str, cache: int) -> list[int]:
    """Return the memory of a peer that only serves, for each stage; one stage if the model is not cut.

    Args:
        weights: The format of the served copies.
        cache: Bytes of keys and values.
    """
    has_base = manifest.lora is not None or bool(manifest.pipeline.quant)
    base = FROZEN_BYTES[manifest.pipeline.quant] if has_base else 0.0
    spans = [Span(*blocks) for blocks in stage_blocks(manifest)]
    return [estimate_serving_bytes(manifest.model, span, SERVED_BYTES[weights], cache, base) for span in spans]
