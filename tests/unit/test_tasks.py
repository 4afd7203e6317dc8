"""Background tasks: a failure is logged at once, the owner acts, nothing outlives its owner."""

import ast
import asyncio
import gc
import logging
import random
import re
from pathlib import Path

import pytest

from p2ptrain.errors import PeerLostError
from p2ptrain.network.simulated import SimulatedNetwork
from p2ptrain.tasks import FIRST_PAUSE_SECONDS, Backoff, Tasks, to_its_end, together
from tests.support.coroutines import simulated

PACKAGE = Path(__file__).resolve().parents[2] / "p2ptrain"
ALLOWED = {
    "tasks.py": "the supervised way itself",
    "network/simulated/loop.py": "implements create_task for the simulation, and runs its main coroutine",
    "network/simulated/network.py": "tasks of a simulated process, which dies with them",
}


async def fail(after_seconds: float = 0.0) -> None:
    await asyncio.sleep(after_seconds)
    raise ZeroDivisionError("a defect")


async def block() -> None:
    async with Tasks() as tasks:
        tasks.start(fail(1.0), "beat")
        await asyncio.sleep(60.0)


async def forever() -> None:
    await asyncio.get_running_loop().create_future()


RAW = ("create_task", "ensure_future", "TaskGroup", "gather")
"""What starts tasks without an owner; asyncio's task group logs nothing while its block goes on."""
WRAPPING = ("shield", "as_completed")
"""What makes a task of a coroutine that it is given; with a task of an owner's all is well."""


