"""Adapters of stages are those of the whole model, are trained alone, and load in peft."""

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch

from p2ptrain.errors import ManifestError, UsageError
from p2ptrain.manifest import LoraSpec, ModelSpec, parse_manifest
from p2ptrain.models import Span, build_model, build_stage, export_hugging_face, model_blocks
from p2ptrain.models.adapters import (
    adapter_parameters,
    adapter_shapes,
    add_adapters,
    export_adapters,
)
from p2ptrain.models.int8 import dequantize
from p2ptrain.models.stage import Stage
from tests.support.models import SPECS, parts, sample

TARGETS = {
    "llama": ("q_proj", "v_proj", "down_proj"),
    "gpt2": ("c_attn", "mlp.c_proj"),
    "vit": ("query", "value", "output.dense"),
}
each = pytest.mark.parametrize(
    ("spec", "adapters"),
    [(SPECS[name], LoraSpec(targets=targets, rank=3, alpha=5.0)) for name, targets in TARGETS.items()],
    ids=list(TARGETS),
)
quants = pytest.mark.parametrize("quant", [None, "int8"])


def adapted(spec: ModelSpec, adapters: LoraSpec, *cuts: int, quant: str | None = None) -> list[Stage]:
    """Stages with adapters at their initial values."""
    stages = [build_stage(spec, span, quant=quant) for span in parts(set(cuts), len(model_blocks(spec)))]
    for stage in stages:
        add_adapters(stage, spec, adapters)
    return stages


def fill(stages: list[Stage]) -> None:
    """Give adapters values that depend on their names alone, as if they had been trained."""
    for stage in stages:
        for name, parameter in adapter_parameters(stage).items():
            seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:7])
            parameter.data = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed)) / 5


def run(stages: list[Stage], inputs: torch.Tensor) -> torch.Tensor:
    for stage in stages:
        inputs = stage(inputs)
    return inputs


def together(stages: list[Stage]) -> dict[str, torch.Tensor]:
    return {name: value for stage in stages for name, value in adapter_parameters(stage).items()}


@each
@quants
def test_adapters_are_all_that_is_trained_and_change_nothing_at_first(
    spec: ModelSpec, adapters: LoraSpec, quant: str | None
) -> None:
    (model,) = adapted(spec, adapters, quant=quant)
    trained = {id(parameter) for parameter in model.parameters() if parameter.requires_grad}
    assert trained == {id(parameter) for parameter in adapter_parameters(model).values()}
    inputs = sample(spec)
    assert torch.equal(model(inputs), build_model(spec, quant=quant)(inputs))
    fill([model])
    assert not torch.allclose(model(inputs), build_model(spec, quant=quant)(inputs), atol=1e-3)


@each
@quants
def test_stages_with_adapters_are_the_whole_model_with_them(
    spec: ModelSpec, adapters: LoraSpec, quant: str | None
) -> None:
    whole, stages = adapted(spec, adapters, quant=quant), adapted(spec, adapters, 1, 3, quant=quant)
    expected = together(whole)
    assert {name: tuple(value.shape) for name, value in expected.items()} == adapter_shapes(spec, adapters)
    assert together(stages).keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in together(stages).items())
    fill(whole)
    fill(stages)
    assert torch.equal(run(stages, sample(spec)), run(whole, sample(spec)))


def test_initial_values_depend_on_names_and_seed_alone() -> None:
    spec, adapters = SPECS["llama"], LoraSpec(targets=("q_proj",), rank=4)
    torch.manual_seed(7)
    expected = torch.rand(4)
    torch.manual_seed(7)
    found = together(adapted(spec, adapters))
    assert torch.equal(torch.rand(4), expected)  # the global generator is left alone
    digest = hashlib.sha256(b"".join(value.detach().numpy().tobytes() for value in found.values())).hexdigest()
    assert digest == "677371ebe8bf1bb8e4f03b36a4cb1df190734d0291fa5de6242a67a8bbe576f1"
    assert not any(bool(value.any()) for name, value in found.items() if "lora_B" in name)
    first, second = (found[f"base_model.model.model.layers.{layer}.self_attn.q_proj.lora_A.weight"] for layer in (0, 1))
    assert not torch.equal(first, second)
    other = together(adapted(spec, LoraSpec(targets=("q_proj",), rank=4, seed=2)))
    assert not torch.equal(other["base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"], first)


@each
@quants
def test_gradients_are_those_of_plain_torch(spec: ModelSpec, adapters: LoraSpec, quant: str | None) -> None:
    stages = adapted(spec, adapters, 2, quant=quant)
    fill(stages)
    outputs = run(stages, sample(spec))
    torch.autograd.backward(outputs.square().mean())

    plain, leaves = merged(spec, adapters, together(stages), quant)
    expected = plain(sample(spec))
    torch.autograd.backward(expected.square().mean())
    tolerance = 1e-5 if quant is None else 2e-3  # inputs in int8 are rounded
    for name, parameter in together(stages).items():
        reference = leaves[name].grad
        assert parameter.grad is not None
        assert reference is not None
        assert float((parameter.grad - reference).abs().max()) <= tolerance * float(reference.abs().max()), name
    assert all(
        parameter.grad is None for stage in stages for parameter in stage.parameters() if not parameter.requires_grad
    )


