"""Products with int8 weights are near those in fp32, and the same bits whatever the kernel and the batch."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import linear

from p2ptrain.models import int8
from p2ptrain.models.int8 import (
    Product,
    bitsandbytes_product,
    dequantize,
    digits,
    exact_product,
    int8_linear,
    quantize,
    torch_product,
)
from tests.support.codecs import gaussian
from tests.support.models import input_gradient

PRODUCTS: dict[str, Product] = {"torch": torch_product, "bitsandbytes": bitsandbytes_product, "fp32": exact_product}
products = pytest.mark.parametrize("product", PRODUCTS.values(), ids=list(PRODUCTS))
FP32 = torch.finfo(torch.float32).eps


def with_outliers(*shape: int) -> torch.Tensor:
    """Inputs of which some are a hundred times as large as most, as language models have them."""
    values = gaussian(*shape)
    values[..., ::17] *= 100
    return values


@pytest.mark.parametrize("shape", [(7, 5), (3, 4096), (300, 2048)])  # the last is rounded in several parts
def test_weights_are_rounded_to_half_a_step(shape: tuple[int, int]) -> None:
    weight = gaussian(*shape)
    rounded, scale = quantize(weight)
    assert torch.equal(scale, weight.abs().amax(dim=1) / 127)
    assert rounded.dtype == torch.int8
    assert int(rounded.abs().amax()) == 127
    error = (dequantize(rounded, scale) - weight).abs()
    assert bool((error <= scale[:, None] / 2 * (1 + 300 * FP32)).all())


def test_rows_of_zeros_stay_zeros() -> None:
    rounded, scale = quantize(torch.zeros(2, 8))
    assert torch.equal(dequantize(rounded, scale), torch.zeros(2, 8))
    assert torch.equal(int8_linear(torch.zeros(3, 8), *quantize(gaussian(4, 8))), torch.zeros(3, 4))


@products
def test_outputs_are_off_by_no_more_than_the_rounding_of_weights_and_inputs(product: Product) -> None:
    weight, inputs = gaussian(70, 300, seed=1), with_outliers(9, 300)
    rounded, scale = quantize(weight)
    found = int8_linear(inputs, rounded, scale, product).double()
    by_weights = inputs.abs().sum(1, keepdim=True) * scale / 2
    by_inputs = digits(inputs)[1] / 508 * dequantize(rounded, scale).abs().sum(1)
    error = (found - inputs.double() @ weight.double().t()).abs()
    assert bool((error <= (by_weights + by_inputs) * 1.01).all())
    exact = inputs.double() @ dequantize(rounded, scale).double().t()
    assert bool(((found - exact).abs() <= by_inputs * 1.01 + 4 * FP32 * exact.abs().amax()).all())


@settings(max_examples=40)
@given(rows=st.integers(1, 9), outputs=st.integers(1, 40), inputs=st.integers(1, 1100), seed=st.integers(0, 99))
def test_all_kernels_give_the_same_bits(rows: int, outputs: int, inputs: int, seed: int) -> None:
    values, held = gaussian(rows, inputs, seed=seed), quantize(gaussian(outputs, inputs, seed=seed + 1))
    found = [int8_linear(values, *held, product) for product in PRODUCTS.values()]
    assert all(torch.equal(found[0], each) for each in found[1:])


@pytest.mark.parametrize("product", [torch_product, exact_product])
def test_the_greatest_sums_are_exact(product: Product) -> None:
    left, right = (torch.full(shape, 127, dtype=torch.int8) for shape in ((3, 5000), (40, 5000)))
    left[1] = -127
    right[::3] = 126
    assert torch.equal(product(left, right).long(), left.long() @ right.long().t())


def test_cpus_without_int8_products_take_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, held = gaussian(6, 64), quantize(gaussian(5, 64, seed=1))
    expected = int8_linear(inputs, *held)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    monkeypatch.setattr(int8, "has_int8_product", int8.has_int8_product.__wrapped__)
    monkeypatch.setattr(torch, "_int_mm", None)
    assert torch.equal(int8_linear(inputs, *held), expected)


@pytest.mark.parametrize("saturates", [False, True])
def test_a_kernel_that_fails_or_saturates_is_not_used(saturates: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def kernel(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        if not saturates:
            raise RuntimeError("no such kernel")
        return (left.long() @ right.long()).clamp(-(1 << 15), (1 << 15) - 1).int()

    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX512")
    monkeypatch.setattr(torch, "_int_mm", kernel)
    assert not int8.has_int8_product.__wrapped__()


@products
def test_a_token_s_outputs_do_not_depend_on_the_batch(product: Product, monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, held = with_outliers(70, 96), quantize(gaussian(33, 96, seed=1))
    together = int8_linear(inputs, *held, product)
    for rows in (slice(1), slice(1, 3), slice(3, 20), slice(20, None)):
        assert torch.equal(int8_linear(inputs[rows], *held, product), together[rows])
    monkeypatch.setattr(int8, "_BLOCK_VALUES", 64)  # several blocks of 64 tokens
    assert torch.equal(int8_linear(inputs, *held, product), together)


@products
def test_the_gradient_is_that_of_the_dequantized_weights(product: Product, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(int8, "_CHUNK_VALUES", 96 * 10)  # several chunks
    inputs, held, towards = gaussian(2, 5, 96), quantize(gaussian(33, 96, seed=1)), gaussian(2, 5, 33, seed=2)
    found = input_gradient(lambda values: int8_linear(values, *held, product), inputs, towards)
    expected = input_gradient(lambda values: linear(values, dequantize(*held)), inputs, towards)
    assert torch.allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_inputs_that_are_not_finite_give_outputs_that_are_not(bad: float) -> None:
    inputs = gaussian(3, 40)
    inputs[1, 7] = bad
    finite = int8_linear(inputs, *quantize(gaussian(6, 40, seed=1))).isfinite()
    assert finite.all(dim=1).tolist() == [True, False, True]
    assert not bool(finite[1].any())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_outputs_and_gradients_have_the_inputs_type(dtype: torch.dtype) -> None:
    inputs = gaussian(3, 40).to(dtype).requires_grad_()
    found = int8_linear(inputs, *quantize(gaussian(6, 40, seed=1)))
    torch.autograd.backward(found.sum())
    assert inputs.grad is not None
    assert found.dtype == inputs.grad.dtype == dtype
