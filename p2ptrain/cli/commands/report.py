"""``p2ptrain report RUN_DIR``

Write one self-contained HTML page of a finished run: its loss, rounds, peers, traffic and settings. RUN_DIR is what
'p2ptrain up' or 'p2ptrain join' names; the page needs no other file and no network.
"""

from __future__ import annotations

import argparse
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("directory", type=Path, metavar="RUN_DIR", help="the run directory")
    parser.add_argument("--output", type=Path, metavar="FILE", help="where to write (default RUN_DIR/report.html)")


def run(arguments: argparse.Namespace) -> int:
    from p2ptrain.disk import replace_file
    from p2ptrain.monitor.report import read_run, render
    from p2ptrain.network.identity import Identity

    output = arguments.output or arguments.directory / "report.html"
    with Identity.ephemeral() as verifier:
        page = render(read_run(arguments.directory, verifier))
    output.parent.mkdir(parents=True, exist_ok=True)
    replace_file(output, page.encode())
    print(f"wrote {output}")
    return 0
