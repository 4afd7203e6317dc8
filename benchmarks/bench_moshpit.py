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

import itertools
import math
import sys
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

import numpy as np

from benchmarks.findings import Finding, Section, run
from benchmarks.harness import arguments
from benchmarks.mixing import Cells, Climbed, Mixed, Mixer, PaperGrid, PaperRandom, cells_for, climb, mix
from p2ptrain.averaging.grouping.cells import level_cells

GROUP_SIZE = 32
PAPER_SHAPE = (32, 32)
PUBLISHED = {
    "grid": {
        (512, 0.0): 8.2, (512, 0.001): 8.5, (512, 0.005): 8.8, (512, 0.01): 8.8,
        (768, 0.0): 6.0, (768, 0.001): 6.0, (768, 0.005): 6.6, (768, 0.01): 6.9,
        (900, 0.0): 5.0, (900, 0.001): 5.1, (900, 0.005): 5.9, (900, 0.01): 6.5, (1024, 0.0): 2.0,
    },
    "random": {
        (512, 0.0): 6.1, (512, 0.001): 6.3, (512, 0.005): 6.3, (512, 0.01): 6.6,
        (768, 0.0): 6.2, (768, 0.001): 6.5, (768, 0.005): 6.6, (768, 0.01): 7.0,
        (900, 0.0): 6.4, (900, 0.001): 6.3, (900, 0.005): 6.7, (900, 0.01): 7.0,
    },
}  # fmt: skip
"""Sub-rounds by (peers, failure rate)."""
TOLERANCE = 0.6
"""Sub-rounds by which a published mean of 10 restarts may differ from ours."""
RESTARTS = 10
PEERS = 1000
"""Of the tree, and of what it is compared with."""
Make = Callable[[np.random.Generator], Mixer]


def repeat(make: Make, failure_rate: float, restarts: int, seed: int, **options: Any) -> list[Mixed]:
    """So many independent runs of one way of mixing."""
    generators = [np.random.default_rng([seed, restart]) for restart in range(restarts)]
    return [mix(make(generator), failure_rate, generator, **options) for generator in generators]


def paper_grid(count: int) -> Make:
    """The grid of the paper's experiment."""
    return lambda generator: PaperGrid(count, generator, PAPER_SHAPE)


def paper_random(count: int) -> Make:
    """The random groups of the paper's experiment."""
    return lambda generator: PaperRandom(count, generator, GROUP_SIZE)


def cells(count: int) -> Make:
    """Random groups as the product draws them."""
    return lambda generator: Cells(count, generator, cells_for(count, GROUP_SIZE), GROUP_SIZE)


def against_paper(batches: int) -> Section:
    """The paper's experiment, ``batches`` times with other seeds, and `Cells` in the same situations."""
    section = Section(
        "Moshpit: sub-rounds until the variance is below 1e-9, groups of 32; in brackets means of 10 restarts",
        ("peers, failure rate", "published grid", "the same", "published random", "the same", "the product's random"),
    )
    furthest = 0.0
    for count, rate in itertools.product((512, 768, 900, 1024), (0.0, 0.001, 0.005, 0.01, 0.1)):
        row: list[object] = [f"{count}, {rate:g}"]
        for name, make in (("grid", paper_grid(count)), ("random", paper_random(count))):
            published = PUBLISHED[name].get((count, rate))
            means = [_sub_rounds(make, rate, seed) for seed in range(batches)]
            section.results[f"{name}, {count}, {rate:g}"] = {"published": published, "means": means}
            row += [published or "", f"{np.mean(means):.2f} ({min(means):.1f} to {max(means):.1f})"]
            if published is not None:
                furthest = max(furthest, abs(float(np.mean(means)) - published))
        section.rows.append((*row, f"{_sub_rounds(cells(count), rate, 0):.1f}"))
    section.findings.append(Finding("furthest from a published figure", furthest, "sub-rounds", TOLERANCE))
    return section


def _sub_rounds(make: Make, rate: float, seed: int) -> float:
    """The mean over restarts, as the paper gives it."""
    return float(np.mean([one.sub_rounds for one in repeat(make, rate, RESTARTS, seed)]))


