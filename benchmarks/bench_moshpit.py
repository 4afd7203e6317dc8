"""How fast peers of a large swarm come to agree: p2ptrain's tree and Moshpit SGD's grid, beside published figures.

Every peer starts with a number from N(0, 1); counted are the sub-rounds until the variance is below 1e-9. In each, a
peer fails with probability p: it averages with nobody and keeps what it has.

Published figures: Ryabinin et al., "Moshpit SGD" (https://arxiv.org/abs/2103.03239), averaging on a 32 x 32 grid, means
of 10 restarts, in full in the output that its authors keep with their code (``averaging_experiments`` of
https://github.com/yandex-research/moshpit-sgd). Their experiment is not their algorithm 1: peers are drawn onto
different places of the grid and stay there, whoever fails; random groups are all peers alive, shuffled and cut into
groups of 32, with the rest dealt out. `PaperGrid` and `PaperRandom` do the same.

    python -m benchmarks.bench_moshpit --json results/moshpit.json
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import numpy as np

from benchmarks import grid
from benchmarks.harness import Measured, format_table, report
from benchmarks.mixing import Cells, Climbed, Fixed, Mixed, Mixer, PaperGrid, PaperRandom, climb, mix
from p2ptrain.averaging.grouping.cells import level_cells

GROUP_SIZE = 32
PAPER_SHAPE = (32, 32)
PUBLISHED_GRID = {
    (512, 0.0): 8.2, (512, 0.001): 8.5, (512, 0.005): 8.8, (512, 0.01): 8.8,
    (768, 0.0): 6.0, (768, 0.001): 6.0, (768, 0.005): 6.6, (768, 0.01): 6.9,
    (900, 0.0): 5.0, (900, 0.001): 5.1, (900, 0.005): 5.9, (900, 0.01): 6.5, (1024, 0.0): 2.0,
}  # fmt: skip
PUBLISHED_RANDOM = {
    (512, 0.0): 6.1, (512, 0.001): 6.3, (512, 0.005): 6.3, (512, 0.01): 6.6,
    (768, 0.0): 6.2, (768, 0.001): 6.5, (768, 0.005): 6.6, (768, 0.01): 7.0,
    (900, 0.0): 6.4, (900, 0.001): 6.3, (900, 0.005): 6.7, (900, 0.01): 7.0,
}  # fmt: skip
"""Sub-rounds by (peers, failure rate)."""
TOLERANCE = 0.6
"""Sub-rounds by which a published mean of 10 restarts may differ from ours."""
RESTARTS = 10
SWEEP = (
    ((32, 32), 0.95, 32), ((32, 32), 0.75, 32), ((32, 32), 0.5, 32), ((22, 22), 0.95, 32), ((14, 14), 0.95, 32),
    ((10, 10), 0.75, 32), ((10, 10, 10), 0.95, 16), ((10, 10, 10), 0.95, 12),
)  # fmt: skip
"""(shape, how much of it is occupied, group size)."""
SWEEP_RATES = (0.0, 0.01, 0.02, 0.03, 0.05, 0.1)
Make = Callable[[np.random.Generator], Mixer]
Rows = list[dict[str, Any]]
Table = tuple[str, tuple[str, ...], list[tuple[object, ...]]]
"""Title, headers, rows."""


def runs(make: Make, failure_rate: float, restarts: int, seed: int, **options: Any) -> list[Mixed]:
    """So many independent runs of one way of mixing."""
    generators = [np.random.default_rng([seed, restart]) for restart in range(restarts)]
    return [mix(make(generator), failure_rate, generator, **options) for generator in generators]


def mean_sub_rounds(make: Make, failure_rate: float, restarts: int, seed: int, **options: Any) -> float:
    """The mean over restarts, as the paper gives it."""
    return float(np.mean([run.sub_rounds for run in runs(make, failure_rate, restarts, seed, **options)]))


def fixed(count: int, shape: grid.Shape, group_size: int, offset: bool = True) -> Make:
    """Fixed coordinates in this grid."""
    return lambda generator: Fixed(count, generator, shape, group_size, offset)


def cells(count: int, group_size: int) -> Make:
    """Random groups."""
    num_cells = grid.cells_for(count, group_size, grid.MIXING_TAIL)
    return lambda generator: Cells(count, generator, num_cells, group_size)


def paper_grid(count: int) -> Make:
    """The grid of the paper's experiment."""
    return lambda generator: PaperGrid(count, generator, PAPER_SHAPE)


