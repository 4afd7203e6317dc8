"""``p2ptrain up``

Run a whole swarm on this machine, offline: one bootstrap peer and a few trainers, each a real process with its own
network daemon, training a small model on text that is there already. Shows a live table, serves a status page on this
machine, and ends with a summary, some text by the trained model, and the commands that go on from there.
In a private swarm, whose manifest has [private], each peer is a site with a part of the text for itself.
Ctrl-C ends it in good order; a second one ends it at once.
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from p2ptrain.errors import UsageError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--peers", type=int, default=3, metavar="N", help="trainers (default 3)")
    end = parser.add_argument_group("when it ends")
    end.add_argument("--minutes", type=float, metavar="N", help="after this time (default 3, unless --rounds)")
    end.add_argument("--rounds", type=int, metavar="N", help="after so many rounds")
    what = parser.add_argument_group("what is trained")
    what.add_argument("--manifest", type=Path, metavar="FILE", help="a run.toml as 'p2ptrain init' writes it")
    what.add_argument("--weights", type=Path, metavar="DIR", help="the pretrained model, if the manifest names one")
    what.add_argument("--every", type=int, metavar="H", help="inner steps a round; 1 (the default) averages gradients")
    what.add_argument("--stages", type=int, metavar="N", help="cut the model into so many stages; every peer hosts one")
    what.add_argument("--codec", help="fp32, fp16, bf16, int8, int4 or topk")
    what.add_argument("--data", metavar="SOURCE", help="stdlib, datasets:NAME, or the path of a file or folder")
    what.add_argument(
        "--partition", metavar="FORM",
        help="how a private swarm's sites share the text: iid (default), dirichlet:ALPHA by folder, or sizes:zipf",
    )  # fmt: skip
    what.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="any other value, such as model.layers=6"
    )
    serving = parser.add_argument_group("serving")
    serving.add_argument(
        "--serve", action="store_true",
        help="serve a pretrained model in 2 stages and talk with it, instead of training; with --manifest: beside it",
    )  # fmt: skip
    serving.add_argument(
        "--model", metavar="MODEL", help="with --serve: smollm2 (default), the folder of a model, or hub:OWNER/NAME"
    )
    where = parser.add_argument_group("how it runs")
    where.add_argument("--device", metavar="auto|cpu|cuda:N", help="where the trainers compute (default auto)")
    where.add_argument(
        "--threads", type=int, metavar="N", help="CPU threads of each trainer (default: the cores, shared out)"
    )
    where.add_argument("--run-dir", type=Path, metavar="DIR", help="where to keep its files (default runs/up-TIME)")
    where.add_argument("--summary", type=Path, metavar="FILE", help="write the summary as JSON, too")
    where.add_argument("--no-monitor", action="store_true", help="do not serve the status page")


def run(arguments: argparse.Namespace) -> int:
    if arguments.peers < 1:
        raise UsageError(f"--peers {arguments.peers}: a swarm has at least 1 trainer")
    if arguments.model is not None and (not arguments.serve or arguments.manifest is not None):
        raise UsageError(
            "--model goes with --serve, and without --manifest; to train from a pretrained model, see"
            " 'p2ptrain init --model'"
        )
    for name in ("minutes", "rounds"):
        value = getattr(arguments, name)
        if value is not None and not value > 0:
            raise UsageError(f"--{name} {value}: give a number above 0")
    if arguments.summary is not None:
        _check_writable(arguments.summary)
    from p2ptrain.cli.local_swarm import run_swarm
    from p2ptrain.cli.plan import make_plan
    from p2ptrain.cli.running import run_async

    return run_async(run_swarm(make_plan(arguments), arguments.summary))


def _check_writable(path: Path) -> None:
    """Raise `UsageError` before the training if the summary cannot be written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir() or not os.access(path.parent, os.W_OK):
        raise UsageError(f"--summary {path}: a file cannot be written there; choose another path")