def contraction(restarts: int) -> Section:
    """By how much random groups of any size shrink the variance in a sub-round, against (r - 1) / N + r / N**2."""
    section = Section(
        "Random groups: what is left of the variance after a sub-round, against (r - 1) / N + r / N**2",
        ("peers", "groups", "formula", "measured, of it"),
    )
    for count, num_cells in ((512, 16), (1024, 32), (1024, 57), (4000, 60)):
        ratios, expected = [], []
        for seed in range(restarts):
            generator = np.random.default_rng([seed, count])
            mixer = Cells(count, generator, num_cells, group_size=count)
            groups = len(mixer.groups(0, list(range(count))))
            held = mix(mixer, 0.0, generator, values=256, most=3).variances
            ratios += [after / before for before, after in itertools.pairwise(held)]
            expected.append((groups - 1) / count + groups / count**2)
        ratio = float(np.mean(ratios) / np.mean(expected))
        section.rows.append((count, num_cells, f"{np.mean(expected):.5f}", f"{ratio:.4f}"))
        section.results[f"{count} peers, {num_cells} groups"] = ratio
    furthest = max(section.results.values(), key=lambda ratio: abs(ratio - 1))
    section.findings.append(Finding("variance after a round of random groups", furthest, "the formula's", 1.05))
    return section


def trees(restarts: int) -> Section:
    """A tree with delegates against mixing for as many sub-rounds, and until all agree."""
    section = Section(
        f"A tree with delegates against mixing: {PEERS} peers, groups of {GROUP_SIZE}",
        ("failure rate, way", "sub-rounds", "vectors sent", "most", "spread left", "off the mean", "missed", "lost"),
    )
    levels = len(level_cells(PEERS, GROUP_SIZE))
    for rate in (0.0, 0.01, 0.1):
        for tries in (1, 2, 3):
            generators = [np.random.default_rng([4, seed]) for seed in range(restarts)]
            found = [climb(PEERS, GROUP_SIZE, rate, tries, generator) for generator in generators]
            means = {name: float(np.mean([asdict(one)[name] for one in found])) for name in Climbed.__annotations__}
            _add(section, f"{rate:g}, tree, {tries} tried", {**means, "spread": 0.0})
        for name, make in (("grid", paper_grid(PEERS)), ("random", cells(PEERS))):
            for way, most in (("as long", levels), ("to the end", 60)):
                mixed = repeat(make, rate, restarts, 4, most=most)
                means = {what: float(np.mean([getattr(one, what) for one in mixed])) for what in ("sub_rounds", "sent")}
                spread = math.sqrt(float(np.mean([one.variances[-1] for one in mixed])))
                lost = {"missed": 0.0, "lost": 0.0, "offset": 0.0, "most_sent": means["sent"]}
                _add(section, f"{rate:g}, {name}, {way}", {**means, **lost, "spread": spread})
    return section


def _add(section: Section, name: str, found: dict[str, float]) -> None:
    section.results[name] = found
    section.rows.append(
        (
            name, f"{found['sub_rounds']:.1f}", f"{found['sent']:.2f}", f"{found['most_sent']:.1f}",
            f"{found['spread']:.1e}", f"{found['offset']:.1e}", f"{found['missed']:.2%}", f"{found['lost']:.3%}",
        )
    )  # fmt: skip


def main() -> int:
    """Measure and report."""
    parser = arguments(__doc__, "one batch, one restart")
    parser.add_argument("--batches", type=int, default=2, help="times that the paper's 10 restarts are repeated")
    parser.add_argument("--restarts", type=int, default=5, help="runs of everything else")
    options = parser.parse_args()
    if options.quick:
        options.batches = options.restarts = 1
    parts = {
        "against_paper": partial(against_paper, options.batches),
        "contraction": partial(contraction, options.restarts),
        "trees": partial(trees, 2 * options.restarts),
    }
    return run("moshpit", parts, options)


if __name__ == "__main__":
    sys.exit(main())