def paper_random(count: int) -> Make:
    """The random groups of the paper's experiment."""
    return lambda generator: PaperRandom(count, generator, GROUP_SIZE)


def against_paper(batches: int) -> Iterator[dict[str, Any]]:
    """The paper's experiment, ``batches`` times with other seeds, and `Fixed` and `Cells` in the same situations."""
    for count in (512, 768, 900, 1024):
        for rate in (0.0, 0.001, 0.005, 0.01, 0.1):
            row: dict[str, Any] = {"peers": count, "failure_rate": rate}
            for name, make, published in (
                ("grid", paper_grid(count), PUBLISHED_GRID),
                ("random", paper_random(count), PUBLISHED_RANDOM),
            ):
                means = [mean_sub_rounds(make, rate, RESTARTS, seed) for seed in range(batches)]
                row |= {f"paper {name}": Measured(tuple(means)).to_json()}
                row |= {f"published {name}": published.get((count, rate))}
            for name, shape in (("fixed", grid.grid_shape(count, GROUP_SIZE)), ("fixed 32x32", PAPER_SHAPE)):
                make, warm_up = fixed(count, shape, GROUP_SIZE), 2 * len(shape)
                row[name] = mean_sub_rounds(make, rate, RESTARTS, 0, warm_up=warm_up)
            row["algorithm 1"] = mean_sub_rounds(fixed(count, PAPER_SHAPE, GROUP_SIZE, False), rate, RESTARTS, 0)
            row["random"] = mean_sub_rounds(cells(count, GROUP_SIZE), rate, RESTARTS, 0)
            yield row


def far_off(rows: list[dict[str, Any]]) -> list[str]:
    """Where the mean over all batches is not within `TOLERANCE` of the published figure."""
    return [
        f"{name}, {row['peers']} peers, p = {row['failure_rate']}"
        for row in rows
        for name in ("grid", "random")
        if row[f"published {name}"] is not None
        and abs(np.mean(row[f"paper {name}"]["values"]) - row[f"published {name}"]) > TOLERANCE
    ]


def contraction(restarts: int) -> Iterator[dict[str, Any]]:
    """By how much random groups of any size shrink the variance in a sub-round, against (r - 1) / N + r / N**2."""
    for count, num_cells in ((512, 16), (1024, 32), (1024, 57), (4000, 60)):
        ratios, expected = [], []
        for run in range(restarts):
            generator = np.random.default_rng([run, count])
            mixer = Cells(count, generator, num_cells, group_size=count)
            groups = len(mixer.groups(0, list(range(count))))
            held = mix(mixer, 0.0, generator, values=256, most=3).variances
            ratios += [after / before for before, after in itertools.pairwise(held)]
            expected.append((groups - 1) / count + groups / count**2)
        ratio = float(np.mean(ratios) / np.mean(expected))
        yield {"peers": count, "groups": num_cells, "formula": float(np.mean(expected)), "ratio": ratio}


def sweep(restarts: int) -> Iterator[dict[str, Any]]:
    """Fixed coordinates, in a grid that is not new, against random groups, by failure rate."""
    for shape, fill, group_size in SWEEP:
        count = round(fill * grid.capacity(shape))
        found = {
            rate: (
                mean_sub_rounds(fixed(count, shape, group_size), rate, restarts, 1, warm_up=2 * len(shape)),
                mean_sub_rounds(cells(count, group_size), rate, restarts, 1),
            )
            for rate in SWEEP_RATES
        }
        chosen = {rate: grid.choose_assignment(shape, count, group_size, rate).kind for rate in SWEEP_RATES}
        regret = max(found[rate][chosen[rate] == "random"] - min(found[rate]) for rate in SWEEP_RATES)
        q = sum(shape) / len(shape) / grid.capacity(shape) * grid.cells_for(count, group_size, grid.MIXING_TAIL)
        yield {
            "shape": list(shape), "peers": count, "group_size": group_size, "q": q,
            "sub_rounds": {str(rate): list(pair) for rate, pair in found.items()},
            "even_at": _crossing([(rate, pair[0] - pair[1]) for rate, pair in found.items()]),
            "limit": max(0.0, grid.FIXED_SLOPE * (min(1.0, q) - grid.FIXED_FROM)), "regret": regret,
        }  # fmt: skip


