"""Stages for serving give a session the same bits in any batch, any chunks, any stages and any build."""

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

import numpy as np
import psutil
import pytest
import torch

from p2ptrain.errors import IntegrityError, UsageError
from p2ptrain.manifest import LoraSpec, ModelSpec
from p2ptrain.models import Span, build_model, build_stage, export_hugging_face, model_blocks
from p2ptrain.models.adapters import adapter_parameters, add_adapters
from p2ptrain.models.building import deterministic_normal_
from p2ptrain.models.exact import ExactStage, NotFiniteError, Part, WeightFormat, check, exact_stage, self_check
from p2ptrain.models.exact import stage as stage_module
from p2ptrain.models.exact.program import Geometry
from p2ptrain.models.exact.runners import PageStore
from p2ptrain.models.int8 import freeze_int8
from tests.support.exact import kernels, lively_model
from tests.support.models import SPECS as SMALL_SPECS
from tests.support.models import parts
from tests.support.tools import needed

BUILDS = kernels()
pytestmark = needed("" if BUILDS else "there is no library of exact kernels", "kernels")
BEST = next(iter(BUILDS.values()), None)
SHAPE: dict[str, Any] = {"layers": 3, "hidden": 48, "heads": 4, "intermediate": 84, "vocabulary": 90, "context": 200}
SPECS = {
    "llama": ModelSpec(family="llama", kv_heads=2, **SHAPE),
    "llama, untied": ModelSpec(family="llama", tied_embeddings=False, **SHAPE),
    "qwen2": ModelSpec(family="qwen2", **SHAPE),
    "qwen3, stretched": ModelSpec(
        family="qwen3", kv_heads=1, head_width=10, rope_theta=100.0, rope_scaling=(8.0, 1.0, 4.0, 50), **SHAPE
    ),
    "gpt2": ModelSpec(family="gpt2", **SHAPE),
    "gpt2, untied": ModelSpec(family="gpt2", tied_embeddings=False, **SHAPE),
}
LENGTH, NUM_PAGES = 150, 12
FORMATS: tuple[WeightFormat, ...] = get_args(WeightFormat)
each_spec = pytest.mark.parametrize("spec", SPECS.values(), ids=list(SPECS))
each_format = pytest.mark.parametrize("weights", FORMATS)


def ids_of(seed: int, length: int = LENGTH) -> torch.Tensor:
    return torch.randint(SHAPE["vocabulary"], (length,), generator=torch.Generator().manual_seed(seed))


def run(stages: Sequence[ExactStage], ids: torch.Tensor, chunks: Sequence[int] = ()) -> torch.Tensor:
    """Logits of all positions of one session."""
    stores, found, first = [stage.new_pages(NUM_PAGES) for stage in stages], [], 0
    for chunk in torch.split(ids, list(chunks) or len(ids)):
        hidden = chunk
        for stage, store in zip(stages, stores, strict=True):
            hidden = stage.step([Part(len(chunk), first, (7, 2, 5))], hidden, store)
        found.append(stages[-1].logits(hidden))
        first += len(chunk)
    return torch.cat(found)


@each_format
@each_spec
def test_chunks_builds_and_threads_change_no_bit(spec: ModelSpec, weights: WeightFormat) -> None:
    model, ids = lively_model(spec), ids_of(0)
    whole = run([ExactStage(model, spec, weights=weights, kernels=BEST)], ids)
    for build in BUILDS.values():
        for threads in (1, 3):
            stage = ExactStage(model, spec, weights=weights, kernels=build, threads=threads)
            for chunks in ([LENGTH], [100, 50], [149, 1], [64, 64, 22], [1] * LENGTH):
                assert torch.equal(run([stage], ids, chunks), whole), (build.build, threads, chunks)


