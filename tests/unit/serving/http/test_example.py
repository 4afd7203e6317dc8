"""The example in examples/chat runs as a reader would run it, against a server with a small random model."""

import ast
import json
import subprocess
import sys
from typing import Any

from tests.support.exact import kernels
from tests.support.processes.commands import ROOT
from tests.support.tools import needed
from tests.support.web.small_server import small_server

pytestmark = needed("" if kernels() else "there is no library of exact kernels", "kernels")
FOLDER = ROOT / "examples" / "chat"
URL = "http://127.0.0.1:8000/"


def run(*arguments: str, said: str = "") -> str:
    """Return what the script prints."""
    return subprocess.run(
        [sys.executable, FOLDER / "ask.py", *arguments], input=said, capture_output=True, text=True, check=True,
        timeout=100,
    ).stdout  # fmt: skip


def test_the_script_streams_converses_and_gives_objects() -> None:
    with small_server(context=2048) as url:
        options = ("--url", f"{url}v1", "--seed", "7")
        once = run(*options, "--max-tokens", "20", "Hi")
        assert once.strip()
        assert run(*options, "--max-tokens", "20", said="Hi\n") == once
        assert "confidence=" in run(*options, "--max-tokens", "1500", "--json", "Hi")


def test_the_notebook_runs_and_has_no_outputs(capsys: Any) -> None:
    cells = [cell for cell in json.loads((FOLDER / "chat.ipynb").read_text())["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in cells)
    names: dict[str, Any] = {}
    with small_server(context=2048) as url:
        for cell in cells:
            source = "".join(cell["source"]).replace(URL, url)
            ast.parse(source)
            exec(source, names)
        names["client"].close()
    assert names["told"]
    assert 0 <= names["city"].people <= 40_000_000
    assert names["result"]["sky"] == "blue"
    assert names["final"].choices[0].message.tool_calls is None
