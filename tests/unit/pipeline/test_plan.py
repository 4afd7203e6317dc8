"""What a manifest makes of its model: stages, units of averaging, and what a stage takes."""

from typing import Any

import pytest

from p2ptrain.errors import ManifestError
from p2ptrain.manifest import Manifest, ModelSpec, parse_manifest
from p2ptrain.models import PROCESS_BYTES, Span, estimate_memory_bytes, model_blocks, num_parameters
from p2ptrain.models.blocks import stage_shapes
from p2ptrain.pipeline.messages import IDS, Payload
from p2ptrain.pipeline.plan import PipelinePlan
from tests.support.models import SPECS, each


def manifest(pipeline: dict[str, Any], model: ModelSpec | None = None, **training: Any) -> Manifest:
    spec = (model or SPECS["llama"]).model_dump()
    values = {"every": 1, "global_batch": 8, "local_batch": 2, **training}
    return parse_manifest({"model": spec, "training": values, "pipeline": pipeline}, "run.toml")


def plan_of(pipeline: dict[str, Any], model: ModelSpec | None = None) -> PipelinePlan:
    return PipelinePlan(manifest(pipeline, model))


# Stages


@each
@pytest.mark.parametrize("num_stages", [2, 3, 5])
def test_stages_hold_all_blocks_one_after_another(spec: ModelSpec, num_stages: int) -> None:
    plan = plan_of({"stages": num_stages}, spec)
    assert plan.num_stages == num_stages
    assert [number for span in plan.spans for number in range(*span)] == list(range(len(model_blocks(spec))))
    work = plan_of({"stages": 5}, spec).needs
    assert sum(need.work for need in plan.needs) == sum(need.work for need in work)


def test_cuts_say_where_stages_begin() -> None:
    assert plan_of({"cuts": [1, 4]}).spans == (Span(0, 1), Span(1, 4), Span(4, 5))


def test_automatic_stages_are_as_few_as_fit_into_the_memory() -> None:
    model = SPECS["llama"].model_copy(update={"layers": 8, "hidden": 64, "intermediate": 512})
    blocks = [estimate_memory_bytes(manifest({}, model), Span(n, n + 1)) - PROCESS_BYTES for n in range(10)]
    numbers = []
    for room in (max(blocks), 2 * max(blocks), 3 * max(blocks), sum(blocks)):
        plan = plan_of({"stages": "auto", "stage_memory": PROCESS_BYTES + room}, model)
        assert all(need.memory <= PROCESS_BYTES + room for need in plan.needs)
        assert plan.num_stages >= sum(blocks) / room / 2
        numbers.append(plan.num_stages)
    assert numbers == sorted(numbers, reverse=True)
    assert numbers[-1] == 1
    assert len(set(numbers)) > 2


