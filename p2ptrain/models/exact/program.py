"""A stage's layers as a list of operations on named buffers, with copies of its weights.

A buffer holds a row of values for each row of the batch. ``hidden`` is input and output of the layers, and input of the
head; ``logits`` is the head's output. Layers may be fp32 or int8 (`p2ptrain.models.int8`), and may have adapters
(`p2ptrain.models.adapters`), which are computed beside them: ``W x + s B (A x)``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import nn

from p2ptrain.errors import UsageError
from p2ptrain.manifest import ROTARY_FAMILIES, ModelSpec, RopeScaling
from p2ptrain.models.families.layers import Affine
from p2ptrain.models.int8 import Frozen, dequantize, quantize
from p2ptrain.models.stage import Stage
from p2ptrain.native.exact import MAX_INT8_INPUTS, Kind

WeightFormat = Literal["fp32", "int8"]


@dataclass(frozen=True)
class Op:
    """One operation: reads the buffer ``x``, and writes to the buffer ``y``.

    Attributes:
        layer: The layer's number within the stage.
        weight, bias: Of a linear layer ``[outputs, inputs]`` and ``[outputs]``, or of a normalisation.
        scale: Of int8 weights, ``[outputs]``.
        stride: Values of a row of ``y``; 0 for ``inputs``.
        column: Of ``y``, at which the outputs begin.
        factor: Of a linear layer: 0 to store, else the multiple of the result that is added to ``y``. Of a
            normalisation: epsilon. Of `Kind.PLACE`: the queries' scale.
    """

    kind: Kind
    x: str
    y: str
    inputs: int
    outputs: int = 0
    stride: int = 0
    column: int = 0
    layer: int = 0
    factor: float = 0.0
    weight: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    scale: torch.Tensor | None = None

    @property
    def inputs_width(self) -> int:
        """Values that it reads of a row: gates and what they multiply are two halves."""
        return 2 * self.inputs if self.kind is Kind.SILU else self.inputs


class Matrix(NamedTuple):
    """A copy of a linear layer's or table's weight ``[outputs, inputs]``, with a scale a row if it is int8."""

    weight: torch.Tensor
    scale: torch.Tensor | None

    def rows(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return rows in fp32."""
        found = self.weight[numbers]
        return found if self.scale is None else dequantize(found, self.scale[numbers])


class Adapter(NamedTuple):
    """An adapter of a linear layer: ``factor * up (down x)`` is added."""

    down: torch.Tensor
    up: torch.Tensor
    factor: float


def copy_matrix(module: Any, weights: WeightFormat) -> Matrix:
    """Copy the weight of a linear layer or an embedding, which may be int8, in a format."""
    held = module.weight.detach()
    if isinstance(module, Frozen):
        if weights == "int8":
            return Matrix(held.cpu().clone(), module.scale.detach().cpu().clone())
        return Matrix(dequantize(held, module.scale).cpu(), None)
    turned = (held.t() if isinstance(module, Affine) else held).cpu().float()
    return Matrix(*quantize(turned)) if weights == "int8" else Matrix(turned.contiguous().clone(), None)


def _copy(value: torch.Tensor) -> torch.Tensor:
    return value.detach().to("cpu", torch.float32).contiguous().clone()


def _unwrap(module: nn.Module) -> tuple[Any, Adapter | None]:
    """Split a layer that may be peft's wrapper into the linear layer and its adapter."""
    layer: Any = module
    if not hasattr(layer, "base_layer"):
        return layer, None
    (name,) = layer.lora_A.keys()
    factor = float(layer.scaling[name])
    adapter = Adapter(_copy(layer.lora_A[name].weight), _copy(layer.lora_B[name].weight), factor)
    return layer.base_layer, adapter if factor else None


