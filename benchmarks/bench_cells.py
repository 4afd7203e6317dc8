"""How full the cells of a tree are, and who finds no room: as they are, as safe as can be, and with second choices.

Peers are drawn into the cells of a tree's first level by the product's own hash, in several rounds. Three ways:

* **now**: `tree_cells`; whoever comes to a full cell waits a round.
* **safe**: so many cells that each overflows once in a thousand times.
* **choices**: cells filled to 70 % on average; whoever comes to a full cell goes on to a second one, and a third. How
  many find no room is given twice: if all others wait for them, and if half of the other groups stand already by then.

    python -m benchmarks.bench_cells --json results/cells.json
"""

from __future__ import annotations

import argparse
import hashlib
import random
import statistics
import sys
from collections.abc import Iterator
from typing import Any

from benchmarks.grid import cells_for
from benchmarks.harness import report
from p2ptrain.averaging.grouping.cells import cell_of, tree_cells

GROUP_SIZES = (4, 8, 16, 64)
PEERS = (5, 12, 24, 64, 100, 200, 512, 1000, 2000)
SAFE_TAIL = 1e-3
CHOICES_FILL_PERCENT = 70
CHOICES = 3
DRAWN = 10_000
"""Peers that are drawn for each size, over all rounds."""


def fill(num_peers: int, group_size: int, num_cells: int, choices: int, gone: float, round_: int) -> list[int]:
    """The members of each cell in one round.

    Args:
        num_peers: Who are there.
        group_size: The most members of a group.
        num_cells: That peers are drawn into.
        choices: Cells that a peer tries, one after the other.
        gone: The chance that a cell's group stands already when a peer comes by another than its first choice.
        round_: Which round.
    """
    lineage, chance = hashlib.sha256(b"%d" % round_).digest(), random.Random(round_)
    members, waiting = [0] * num_cells, [f"peer {number}" for number in range(num_peers)]
    for choice in range(choices):
        refused = []
        for peer in waiting:
            cell = cell_of(lineage, round_, 0, peer, num_cells, choice)
            if members[cell] < group_size and not (choice and chance.random() < gone):
                members[cell] += 1
            else:
                refused.append(peer)
        waiting = refused
    return members


def look_at(num_peers: int, group_size: int, num_cells: int, choices: int = 1, gone: float = 0.0) -> dict[str, Any]:
    """Cells, levels, how full cells with members are, and the shares of peers that wait and that are alone."""
    rounds = max(5, DRAWN // num_peers)
    drawn = [fill(num_peers, group_size, num_cells, choices, gone, round_) for round_ in range(rounds)]
    levels, above = 1, num_cells
    while above > 1:
        levels, above = levels + 1, -(-above // group_size)
    return {
        "cells": num_cells,
        "levels": levels,
        "fill": statistics.mean(count / group_size for members in drawn for count in members if count),
        "wait": 1 - sum(map(sum, drawn)) / (rounds * num_peers),
        "alone": sum(members.count(1) for members in drawn) / (rounds * num_peers),
    }


def measure() -> Iterator[dict[str, Any]]:
    """All sizes."""
    for group_size in GROUP_SIZES:
        for num_peers in PEERS:
            if num_peers > group_size:
                filled = max(2, -(-100 * num_peers // (CHOICES_FILL_PERCENT * group_size)))
                yield {
                    "peers": num_peers,
                    "group_size": group_size,
                    "now": look_at(num_peers, group_size, tree_cells(num_peers, group_size)),
                    "safe": look_at(num_peers, group_size, cells_for(num_peers, group_size, SAFE_TAIL)),
                    "choices": look_at(num_peers, group_size, filled, CHOICES),
                    "choices, late": look_at(num_peers, group_size, filled, CHOICES, 0.5),
                }


def row(found: dict[str, Any]) -> tuple[object, ...]:
    """One line of the table."""
    ways = [found[name] for name in ("now", "safe", "choices")]
    columns = [
        f"{way['cells']} / {way['levels']} / {way['fill']:.0%} / {way['wait']:.1%} / {way['alone']:.0%}" for way in ways
    ]
    return (f"{found['peers']} in {found['group_size']}", *columns, f"{found['choices, late']['wait']:.1%}")


def main() -> int:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", metavar="FILE", help="also write the results here")
    options = parser.parse_args()
    results = list(measure())
    report(
        "Cells / levels / how full cells with members are / share of peers that wait a round / that average alone",
        ("peers", "now", "safe", "choices", "wait, if half come late"), map(row, results), results, options.json,
    )  # fmt: skip
    return 0


if __name__ == "__main__":
    sys.exit(main())
