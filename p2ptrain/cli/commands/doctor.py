"""``p2ptrain doctor``

Check that this machine can take part: Python, torch, the network daemon, ports, clock, disk, memory, file limit.
Every check that does not pass comes with its fix. Exits with 7 if something required is missing.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from p2ptrain.errors import ResourceError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--run-dir", type=Path, default=Path(), metavar="DIR", help="the folder whose disk is checked (default .)"
    )
    parser.add_argument(
        "--port", type=int, default=31337, metavar="N", help="the TCP port that 'seed' would use (default 31337)"
    )
    parser.add_argument(
        "--direct-port", type=int, default=0, metavar="N",
        help="the TCP port for bulk data, 'network.direct_port' of a role file (default 0: any free one)",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print JSON")


def run(arguments: argparse.Namespace) -> int:
    """Run and print the checks; return 7 if a required one fails, else 0."""
    from dataclasses import asdict

    from p2ptrain.cli.checks import all_checks

    checks = all_checks(arguments.run_dir, arguments.port, arguments.direct_port)
    failed = [check for check in checks if check.required and not check.passed]
    if arguments.json:
        print(json.dumps({"ok": not failed, "checks": [asdict(check) for check in checks]}, indent=2))
    else:
        for check in checks:
            mark = "ok  " if check.passed else "FAIL" if check.required else "warn"
            print(f"{mark}  {check.name:<11} {check.detail}")
            if not check.passed:
                print(f"      {'':<11} fix: {check.fix}")
    return ResourceError.exit_code if failed else 0
