"""A newcomer measures itself before it chooses a stage."""

from pathlib import Path

import psutil
import pytest
import torch

from p2ptrain.manifest import LoraSpec
from p2ptrain.models import Span
from p2ptrain.pipeline import measure as measuring
from p2ptrain.pipeline.measure import available_memory, measure_speed
from p2ptrain.pipeline.plan import PipelinePlan
from tests.support.sim.pipelines import make_manifest

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "SECONDS", 0.01)


@pytest.mark.parametrize("quant", ["", "int8"])
def test_a_speed_is_measured_whatever_is_trained_and_chance_is_left_alone(quant: str) -> None:
    lora = LoraSpec(targets=("q_proj",)) if quant else None
    before = torch.get_rng_state()
    assert measure_speed(PipelinePlan(make_manifest(2, quant=quant, lora=lora)), CPU) > 0
    assert torch.equal(torch.get_rng_state(), before)


def test_twice_the_work_of_a_block_in_the_same_time_is_twice_the_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a newcomer's speed can be compared with those of hosts, whatever stage they have."""
    clock = iter(range(10_000))
    monkeypatch.setattr("p2ptrain.pipeline.measure.time.perf_counter", lambda: float(next(clock)))
    speeds = {}
    for hidden in (16, 64):
        manifest = make_manifest(2)
        model = manifest.model.model_copy(update={"hidden": hidden, "intermediate": 3 * hidden})
        plan = PipelinePlan(manifest.model_copy(update={"model": model}))
        work = plan.work_of(plan.spans[0]) + plan.work_of(plan.spans[1])
        assert work == sum(need.work for need in plan.needs)
        speeds[hidden] = measure_speed(plan, CPU) / (plan.work_of(Span(2, 3)))
    assert speeds[16] == speeds[64]


def test_a_thin_uplink_is_what_counts() -> None:
    plan = PipelinePlan(make_manifest(2))
    free, thin, thinner = (measure_speed(plan, CPU, bandwidth) for bandwidth in (0, 2_000, 1_000))
    assert thinner == thin / 2
    assert thin < free


@pytest.mark.parametrize(
    ("folder", "limit", "used", "cached"),
    [
        (".", "memory.max", "memory.current", "inactive_file"),
        ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ],
)
def test_in_a_container_no_more_is_to_spare_than_its_limit_leaves(
    folder: str, limit: str, used: str, cached: str, tmp_path: Path
) -> None:
    group = tmp_path / folder
    group.mkdir(exist_ok=True)
    (group / used).write_text("7000\n")
    (group / "memory.stat").write_text(f"anon 6000\n{cached} 500\n")
    (group / limit).write_text("10000\n")
    assert available_memory(tmp_path) == 10000 - 7000 + 500
    (group / limit).write_text("5000\n")
    assert available_memory(tmp_path) == 0
    machine = psutil.virtual_memory().total
    for unlimited in ("max\n", f"{1 << 62}\n"):
        (group / limit).write_text(unlimited)
        assert machine / 10 < available_memory(tmp_path) <= machine
