"""A layout loses nothing on the way from a module to a vector and back, and codecs are laid over its tensors."""

import json
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from p2ptrain.codecs import CODECS, get_codec
from p2ptrain.manifest import AveragingSpec
from p2ptrain.training.state.layout import MAX_EXACT_INTEGER, Layout, vector_codec


class Everything(nn.Module):
    """Tied, frozen and half-precision parameters; persistent, integer, boolean and transient buffers."""

    mask: torch.Tensor
    cache: torch.Tensor

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(3, 4)
        self.second = nn.Linear(3, 4, bias=False)
        self.second.weight = self.first.weight
        self.frozen = nn.Linear(2, 2)
        self.frozen.requires_grad_(False)
        self.scalar = nn.Parameter(torch.tensor(0.5))
        self.low = nn.Parameter(torch.randn(5).bfloat16())
        self.norm = nn.BatchNorm1d(4)
        self.register_buffer("mask", torch.tensor([True, False, True]))
        self.register_buffer("cache", torch.randn(9), persistent=False)

    @property
    def count(self) -> torch.Tensor:
        """The integer buffer."""
        return dict(self.named_buffers())["norm.num_batches_tracked"]


def test_order_is_parameters_once_then_persistent_buffers() -> None:
    layout = Layout.from_module(Everything())
    names = [entry.name for entry in layout.entries]
    assert names == [
        "scalar",
        "low",
        "first.weight",
        "first.bias",
        "norm.weight",
        "norm.bias",
        "mask",
        "norm.running_mean",
        "norm.running_var",
        "norm.num_batches_tracked",
    ]
    assert [entry.kind for entry in layout.entries] == ["param"] * 6 + ["buffer"] * 4
    assert layout.num_parameters == 1 + 5 + 12 + 4 + 4 + 4
    assert layout.num_values == layout.num_parameters + 3 + 4 + 4 + 1


def test_write_then_read_is_identity() -> None:
    source, target = Everything(1), Everything(2)
    source.count.fill_(MAX_EXACT_INTEGER)
    source.mask.logical_not_()
    layout = Layout.from_module(source)
    vector, again = layout.new_vector(), layout.new_vector()
    layout.read(source, vector)
    layout.write(vector, target)
    layout.read(target, again)
    assert torch.equal(vector, again)
    for name, tensor in source.state_dict().items():
        if not name.startswith("frozen"):
            assert torch.equal(tensor, target.state_dict()[name]), name
    assert target.second.weight is target.first.weight


def test_write_is_in_place_and_leaves_frozen_and_transient_tensors_alone() -> None:
    module = Everything()
    layout = Layout.from_module(module)
    before = module.first.weight.data_ptr(), module.frozen.weight.clone(), module.cache.clone()
    layout.write(torch.full((layout.num_values,), 7.0), module)
    assert module.first.weight.data_ptr() == before[0]
    assert torch.equal(module.frozen.weight, before[1])
    assert torch.equal(module.cache, before[2])


@given(st.floats(width=32))
def test_any_float_makes_a_valid_integer(value: float) -> None:
    module = Everything()
    layout = Layout.from_module(module)
    layout.write(torch.full((layout.num_values,), value), module, kind="buffer")
    count = int(module.count)
    assert abs(count) <= 1 << 53
    if abs(value) < MAX_EXACT_INTEGER:
        assert count == round(value)


def test_fingerprint_depends_on_names_shapes_dtypes_and_not_on_values() -> None:
    assert Layout.from_module(Everything(1)).fingerprint == Layout.from_module(Everything(2)).fingerprint
    plain, compiled = nn.Sequential(nn.Linear(2, 3)), nn.Module()
    compiled.add_module("_orig_mod", plain)
    assert Layout.from_module(compiled).fingerprint == Layout.from_module(plain).fingerprint
    modules = (nn.Linear(2, 3), nn.Linear(3, 2), nn.Linear(2, 3, bias=False), nn.Linear(2, 3).bfloat16(), plain)
    assert len({Layout.from_module(module).fingerprint for module in modules}) == 5


def test_what_cannot_be_shared_is_refused() -> None:
    module = nn.Linear(2, 2)
    module.register_buffer("ids", torch.tensor([MAX_EXACT_INTEGER + 1]))
    with pytest.raises(ValueError, match=r"ids.*persistent=False"):
        Layout.from_module(module)
    module.register_buffer("ids", torch.full((2, 2), -torch.inf).triu(1))
    with pytest.raises(ValueError, match=r"ids.*not finite.*persistent=False"):
        Layout.from_module(module)
    module.register_buffer("ids", torch.full((2, 2), -torch.inf), persistent=False)
    assert not Layout.from_module(module).buffer_entries
    with pytest.raises(ValueError, match="requires_grad"):
        Layout.from_module(nn.Linear(2, 2).requires_grad_(False))
    with pytest.raises(ValueError, match="complex"):
        Layout.from_module(nn.Linear(2, 2, dtype=torch.complex64))


