"""``p2ptrain simulate RUN_TOML --sites N``

Train N sites of a private swarm in this process, to try a strategy before the swarm starts. Local steps, codec, rule
and outer optimizer are those of the swarm; its messages, votes and failures are left out.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
from pathlib import Path
from typing import TYPE_CHECKING

from p2ptrain.errors import UsageError

if TYPE_CHECKING:
    from p2ptrain.training.simulation.rounds import RoundReport

ROUNDS = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("manifest", type=Path, metavar="RUN_TOML", help="the swarm's run.toml, with [private]")
    parser.add_argument("--sites", type=int, default=10, metavar="N", help="number of sites (default 10)")
    parser.add_argument(
        "--partition", default="iid", metavar="FORM",
        help="how samples are dealt: iid (default), dirichlet:ALPHA by label, or sizes:zipf",
    )  # fmt: skip
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--data", type=Path, metavar="DIR_OR_FILE", help="text for a language model")
    source.add_argument("--script", type=Path, metavar="FILE", help="Python file whose task(manifest) returns the task")
    parser.add_argument("--rounds", type=int, metavar="N", help=f"rounds (default those of RUN_TOML, or {ROUNDS})")
    parser.add_argument("--seed", type=int, default=1, metavar="N", help="of all that is drawn (default 1)")
    parser.add_argument("--mbit", type=float, default=100.0, help="links' Mbit/s for the time column (default 100)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write all rounds and sites here")


def run(arguments: argparse.Namespace) -> int:
    """Train, and print a line for each round.

    Raises:
        UsageError: The manifest is not private, or an option does not fit it.
        DivergedError: A site's training gives values that are not finite.
    """
    from p2ptrain.cli.manifests import load_manifest
    from p2ptrain.codecs import warm_up
    from p2ptrain.disk import replace_file
    from p2ptrain.training.simulation.partition import partition
    from p2ptrain.training.simulation.rounds import Simulation
    from p2ptrain.training.simulation.tasks import script_task, text_task

    manifest = load_manifest(arguments.manifest)
    rounds = manifest.training.rounds or ROUNDS if arguments.rounds is None else arguments.rounds
    if rounds < 1 or not arguments.mbit > 0 or arguments.seed < 0:
        raise UsageError("--rounds and --mbit must be above 0, and --seed at least 0")
    if arguments.json is not None and (arguments.json.is_dir() or not arguments.json.parent.is_dir()):
        raise UsageError(f"--json {arguments.json}: give a file in a folder that is there")
    warm_up()
    script, text = arguments.script, arguments.data
    task = script_task(script, manifest) if script else text_task(manifest, f"path:{text}")
    parts = partition(arguments.partition, task.labels, arguments.sites, arguments.seed)
    simulation = Simulation(manifest, task, parts, arguments.seed)
    sites = simulation.sites
    sizes = sorted(len(site.train) for site in sites)
    print(
        f"{len(sites)} sites, {arguments.partition}, seed {arguments.seed}: {sizes[0]} to {sizes[-1]} training samples,"
        f" median {sizes[len(sizes) // 2]}; {simulation.state.layout.num_values} shared values"
    )
    privacy = "  ε, least to most" if manifest.differential_privacy else ""
    print(f"{'round':>5}  {'loss':>8}  {task.metric_name + ' (95 %)':>20}  {'sites, worst to best':>22}  "
          f"{'sent, most':>12}  {'link time':>10}  {'sites':>5}{privacy}")  # fmt: skip
    gc.freeze()  # Garbage collections in a round do not visit what is loaded, such as torch.
    seconds, reports = 0.0, []
    try:
        for report in simulation.run(rounds):
            seconds += 8 * max(report.sent_bytes.values()) / (arguments.mbit * 1e6)
            reports.append(report)
            print(_line(report, seconds, task.metric_name), flush=True)
    finally:  # Also what a run gave that diverged, or was interrupted.
        if arguments.json is not None:
            about = {"partition": arguments.partition, "seed": arguments.seed, "samples": [len(s.train) for s in sites]}
            payload = {**about, "metric": task.metric_name, "rounds": [_as_json(each) for each in reports]}
            replace_file(arguments.json, json.dumps(payload, indent=1).encode())
    if len(reports) < rounds:
        print("ended early: the privacy budget of too few sites allows another step")
    print("next: change a strategy in run.toml and compare, or start the swarm with 'p2ptrain seed'")
    return 0


def _line(report: RoundReport, seconds: float, metric: str) -> str:
    pooled, means = report.pooled, sorted(report.by_site.values(), reverse=metric == "loss")
    value = "not finite" if pooled is None else f"{pooled.mean:.4f}"
    if pooled is not None and pooled.interval is not None:
        value += f" ± {pooled.interval:.4f}"
    spread = f"{means[0]:.4f} to {means[-1]:.4f}" if means else ""
    sent = max(report.sent_bytes.values()) / 1e6
    spent = report.epsilon.values()
    least, most = (math.ceil(100 * each) / 100 for each in (min(spent, default=0), max(spent, default=0)))
    return (
        f"{report.round:5d}  {report.loss:8.4f}  {value:>20}  {spread:>22}  {sent:9.3f} MB  {seconds:8.2f} s"
        f"  {len(report.sent_bytes):5d}{f'  {least:.2f} to {most:.2f}' if spent else ''}"
    )


def _as_json(report: RoundReport) -> dict[str, object]:
    pooled = report.pooled
    return {
        "round": report.round, "loss": report.loss if math.isfinite(report.loss) else None,
        "mean": pooled.mean if pooled else None,
        "interval": pooled.interval if pooled else None, "by_site": report.by_site, "sent_bytes": report.sent_bytes,
        "left_out": report.left_out, **({"epsilon": report.epsilon} if report.epsilon else {}),
    }  # fmt: skip
