"""Models are the same everywhere, have the size that was computed, and load in transformers."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import parameters_to_vector

from p2ptrain.errors import IncompatibleError, UsageError
from p2ptrain.manifest import ModelSpec, TrainingSpec
from p2ptrain.models import build_model, estimate_memory_bytes, export_hugging_face, num_parameters
from p2ptrain.models.tokenizers import byte_tokenizer

SMALL = ModelSpec(layers=2, hidden=32, heads=4, kv_heads=2, intermediate=64, context=32)


def flat(model: nn.Module) -> torch.Tensor:
    return parameters_to_vector(model.parameters()).detach()


def test_initial_parameters_depend_on_the_spec_alone_and_have_golden_bits() -> None:
    threads, found = torch.get_num_threads(), []
    try:
        for number in (1, 3):
            torch.set_num_threads(number)
            torch.manual_seed(number)
            state = torch.get_rng_state()
            found.append(flat(build_model(SMALL)).numpy().tobytes())
            assert torch.equal(torch.get_rng_state(), state), "the global generator is left alone"
    finally:
        torch.set_num_threads(threads)
    assert found[0] == found[1] != flat(build_model(SMALL.model_copy(update={"initial_seed": 2}))).numpy().tobytes()
    digest = hashlib.sha256(found[0]).hexdigest()
    assert digest == "9b51f99baab2d53c50c3fcee47861ee5698e5abd90a122dc80ece9b49650c5ae"


def test_initial_weights_are_centred_with_the_intended_spread() -> None:
    model = build_model(ModelSpec(layers=2, hidden=256, heads=4, kv_heads=4, intermediate=512, initial_seed=5))
    weights = {name: weight.detach() for name, weight in model.named_parameters()}
    for name, expected in {
        "model.embed_tokens.weight": 0.02,
        "model.layers.0.self_attn.q_proj.weight": 256**-0.5,
        "model.layers.1.mlp.down_proj.weight": 512**-0.5 / 2,
    }.items():
        assert abs(float(weights[name].mean())) < 0.03 * expected
        assert float(weights[name].std()) == pytest.approx(expected, rel=0.02)
    assert bool((weights["model.norm.weight"] == 1).all())


def llama(**sizes: Any) -> ModelSpec:
    return ModelSpec(heads=4, **sizes)


@settings(max_examples=20)
@given(
    st.builds(
        llama, layers=st.integers(1, 3), kv_heads=st.sampled_from([1, 2, 4]), hidden=st.sampled_from([16, 32]),
        intermediate=st.integers(8, 40), vocabulary=st.integers(2, 300), tied_embeddings=st.booleans(),
    )
)  # fmt: skip
def test_number_of_parameters_is_that_of_the_built_model(spec: ModelSpec) -> None:
    assert num_parameters(spec) == sum(parameter.numel() for parameter in build_model(spec).parameters())


def test_memory_estimate_grows_with_model_and_batch() -> None:
    small = estimate_memory_bytes(ModelSpec(), TrainingSpec(local_batch=4))
    assert small > 32 * num_parameters(ModelSpec())
    assert estimate_memory_bytes(ModelSpec(), TrainingSpec(local_batch=64)) > small
    assert estimate_memory_bytes(ModelSpec(layers=32), TrainingSpec(local_batch=4)) > small


def test_an_export_has_a_tokenizer_and_overwrites_an_earlier_one(tmp_path: Path) -> None:
    """`test_families` compares its logits."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    for _ in range(2):
        export_hugging_face(build_model(SMALL), SMALL, tmp_path)
    tokenizer, text = AutoTokenizer.from_pretrained(tmp_path), "def f(x):\n    return x"
    assert tokenizer(text).input_ids == list(text.encode())
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert loaded.config.eos_token_id == loaded.generation_config.eos_token_id == 0


@settings(max_examples=100)
@given(st.text())
def test_byte_tokenizer_gives_the_bytes_of_any_text_and_back(text: str) -> None:
    tokens = TOKENIZER.encode(text)
    assert tokens == list(text.encode())
    assert TOKENIZER.decode(tokens) == text


TOKENIZER = byte_tokenizer(128)


def test_unknown_and_custom_families_are_refused() -> None:
    with pytest.raises(IncompatibleError, match="unknown model family 'mamba'"):
        build_model(ModelSpec(family="mamba"))
    with pytest.raises(UsageError, match="custom"):
        num_parameters(ModelSpec(family="custom"))
