"""Families as lists of blocks: stages run one after another are the whole model, and transformers' model, too."""

import itertools
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from p2ptrain.errors import ConfigError, ManifestError, UsageError
from p2ptrain.manifest import ModelSpec
from p2ptrain.models import (
    Span,
    build_model,
    build_stage,
    export_hugging_face,
    get_family,
    model_blocks,
    num_parameters,
    whole,
)  # fmt: skip
from p2ptrain.models.blocks import stage_ties
from p2ptrain.models.families.sequential import SequentialStage, sequential_blocks
from p2ptrain.models.stage import LayerCache, Stage, StageContext
from tests.support.models import SIZES, SPECS, each, parts, sample, shards
from tests.support.processes.commands import printed

quants = pytest.mark.parametrize("quant", [None, "int8"])


def full_sample(spec: ModelSpec) -> torch.Tensor:
    """As `sample`, as long as can be."""
    if spec.family == "vit":
        return sample(spec)
    return torch.randint(spec.vocabulary, (2, spec.context), generator=torch.Generator().manual_seed(0))


@each
def test_blocks_say_which_parameters_a_model_has_and_in_which_order(spec: ModelSpec) -> None:
    told = {name: shape for block in model_blocks(spec) for name, shape in block.shapes.items()}
    built = {name: tuple(parameter.shape) for name, parameter in build_model(spec).named_parameters()}
    assert list(told.items()) == list(built.items())
    assert num_parameters(spec) == sum(parameter.numel() for parameter in build_model(spec).parameters())


@each
def test_work_is_what_torch_counts(spec: ModelSpec) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    inputs, counted = full_sample(spec), []
    for number in range(len(model_blocks(spec))):
        stage = build_stage(spec, Span(number, number + 1))
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
            inputs = stage(inputs)
        counted.append(counter.get_total_flops() / 2 / len(inputs))
    assert counted == pytest.approx(list(get_family(spec).work(spec)), rel=1e-9)


@settings(max_examples=50)
@given(
    name=st.sampled_from(sorted(SPECS)), cuts=st.sets(st.integers(1, 4), max_size=4), seed=st.integers(0, 99),
    quant=st.sampled_from([None, "int8"]),
)  # fmt: skip
def test_stages_one_after_another_are_the_whole_model_bit_by_bit(
    name: str, cuts: set[int], seed: int, quant: str | None
) -> None:
    spec = SPECS[name]
    flowing = inputs = sample(spec, seed)
    for span in parts(cuts, len(model_blocks(spec))):
        flowing = build_stage(spec, span, quant=quant)(flowing)
    assert torch.equal(flowing, build_model(spec, quant=quant)(inputs))


@settings(max_examples=25)
@given(
    name=st.sampled_from(sorted(SPECS.keys() - {"vit"})),
    cuts=st.sets(st.integers(1, 4), max_size=4),
    ends=st.sets(st.integers(1, 12)),
)
@example(name="llama", cuts=set(), ends=set(range(1, 13)))
@example(name="gpt2", cuts={2}, ends=set(range(1, 13)))
@example(name="qwen3", cuts={3}, ends=set(range(1, 13)))
def test_positions_one_after_another_with_a_cache_give_what_all_at_once_give(
    name: str, cuts: set[int], ends: set[int]
) -> None:
    """Token by token, and in pieces of any length, through any stages."""
    spec = SPECS[name]
    stages = [build_stage(spec, span) for span in parts(cuts, len(model_blocks(spec)))]
    inputs = sample(spec)
    caches: list[defaultdict[str, LayerCache]] = [defaultdict(LayerCache) for _ in stages]
    found = []
    with torch.no_grad():
        for first, stop in itertools.pairwise(sorted({0, *ends, inputs.shape[1]})):
            flowing = inputs[:, first:stop]
            for stage, cache in zip(stages, caches, strict=True):
                flowing = stage(flowing, StageContext(first, cache))
            found.append(flowing)
        expected = build_model(spec)(inputs)
    torch.testing.assert_close(torch.cat(found, dim=1), expected, rtol=1e-4, atol=1e-5)


@each
def test_gradients_that_flow_back_through_stages_are_the_whole_models(spec: ModelSpec) -> None:
    blocks = model_blocks(spec)
    model = build_model(spec)
    torch.autograd.backward(model(sample(spec)).square().mean())
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}

    spans = parts({1, 3}, len(blocks))
    stages = [build_stage(spec, span) for span in spans]
    flowing, entries = sample(spec), []
    for stage in stages:
        entry = flowing.detach()
        if entry.is_floating_point():
            entry.requires_grad_()
        flowing = stage(entry)
        entries.append((entry, flowing))
    torch.autograd.backward(flowing.square().mean())
    for (_, left), (entry, _) in reversed(list(itertools.pairwise(entries))):
        torch.autograd.backward(left, entry.grad)

    found: dict[str, torch.Tensor] = {}
    for span, stage in zip(spans, stages, strict=True):
        ties = stage_ties(blocks, span)
        for name, parameter in stage.named_parameters():
            assert parameter.grad is not None, name
            original = ties.get(name, name)
            found[original] = found.get(original, torch.zeros(())) + parameter.grad
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        assert gradient is not None
        assert torch.allclose(found[name], gradient, rtol=1e-4, atol=1e-7), name