def merged(
    spec: ModelSpec, adapters: LoraSpec, values: dict[str, torch.Tensor], quant: str | None
) -> tuple[Any, dict[str, torch.Tensor]]:
    """The model in plain torch, ``W + alpha / rank * B @ A`` written out; and the adapters, as leaves."""
    model, held = build_model(spec), build_model(spec, quant=quant)
    leaves = {name: value.detach().clone().requires_grad_() for name, value in values.items()}
    state: dict[str, torch.Tensor] = {name: value.detach() for name, value in model.state_dict().items()}
    for name, layer in held.named_modules():
        if hasattr(layer, "scale"):
            weight = dequantize(layer.weight, layer.scale)
            state[f"{name}.weight"] = weight.t() if getattr(layer, "transposed", False) else weight
        down, up = (f"base_model.model.{name}.{kind}.weight" for kind in ("lora_A", "lora_B"))
        if down in leaves:
            change = adapters.alpha / adapters.rank * leaves[up] @ leaves[down]
            key = f"{name}.weight"
            state[key] = state[key] + (change if state[key].shape == change.shape and "c_" not in name else change.t())
    return lambda inputs: torch.func.functional_call(model, state, (inputs,)), leaves


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")  # peft 0.21 asks transformers for it
@pytest.mark.parametrize("family", ["llama", "gpt2"])
def test_peft_gives_the_same_logits(family: str, tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    spec, adapters = SPECS[family], LoraSpec(targets=TARGETS[family], rank=3, alpha=5.0)
    export_hugging_face(build_model(spec), spec, tmp_path / "model")
    stages = adapted(spec, adapters, 1, 3)
    fill(stages)
    export_adapters(together(stages), spec, adapters, tmp_path / "adapters", base=str(tmp_path / "model"))
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    theirs = PeftModel.from_pretrained(base, tmp_path / "adapters").eval()
    inputs = sample(spec)
    with torch.no_grad():
        found, plain = run(stages, inputs), build_model(spec)(inputs)
        assert torch.allclose(found, theirs(inputs).logits, rtol=1e-4, atol=1e-5)
        assert not torch.allclose(found, plain, atol=1e-2)


def test_adapters_that_are_incomplete_or_that_peft_could_not_load_are_not_exported(tmp_path: Path) -> None:
    vit, targets = SPECS["vit"], LoraSpec(targets=TARGETS["vit"])
    llama, adapters = SPECS["llama"], LoraSpec(targets=("q_proj",))
    stages = adapted(llama, adapters, 1, 3)
    missing = r"layers.2.self_attn.q_proj.lora_A.weight is missing and should be \[8, 32\]"
    for values, spec, lora, refusal in (
        (together(adapted(vit, targets)), vit, targets, "no module 'vit"),
        (together(stages[:2]), llama, adapters, missing),
        ({**together(stages), "x": torch.zeros(1)}, llama, adapters, "should be no adapter of this model"),
    ):
        with pytest.raises(UsageError, match=refusal):
            export_adapters(values, spec, lora, tmp_path / "no")
    assert not (tmp_path / "no").exists()


def test_a_stage_without_target_layers_is_frozen_and_an_untied_head_can_be_one() -> None:
    for name, target, counts in (("llama", "q_proj", [0, 4, 2]), ("llama, untied", "lm_head", [0, 0, 2])):
        stages = adapted(SPECS[name], LoraSpec(targets=(target,)), 1, 3)
        assert [len(adapter_parameters(stage)) for stage in stages] == counts
        assert not any(parameter.requires_grad for parameter in stages[0].parameters())


@pytest.mark.parametrize(
    ("family", "targets"), [("llama", ["q_proj", "query"]), ("llama", ["lm_head"]), ("gpt2", ["wte"]), ("vit", ["ery"])]
)
def test_targets_that_are_no_linear_layers_are_refused(family: str, targets: list[str]) -> None:
    with pytest.raises(UsageError, match=f"no linear layer '{targets[-1]}'"):
        add_adapters(build_stage(SPECS[family], Span(1, 2)), SPECS[family], LoraSpec(targets=targets))


def test_settings_that_make_no_sense_are_refused() -> None:
    wrong: list[dict[str, object]] = [{"targets": ["q_proj"], "rank": 0}, {"targets": []}, {"targets": "q_proj"}, {}]
    for settings in wrong:
        with pytest.raises(ManifestError, match=r"lora\.(targets|rank)"):
            parse_manifest({"lora": settings}, "run.toml")
    (stage,) = adapted(SPECS["llama"], LoraSpec(targets=("q_proj",)))
    with pytest.raises(UsageError, match="already"):
        add_adapters(stage, SPECS["llama"], LoraSpec(targets=("v_proj",)))