@pytest.mark.parametrize(
    ("pipeline", "words"),
    [
        ({"stages": 9}, ["pipeline.stages = 9", "5 blocks", "1 to 5"]),
        ({"cuts": [5]}, ["pipeline.cuts = [5]", "from 1 to 4"]),
        ({"stages": "auto", "stage_memory": 1000}, ["pipeline.stage_memory = 1000", str(PROCESS_BYTES), "torch"]),
        (
            {"stages": "auto", "stage_memory": PROCESS_BYTES + 1000},
            [f"pipeline.stage_memory = {PROCESS_BYTES + 1000} bytes", "block 1 alone (layer 0)"],
        ),
    ],
)
def test_what_cannot_be_is_refused_with_one_line_that_names_it(pipeline: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(ManifestError) as caught:
        plan_of(pipeline)
    for word in words:
        assert word in str(caught.value)
    assert "\n" not in str(caught.value)


def test_the_memory_that_the_error_asks_for_is_enough() -> None:
    with pytest.raises(ManifestError) as caught:
        plan_of({"stages": "auto", "stage_memory": PROCESS_BYTES + 1})
    needed = int(str(caught.value).split("which takes ")[1].split(":")[0])
    assert plan_of({"stages": "auto", "stage_memory": needed}).num_stages > 1
    with pytest.raises(ManifestError):
        plan_of({"stages": "auto", "stage_memory": needed - 1})


# Units


@each
@pytest.mark.parametrize("num_stages", [2, 5])
def test_each_parameter_is_averaged_in_one_unit_by_all_that_hold_it(spec: ModelSpec, num_stages: int) -> None:
    plan = plan_of({"stages": num_stages}, spec)
    holders: dict[str, set[int]] = {}
    for stage in range(num_stages):
        shapes = stage_shapes(model_blocks(spec), plan.spans[stage])
        local = [name for unit in plan.units(stage) for name in plan.local_names(stage, unit).values()]
        assert sorted(local) == sorted(shapes), "a host averages all that it holds"
        for unit in plan.units(stage):
            assert stage in unit.stages
            for name in unit.names:
                holders.setdefault(name, set()).add(stage)
                assert set(unit.stages) >= holders[name]
    units = {unit.number: unit for stage in range(num_stages) for unit in plan.units(stage)}
    names = [name for unit in units.values() for name in unit.names]
    assert len(names) == len(set(names)) == len(holders)
    sizes = {name: shape for block in model_blocks(spec) for name, shape in block.shapes.items()}
    assert set(names) == set(sizes)
    assert num_parameters(spec) == sum(block.num_parameters for block in model_blocks(spec))


def test_tied_embeddings_are_averaged_by_both_ends_and_doubled() -> None:
    plan = plan_of({"stages": 3})
    tied = plan.tied
    assert tied is not None
    assert (tied.number, tied.stages, tied.names, tied.scale) == (3, (0, 2), ("model.embed_tokens.weight",), 2.0)
    assert plan.local_names(0, tied) == {"model.embed_tokens.weight": "model.embed_tokens.weight"}
    assert plan.local_names(2, tied) == {"model.embed_tokens.weight": "lm_head.weight"}
    assert [len(plan.units(stage)) for stage in range(3)] == [2, 1, 2]
    assert all(plan.own(stage).scale == 1.0 for stage in range(3))


@pytest.mark.parametrize("name", ["llama, untied", "gpt2, untied", "vit"])
def test_without_ties_each_stage_averages_alone(name: str) -> None:
    plan = plan_of({"stages": 3}, SPECS[name])
    assert plan.tied is None
    assert [plan.units(stage) for stage in range(3)] == [(plan.own(stage),) for stage in range(3)]


def test_units_are_swarms_of_their_own_in_every_manifest() -> None:
    plans = [plan_of({"stages": stages, "codec": codec}) for stages in (2, 3) for codec in ("int8", "fp32")]
    swarms = [plan.swarm_of(unit) for plan in plans for unit in range(plan.num_stages + 1)]
    swarms += [plan.manifest.digest for plan in plans]
    assert len(set(swarms)) == len(swarms)
    assert {len(swarm) for swarm in swarms} == {32}
    assert plans[0].swarm_of(1) == plan_of({"stages": 2, "codec": "int8"}).swarm_of(1)


# What a stage takes

LLAMA, VIT = SPECS["llama"], SPECS["vit"]


def payload(codec: str, *shape: int) -> Payload:
    return Payload(codec, shape, b"")


GOOD: dict[str, tuple[ModelSpec, int, Payload, Payload, int, int]] = {
    "tokens": (LLAMA, 0, payload(IDS, 3, 16), payload(IDS, 3, 16), 3, 48),
    "short text": (LLAMA, 0, payload(IDS, 3, 5), payload(IDS, 3, 5), 3, 15),
    "hidden states": (LLAMA, 1, payload("int8", 3, 5, 32), payload(IDS, 3, 5), 3, 15),
    "images": (VIT, 0, payload("int8", 4, 3, 8, 8), payload(IDS, 4), 4, 4),
    "patches": (VIT, 2, payload("int8", 4, 17, 32), payload(IDS, 4), 4, 4),
}


@pytest.mark.parametrize("case", GOOD.values(), ids=GOOD.keys())
def test_a_stage_takes_what_the_stage_before_it_gives(case: tuple[ModelSpec, int, Payload, Payload, int, int]) -> None:
    spec, stage, inputs, targets, samples, tokens = case
    plan_of({"stages": 3}, spec).check(stage, inputs, targets, samples, tokens)


BAD: dict[str, tuple[ModelSpec, int, Payload, Payload, int, int]] = {
    "no samples' worth": (LLAMA, 0, payload(IDS, 2, 16), payload(IDS, 3, 16), 3, 48),
    "fewer samples than told": (LLAMA, 0, payload(IDS, 2, 16), payload(IDS, 2, 16), 3, 32),
    "longer than the context": (LLAMA, 0, payload(IDS, 2, 17), payload(IDS, 2, 17), 2, 34),
    "inputs longer than targets": (LLAMA, 0, payload(IDS, 2, 16), payload(IDS, 2, 15), 2, 30),
    "flat targets": (LLAMA, 0, payload(IDS, 2, 16), payload(IDS, 32), 2, 32),
    "targets of three dimensions": (LLAMA, 0, payload(IDS, 2, 16), payload(IDS, 2, 16, 1), 2, 32),
    "more tokens than there are": (LLAMA, 0, payload(IDS, 2, 16), payload(IDS, 2, 16), 2, 33),
    "fewer tokens than there are": (LLAMA, 0, payload(IDS, 2, 16), payload(IDS, 2, 16), 2, 2),
    "floats for the first stage": (LLAMA, 0, payload("int8", 2, 16), payload(IDS, 2, 16), 2, 32),
    "hidden states for the first stage": (LLAMA, 0, payload("int8", 2, 16, 32), payload(IDS, 2, 16), 2, 32),
    "ids for a later stage": (LLAMA, 1, payload(IDS, 2, 16, 32), payload(IDS, 2, 16), 2, 32),
    "tokens for a later stage": (LLAMA, 1, payload(IDS, 2, 16), payload(IDS, 2, 16), 2, 32),
    "another width": (LLAMA, 1, payload("int8", 2, 16, 31), payload(IDS, 2, 16), 2, 32),
    "another length": (LLAMA, 1, payload("int8", 2, 15, 32), payload(IDS, 2, 16), 2, 32),
    "transposed": (LLAMA, 1, payload("int8", 16, 2, 32), payload(IDS, 2, 16), 2, 32),
    "another codec": (LLAMA, 1, payload("fp32", 2, 16, 32), payload(IDS, 2, 16), 2, 32),
    "a codec for averages": (LLAMA, 1, payload("topk", 2, 16, 32), payload(IDS, 2, 16), 2, 32),
    "images as ids": (VIT, 0, payload(IDS, 4, 3, 8, 8), payload(IDS, 4), 4, 4),
    "images in another codec": (VIT, 0, payload("fp32", 4, 3, 8, 8), payload(IDS, 4), 4, 4),
    "images of another size": (VIT, 0, payload("int8", 4, 3, 8, 9), payload(IDS, 4), 4, 4),
    "a class for each patch": (VIT, 2, payload("int8", 4, 17, 32), payload(IDS, 4, 17), 4, 68),
    "a patch too few": (VIT, 2, payload("int8", 4, 16, 32), payload(IDS, 4), 4, 4),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD.values(), ids=BAD.keys())
def test_a_stage_refuses_what_no_honest_peer_sends(case: tuple[ModelSpec, int, Payload, Payload, int, int]) -> None:
    spec, stage, inputs, targets, samples, tokens = case
    with pytest.raises(ValueError, match=r"targets|input|samples|does not take") as caught:
        plan_of({"stages": 3}, spec).check(stage, inputs, targets, samples, tokens)
    assert "\n" not in str(caught.value)


def test_what_values_may_be_is_the_models() -> None:
    assert (plan_of({"stages": 2}).num_ids, plan_of({"stages": 2}).num_classes) == (50, 50)
    assert (plan_of({"stages": 2}, VIT).num_ids, plan_of({"stages": 2}, VIT).num_classes) == (0, 5)
