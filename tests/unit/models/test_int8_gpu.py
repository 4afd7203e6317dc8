"""On a CUDA device: bitsandbytes' kernel there gives what the CPU does, and `Linear8bitLt` is as near as it says."""

import pytest
import torch

from p2ptrain.manifest import LoraSpec, ModelSpec
from p2ptrain.models import Span, build_stage, model_blocks
from p2ptrain.models.adapters import adapter_parameters, add_adapters
from p2ptrain.models.int8 import bitsandbytes_product, exact_product, int8_linear, quantize
from tests.support.codecs import gaussian
from tests.support.models import each, sample

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
    # bitsandbytes falls back to fp32 for shapes that the device's library has no int8 product for, and says so.
    pytest.mark.filterwarnings("ignore:int8_linear_matmul has no usable:RuntimeWarning"),
]


@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(1, 64, 128), (2, 576, 576), (130, 192, 576), (7, 33, 50)])
def test_the_kernel_multiplies_exactly(rows: int, outputs: int, inputs: int) -> None:
    generator = torch.Generator().manual_seed(1)
    left, right = (
        torch.randint(-127, 128, shape, generator=generator, dtype=torch.int8)
        for shape in ((rows, inputs), (outputs, inputs))
    )
    assert torch.equal(bitsandbytes_product(left.cuda(), right.cuda()).cpu(), exact_product(left, right))


def test_linear_layers_are_the_cpu_s() -> None:
    inputs, held = gaussian(5, 576), quantize(gaussian(192, 576, seed=1))
    expected = int8_linear(inputs, *held)
    found = int8_linear(inputs.cuda(), held[0].cuda(), held[1].cuda()).cpu()
    assert torch.allclose(found, expected, rtol=1e-6, atol=1e-6 * float(expected.abs().max()))


def test_linear8bitlt_is_as_near_as_one_digit_and_fp16_allow() -> None:
    from bitsandbytes.nn.modules import Linear8bitLt

    weight, inputs = gaussian(192, 576, seed=1), gaussian(40, 576)
    theirs = Linear8bitLt(576, 192, bias=False, has_fp16_weights=False)
    theirs.weight.data.copy_(weight)
    with torch.no_grad():
        found = theirs.cuda()(inputs.half().cuda()).float().cpu()
    rounded, scale = quantize(weight)
    ours = int8_linear(inputs, rounded, scale)
    # Half a step of an input's only digit, and one of a weight that fp16 rounds to its neighbour, for each product.
    step = inputs.abs().amax(dim=1, keepdim=True) / 127
    bound = step / 2 * weight.abs().sum(dim=1) + scale * inputs.abs().sum(dim=1, keepdim=True)
    assert bool(((found - ours).abs() <= bound + 2e-3 * ours.abs().max()).all())
    assert float((found - ours).pow(2).mean().sqrt()) < 0.02 * float(ours.std())


@each
def test_a_stage_is_the_cpu_s_with_its_gradients(spec: ModelSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # vit's patches
    blocks = len(model_blocks(spec))
    target = {"llama": "q_proj", "gpt2": "c_attn", "vit": "query"}[spec.family]
    outputs, gradients = [], []
    for device in ("cpu", "cuda"):
        stage = build_stage(spec, Span(0, blocks), quant="int8")
        add_adapters(stage, spec, LoraSpec(targets=(target,)))
        stage.to(device)
        found = stage(sample(spec).to(device))
        torch.autograd.backward(found.square().mean())
        outputs.append(found.detach().cpu())
        gradients.append([parameter.grad for parameter in adapter_parameters(stage).values()])
    # An input that a rounding error moves across the edge of a step moves by a 64000th of its row's greatest.
    assert float((outputs[0] - outputs[1]).abs().max()) < 1e-3 * float(outputs[0].std())
    for ours, theirs in zip(*gradients, strict=True):
        assert ours is not None
        assert theirs is not None
        assert float((ours - theirs.cpu()).abs().max()) <= 1e-2 * float(ours.abs().max())