@each_format
@each_spec
def test_borders_between_stages_change_no_bit(
    spec: ModelSpec, weights: WeightFormat, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The initial parameters of stages are those of the whole model."""
    ids, blocks = ids_of(1), len(model_blocks(spec))
    whole = run([ExactStage(build_model(spec), spec, weights=weights, kernels=BEST)], ids)
    for cuts in ({1}, {2}, {4}, {1, 2, 3, 4}):
        stages = [
            ExactStage(build_stage(spec, span), spec, weights=weights, kernels=BEST) for span in parts(cuts, blocks)
        ]
        assert torch.equal(run(stages, ids, [90, 60]), whole), cuts
    monkeypatch.setattr(stage_module, "MAX_ROWS", 40)
    assert torch.equal(run([ExactStage(build_model(spec), spec, weights=weights, kernels=BEST)], ids), whole)


class Session:
    """A session of a random schedule: its ids, its pages, and the logits of all positions if it were alone."""

    def __init__(self, alone: torch.Tensor, ids: torch.Tensor, pages: list[int]) -> None:
        self.alone, self.ids, self.pages, self.done = alone, ids, pages, 0


@pytest.fixture(scope="module")
def references() -> dict[str, tuple[ExactStage, list[tuple[torch.Tensor, torch.Tensor]]]]:
    """By model and format: a stage, and ids with their logits."""
    found = {}
    for (name, spec), weights in itertools.product(SPECS.items(), FORMATS):
        model = lively_model(spec)
        stage = ExactStage(model, spec, weights=weights, kernels=BEST, threads=2)
        slowest = ExactStage(model, spec, weights=weights, kernels=list(BUILDS.values())[-1])
        lengths = {seed: 20 + 37 * seed % 131 for seed in range(8)}
        everything = [(ids_of(seed, length), run([slowest], ids_of(seed, length))) for seed, length in lengths.items()]
        found[f"{name} {weights}"] = stage, everything
    return found


@pytest.mark.parametrize("name", [f"{name} {weights}" for name in SPECS for weights in FORMATS])
def test_sessions_in_25_random_schedules_have_the_bits_that_they_have_alone(
    name: str, references: dict[str, tuple[ExactStage, list[tuple[torch.Tensor, torch.Tensor]]]]
) -> None:
    """200 schedules of all models together."""
    stage, known = references[name]
    for seed in range(25):
        rng = np.random.default_rng([seed, *name.encode()])
        store = stage.new_pages(NUM_PAGES)
        store.keys.fill_(torch.nan)
        store.values.fill_(torch.nan)
        chosen = [known[each] for each in rng.permutation(len(known))[:4]]
        numbers = rng.permutation(NUM_PAGES).tolist()
        sessions = [Session(alone, ids, [numbers.pop() for _ in range(3)]) for ids, alone in chosen]
        while waiting := [session for session in sessions if session.done < len(session.ids)]:
            batch = []
            for session in rng.permutation(np.array(waiting, dtype=object))[: rng.integers(1, 5)]:
                rows = int(rng.choice([1, 1, 2, 7, 30, 64, 150]))
                batch.append((session, min(rows, len(session.ids) - session.done)))
            inputs = torch.cat([session.ids[session.done : session.done + rows] for session, rows in batch])
            hidden = stage.step([Part(rows, each.done, each.pages) for each, rows in batch], inputs, store)
            logits = torch.split(stage.logits(hidden), [rows for _, rows in batch])
            for (session, rows), found in zip(batch, logits, strict=True):
                assert torch.equal(found, session.alone[session.done : session.done + rows]), (seed, session.done)
                session.done += rows
                if rng.random() < 0.1:  # as after a rejected draft
                    session.done = int(rng.integers(max(session.done - 70, 0), session.done + 1))


@each_spec
def test_greedy_tokens_and_last_hidden_states_are_those_of_transformers(spec: ModelSpec, tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    model = lively_model(spec)
    export_hugging_face(model, spec, tmp_path)
    theirs: Any = AutoModelForCausalLM.from_pretrained(tmp_path)
    for stage in (exact_stage(model, spec), ExactStage(model, spec)):
        store, ids, compared = stage.new_pages(4), ids_of(2, 20), 0
        hidden = stage.step([Part(20, 0, range(4))], ids, store)
        for position in range(20, 180):
            (logits,), (state,) = stage.head(hidden[-1:])
            with torch.inference_mode():
                found = theirs(ids[None], output_hidden_states=True)
            expected = found.logits[0, -1]
            torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(state, found.hidden_states[-1][0, -1], rtol=1e-4, atol=1e-4)
            first, second = expected.topk(2).values
            if first - second > 1e-3:
                assert logits.argmax() == expected.argmax()
                compared += 1
            ids = torch.cat((ids, expected.argmax()[None]))
            hidden = stage.step([Part(1, position, range(4))], ids[-1:], store)
        assert compared > 100


@pytest.mark.parametrize("quant", [None, "int8"])
@pytest.mark.parametrize(
    ("name", "targets"),
    [
        ("llama", ("q_proj", "v_proj", "o_proj", "down_proj")),
        ("qwen3, stretched", ("q_proj", "k_proj", "o_proj")),
        ("gpt2", ("c_attn", "attn.c_proj", "mlp.c_fc")),
    ],
)
def test_adapters_are_computed_beside_the_frozen_layers(name: str, targets: tuple[str, ...], quant: str | None) -> None:
    spec = SPECS[name]
    model = lively_model(spec)
    if quant:
        freeze_int8(model)
    add_adapters(model, spec, LoraSpec(targets=targets, rank=3, alpha=5.0))
    for each, value in adapter_parameters(model).items():
        deterministic_normal_(value.data, 0.2, each)
    ids = ids_of(3)
    with torch.inference_mode():
        expected = model.eval()(ids[None])[0]
    stage = ExactStage(model, spec, weights="int8" if quant else "fp32", kernels=BEST)
    whole = run([stage], ids)
    limits: dict[str, Any] = {"rtol": 0.05, "atol": 0.1} if quant else {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(whole, expected, **limits)
    assert not torch.allclose(whole, run([ExactStage(lively_model(spec), spec, kernels=BEST)], ids), atol=0.1)
    for build in BUILDS.values():
        same = ExactStage(model, spec, weights="int8" if quant else "fp32", kernels=build, threads=2)
        assert torch.equal(run([same], ids, [100, 49, 1]), whole)


@each_spec
def test_a_frozen_int8_model_is_served_as_it_is_or_in_fp32(spec: ModelSpec) -> None:
    frozen, model = lively_model(spec), lively_model(spec)
    freeze_int8(frozen)
    ids = ids_of(4)
    served = run([ExactStage(frozen, spec, weights="int8", kernels=BEST)], ids)
    assert torch.equal(served, run([ExactStage(model, spec, weights="int8", kernels=BEST)], ids))
    exact = run([ExactStage(frozen, spec, kernels=BEST)], ids)
    torch.testing.assert_close(served, exact, rtol=0.05, atol=0.2)


def test_training_that_goes_on_changes_nothing() -> None:
    spec = SPECS["llama"]
    model, ids = lively_model(spec), ids_of(5)
    stage = ExactStage(model, spec, kernels=BEST)
    before = run([stage], ids)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert torch.equal(run([stage], ids), before)


def test_only_the_session_whose_result_is_not_finite_fails() -> None:
    spec = SPECS["llama"]
    stage = ExactStage(lively_model(spec), spec, kernels=BEST)
    store = stage.new_pages(4)
    good, bad = Part(3, 0, (0,)), Part(2, 1, (1,))
    store.keys[:, 1], store.values[:, 1] = torch.nan, torch.nan
    with pytest.raises(NotFiniteError, match="not finite") as raised:
        stage.step([good, bad, good], torch.arange(8), store)
    assert isinstance(raised.value, IntegrityError)
    assert raised.value.parts == (1,)
    hidden = torch.zeros(3, spec.hidden)
    hidden[1, 4] = torch.inf
    with pytest.raises(NotFiniteError) as raised:
        stage.logits(hidden)
    assert raised.value.parts == (1,)


@pytest.mark.parametrize(
    ("part", "ids", "message"),
    [
        (Part(2, 0, (0,)), [1], "do not make up 1 rows"),
        (Part(0, 0, (0,)), [], "do not make up"),
        (Part(1, 0, (0,)), [90], "below 90"),
        (Part(1, 0, (0,)), [-1], "below 90"),
        (Part(1, 64, (0,)), [1], "position 64 has no page"),
        (Part(1, 0, (4,)), [1], "no page in the store"),
        (Part(1, -1, (0,)), [1], "no position"),
        (Part(1, 200, (0, 1, 2, 3)), [1], "no position 200"),
    ],
)
def test_rows_that_do_not_fit_are_refused(part: Part, ids: list[int], message: str) -> None:
    stage = ExactStage(build_model(SPECS["gpt2"]), SPECS["gpt2"], kernels=BEST)
    with pytest.raises(ValueError, match=message):
        stage.step([part], torch.tensor(ids, dtype=torch.int64), stage.new_pages(4))


def test_sizes_are_told() -> None:
    spec = SPECS["llama"]
    middle = ExactStage(build_stage(spec, Span(1, 3)), spec, kernels=BEST)
    assert (middle.is_first, middle.is_last, middle.num_layers, middle.hidden) == (False, False, 2, 48)
    store = middle.new_pages(3)
    assert 3 * middle.page_bytes == 4 * (store.keys.numel() + store.values.numel())
    assert middle.arithmetic == "exact-1/fp32"
    assert ExactStage(build_model(spec), spec, weights="int8").arithmetic == "torch-1/int8"


def test_a_family_that_does_not_generate_is_refused() -> None:
    with pytest.raises(UsageError, match="vit model cannot be served"):
        exact_stage(build_model(SMALL_SPECS["vit"]), SMALL_SPECS["vit"])


@pytest.mark.parametrize("name", BUILDS)
def test_each_build_computes_the_bits_of_the_repository(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    self_check(BUILDS[name], threads=2)
    monkeypatch.setattr(check, "DIGEST", "0" * 64)
    with pytest.raises(IntegrityError, match=f"the {name} kernels compute wrong bits"):
        self_check(BUILDS[name])
    self_check(None)


def test_pages_take_memory_on_first_use() -> None:
    before = psutil.Process().memory_info().rss
    store = PageStore(Geometry(4, 9, 3, 64, 0.0), 1000)
    assert store.keys.numel() + store.values.numel() > 300 << 20 >> 2
    assert not store.keys[:, :3].any()
    assert psutil.Process().memory_info().rss - before < 50 << 20