@dataclass
class Program:
    """A list of operations that grows as layers are added.

    Attributes:
        widths: Values a row of each buffer.
    """

    weights: WeightFormat
    ops: list[Op] = field(default_factory=list)
    widths: defaultdict[str, int] = field(default_factory=lambda: defaultdict(int))

    def add(self, op: Op) -> None:
        self.ops.append(op)
        for name, width in ((op.x, op.inputs_width), (op.y, op.stride or op.inputs)):
            self.widths[name] = max(self.widths[name], width)

    def norm(self, module: Any, epsilon: float, x: str, y: str) -> None:
        kind = Kind.LAYER_NORM if isinstance(module, nn.LayerNorm) else Kind.RMS_NORM
        bias = _copy(module.bias) if kind is Kind.LAYER_NORM else None
        width = len(module.weight)
        self.add(Op(kind, x, y, width, weight=_copy(module.weight), bias=bias, factor=epsilon))

    def norm_heads(self, module: Any, epsilon: float, column: int, heads: int, total: int) -> None:
        """Normalise some heads in ``heads``, a buffer of ``total`` values a row, from ``column`` on."""
        width = len(module.weight)
        self.add(Op(
            Kind.HEAD_NORM, "heads", "heads", width, heads, total, column, factor=epsilon, weight=_copy(module.weight)
        ))  # fmt: skip

    def linear(self, modules: Sequence[nn.Module], x: str, y: str, *, adds: bool = False) -> None:
        """Add linear layers with one input; their outputs stand side by side in ``y``, or are added to it."""
        layers, adapters = zip(*map(_unwrap, modules), strict=True)
        matrices = [copy_matrix(layer, self.weights) for layer in layers]
        biases = [_copy(layer.bias) for layer in layers if layer.bias is not None]
        target = "adapted" if adds and any(adapters) else y  # where adapters add before the residual does
        outputs = self.matrix(
            _together(matrices), x, target, torch.cat(biases) if biases else None, adds and target == y
        )
        column = 0
        for matrix, adapter in zip(matrices, adapters, strict=True):
            if adapter is not None:
                inputs, rank = matrix.weight.shape[1], len(adapter.down)
                self.add(Op(Kind.LINEAR, x, "rank", inputs, rank, rank, weight=adapter.down))
                self.add(Op(
                    Kind.LINEAR, "rank", target, rank, len(adapter.up), outputs, column, factor=adapter.factor,
                    weight=adapter.up,
                ))  # fmt: skip
            column += len(matrix.weight)
        if target != y:
            self.add(Op(Kind.ADD, target, y, outputs))

    def matrix(self, matrix: Matrix, x: str, y: str, bias: torch.Tensor | None = None, adds: bool = False) -> int:
        """Add one product; return its number of outputs."""
        outputs, inputs = matrix.weight.shape
        kind = Kind.LINEAR
        if matrix.scale is not None:
            if inputs > MAX_INT8_INPUTS:
                raise UsageError(f"a layer has {inputs} inputs, and int8 at most {MAX_INT8_INPUTS}: serve it in fp32")
            self.add(Op(Kind.DIGITS, x, "digits", inputs))
            kind, x = Kind.LINEAR8, "digits"
        factor = float(adds)
        self.add(Op(kind, x, y, inputs, outputs, outputs, 0, 0, factor, matrix.weight, bias, matrix.scale))
        return outputs


def _together(matrices: Sequence[Matrix]) -> Matrix:
    if len(matrices) == 1:
        return matrices[0]
    scales = [each.scale for each in matrices if each.scale is not None]
    return Matrix(torch.cat([each.weight for each in matrices]), torch.cat(scales) if scales else None)


def _llama_layer(program: Program, spec: ModelSpec, number: int, layer: Any) -> None:
    at, mlp, epsilon = layer.self_attn, layer.mlp, spec.norm_epsilon
    program.norm(layer.input_layernorm, epsilon, "hidden", "normed")
    program.linear((at.q_proj, at.k_proj, at.v_proj), "normed", "heads")
    if hasattr(at, "q_norm"):
        queries, total = spec.heads * spec.width_of_head, (spec.heads + 2 * spec.kv_heads) * spec.width_of_head
        program.norm_heads(at.q_norm, epsilon, 0, spec.heads, total)
        program.norm_heads(at.k_norm, epsilon, queries, spec.kv_heads, total)
    _attention(program, spec, number)
    program.linear((at.o_proj,), "mixed", "hidden", adds=True)
    program.norm(layer.post_attention_layernorm, epsilon, "hidden", "normed")
    program.linear((mlp.gate_proj, mlp.up_proj), "normed", "wide")
    program.add(Op(Kind.SILU, "wide", "active", spec.intermediate))
    program.linear((mlp.down_proj,), "active", "hidden", adds=True)


