"""Run scenarios: ``python -m tests.lab SCENARIO.toml… [--real | --simulated] [--seed N]``.

A scenario without a folder in its name is one of ``tests/lab/scenarios``; ``all`` stands for all of them. The exit code
is 1 if one fails, or passes although it is known to fail.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from pathlib import Path

from tests.lab.scenario import SCENARIOS, Mode, Verdict, read_scenario
from tests.lab.simulated import run_simulated


def find_scenarios(names: list[str]) -> list[Path]:
    """Return the files that names stand for; raise `ValueError` for a name that stands for none."""
    paths: list[Path] = []
    for name in names:
        given = Path(name)
        own = SCENARIOS / f"{given.stem}.toml"
        if name == "all":
            paths += sorted(SCENARIOS.glob("*.toml"))
        elif given.exists() or own.exists():
            paths.append(given if given.is_file() else own)
        else:
            raise ValueError(f"there is no scenario {name}: those of the laboratory are in {SCENARIOS}")
    return paths


def run(path: Path, mode: Mode, seed: int) -> Verdict:
    """Run one scenario, and the same swarm undisturbed before it."""
    scenario = read_scenario(path)
    if mode == "real":
        from tests.lab.real import run_real

        undisturbed, disturbed = (run_real(scenario, disturbed=each) for each in (False, True))
    else:
        undisturbed, disturbed = (run_simulated(scenario, seed, disturbed=each) for each in (False, True))
    return Verdict(path.stem, mode, seed, scenario, disturbed, undisturbed)


def main(arguments: list[str] | None = None) -> int:
    import torch

    parser = argparse.ArgumentParser(prog="python -m tests.lab", description=__doc__)
    parser.add_argument("scenarios", nargs="+", metavar="SCENARIO.toml")
    modes = parser.add_mutually_exclusive_group()
    modes.add_argument("--real", action="store_true", help="with processes in network namespaces; needs root, ip, nft")
    modes.add_argument("--simulated", action="store_true", help="in virtual time: the default")
    parser.add_argument("--seed", type=int, default=1, help="of the simulation")
    parser.add_argument("--verbose", action="store_true", help="log what the peers do")
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.DEBUG if options.verbose else logging.CRITICAL)
    torch.set_num_threads(1)
    mode: Mode = "real" if options.real else "simulated"
    try:
        paths = find_scenarios(options.scenarios)
        if options.real and options.scenarios == ["all"]:
            paths = [path for path in paths if read_scenario(path).real]
        unexpected = 0
        for path in paths:
            verdict = run(path, mode, options.seed)
            unexpected += not verdict.is_as_expected
            sys.stdout.write(f"{verdict}\n")
            sys.stdout.flush()
    except ValueError as error:
        sys.stdout.write(f"{error}\n")
        return 2
    return int(bool(unexpected))


def pin_hashes() -> None:
    """Start this program again with fixed hashes of strings: a run repeats only if sets keep their order."""
    if os.environ.get("PYTHONHASHSEED") != "0":
        os.execve(sys.executable, sys.orig_argv, {**os.environ, "PYTHONHASHSEED": "0"})


if __name__ == "__main__":
    pin_hashes()
    sys.exit(main())
