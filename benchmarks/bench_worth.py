"""How surely audits of worth tell work from what only looks like it, after `LEAST_AUDITS` audits of a peer.

Each row is a training of its own: one peer works, another one does what the row says. Standard errors of the mean above
0, for the peer that works and for the other; from 3 on, work is proved. See `tests.support.sim.worth` for the model.

    python -m benchmarks.bench_worth --json results/worth.json
"""

from __future__ import annotations

import sys
from functools import partial

import torch

from benchmarks.findings import Finding, Section, run
from benchmarks.harness import Measured, arguments
from p2ptrain.training.worth import LEAST_AUDITS, LEAST_DEVIATIONS
from tests.support.sim.worth import PRETENDERS, SAMPLES, AuditedTraining, Peer

FAST = 12
"""How many times as many samples the fast peer reads."""


def compare(num_seeds: int, audits: int) -> Section:
    """All kinds of peers, over some seeds."""
    section = Section(
        f"Standard errors above 0 after {audits} audits, {num_seeds} seeds: median (least to most)",
        ("the other peer", "the peer that works", "the other peer's"),
    )
    names = ("works", f"works {FAST} times as much", "claims 4 times its work", *PRETENDERS)
    least, most = float("inf"), float("-inf")
    for name in names:
        honest, others = list[float](), list[float]()
        for seed in range(num_seeds):
            training = AuditedTraining(seed)
            fast: Peer = partial(training.work, samples=FAST * SAMPLES)
            kinds: dict[str, tuple[Peer, int]] = {
                names[0]: (training.work, SAMPLES),
                names[1]: (fast, FAST * SAMPLES),
                names[2]: (training.work, 4 * SAMPLES),
            }
            peer, claim = kinds[name] if name in kinds else (partial(PRETENDERS[name], training), SAMPLES)
            training.play(audits, [training.work, peer], [SAMPLES, claim])
            scores = training.audits.scores
            honest.append(scores["peer 0"].deviations)
            others.append(scores["peer 1"].deviations)
        cells = [Measured(tuple(values)) for values in (honest, others)]
        section.results[name] = cells[1].to_json()
        section.rows.append((name, *(f"{c.median:.1f} ({min(c.values):.1f} to {max(c.values):.1f})" for c in cells)))
        least = min(least, *honest, *(others if name in names[:2] else ()))
        most = max(most, *(others if name not in names[:3] else ()), float("-inf"))
    section.findings.append(Finding("least surely proved work", LEAST_DEVIATIONS / least, "of what proves it", 1.0))
    section.findings.append(Finding("most of what is no work", most / LEAST_DEVIATIONS, "of what proves it", 1.0))
    return section


def main() -> int:
    """Train and report."""
    parser = arguments(__doc__, "one seed, 16 audits")
    parser.add_argument("--seeds", type=int, default=5, help="trainings of each kind")
    options = parser.parse_args()
    audits = LEAST_AUDITS
    if options.quick:
        options.seeds, audits = 1, 16
    torch.set_num_threads(1)
    return run("worth", {"deviations": partial(compare, options.seeds, audits)}, options)


if __name__ == "__main__":
    sys.exit(main())
