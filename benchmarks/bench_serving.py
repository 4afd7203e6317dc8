"""Serving: exact kernels against torch, sessions against plain transformers with one, drafts, and hosts that fail.

The model has the shape of SmolLM2-135M and random weights. Times are of contenders in turn on the same threads; a ratio
is the median of the ratios turn by turn.

    python -m benchmarks.bench_serving --threads 1 --json results/serving.json
    make bench-serving ARGS="--only beside-prompts"

Two versions of a model that is fine-tuned are compared with ``--served DIR --only versions``.
A trained draft is measured with ``--served DIR --draft DIR``, the model and what 'p2ptrain draft train' made of it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch.nn import functional

from benchmarks.findings import Finding, Section
from benchmarks.findings import run as run_parts
from benchmarks.harness import Measured, alternate, arguments, paired
from benchmarks.serving_batches import beside_prompts
from benchmarks.serving_chain import direct_tokens, long_prompts
from benchmarks.serving_draft import drafting
from benchmarks.serving_hosts import decoding_on_hosts, failover, memory, prefixes
from benchmarks.serving_speculation import speculation
from benchmarks.serving_training import beside_training
from benchmarks.serving_versions import versions
from p2ptrain.manifest import ModelSpec
from p2ptrain.models import build_model, get_family
from p2ptrain.models.exact import ExactStage, Part, WeightFormat, exact_stage, self_check
from p2ptrain.models.exact.program import Geometry, Op, Program
from p2ptrain.models.exact.runners import KernelRunner, PageStore, Piece, Rotary, Rows
from p2ptrain.models.int8 import quantize
from p2ptrain.native.exact import Kernels, Kind, load_kernels
from p2ptrain.serving.sampling import Sampling, draw

SPEC = ModelSpec(
    layers=30, hidden=576, heads=9, kv_heads=3, intermediate=1536, vocabulary=49152, context=2048, rope_theta=100000.0
)
SHAPES = ((576, 576), (1536, 576), (576, 1536), (49152, 576))
PROMPT = 128
GOALS: dict[WeightFormat, dict[int, float]] = {"fp32": {1: 1.4, 8: 4.5, 32: 7.0}, "int8": {1: 2.0}}
"""Tokens a second of some sessions, as multiples of plain transformers with one."""


def timed(function: Callable[[], object]) -> Callable[[], float]:
    """Measure the milliseconds that ``function`` takes."""

    def measure() -> float:
        start = time.perf_counter()
        function()
        return 1000 * (time.perf_counter() - start)

    return measure


def best_kernels() -> Kernels:
    kernels = load_kernels()
    if kernels is None:
        raise RuntimeError("there are no kernels on this machine")
    self_check(kernels)
    return kernels


def linear_runner(weight: torch.Tensor, kind: WeightFormat, rows: int, threads: int) -> Callable[[], object]:
    """One product of ``[rows, inputs]``, with kernels."""
    outputs, inputs = weight.shape
    program, geometry = Program(kind), Geometry(0, 1, 1, 1, 0.0)
    if kind == "fp32":
        program.add(Op(Kind.LINEAR, "x", "y", inputs, outputs, outputs, weight=weight))
    else:
        rounded, scale = quantize(weight)
        program.add(Op(Kind.DIGITS, "x", "digits", inputs))
        program.add(Op(Kind.LINEAR8, "digits", "y", inputs, outputs, outputs, weight=rounded, scale=scale))
    runner = KernelRunner(program, geometry, Rotary(geometry), rows, best_kernels(), threads)
    runner.buffers["x"].normal_()
    batch = Rows((), np.zeros(rows, dtype=np.int64), np.zeros(0, dtype=np.int64))
    return partial(runner.run, batch, None)


def products(threads: int, repeats: int) -> Section:
    """Linear layers against torch's."""
    section = Section("Products, milliseconds", ("outputs x inputs, rows", "exact fp32", "exact int8", "torch fp32"))
    for outputs, inputs in SHAPES:
        weight = torch.randn(outputs, inputs)
        for rows in (1, 8, 64):
            x = torch.randn(rows, inputs)
            cases = {
                "fp32": timed(linear_runner(weight, "fp32", rows, threads)),
                "int8": timed(linear_runner(weight, "int8", rows, threads)),
                "torch": timed(partial(functional.linear, x, weight)),
            }
            found = alternate(cases, max(repeats * 4096 // outputs, 3))
            section.rows.append((f"{outputs} x {inputs}, {rows}", *found.values()))
            name = f"{outputs} x {inputs}, {rows} rows"
            section.results[name] = {each: value.to_json() for each, value in found.items()}
            section.findings.append(Finding(name, paired(found["fp32"], found["torch"]).median, "torch's time"))
    return section


def attention_runner(keys: int, rows: int, threads: int) -> Callable[[], object]:
    """Attention of the last rows of some keys, with kernels."""
    geometry = Geometry(1, SPEC.heads, SPEC.kv_heads, 64, 0.0)
    program, total = Program("fp32"), (SPEC.heads + 2 * SPEC.kv_heads) * 64
    program.add(Op(Kind.ATTEND, "x", "y", total, SPEC.hidden, SPEC.hidden))
    runner, store = (
        KernelRunner(program, geometry, Rotary(geometry), rows, best_kernels(), threads),
        PageStore(geometry, -(-keys // 64)),
    )
    for each in (runner.buffers["x"], store.keys, store.values):
        each.normal_()
    pages, positions = np.arange(store.number), np.arange(keys - rows, keys)
    return partial(runner.run, Rows((Piece(0, rows, keys - rows, pages),), positions, pages[positions // 64]), store)


def attention(threads: int, repeats: int) -> Section:
    """Attention over pages against SDPA over contiguous keys."""
    section = Section("Attention of 9 heads to 3 of keys, milliseconds", ("rows to keys", "exact", "SDPA"))
    for keys in (128, 512, 2048):
        for rows in (1, 64):
            q, k, v = (torch.randn(1, heads, n, 64) for heads, n in ((9, rows), (3, keys), (3, keys)))
            mask = torch.ones(rows, keys, dtype=torch.bool).tril(keys - rows) if rows > 1 else None
            sdpa = partial(functional.scaled_dot_product_attention, q, k, v, attn_mask=mask, enable_gqa=True)
            cases = {"exact": timed(attention_runner(keys, rows, threads)), "SDPA": timed(sdpa)}
            found = alternate(cases, repeats)
            section.rows.append((f"{rows} to {keys}", *found.values()))
            section.results[f"{rows} to {keys}"] = {each: value.to_json() for each, value in found.items()}
            ratio = paired(found["exact"], found["SDPA"]).median
            section.findings.append(Finding(f"attention of {rows} to {keys}", ratio, "SDPA's time"))
    return section


@cache
def model() -> tuple[Any, Any]:
    """The model of p2ptrain, and the same one of transformers."""
    from transformers import AutoModelForCausalLM

    ours, make = build_model(SPEC).eval(), cast(Any, AutoModelForCausalLM)
    theirs = make.from_config(get_family(SPEC).hugging_face(SPEC))
    theirs.load_state_dict(ours.state_dict(), strict=False)
    theirs.tie_weights()
    return ours, theirs.eval()


class Sessions:
    """Some sessions, which a call advances by one greedy token each, in one batch."""

    def __init__(self, stage: ExactStage, number: int) -> None:
        each = PROMPT // 64 + 6
        self.stage, self.store = stage, stage.new_pages(each * number)
        self.pages = [range(first, first + each) for first in range(0, each * number, each)]
        self.position, self.ids = PROMPT, torch.zeros(number, dtype=torch.int64)
        prompt = torch.arange(PROMPT) * 37 % stage.vocabulary
        for pages in self.pages:
            stage.step([Part(PROMPT, 0, pages)], prompt, self.store)

    def __call__(self) -> None:
        parts = [Part(1, self.position, pages) for pages in self.pages]
        logits = self.stage.logits(self.stage.step(parts, self.ids, self.store))
        drawn = [draw(row, self.position + 1, (), Sampling(temperature=0), 0).id for row in logits]
        self.ids, self.position = torch.tensor(drawn), self.position + 1


class Plain:
    """One session of plain transformers, which a call advances by one greedy token."""

    def __init__(self, theirs: Any, vocabulary: int = SPEC.vocabulary, device: str | torch.device = "cpu") -> None:
        from transformers import DynamicCache

        self.theirs, self.cache, self.device = theirs, DynamicCache(), device
        self.id = self._advance(torch.arange(PROMPT)[None] * 37 % vocabulary)

    def _advance(self, ids: torch.Tensor) -> int:
        with torch.inference_mode():
            found = self.theirs(ids.to(self.device), past_key_values=self.cache, logits_to_keep=1).logits
        return int(found[0, -1].argmax())

    def __call__(self) -> None:
        self.id = self._advance(torch.tensor([[self.id]]))


def decoding(threads: int, repeats: int) -> Section:
    """Greedy tokens of sessions against plain transformers with one; keys grow alike."""
    ours, theirs = model()
    section = Section(
        f"A token after {PROMPT} and more, {threads} threads", ("sessions", "milliseconds", "tokens a second")
    )
    cases: dict[str, Callable[[], float]] = {"plain fp32, 1": timed(Plain(theirs))}
    for weights in GOALS:
        stage = exact_stage(ours, SPEC, weights=weights, threads=threads)
        for number in (1, 8, 32):
            cases[f"exact {weights}, {number}"] = timed(Sessions(stage, number))
    found = alternate(cases, repeats)
    for name, measured in found.items():
        number = int(name.split()[-1])
        section.rows.append((name, measured, f"{1000 * number / measured.median:.1f}"))
        section.results[name] = measured.to_json()
    for weights, goals in GOALS.items():
        for number in (1, 8, 32):
            ratio = number * paired(found["plain fp32, 1"], found[f"exact {weights}, {number}"]).median
            goal = goals.get(number)
            what = f"tokens of {number} sessions, {weights}"
            section.findings.append(Finding(what, ratio, "plain transformers with 1", goal, at_least=True))
    return section


def prefill(threads: int, repeats: int) -> Section:
    """A prompt's rows against plain transformers."""
    ours, theirs = model()
    ids = torch.arange(256) * 37 % SPEC.vocabulary
    section = Section("A prompt of 256 tokens", ("contender", "milliseconds"))

    def plain() -> None:
        with torch.inference_mode():
            theirs(ids[None], logits_to_keep=1)

    cases: dict[str, Callable[[], float]] = {"plain fp32": timed(plain)}
    for weights in GOALS:
        stage = exact_stage(ours, SPEC, weights=weights, threads=threads)
        cases[f"exact {weights}"] = timed(partial(stage.step, [Part(256, 0, range(4))], ids, stage.new_pages(4)))
    found = alternate(cases, repeats)
    section.rows += list(found.items())
    section.results = {name: measured.to_json() for name, measured in found.items()}
    for weights in GOALS:
        ratio = paired(found[f"exact {weights}"], found["plain fp32"]).median
        section.findings.append(Finding(f"a prompt, {weights}", ratio, "plain transformers' time"))
    return section


def sampling(repeats: int) -> Section:
    """Draws from the logits of a large vocabulary."""
    logits = torch.randn(SPEC.vocabulary, generator=torch.Generator().manual_seed(0)) * 3
    settings = {
        "greedy": Sampling(temperature=0), "temperature 1": Sampling(), "top-p 0.9": Sampling(top_p=0.9),
        "top-k 40": Sampling(top_k=40), "5 logprobs": Sampling(logprobs=5),
    }  # fmt: skip
    cases = {name: timed(partial(draw, logits, 5, (), each, 0)) for name, each in settings.items()}
    found: dict[str, Measured] = alternate(cases, 5 * repeats)
    results = {name: measured.to_json() for name, measured in found.items()}
    return Section("A draw, milliseconds", ("settings", "exact"), list(found.items()), results=results)


def main() -> int:
    """Measure and report."""
    parser = arguments(__doc__, "3 measurements of each")
    parser.add_argument("--repeats", type=int, default=25, help="measurements of each")
    parser.add_argument("--threads", type=int, default=1, help="of all contenders")
    parser.add_argument("--served", type=Path, metavar="DIR", help="folder of a real model, for versions and --draft")
    parser.add_argument("--draft", type=Path, metavar="DIR", help="draft of that model")
    parser.add_argument("--only", metavar="PART", help="measure one part")
    options = parser.parse_args()
    repeats = 3 if options.quick else options.repeats
    torch.set_num_threads(options.threads)
    parts: dict[str, Callable[[], Section]] = {
        "products": partial(products, options.threads, repeats),
        "attention": partial(attention, options.threads, repeats),
        "decoding": partial(decoding, options.threads, repeats),
        "prefill": partial(prefill, options.threads, max(repeats // 5, 3)),
        "sampling": partial(sampling, repeats),
        "beside-prompts": partial(beside_prompts, SPEC, 20 if options.quick else 150),
        "beside-training": partial(beside_training, SPEC, 1 if options.quick else 5, 60 if options.quick else 150),
        "hosts": lambda: decoding_on_hosts(SPEC, timed(Plain(model()[1])), 30 if options.quick else 100),
        "memory": partial(memory, SPEC, *((2, 256) if options.quick else (8, 512))),
        "prefixes": partial(prefixes, SPEC, 3 if options.quick else 10),
        "direct-tokens": partial(direct_tokens, SPEC, 1 if options.quick else 3),
        "long-prompts": partial(long_prompts, SPEC, 1 if options.quick else 3),
        "speculation": partial(speculation, SPEC, options.threads, 1 if options.quick else 3),
        "failover": partial(failover, SPEC, (100,) if options.quick else (100, 2000)),
    }
    if options.served is not None:
        parts["versions"] = partial(versions, options.served, 2 if options.quick else 10)
    if options.served is not None and options.draft is not None:
        parts["draft"] = partial(drafting, options.served, options.draft, 1 if options.quick else 3)
    if options.only is not None:
        if options.only not in parts:
            parser.error(f"--only {options.only}: give one of {', '.join(parts)}")
        parts = {options.only: parts[options.only]}
    return run_parts("serving", parts, options)


if __name__ == "__main__":
    sys.exit(main())
