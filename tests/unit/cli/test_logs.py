import json
import logging
import os
import subprocess
import sys
from pathlib import Path

from p2ptrain.cli.logs import JsonFormatter, _is_ours


def test_a_json_line_holds_the_message_what_was_added_and_the_exception() -> None:
    try:
        raise ValueError("why\nso")
    except ValueError as error:
        record = logging.LogRecord("p2ptrain.x", logging.WARNING, "f", 1, "round %d", (7,), (ValueError, error, None))
    record.round = 7
    line = JsonFormatter().format(record)
    values = json.loads(line)
    assert "\n" not in line
    found = values["level"], values["logger"], values["message"], values["round"]
    assert found == ("warning", "p2ptrain.x", "round 7", 7)
    assert "why" in values["exception"]
    assert values["time"].endswith("Z")


def test_a_library_that_renames_the_levels_does_not_change_the_log() -> None:
    before = logging.getLevelName(logging.WARNING)
    logging.addLevelName(logging.WARNING, "WARN")
    try:
        record = logging.LogRecord("p2ptrain.x", logging.WARNING, "f", 1, "slow", (), None)
        assert json.loads(JsonFormatter().format(record))["level"] == "warning"
    finally:
        logging.addLevelName(logging.WARNING, before)


def test_a_wait_that_hivemind_leaves_behind_is_not_logged_and_a_lost_task_of_ours_is() -> None:
    def logged(name: str, coroutine: str) -> bool:
        text = f"Task was destroyed but it is pending!\ntask: <Task pending name='{name}' coro=<{coroutine}() done>>"
        return _is_ours(logging.LogRecord("asyncio", logging.ERROR, "f", 1, text, (), None))

    assert not logged("Task-349", "Event.wait")
    assert logged("presence", "Event.wait")
    assert logged("Task-349", "Presence.run")
    assert _is_ours(logging.LogRecord("asyncio", logging.ERROR, "f", 1, "another %s", ("error",), None))


def test_libraries_draw_no_progress_bars_into_a_pipe() -> None:
    load = (
        "from p2ptrain.cli.logs import configure_logging; configure_logging('text', 'warning')\n"
        "from transformers.utils.logging import tqdm\n"
        "for _ in tqdm(range(3), desc='Loading weights'): pass"
    )
    environment = {key: value for key, value in os.environ.items() if key != "HF_HUB_DISABLE_PROGRESS_BARS"}
    root = Path(__file__).parents[3]
    command = [sys.executable, "-c", load]
    done = subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