def raw_starts(path: Path) -> list[int]:
    """The lines that start a task without an owner."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Call):
            name = _name(node.func)
            wraps = name in WRAPPING and any(isinstance(inner, ast.Call) for inner in ast.walk(node.args[0]))
            is_asyncio = name != "gather" or _name(getattr(node.func, "value", node.func)) in ("asyncio", "gather")
            if wraps or (name in RAW and is_asyncio):
                found.append(node.lineno)
    return sorted(found)


def _name(node: ast.expr) -> str:
    return node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")


def test_every_task_of_the_package_is_started_by_an_owner() -> None:
    paths = {path.relative_to(PACKAGE).as_posix(): path for path in sorted(PACKAGE.rglob("*.py"))}
    assert ALLOWED.keys() <= paths.keys()
    found = {name: raw_starts(path) for name, path in paths.items() if name not in ALLOWED}
    assert {name: lines for name, lines in found.items() if lines} == {}


def test_a_raw_start_is_found_and_one_of_an_owner_is_not(tmp_path: Path) -> None:
    raw = [
        "await asyncio.gather(f(), g())",
        "await asyncio.gather(*parts)",
        "await gather(*(f(x) for x in xs))",
        "asyncio.ensure_future(f())",
        "loop.create_task(f())",
        "asyncio.create_task(f())",
        "async with asyncio.TaskGroup() as group: pass",
        "group.create_task(f())",
        "await asyncio.shield(f())",
        "for each in asyncio.as_completed([f(x) for x in xs]): pass",
    ]
    owned = [
        "tasks.start(f(), 'f')",
        "await asyncio.shield(task)",
        "for each in asyncio.as_completed(asking, timeout=3.0): pass",
        "fragment.gather(vector, values)",
        "group: asyncio.TaskGroup",
    ]
    path = tmp_path / "some.py"
    path.write_text("\n".join([*raw, *owned]))
    assert raw_starts(path) == list(range(1, len(raw) + 1))


@simulated()
async def test_the_first_failure_of_several_ends_the_others_and_results_keep_their_order() -> None:
    ended: list[str] = []

    async def answer(seconds: float) -> float:
        try:
            await asyncio.sleep(seconds)
        finally:
            ended.append(f"{seconds:g}")
        return seconds

    assert await together("answer", map(answer, (3.0, 1.0, 2.0))) == [3.0, 1.0, 2.0]
    assert await together("answer", ()) == []
    ended.clear()
    with pytest.raises(ZeroDivisionError):
        await together("answer", (answer(60.0), fail(1.0)))
    assert ended == ["60"]
    assert asyncio.get_running_loop().time() == 4.0


@simulated()
async def test_a_failure_is_logged_with_its_trace_and_told_to_the_owner(
    network: SimulatedNetwork, caplog: pytest.LogCaptureFixture
) -> None:
    told: list[Exception] = []
    tasks = Tasks(on_failure=told.append)
    tasks.start(fail(), "the watcher")
    await asyncio.sleep(1.0)
    assert len(tasks) == 0
    await tasks.close()
    assert [type(error) for error in told] == [ZeroDivisionError]
    assert "the watcher failed" in caplog.text
    assert "Traceback" in caplog.text
    network.loop.errors.clear()


@simulated()
async def test_a_failure_ends_the_block_that_waits_for_something_else(
    network: SimulatedNetwork, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ZeroDivisionError):
        await block()
    task = asyncio.current_task()
    assert task is not None
    assert task.cancelling() == 0
    assert asyncio.get_running_loop().time() == 1.0
    async with asyncio.timeout(5.0):  # A deadline after it, as one around it, works as ever.
        await asyncio.sleep(1.0)
    assert "beat failed" in caplog.text
    network.loop.errors.clear()


@simulated()
async def test_a_cancelled_block_stays_cancelled() -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1.0):
            await block()


@simulated()
async def test_a_block_ends_its_tasks() -> None:
    async with Tasks() as tasks:
        tasks.start(forever(), "a")
        called = tasks.call(forever(), "b")
    assert called.cancelled()


@simulated()
async def test_a_result_and_an_error_of_a_call_are_the_callers(caplog: pytest.LogCaptureFixture) -> None:
    async def answer() -> int:
        return 42

    async with Tasks() as tasks:
        assert await tasks.call(answer(), "answer") == 42
        with pytest.raises(ZeroDivisionError):
            await tasks.call(fail(), "failing")
    assert caplog.text == ""


@simulated()
async def test_a_defect_that_no_caller_looks_at_is_logged(
    network: SimulatedNetwork, caplog: pytest.LogCaptureFixture
) -> None:
    async def lost() -> None:
        raise PeerLostError("peer", "went away")

    async with Tasks() as tasks:
        tasks.call(fail(), "unseen")
        tasks.call(lost(), "a peer that left")
        await asyncio.sleep(1.0)
    assert "unseen failed" in caplog.text
    assert "a peer that left" not in caplog.text
    network.loop.errors.clear()


@simulated()
async def test_no_error_is_lost_of_a_call_whose_block_is_cancelled_again_while_it_closes() -> None:
    async def fail_at_the_end() -> None:
        try:
            await forever()
        except asyncio.CancelledError:
            await asyncio.sleep(1.0)
            raise PeerLostError("peer", "is gone") from None

    async def called_before() -> None:
        raise PeerLostError("peer", "was gone before")

    async def block() -> None:
        async with Tasks() as tasks:
            tasks.call(fail_at_the_end(), "slow-end")
            tasks.call(called_before(), "early-end")
            await forever()

    task = asyncio.create_task(block())
    await asyncio.sleep(1.0)
    task.cancel()
    await asyncio.sleep(0.5)
    task.cancel()
    await asyncio.wait({task})
    assert task.cancelled()
    del task
    await asyncio.sleep(2.0)
    gc.collect()


@simulated()
async def test_a_loop_is_started_again_after_growing_pauses(
    network: SimulatedNetwork, caplog: pytest.LogCaptureFixture
) -> None:
    began: list[float] = []

    async def loop() -> None:
        began.append(asyncio.get_running_loop().time())
        if len(began) < 4:
            await fail()
        await forever()

    tasks = Tasks()
    tasks.keep(loop, "presence")
    await asyncio.sleep(100.0)
    assert len(tasks) == 1
    await tasks.close()
    first = FIRST_PAUSE_SECONDS
    assert began == [0.0, first, 3 * first, 7 * first]
    assert caplog.text.count("presence failed") == 3
    network.loop.errors.clear()


def test_pauses_double_up_to_the_longest_and_start_over() -> None:
    backoff = Backoff(0.5, 3.0)
    assert [backoff.next() for _ in range(5)] == [0.5, 1.0, 2.0, 3.0, 3.0]
    backoff.reset()
    assert [backoff.next() for _ in range(2)] == [0.5, 1.0]


def test_jitter_varies_a_pause_by_half_and_leaves_the_next_one_alone() -> None:
    drawn = [Backoff(1.0, 8.0, random.Random(seed)) for seed in range(200)]
    first, second = ([each.next() for each in drawn] for _ in range(2))
    assert 0.5 <= min(first) < 0.6
    assert 1.4 < max(first) < 1.5
    assert 1.0 <= min(second) < max(second) < 3.0


def test_nothing_else_doubles_its_pauses() -> None:
    doubled = re.compile(r"min\(2 \* \w*pause|pause \*= |SECONDS \* 2 ?\*\*")
    allowed = {"tasks.py", "network/simulated/links.py"}  # The second draws the delay of lost packets.
    found = {str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py") if doubled.search(path.read_text())}
    assert found <= allowed


@simulated()
async def test_closing_waits_as_long_as_told_and_for_what_an_end_starts() -> None:
    ended = []
    tasks = Tasks()

    async def last() -> None:
        try:
            await forever()
        finally:
            ended.append("last")

    async def first() -> None:
        try:
            await forever()
        finally:
            tasks.start(last(), "last")
            await asyncio.sleep(0)
            ended.append("first")

    async def soon() -> None:
        await asyncio.sleep(3.0)
        ended.append("soon")

    tasks.start(first(), "first")
    tasks.start(soon(), "soon")
    await tasks.close(grace_seconds=5.0)
    assert asyncio.get_running_loop().time() == 5.0
    assert ended == ["soon", "first", "last"]


@simulated()
async def test_a_cancelled_owner_ends_its_tasks_though_it_waits_for_them() -> None:
    tasks = Tasks()
    running = tasks.start(forever(), "runs")
    closing = asyncio.create_task(tasks.close(grace_seconds=60.0))
    await asyncio.sleep(1.0)
    closing.cancel()
    await asyncio.wait({closing})
    assert closing.cancelled()
    assert running.cancelled()
    assert not len(tasks)


@simulated()
async def test_a_change_runs_to_its_end_though_its_caller_is_cancelled() -> None:
    done = []

    async def change() -> None:
        await asyncio.sleep(2.0)
        done.append(True)

    with pytest.raises(TimeoutError):
        async with asyncio.timeout(1.0):
            await to_its_end(change())
    assert done == [True]


@simulated()
async def test_a_deliberate_error_is_one_line(caplog: pytest.LogCaptureFixture) -> None:
    async def lost() -> None:
        raise PeerLostError("peer", "went away")

    tasks = Tasks()
    tasks.start(lost(), "announce")
    await asyncio.sleep(1.0)
    await tasks.close()
    assert [record.levelno for record in caplog.records] == [logging.ERROR]
    assert "Traceback" not in caplog.text