@each
def test_transformers_gives_the_same_outputs(spec: ModelSpec, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoModelForImageClassification

    model = build_model(spec).eval()
    export_hugging_face(model, spec, tmp_path)
    auto: Any = AutoModelForImageClassification if spec.family == "vit" else AutoModelForCausalLM
    theirs, problems = auto.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(problems[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")), problems
    inputs = sample(spec)
    with torch.no_grad():
        assert torch.allclose(model(inputs), theirs(inputs).logits, rtol=1e-4, atol=1e-6)


@each
@quants
def test_a_stage_reads_its_own_parameters_of_a_folder(spec: ModelSpec, quant: str | None, tmp_path: Path) -> None:
    other = spec.model_copy(update={"initial_seed": 7})
    export_hugging_face(build_model(other), spec, tmp_path / "one")
    shards(tmp_path / "one", tmp_path / "sharded")
    inputs = sample(spec)
    expected = build_model(other, quant=quant)(inputs)
    for folder in (tmp_path / "one", tmp_path / "sharded"):
        flowing = inputs
        for span in parts({2, 4}, len(model_blocks(spec))):
            flowing = build_stage(spec, span, folder, quant)(flowing)
        assert torch.equal(flowing, expected)


def test_weights_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    spec = SPECS["llama"]
    span = Span(1, 2)
    with pytest.raises(ConfigError, match="no usable"):
        build_stage(spec, span, tmp_path)
    export_hugging_face(build_model(spec), spec, tmp_path)
    with pytest.raises(ConfigError, match=r"gate_proj.* is \[48, 32\] and should be \[64, 32\]"):
        build_stage(spec.model_copy(update={"intermediate": 64}), span, tmp_path)
    with pytest.raises(ConfigError, match=r"no parameter 'model.layers.3"):
        build_stage(spec.model_copy(update={"layers": 4}), Span(4, 5), tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"x": "../elsewhere"}}')
    with pytest.raises(ConfigError, match="names files elsewhere"):
        build_stage(spec, span, tmp_path)
    for nonsense in ("[]", '{"weight_map": 3}', "rubbish"):
        (tmp_path / "model.safetensors.index.json").write_text(nonsense)
        with pytest.raises(ConfigError, match="no usable"):
            build_stage(spec, span, tmp_path)
    (tmp_path / "model.safetensors.index.json").unlink()
    (tmp_path / "model.safetensors").write_bytes(b"rubbish")
    with pytest.raises(ConfigError, match="no usable"):
        build_stage(spec, span, tmp_path)


def test_a_stage_of_a_large_model_takes_the_memory_of_the_stage() -> None:
    spec = "ModelSpec(layers=40, hidden=1024, heads=16, kv_heads=16, intermediate=2816, vocabulary=32000)"
    code = (
        "import resource; from p2ptrain.manifest import ModelSpec; from p2ptrain.models import Span, build_stage\n"
        f"small = build_stage({spec}.model_copy(update=dict(layers=1, hidden=64, vocabulary=256)), Span(1, 2))\n"
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        f"stage = build_stage({spec}, Span(3, 5))\n"
        "after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss\n"
        "size = sum(parameter.nbytes for parameter in stage.parameters())\n"
        "print((after - before) * 1024 / size)"
    )
    assert float(printed(code)) < 2.0  # The whole model is twenty times the stage.


BUILD = (
    "from p2ptrain.models import build_model; from tests.support.models import SPECS\n"
    "for spec in SPECS.values(): build_model(spec), build_model(spec, quant='int8')"
)


def test_the_compiler_of_torch_is_not_imported_in_vain() -> None:
    """It takes more than a second, as long as torch itself."""
    assert printed(f"import sys\n{BUILD}\nprint('torch._dynamo' in sys.modules)") == "False\n"


@pytest.mark.parametrize("span", [Span(0, 0), Span(2, 1), Span(-1, 2), Span(3, 6)])
def test_a_span_outside_the_model_is_refused(span: Span) -> None:
    with pytest.raises(UsageError, match="blocks 0 to 4"):
        build_stage(SPECS["llama"], span)


def test_settings_that_a_family_has_no_models_for_are_refused() -> None:
    for changes, message in (
        ({"family": "llama", "hidden": 36}, "of 9 values"),
        ({"family": "qwen3", "head_width": 5}, "of 5 values"),
        ({"family": "vit", "patch_size": 3, "image_size": 8}, "patch_size = 3"),
    ):
        with pytest.raises(ManifestError, match=message):
            whole(ModelSpec(**{**SIZES, **changes}))


def test_a_sequential_of_ones_own_is_split_between_its_children() -> None:
    module = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    assert [block.num_parameters for block in sequential_blocks(module)] == [40, 0, 27]
    stages: list[Stage] = [SequentialStage(module, Span(0, 2)), SequentialStage(module, Span(2, 3))]
    inputs = torch.randn(5, 4)
    assert torch.equal(stages[1](stages[0](inputs)), module(inputs))
    told = {name for block in sequential_blocks(module) for name in block.shapes}
    assert told == {name for stage in stages for name, _ in stage.named_parameters()}
    with pytest.raises(UsageError, match="must not share"):
        sequential_blocks(nn.Sequential(module[0], module[0]))
