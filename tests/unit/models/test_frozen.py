"""Stages in int8: near those in fp32, a quarter of their size, and the whole int8 model if run one after another."""

import itertools
import math
from pathlib import Path

import pytest
import torch
from torch import nn

from p2ptrain.errors import UsageError
from p2ptrain.manifest import ModelSpec
from p2ptrain.models import Span, build_model, build_stage, export_hugging_face, model_blocks
from p2ptrain.models.blocks import stage_shapes
from p2ptrain.models.families.sequential import SequentialStage
from p2ptrain.models.int8 import Frozen, Int8Linear, dequantize, freeze_int8
from p2ptrain.models.stage import Stage
from tests.support.models import SPECS, each, input_gradient, sample, write_shards
from tests.support.processes.commands import printed


def dequantized(spec: ModelSpec, stage: Stage) -> Stage:
    """The stage in fp32 whose parameters are those that an int8 one stands for."""
    plain, state = build_stage(spec, stage.span), dict(stage.state_dict())
    for name, layer in stage.named_modules():
        if isinstance(layer, Frozen):
            weight = dequantize(layer.weight, state.pop(f"{name}.scale"))
            is_transposed = isinstance(layer, Int8Linear) and layer.transposed
            state[f"{name}.weight"] = weight.t() if is_transposed else weight
    plain.load_state_dict(state)
    return plain


def num_bytes(stage: nn.Module) -> int:
    return sum(each.nbytes for each in itertools.chain(stage.parameters(), stage.buffers()))


@each
def test_outputs_are_those_of_the_weights_that_it_stands_for(spec: ModelSpec) -> None:
    model, inputs = build_model(spec, quant="int8"), sample(spec)
    with torch.no_grad():
        found, expected = model(inputs), dequantized(spec, model)(inputs)
        plain = build_model(spec)(inputs)
    spread = plain.std()
    # Inputs are rounded to a 64000th of a row's greatest, weights to a 254th of theirs.
    assert float((found - expected).abs().max()) < 1e-3 * spread
    assert float((found - plain).pow(2).mean().sqrt()) < 1 / 25 * spread


@each
def test_gradients_flow_through_and_none_stays(spec: ModelSpec) -> None:
    stage = build_stage(spec, Span(2, len(model_blocks(spec))), quant="int8")
    hidden = torch.randn(2, 5, spec.hidden, generator=torch.Generator().manual_seed(3))
    found, expected = input_gradient(stage, hidden), input_gradient(dequantized(spec, stage), hidden)
    assert torch.allclose(found, expected, rtol=1e-2, atol=2e-3 * float(expected.abs().max()))
    assert not any(parameter.requires_grad or parameter.grad is not None for parameter in stage.parameters())


@each
def test_weights_are_buffers_and_what_is_small_stays_in_fp32(spec: ModelSpec) -> None:
    stage = build_model(spec, quant="int8")
    assert stage.training
    assert all(parameter.dtype == torch.float32 for parameter in stage.parameters())
    kept = {name.rpartition(".")[2] for name, parameter in stage.named_parameters() if parameter.dim() == 2}
    assert not kept
    shapes = stage_shapes(model_blocks(spec), stage.span)
    held = stage.state_dict()
    assert {name for name in held if not name.endswith(".scale")} == set(shapes)


SMOLLM2 = ModelSpec(
    layers=30, hidden=576, heads=9, kv_heads=3, intermediate=1536, vocabulary=49152, context=8192, rope_theta=100_000.0
)


def test_a_stage_takes_a_quarter_of_the_memory() -> None:
    spec = SMOLLM2.model_copy(update={"layers": 2, "vocabulary": 4096})
    for span in (Span(0, 1), Span(1, 3), Span(3, 4)):
        ratio = num_bytes(build_stage(spec, span, quant="int8")) / num_bytes(build_stage(spec, span))
        assert 0.25 < ratio < 0.26


def test_a_whole_tied_model_holds_one_table() -> None:
    tied, untied = (build_model(SPECS[name], quant="int8") for name in ("gpt2", "gpt2, untied"))
    table = SPECS["gpt2"].vocabulary * (SPECS["gpt2"].hidden + 4)
    assert num_bytes(untied) - num_bytes(tied) == table


def test_building_holds_the_int8_stage_and_one_large_parameter(tmp_path: Path) -> None:
    large = ModelSpec(layers=4, hidden=1024, heads=8, kv_heads=8, intermediate=4096, vocabulary=256)
    shapes = stage_shapes(model_blocks(large), Span(1, 5))
    write_shards({name: torch.ones(shape, dtype=torch.bfloat16) for name, shape in shapes.items()}, tmp_path / "large")
    code = (
        "import resource, sys; from pathlib import Path; from p2ptrain.manifest import ModelSpec\n"
        "from p2ptrain.models import Span, build_stage\n"
        "peak = lambda: 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "build_stage(ModelSpec(), Span(1, 2), quant='int8'); before = peak()\n"
        f"stage = build_stage(ModelSpec.model_validate({large.model_dump()}), Span(1, 5), Path(sys.argv[1]), 'int8')\n"
        "print(peak() - before - sum(each.nbytes for each in [*stage.parameters(), *stage.buffers()]))"
    )
    extra = int(printed(code, tmp_path / "large"))
    # The file's parameter, the same in fp32, and what rounding it takes; the stage in fp32 is 16 times the largest.
    assert extra < 3 * 4 * math.prod(max(shapes.values(), key=math.prod))


def test_children_of_a_sequential_are_frozen_in_place() -> None:
    module = nn.Sequential(nn.Embedding(9, 8), nn.Sequential(nn.Linear(8, 16), nn.Tanh()), nn.Linear(16, 3))
    inputs = torch.arange(9).view(3, 3)
    plain = module(inputs).detach()
    stages = [SequentialStage(module, span) for span in (Span(0, 2), Span(2, 3))]
    before = sum(map(num_bytes, stages))
    for stage in stages:
        freeze_int8(stage)
    found = stages[1](stages[0](inputs))
    assert float((found - plain).abs().max()) < 0.05 * float(plain.std())
    assert sum(map(num_bytes, stages)) < before / 2
    assert not any(parameter.requires_grad for stage in stages for parameter in stage.parameters())


def test_layers_that_are_used_in_ways_of_their_own_stay_as_they_are() -> None:
    module = nn.Sequential(nn.MultiheadAttention(8, 2), nn.Linear(8, 8))
    freeze_int8(module)
    tokens = torch.ones(3, 1, 8)
    assert module[0](tokens, tokens, tokens)[0].shape == (3, 1, 8)
    assert isinstance(module[1], Int8Linear)


def test_unknown_quantizations_are_refused() -> None:
    with pytest.raises(UsageError, match="'int3': this version has int8"):
        build_stage(SPECS["llama"], Span(0, 1), quant="int3")


def test_an_int8_model_is_not_exported(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="int8 cannot be exported"):
        export_hugging_face(build_model(SPECS["gpt2"], quant="int8"), SPECS["gpt2"], tmp_path)
    assert not list(tmp_path.iterdir())