def _crossing(differences: list[tuple[float, float]]) -> float:
    """The failure rate up to which fixed coordinates need fewer sub-rounds, by a straight line between two."""
    previous = differences[0]
    for rate, difference in differences:
        if difference > 0:
            gap = difference - previous[1]
            return previous[0] + (rate - previous[0]) * -previous[1] / gap if gap > 0 else rate
        previous = (rate, difference)
    return differences[-1][0]


def kept_shapes(restarts: int) -> Iterator[dict[str, Any]]:
    """What it costs to keep a shape that the swarm has shrunk in, against a new one."""
    for fill in (1.0, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4):
        count = round(fill * grid.capacity(PAPER_SHAPE))
        new = grid.grid_shape(count, GROUP_SIZE)
        row: dict[str, Any] = {"fill": fill, "peers": count, "new_shape": list(new)}
        for name, shape in (("kept", PAPER_SHAPE), ("new", new)):
            for rate in (0.0, 0.01):
                make = fixed(count, shape, GROUP_SIZE)
                row[f"{name} {rate}"] = mean_sub_rounds(make, rate, restarts, 2, warm_up=2 * len(shape))
        yield row


def work(restarts: int) -> Iterator[dict[str, Any]]:
    """What a peer does until all agree, by the size of the swarm."""
    for group_size in (32, 64):
        for count in (100, 1_000, 10_000):
            shape = grid.grid_shape(count, group_size)
            some = max(1, restarts * 1_000 // max(count, 1_000))
            ways: dict[str, list[Mixed] | list[Climbed]] = {
                "fixed": runs(fixed(count, shape, group_size), 0.01, some, 3, warm_up=2 * len(shape)),
                "random": runs(cells(count, group_size), 0.01, some, 3),
                "tree": [climb(count, group_size, 0.01, 3, np.random.default_rng([3, run])) for run in range(some)],
            }
            row: dict[str, Any] = {"peers": count, "group_size": group_size, "shape": list(shape)}
            for name, found in ways.items():
                for what in ("sub_rounds", "joined", "keys", "sent"):
                    row[f"{name} {what}"] = float(np.mean([getattr(one, what) for one in found]))
            yield row


def trees(count: int, restarts: int) -> Iterator[dict[str, Any]]:
    """A tree with delegates against mixing for as many sub-rounds, and until all agree."""
    levels = len(level_cells(count, GROUP_SIZE))
    shape = grid.grid_shape(count, GROUP_SIZE)
    for rate in (0.0, 0.01, 0.1):
        for tries in (1, 2, 3):
            found = [climb(count, GROUP_SIZE, rate, tries, np.random.default_rng([4, run])) for run in range(restarts)]
            means = {name: float(np.mean([asdict(one)[name] for one in found])) for name in Climbed.__annotations__}
            yield {"peers": count, "way": f"tree, {tries} tried", "failure_rate": rate, "spread": 0.0, **means}
        for name, make in (("fixed", fixed(count, shape, GROUP_SIZE)), ("random", cells(count, GROUP_SIZE))):
            warm_up = 2 * len(shape) if name == "fixed" else 0
            for way, most in (("as long", levels), ("to the end", 60)):
                mixed = runs(make, rate, restarts, 4, warm_up=warm_up, most=most)
                means = {what: float(np.mean([getattr(run, what) for run in mixed])) for what in ("sub_rounds", "sent")}
                spread = math.sqrt(float(np.mean([run.variances[-1] for run in mixed])))
                lost = {"missed": 0.0, "lost": 0.0, "offset": 0.0, "most_sent": means["sent"]}
                yield {"way": f"{name}, {way}", "peers": count, "failure_rate": rate, "spread": spread, **means, **lost}


def tables(results: dict[str, Any]) -> list[Table]:
    """The parts of the results, for people."""
    return [
        _against_paper_table(results["against_paper"]),
        (
            "Random groups: what is left of the variance after a sub-round, against (r - 1) / N + r / N**2",
            ("peers", "groups", "formula", "measured, of it"),
            [
                (row["peers"], row["groups"], f"{row['formula']:.5f}", f"{row['ratio']:.4f}")
                for row in results["contraction"]
            ],
        ),
        _sweep_table(results["sweep"]),
        _kept_shapes_table(results["kept_shapes"]),
        _work_table(results["work"]),
        _trees_table(results["trees"]),
    ]


def _against_paper_table(rows: Rows) -> Table:
    def span(measured: dict[str, Any]) -> str:
        values = measured["values"]
        return f"{np.mean(values):.2f} ({min(values):.1f} to {max(values):.1f})"

    ours = ("algorithm 1", "fixed 32x32", "fixed", "random")
    return (
        "Moshpit: sub-rounds until the variance is below 1e-9, groups of 32; in brackets means of 10 restarts",
        ("peers, failure rate", "published grid", "the same", "published random", "the same", *ours),
        [
            (
                f"{row['peers']}, {row['failure_rate']:g}",
                row["published grid"] or "", span(row["paper grid"]),
                row["published random"] or "", span(row["paper random"]),
                *(f"{row[name]:.1f}" for name in ours),
            )
            for row in rows
        ],
    )  # fmt: skip


def _sweep_table(rows: Rows) -> Table:
    return (
        "Sub-rounds with fixed coordinates / random groups by failure rate; q is the ratio of their group sizes",
        ("grid", "peers", "groups of", *map(str, SWEEP_RATES), "q", "even at", "rule", "regret"),
        [
            (
                "x".join(map(str, row["shape"])), row["peers"], row["group_size"],
                *("/".join(f"{number:.1f}" for number in row["sub_rounds"][str(rate)]) for rate in SWEEP_RATES),
                f"{row['q']:.2f}", f"{row['even_at']:.3f}", f"{row['limit']:.3f}", f"{row['regret']:.1f}",
            )
            for row in rows
        ],
    )  # fmt: skip


def _kept_shapes_table(rows: Rows) -> Table:
    return (
        "Sub-rounds with fixed coordinates in a shape that was kept / in a new one, by failure rate",
        ("32x32 occupied", "peers", "new", "0", "0.01"),
        [
            (
                f"{row['fill']:.0%}", row["peers"], "x".join(map(str, row["new_shape"])),
                *(f"{row[f'kept {rate}']:.1f}/{row[f'new {rate}']:.1f}" for rate in (0.0, 0.01)),
            )
            for row in rows
        ],
    )  # fmt: skip


def _work_table(rows: Rows) -> Table:
    whats = ("sub_rounds", "joined", "keys", "sent")
    return (
        "Work of a peer until all agree, p = 0.01: sub-rounds / groups joined / directory keys / vectors sent",
        ("peers", "groups of", "grid", "fixed", "random", "tree"),
        [
            (
                row["peers"], row["group_size"], "x".join(map(str, row["shape"])),
                *(" / ".join(f"{row[f'{name} {what}']:.1f}" for what in whats) for name in ("fixed", "random", "tree")),
            )
            for row in rows
        ],
    )  # fmt: skip


def _trees_table(rows: Rows) -> Table:
    return (
        f"A tree with delegates against mixing: {rows[0]['peers']} peers, groups of {GROUP_SIZE}",
        ("failure rate, way", "sub-rounds", "vectors sent", "most", "spread left", "off the mean", "missed", "lost"),
        [
            (
                f"{row['failure_rate']:g}, {row['way']}", f"{row['sub_rounds']:.1f}", f"{row['sent']:.2f}",
                f"{row['most_sent']:.1f}",
                f"{row['spread']:.1e}", f"{row['offset']:.1e}", f"{row['missed']:.2%}", f"{row['lost']:.3%}",
            )
            for row in rows
        ],
    )  # fmt: skip


def main() -> int:
    """Measure and report; 1 when published figures are not met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batches", type=int, default=2, help="times that the paper's 10 restarts are repeated")
    parser.add_argument("--restarts", type=int, default=5, help="runs of everything else")
    parser.add_argument("--json", metavar="FILE", help="also write the results here")
    options = parser.parse_args()
    results: dict[str, Any] = {
        "against_paper": list(against_paper(options.batches)),
        "contraction": list(contraction(options.restarts)),
        "sweep": list(sweep(options.restarts)),
        "kept_shapes": list(kept_shapes(options.restarts)),
        "work": list(work(options.restarts)),
        "trees": list(trees(1000, 2 * options.restarts)),
    }
    results["far_off"] = far_off(results["against_paper"])
    (title, headers, rows), *others = tables(results)
    report(title, headers, rows, results, options.json)
    for title, headers, rows in others:
        sys.stdout.write(f"\n{title}\n\n{format_table(headers, rows)}\n")
    for what in results["far_off"]:
        sys.stdout.write(f"\nnot within {TOLERANCE} of the published figure: {what}\n")
    return 1 if results["far_off"] else 0


if __name__ == "__main__":
    sys.exit(main())
