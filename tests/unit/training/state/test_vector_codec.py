"""The manifest's codecs, laid over a model's tensors."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from p2ptrain.codecs import get_codec
from p2ptrain.errors import IncompatibleError
from p2ptrain.manifest import AveragingSpec
from p2ptrain.training.state.layout import Layout
from p2ptrain.training.sync.replica import vector_codec

MODEL = nn.Sequential(nn.Linear(40, 30), nn.BatchNorm1d(30), nn.Linear(30, 20))
LAYOUT = Layout.from_module(MODEL)


def test_one_codec_unless_small_tensors_have_theirs() -> None:
    assert vector_codec(AveragingSpec(codec="int4"), LAYOUT) is get_codec("int4")
    assert vector_codec(AveragingSpec(codec="int8", small_tensors="fp16", small_values=1), LAYOUT).block_size == 256
    assert vector_codec(AveragingSpec(codec="int8", small_tensors="fp16"), LAYOUT) is get_codec("fp16")


def test_biases_norms_and_counters_travel_as_the_manifest_says() -> None:
    codec = vector_codec(AveragingSpec(codec="topk", small_tensors="bf16", small_values=100), LAYOUT)
    vector = torch.randn(LAYOUT.num_values, generator=torch.Generator().manual_seed(0))
    out = torch.empty_like(vector)
    codec.decode_into(codec.encode(vector), out)
    for entry in LAYOUT.entries:
        part, expected = out[entry.offset : entry.end], vector[entry.offset : entry.end]
        if len(entry.shape) < 2:
            assert torch.equal(part, expected.bfloat16().float()), entry.name
        else:
            assert 0 < int((part != 0).sum()) < len(part) / 20, entry.name


def test_a_codec_of_another_version_is_refused() -> None:
    with pytest.raises(IncompatibleError, match="int3"):
        vector_codec(AveragingSpec(codec="int3"), LAYOUT)
