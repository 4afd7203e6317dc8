"""Where work runs: state, device and pool do not hold each other up, and none of them the event loop."""

import asyncio
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import psutil
import pytest
import torch

from p2ptrain import runtime as module
from p2ptrain.pipeline import messages
from p2ptrain.pipeline.messages import Hop, MicrobatchId, pack
from p2ptrain.pipeline.stage import gradients, worker
from p2ptrain.pipeline.stage.compute import StageCompute
from p2ptrain.pipeline.stage.device import Device, Pass
from p2ptrain.runtime import HANDOVER_BYTES, Runtime, real_runtime
from tests.support.coroutines import on_loop
from tests.support.sim.pipelines import sample
from tests.support.sim.stage_hosts import plan_of, stage_of

PATIENCE_SECONDS = 30.0


@pytest.fixture
def runtime() -> Iterator[Runtime]:
    found = real_runtime("test")
    yield found
    found.close()


def thread_name() -> str:
    return threading.current_thread().name.rpartition("_")[0]


@on_loop
async def test_each_kind_of_work_has_threads_of_its_own(runtime: Runtime) -> None:
    assert await runtime.compute(thread_name) == "state-test"
    assert await runtime.on_device(thread_name) == "device-test"
    assert await runtime.offload(thread_name) == "pool-test"
    assert await runtime.process(HANDOVER_BYTES + 1, thread_name) == "pool-test"
    assert await runtime.process(HANDOVER_BYTES, thread_name) == thread_name()


@pytest.mark.parametrize("kind", ["compute", "on_device"])
@on_loop
async def test_state_and_device_run_one_call_at_a_time_in_the_order_of_the_calls(runtime: Runtime, kind: str) -> None:
    method: Callable[..., Coroutine[Any, Any, None]] = getattr(runtime, kind)
    done: list[int] = []
    running: list[int] = []

    def work(number: int) -> None:
        running.append(number)
        assert running == [number]
        done.append(number)
        running.remove(number)

    await asyncio.gather(*(method(work, number) for number in range(50)))
    assert done == list(range(50))


@on_loop
async def test_a_slow_fsync_holds_up_neither_a_forward_pass_nor_packing_nor_the_event_loop(runtime: Runtime) -> None:
    compute = StageCompute(stage_of(plan_of(3), 0))
    inputs = sample(plan_of(3).manifest, 1)[:, :-1]
    written = threading.Event()
    saving = asyncio.create_task(runtime.compute(written.wait, PATIENCE_SECONDS))
    output = await Device(runtime).run(Pass.FORWARD, lambda: compute.forward(inputs))
    assert (await runtime.offload(pack, output.result, "fp16")).data
    assert not saving.done()
    written.set()
    assert await saving


@on_loop
async def test_activations_are_packed_and_unpacked_on_the_device_thread(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of these waits for the event loop to turn: on its thread that would never happen."""
    turned, seen = threading.Event(), list[str]()

    def watched(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            seen.append(thread_name())
            assert turned.wait(PATIENCE_SECONDS)
            turned.clear()
            return function(*arguments)

        return call

    async def turn() -> None:
        while True:
            turned.set()
            await asyncio.sleep(0.001)

    plan = plan_of(3)
    tokens = sample(plan.manifest, 1)
    inputs = StageCompute(stage_of(plan, 0)).forward(tokens[:, :-1])
    hop = Hop(
        MicrobatchId("trainer", 0, 1), 1, 2, tokens[:, 1:].numel(), (), pack(inputs, "fp32"),
        pack(tokens[:, 1:], "fp32"),
    )  # fmt: skip
    gradient = pack(torch.full_like(inputs, 0.01), "fp32")
    for each in (worker, gradients):
        monkeypatch.setattr(each, "pack", watched(messages.pack))
        monkeypatch.setattr(each, "unpack", watched(messages.unpack))
    turning = asyncio.create_task(turn())
    made = worker.StageWorker(plan, 1, StageCompute(stage_of(plan, 1)), Device(runtime))
    await made.forward(hop.inputs)
    total = gradients.StageGradients(made)
    total.take_out((await total.add(hop, gradient)).result.added)
    await total.until_taken_out()
    turning.cancel()
    assert len(seen) == 7
    assert set(seen) == {"device-test"}


@on_loop
async def test_closing_does_not_wait_for_a_stuck_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CLOSE_SECONDS", 0.2)
    monkeypatch.setattr(module, "left_behind", [])
    runtime, mended = real_runtime("test"), threading.Event()
    stuck = asyncio.create_task(runtime.on_device(mended.wait, PATIENCE_SECONDS))
    await asyncio.sleep(0)
    runtime.close()
    assert module.left_behind == ["device"]
    mended.set()
    await stuck


@pytest.mark.skipif(sys.platform != "linux", reason="glibc alone keeps freed memory")
@on_loop
async def test_memory_that_is_freed_below_what_is_held_goes_back_to_the_system(runtime: Runtime) -> None:
    held = [bytearray(b"x" * 100_000) for _ in range(2000)]
    del held[:-1]
    before = psutil.Process().memory_info().rss
    await runtime.trim_heap()
    assert before - psutil.Process().memory_info().rss > 100 << 20
