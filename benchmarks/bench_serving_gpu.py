"""Serving on a GPU: exact kernels against plain transformers, for SmolLM2's shape and for layers of an 8B model.

Weights are random. Times are of contenders in turn on one GPU; a ratio is the median of the ratios turn by turn.

    python -m benchmarks.bench_serving_gpu --json results/serving-gpu.json
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import nn

from benchmarks.bench_serving import SPEC, Plain, Sessions, timed
from benchmarks.findings import Finding, Section
from benchmarks.findings import run as run_parts
from benchmarks.harness import alternate, arguments, paired
from p2ptrain.manifest import ModelSpec
from p2ptrain.models import build_model, get_family
from p2ptrain.models.exact import ExactStage, Part, checked_kernels
from p2ptrain.models.exact.gpu import GpuKernels

DEVICE = torch.device("cuda:0")
LAYERS = ModelSpec(
    layers=4, hidden=4096, heads=32, kv_heads=8, intermediate=14336, vocabulary=32000, context=4096, rope_theta=500000.0
)
"""A stage's worth of an 8B model."""
FORMATS = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.float16}
"""Of plain transformers; int8 is bitsandbytes' layer, whose inputs are fp16."""


def gpu_kernels() -> GpuKernels:
    kernels = checked_kernels(DEVICE)
    if not isinstance(kernels, GpuKernels):
        raise RuntimeError("there are no kernels for a GPU on this machine")
    return kernels


def plain(ours: nn.Module, spec: ModelSpec, kind: str) -> Any:
    """The same model of transformers on the GPU, in one of `FORMATS`."""
    from transformers import AutoModelForCausalLM

    model = cast(Any, AutoModelForCausalLM).from_config(get_family(spec).hugging_face(spec))
    model.load_state_dict(ours.state_dict(), strict=False)
    model.tie_weights()
    if kind == "int8":
        from bitsandbytes.nn.modules import Linear8bitLt

        for name, module in list(model.model.named_modules()):
            if isinstance(module, nn.Linear):
                layer = Linear8bitLt(module.in_features, module.out_features, bias=False, has_fp16_weights=False)
                layer.weight.data.copy_(module.weight.data)
                parent, _, last = name.rpartition(".")
                setattr(model.model.get_submodule(parent), last, layer)
    return model.to(DEVICE, FORMATS[kind]).eval()


def decoding(spec: ModelSpec, name: str, repeats: int) -> Section:
    """Greedy tokens of sessions against plain transformers with one, and a prompt of 256 rows."""
    ours = build_model(spec).eval()
    section = Section(f"{name} on {torch.cuda.get_device_name()}", ("contender", "milliseconds", "tokens a second"))
    cases: dict[str, Callable[[], float]] = {}
    for kind in FORMATS:
        theirs = plain(ours, spec, kind)
        cases[f"plain {kind}, 1"] = timed(Plain(theirs, spec.vocabulary, DEVICE))
        cases[f"plain {kind}, prompt of 256"] = timed(partial(_prompt, theirs, spec.vocabulary))
    for weights in ("fp32", "int8"):
        stage = ExactStage(ours, spec, weights=weights, kernels=gpu_kernels())
        for number in (1, 8, 32):
            cases[f"exact {weights}, {number}"] = timed(Sessions(stage, number))
        ids, store = torch.arange(256) * 37 % spec.vocabulary, stage.new_pages(4)
        cases[f"exact {weights}, prompt of 256"] = timed(partial(stage.step, [Part(256, 0, range(4))], ids, store))
    found = alternate(cases, repeats)
    for case, measured in found.items():
        number = int(case.split()[-1])
        section.rows.append((case, measured, f"{1000 * number / measured.median:.0f}"))
        section.results[case] = measured.to_json()
    for weights in ("fp32", "int8"):
        for kind in FORMATS:
            for number in (1, 8, 32):
                ratio = number * paired(found[f"plain {kind}, 1"], found[f"exact {weights}, {number}"]).median
                section.findings.append(
                    Finding(f"tokens of {number} sessions, {weights}", ratio, f"plain {kind} with 1")
                )
            prompts = found[f"exact {weights}, prompt of 256"], found[f"plain {kind}, prompt of 256"]
            section.findings.append(Finding(f"a prompt, {weights}", paired(*prompts).median, f"plain {kind}'s time"))
    return section


def _prompt(theirs: Any, vocabulary: int) -> int:
    ids = torch.arange(256)[None] * 37 % vocabulary
    with torch.inference_mode():
        return int(theirs(ids.to(DEVICE), logits_to_keep=1).logits[0, -1].argmax())


def main() -> int:
    """Measure and report."""
    parser = arguments(__doc__, "5 measurements of each")
    parser.add_argument("--repeats", type=int, default=30, help="measurements of each")
    options = parser.parse_args()
    repeats = 5 if options.quick else options.repeats
    parts: dict[str, Callable[[], Section]] = {
        "smollm2": partial(decoding, SPEC, "SmolLM2's shape", repeats),
        "layers": partial(decoding, LAYERS, "4 layers of an 8B model", repeats),
    }
    return run_parts("serving_gpu", parts, options)


if __name__ == "__main__":
    sys.exit(main())