def _gpt2_layer(program: Program, spec: ModelSpec, number: int, layer: Any) -> None:
    program.norm(layer.ln_1, spec.norm_epsilon, "hidden", "normed")
    program.linear((layer.attn.c_attn,), "normed", "heads")
    _attention(program, spec, number)
    program.linear((layer.attn.c_proj,), "mixed", "hidden", adds=True)
    program.norm(layer.ln_2, spec.norm_epsilon, "hidden", "normed")
    program.linear((layer.mlp.c_fc,), "normed", "wide")
    program.add(Op(Kind.GELU, "wide", "active", spec.intermediate))
    program.linear((layer.mlp.c_proj,), "active", "hidden", adds=True)


def _attention(program: Program, spec: ModelSpec, number: int) -> None:
    width = spec.width_of_head
    total, mixed = (spec.heads + 2 * spec.kv_heads) * width, spec.heads * width
    program.add(Op(Kind.PLACE, "heads", "heads", total, stride=total, layer=number, factor=width**-0.5))
    program.add(Op(Kind.ATTEND, "heads", "mixed", total, mixed, mixed, layer=number))


class Geometry(NamedTuple):
    """Shape of attention in all layers of a stage; ``theta`` is 0 without rotary positions.

    For ``scaling`` see `p2ptrain.models.families.layers.stretched`.
    """

    layers: int
    heads: int
    kv_heads: int
    width: int
    theta: float
    scaling: RopeScaling | None = None


@dataclass(frozen=True)
class StagePrograms:
    """All that a stage computes with.

    Attributes:
        table: The embedding, in the first stage.
        positions: GPT-2's embedding of positions ``[context, hidden]``, in the first stage.
        head: From ``hidden`` to ``logits``, in the last stage.
    """

    geometry: Geometry
    layers: Program
    table: Matrix | None
    positions: Matrix | None
    head: Program | None


_FAMILIES = {
    **dict.fromkeys(ROTARY_FAMILIES, (_llama_layer, "model", "layers", "embed_tokens", "norm")),
    "gpt2": (_gpt2_layer, "transformer", "h", "wte", "ln_f"),
}
"""By family: how a layer is written down; names of the body, its layers, its table and its last normalisation."""


def write_programs(stage: Stage, spec: ModelSpec, weights: WeightFormat) -> StagePrograms:
    """Write down a stage; raises `UsageError` for families that do not generate text."""
    if spec.family not in _FAMILIES:
        raise UsageError(f"a {spec.family} model cannot be served: the families {', '.join(_FAMILIES)} can")
    add_layer, body_name, layers_name, table_name, norm_name = _FAMILIES[spec.family]
    body: Any = getattr(stage, body_name)
    modules = list(getattr(body, layers_name).values())
    theta = spec.rope_theta if spec.family in ROTARY_FAMILIES else 0.0
    program = Program(weights)
    for number, layer in enumerate(modules):
        add_layer(program, spec, number, layer)
    table = copy_matrix(getattr(body, table_name), weights) if stage.is_first else None
    head = None
    if stage.is_last:
        head = Program(weights)
        head.norm(getattr(body, norm_name), spec.norm_epsilon, "hidden", "normed")
        if hasattr(stage, "lm_head"):
            head.linear((stage.lm_head,), "normed", "logits")  # type: ignore[arg-type]
        else:
            assert table is not None
            head.matrix(table, "normed", "logits")
    return StagePrograms(
        Geometry(len(modules), spec.heads, spec.kv_heads, spec.width_of_head, theta, spec.rope_scaling),
        program,
        table,
        copy_matrix(body.wpe, weights) if stage.is_first and spec.family == "gpt2" else None,
        head,
    )