@pytest.mark.parametrize(
    "bad", [torch.zeros(3), torch.zeros(6, dtype=torch.float64), torch.zeros(12)[::2], torch.zeros(2, 3)]
)
def test_a_vector_that_does_not_fit_and_a_module_that_changed_are_refused(bad: torch.Tensor) -> None:
    module = nn.Linear(2, 2)
    layout = Layout.from_module(module)
    with pytest.raises(ValueError, match="6 values"):
        layout.read(module, bad)
    with pytest.raises(ValueError, match="weight has shape"):
        layout.write(layout.new_vector(), nn.Linear(2, 3))


MODEL = nn.Sequential(nn.Linear(40, 30), nn.BatchNorm1d(30), nn.Linear(30, 20))
LAYOUT = Layout.from_module(MODEL)


def test_one_codec_unless_small_tensors_have_theirs() -> None:
    layout = Layout.from_module(nn.Linear(40, 30))
    assert vector_codec(AveragingSpec(codec="int4"), layout) is get_codec("int4")
    assert vector_codec(AveragingSpec(codec="int8", small_tensors="fp16", small_values=30), layout).block_size == 256
    assert vector_codec(AveragingSpec(codec="int8", small_tensors="fp16"), layout) is get_codec("fp16")


@pytest.mark.parametrize("name", CODECS.own)
def test_small_buffers_are_exact_and_cost_the_parameters_nothing(name: str) -> None:
    """A counter of batches grows by hundreds in a round, while a running variance moves by less than one."""
    module = nn.Sequential(nn.Linear(40, 30), nn.BatchNorm1d(30))
    module.register_buffer("large", torch.zeros(8192))
    layout, vector = Layout.from_module(module), torch.rand(1230 + 60 + 61 + 8192)
    counter, large = next(e for e in layout.entries if "batches" in e.name), layout.buffer_entries[0]
    vector[counter.offset] = -500.0
    codec, plain = vector_codec(AveragingSpec(codec=name), layout), get_codec(name)
    out, alone = torch.empty_like(vector), torch.empty(layout.num_parameters)
    codec.decode_into(codec.encode(vector), out)
    plain.decode_into(plain.encode(vector[: layout.num_parameters]), alone)
    assert torch.equal(out[large.end :], vector[large.end :])
    if name != "topk":  # A chunk of it has 4096 values, and this one has some of the large buffer.
        torch.testing.assert_close(out[: layout.num_parameters], alone, rtol=0, atol=0.1)
    assert codec.encoded_bytes(layout.num_values) <= plain.encoded_bytes(layout.num_values) + 4 * 61 + 8


def test_biases_and_norms_travel_as_the_manifest_says() -> None:
    codec = vector_codec(AveragingSpec(codec="topk", small_tensors="bf16", small_values=100), LAYOUT)
    vector = torch.randn(LAYOUT.num_values, generator=torch.Generator().manual_seed(0))
    out = torch.empty_like(vector)
    codec.decode_into(codec.encode(vector), out)
    for entry in LAYOUT.entries:
        part, expected = out[entry.offset : entry.end], vector[entry.offset : entry.end]
        if entry.kind == "buffer":
            assert torch.equal(part, expected), entry.name
        elif len(entry.shape) < 2:
            assert torch.equal(part, expected.bfloat16().float()), entry.name
        else:
            assert 0 < int((part != 0).sum()) < len(part) / 20, entry.name


def test_a_description_gives_the_tensors_back_without_the_module() -> None:
    module = Everything()
    module.norm(torch.randn(8, 4))
    layout = Layout.from_module(module, "", ["norm.running*", "scalar"])
    vector = layout.new_vector()
    layout.read(module, vector)
    again = Layout.of_description(json.loads(json.dumps(layout.describe())))
    assert (again.fingerprint, again.entries) == (layout.fingerprint, layout.entries)
    found, state = again.tensors(vector, layout.read_personal(module)), module.state_dict()
    assert state.keys() - found.keys() == {"second.weight", "frozen.weight", "frozen.bias"}, "tied and frozen ones"
    for name, tensor in found.items():
        assert tensor.dtype == state[name].dtype
        torch.testing.assert_close(tensor, state[name])
    with pytest.raises(ValueError, match="personal tensor scalar is missing"):
        again.tensors(vector, {})


@pytest.mark.parametrize("described", [None, [], [[], [], []], [[["param", "a", [1], "nn"]], []], [[["param"]], []]])
def test_what_describes_no_layout_is_refused(described: Any) -> None:
    with pytest.raises(ValueError, match=r"no description|values to unpack"):
        Layout.of_description(described)
