"""Kernels give a row the same bits beside any other rows, in any chunks and threads, and on any CPU."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from torch.nn import functional

from p2ptrain.models.exact.program import Geometry, Op
from p2ptrain.models.exact.runners import PageStore
from p2ptrain.models.int8 import int8_linear, quantize
from p2ptrain.native.exact import Kernels, Kind
from tests.support.exact import kernels, one_piece, run_ops
from tests.support.tools import needed

BUILDS = kernels()
pytestmark = needed("" if BUILDS else "there is no library of exact kernels", "kernels")
BEST = next(iter(BUILDS.values()), None)
each_shape = pytest.mark.parametrize(("outputs", "inputs"), [(64, 32), (200, 83), (7, 5), (1, 1), (33, 160)])
each_kind = pytest.mark.parametrize("kind", ["fp32", "int8"])


@pytest.fixture(autouse=True)
def seed() -> Iterator[None]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


def linear_ops(weight: torch.Tensor, kind: str, bias: torch.Tensor | None = None, factor: float = 0.0) -> list[Op]:
    outputs, inputs = weight.shape
    if kind == "fp32":
        return [Op(Kind.LINEAR, "x", "y", inputs, outputs, outputs, factor=factor, weight=weight, bias=bias)]
    rounded, scale = quantize(weight)
    product = Op(Kind.LINEAR8, "digits", "y", inputs, outputs, outputs, 0, 0, factor, rounded, bias, scale)
    return [Op(Kind.DIGITS, "x", "digits", inputs), product]


@each_kind
@each_shape
def test_a_row_of_a_product_is_the_same_beside_1_to_70_rows_and_in_each_build(
    outputs: int, inputs: int, kind: str
) -> None:
    assert BEST
    ops, x = linear_ops(torch.randn(outputs, inputs), kind), torch.randn(70, inputs)
    x[3], x[5, 0] = 0, 100
    alone = torch.cat([run_ops(BEST, ops, row[None]) for row in x])
    for build in BUILDS.values():
        for rows in range(1, 71):
            assert torch.equal(run_ops(build, ops, x[:rows]), alone[:rows]), (build.build, rows)


@each_shape
def test_fp32_products_are_those_of_torch_but_for_rounding(outputs: int, inputs: int) -> None:
    assert BEST
    weight, bias, x, before = (
        torch.randn(outputs, inputs), torch.randn(outputs), torch.randn(9, inputs), torch.randn(9, outputs),
    )  # fmt: skip
    expected = functional.linear(x.double(), weight.double())
    torch.testing.assert_close(run_ops(BEST, linear_ops(weight, "fp32"), x).double(), expected, rtol=1e-5, atol=1e-5)
    adding = run_ops(BEST, linear_ops(weight, "fp32", bias, 0.5), x, before=before)
    torch.testing.assert_close(adding.double(), before + 0.5 * (expected + bias), rtol=1e-5, atol=1e-5)


def test_a_dot_product_adds_lanes_in_the_order_that_is_documented() -> None:
    """The reference has two roundings a product; integers are small enough that the first is exact."""
    rng = np.random.default_rng(0)
    x, w = (rng.integers(-2000, 2000, 83).astype(np.float32) for _ in range(2))
    w *= np.float32(2.0) ** rng.integers(-8, 8, 83).astype(np.float32)
    lanes = np.zeros(16, dtype=np.float32)
    for k in range(83):
        lanes[k % 16] = np.float32(np.float64(x[k]) * np.float64(w[k]) + np.float64(lanes[k % 16]))
    for distance in (8, 4, 2, 1):
        lanes = lanes[:distance] + lanes[distance : 2 * distance]
    for build in BUILDS.values():
        found = run_ops(build, linear_ops(torch.from_numpy(w)[None], "fp32"), torch.from_numpy(x)[None])
        assert found.item() == lanes[0], build.build


@each_shape
def test_int8_products_have_the_bits_of_frozen_layers_in_training(outputs: int, inputs: int) -> None:
    weight, bias, x = torch.randn(outputs, inputs), torch.randn(outputs), torch.randn(11, inputs) * 9
    x[2] = 0
    expected = int8_linear(x, *quantize(weight)) + bias
    for build in BUILDS.values():
        assert torch.equal(run_ops(build, linear_ops(weight, "int8", bias), x), expected), build.build


ROW_OPS = {
    "rms": Op(Kind.RMS_NORM, "x", "y", 83, weight=torch.linspace(-1, 2, 83), factor=1e-5),
    "layer": Op(
        Kind.LAYER_NORM, "x", "y", 83, weight=torch.linspace(-1, 2, 83), bias=torch.linspace(3, 1, 83), factor=1e-5
    ),
    "gelu": Op(Kind.GELU, "x", "y", 83),
    "silu": Op(Kind.SILU, "x", "y", 83),
}


def expected_row_op(name: str, x: torch.Tensor) -> torch.Tensor:
    op, x = ROW_OPS[name], x.double()
    match name:
        case "rms":
            assert op.weight is not None
            return op.weight * x * torch.rsqrt(x.square().mean(1, keepdim=True) + 1e-5)
        case "layer":
            assert op.weight is not None
            assert op.bias is not None
            return functional.layer_norm(x, (83,), op.weight.double(), op.bias.double(), 1e-5)
        case "gelu":
            return functional.gelu(x, approximate="tanh")
    return functional.silu(x[:, :83]) * x[:, 83:]


@pytest.mark.parametrize("name", ROW_OPS)
def test_norms_and_activations_are_right_and_the_same_in_each_build(name: str) -> None:
    assert BEST
    x = torch.randn(20, 166 if name == "silu" else 83) * torch.logspace(-3, 2, 20)[:, None]
    if name in ("gelu", "silu"):
        x[0, :8] = torch.tensor([-1e30, -200.0, -88.5, -0.0, 0.0, 88.5, 200.0, 1e9])
    found = run_ops(BEST, [ROW_OPS[name]], x)
    torch.testing.assert_close(found.double(), expected_row_op(name, x), rtol=2e-6, atol=2e-6)
    for build in BUILDS.values():
        assert torch.equal(run_ops(build, [ROW_OPS[name]], x, threads=3), found)
        assert torch.equal(torch.cat([run_ops(build, [ROW_OPS[name]], row[None]) for row in x]), found)


GEOMETRIES = [
    Geometry(2, 9, 3, 64, 1e4), Geometry(2, 4, 4, 20, 0.0), Geometry(2, 8, 1, 34, 500.0), Geometry(2, 6, 2, 10, 1e4),
]  # fmt: skip
LENGTH, PAGES = 200, (4, 1, 0, 3)


def attention_ops(geometry: Geometry) -> list[Op]:
    _, heads, kv_heads, width, *_ = geometry
    total = (heads + 2 * kv_heads) * width
    place = Op(Kind.PLACE, "x", "x", total, stride=total, layer=1, factor=width**-0.5)
    return [place, Op(Kind.ATTEND, "x", "y", total, heads * width, heads * width, layer=1)]


def filled(geometry: Geometry, value: float) -> PageStore:
    store = PageStore(geometry, 5)
    store.keys.fill_(value)
    store.values.fill_(value)
    return store


def attend(
    build: Kernels, geometry: Geometry, x: torch.Tensor, chunks: list[int], threads: int = 1, value: float = torch.nan
) -> torch.Tensor:
    """Attention in chunks, from pages that hold one value before."""
    store, found, first = filled(geometry, value), [], 0
    for chunk in torch.split(x, chunks):
        rows = one_piece(first, len(chunk), PAGES)
        found.append(
            run_ops(build, attention_ops(geometry), chunk, rows=rows, store=store, geometry=geometry, threads=threads)
        )
        first += len(chunk)
    return torch.cat(found)


@pytest.mark.parametrize("geometry", GEOMETRIES, ids=str)
def test_attention_is_that_of_torch_and_the_same_in_any_chunks_threads_and_builds(geometry: Geometry) -> None:
    assert BEST
    _, heads, kv_heads, width, theta, _ = geometry
    x = torch.randn(LENGTH, (heads + 2 * kv_heads) * width)
    whole = attend(BEST, geometry, x, [LENGTH])
    split = x.double().view(LENGTH, -1, width).transpose(0, 1)
    turned, values = split[: heads + kv_heads], split[heads + kv_heads :]
    if theta:
        speeds = theta ** -(torch.arange(0, width, 2, dtype=torch.float64) / width)
        angles = torch.outer(torch.arange(LENGTH, dtype=torch.float64), speeds)
        one, other = turned.chunk(2, dim=-1)
        turned = torch.cat((one * angles.cos() - other * angles.sin(), other * angles.cos() + one * angles.sin()), -1)
    expected = functional.scaled_dot_product_attention(
        turned[None, :heads], turned[None, heads:], values[None], is_causal=True, enable_gqa=True
    )
    torch.testing.assert_close(whole.double(), expected[0].transpose(0, 1).flatten(1), rtol=1e-5, atol=1e-5)
    for build in BUILDS.values():
        for chunks in ([1] * LENGTH, [64, 64, 64, 8], [63, 2, 70, 65], [199, 1], [3] * 66 + [2]):
            assert torch.equal(attend(build, geometry, x, chunks), whole), (build.build, chunks)
        assert torch.equal(attend(build, geometry, x, [150, 50], threads=3), whole)
        assert torch.equal(attend(build, geometry, x, [150, 50], value=torch.inf), whole)


def test_a_row_reads_no_key_behind_its_own() -> None:
    assert BEST
    geometry, x = GEOMETRIES[0], torch.randn(LENGTH, 15 * 64)
    whole, changed = attend(BEST, geometry, x, [LENGTH]), x.clone()
    changed[130:] = torch.nan
    found = attend(BEST, geometry, changed, [LENGTH])
    assert torch.equal(found[:130], whole[:130])
    assert bool(found[130:].isnan().all())


def test_scores_that_are_far_apart_select_one_value() -> None:
    assert BEST
    geometry = Geometry(2, 1, 1, 2, 0.0)
    x = torch.zeros(130, 6)
    x[:, 0], x[:, 2], x[:, 4] = 1, torch.arange(130) * 1000.0, torch.arange(130)
    found = attend(BEST, geometry, x, [130])
    assert torch.equal(found[:, 0], torch.arange(130.0))


def test_threads_that_flush_to_zero_compute_the_same() -> None:
    assert BEST
    ops, x = linear_ops(torch.full((3, 32), 1e-20), "fp32"), torch.full((1, 32), 1e-20)
    expected = run_ops(BEST, ops, x)
    assert 0 < expected[0, 0] < 2e-38
    try:
        if not torch.set_flush_denormal(True):
            pytest.skip("this CPU cannot flush to zero")
        found = run_ops(BEST, ops, x)
    finally:
        torch.set_flush_denormal(False)
    assert torch.equal(found, expected)
