"""The GPU's kernels give the CPU's bits: emulated here, and on a GPU where there is one."""

from __future__ import annotations

import pytest
import torch

from p2ptrain.errors import UsageError
from p2ptrain.manifest import ModelSpec
from p2ptrain.models import build_model
from p2ptrain.models.exact import ExactStage, check, checked_kernels, gpu, stage
from p2ptrain.models.exact.check import DIGEST, digest
from p2ptrain.models.exact.gpu import GpuKernels
from p2ptrain.models.exact.program import Geometry, Op
from p2ptrain.models.exact.runners import PageStore
from p2ptrain.models.int8 import quantize
from p2ptrain.native.cuda import CudaError, CudaProgram
from p2ptrain.native.exact import Kernels, Kind, load_kernels
from tests.support.codecs import gaussian
from tests.support.cuda import EmulatedKernels
from tests.support.exact import kernels, one_piece, run_ops
from tests.support.pairs import pairs
from tests.support.tools import needed

pytestmark = needed("" if kernels() else "there is no library of exact kernels", "kernels")
HAS_GPU = torch.cuda.is_available()
FEW, MANY = EmulatedKernels(1), EmulatedKernels(24)
"""Few blocks work in large tiles, and many in small ones."""


@pytest.mark.parametrize("blocks", [1, 3])
def test_a_model_has_the_bits_of_the_repository(blocks: int) -> None:
    assert digest(EmulatedKernels(blocks)) == DIGEST


@pytest.mark.parametrize(
    ("rows", "shape", "emulated"),
    pairs([1, 2, 3, 8, 9, 33, 70], [(1, 16), (70, 60), (70, 208), (33, 83), (130, 64)], [FEW, MANY]),
    ids=lambda value: f"{value.blocks} blocks" if isinstance(value, EmulatedKernels) else str(value),
)
def test_products_are_the_cpu_s(rows: int, shape: tuple[int, int], emulated: EmulatedKernels) -> None:
    outputs, inputs = shape
    x, weight, bias = gaussian(rows, inputs), gaussian(outputs, inputs, seed=1), gaussian(outputs, seed=2)
    before, (rounded, scale) = gaussian(rows, outputs, seed=3), quantize(weight)
    for ops in (
        [Op(Kind.LINEAR, "x", "y", inputs, outputs, outputs, factor=0.3, weight=weight, bias=bias)],
        [
            Op(Kind.DIGITS, "x", "digits", inputs),
            Op(Kind.LINEAR8, "digits", "y", inputs, outputs, outputs, weight=rounded, scale=scale),
        ],
    ):
        assert torch.equal(run_ops(emulated, ops, x, before=before), run_ops(cpu(), ops, x, before=before))


@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(1, 1, 5), (6, 2, 64), (8, 8, 256)])
def test_attention_is_the_cpu_s(heads: int, kv_heads: int, width: int) -> None:
    total, geometry = (heads + 2 * kv_heads) * width, Geometry(1, heads, kv_heads, width, 0.0)
    op = Op(Kind.ATTEND, "x", "y", total, heads * width, heads * width)
    for first, rows in ((0, 1), (300, 1), (120, 10)):  # the first page, more pages than a block scores at once, between
        store = PageStore(geometry, 5)
        for seed, each in enumerate((store.keys, store.values)):
            each.copy_(gaussian(*each.shape, seed=seed))
        found, expected = (
            run_ops(
                build, [op], gaussian(rows, total), rows=one_piece(first, rows, (4, 1, 0, 3, 2)), store=store,
                geometry=geometry,
            )
            for build in (FEW, cpu())
        )  # fmt: skip
        assert torch.equal(found, expected)


@pytest.mark.parametrize("kind", [Kind.RMS_NORM, Kind.LAYER_NORM, Kind.SILU, Kind.GELU])
def test_rows_wider_than_shared_memory_are_the_cpu_s(kind: Kind) -> None:
    width = 4096 + 70
    op = Op(kind, "x", "y", width, factor=1e-5, weight=gaussian(width, seed=1), bias=gaussian(width, seed=2))
    x = 3 * gaussian(2, op.inputs_width)
    assert torch.equal(run_ops(FEW, [op], x), run_ops(cpu(), [op], x))


def test_a_gpu_with_other_bits_does_not_serve(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    wrong = EmulatedKernels(1)
    monkeypatch.setattr(check, "load_gpu_kernels", lambda device: wrong)
    monkeypatch.setattr(check, "digest", lambda build, threads: "other" if build is wrong else DIGEST)
    assert checked_kernels(torch.device("cuda:0")) is load_kernels()
    assert "computes on the CPU: the emulated kernels compute wrong bits" in caplog.text


def test_a_gpu_without_kernels_leaves_serving_to_the_cpu(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(device: torch.device) -> GpuKernels:
        raise CudaError("the NVIDIA driver is not installed")

    monkeypatch.setattr(gpu, "GpuKernels", refuse)
    assert checked_kernels(torch.device("cuda:1")) is load_kernels()
    assert "serving computes on the CPU, not on cuda:1: the NVIDIA driver is not installed" in caplog.text


@pytest.mark.skipif(HAS_GPU, reason="there is a driver")
def test_a_missing_driver_is_named() -> None:
    with pytest.raises(CudaError, match="the NVIDIA driver is not installed"):
        CudaProgram(0)


def test_wide_heads_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stage, "GpuKernels", EmulatedKernels)
    spec = ModelSpec(layers=1, hidden=1024, heads=2, intermediate=16, vocabulary=20, context=20)
    with pytest.raises(UsageError, match="heads have at most 256 values: serve with --device cpu"):
        ExactStage(build_model(spec), spec, kernels=FEW)


@pytest.mark.gpu
@pytest.mark.skipif(not HAS_GPU, reason="there is no CUDA device")
def test_a_gpu_has_the_bits_of_the_repository() -> None:
    assert isinstance(checked_kernels(torch.device("cuda:0")), GpuKernels)


def cpu() -> Kernels:
    found = load_kernels()
    assert found is not None
    return found
