"""Models are the same everywhere, have the size that was computed, and load in transformers."""

import hashlib
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.utils import parameters_to_vector

from p2ptrain.errors import IncompatibleError, UsageError
from p2ptrain.manifest import AveragingSpec, Manifest, ModelSpec, TrainingSpec
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


def test_memory_estimate_grows_with_model_and_batch() -> None:
    small = estimate_memory_bytes(Manifest(training=TrainingSpec(local_batch=4)))
    assert small > 32 * num_parameters(ModelSpec())
    assert estimate_memory_bytes(Manifest(training=TrainingSpec(local_batch=64))) > small
    assert estimate_memory_bytes(Manifest(model=ModelSpec(layers=32), training=TrainingSpec(local_batch=4))) > small


def test_memory_estimate_counts_each_momentum() -> None:
    outer = TrainingSpec(every=10, outer="nesterov", outer_learning_rate=0.7)
    beside = AveragingSpec(worker_momentum=0.5)
    both, one = (estimate_memory_bytes(Manifest(training=outer, averaging=each)) for each in (beside, AveragingSpec()))
    assert both - one == 4 * num_parameters(ModelSpec())


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
