"""Sites of an example: processes of this machine that train in one swarm; their results as figures and as a plot.

An example calls `main` with a function that trains one site. Its command line is the same in all examples:

    python -m examples.hospitals.train --seed 2 --plot curves.svg  # all sites as processes of this machine
    python -m examples.hospitals.train --site 0                    # one site: site 0 starts a swarm, prints its link
    python -m examples.hospitals.train --site 2 'p2ptrain://…'     # another one
    python -m examples.hospitals.train --keep runs                 # keeps each site's run directory, to export from

Sites listen on loopback; `--listen /ip4/0.0.0.0/tcp/0` lets those of other machines in.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import multiprocessing
import signal
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from operator import itemgetter
from queue import Queue
from typing import Any

import torch

from p2ptrain import Manifest, Swarm

LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)
DEADLINE_SECONDS = 600  # Default; twice what an example may take on two idle cores.
Train = Callable[[Swarm, int, int], Any]
"""Trains one site: takes its swarm, its number and the seed; returns its result."""
Curves = dict[str, list[float]]
"""A measurement after each round, by the name of how the model was trained. A single value is not drawn."""
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(
    ["torch._dynamo", "hivemind", "p2ptrain.node.run", "sklearn.metrics", "sklearn.datasets"]
)


def main(
    doc: str,
    train: Train,
    manifests: Sequence[Mapping[str, Any]],
    count: int,
    compare: Callable[[dict[str, list[Any]], int], Curves],
    measure: str,
) -> None:
    """Parse the command line, and run the sites; print the last value of each curve.

    Ctrl-C, SIGTERM and the deadline end all sites, and the exit status is not 0.

    Args:
        doc: Of the example.
        train: Its function for one site.
        manifests: Of the swarms, which run one after another.
        count: Of sites.
        compare: Makes curves of the sites' results, by the name of the manifest, and of the seed.
        measure: Name and unit of the measurement, for the plot.
    """
    parser = command_line(doc)
    parser.add_argument("link", nargs="?", help="with --site: the swarm to join; without it, the site starts one")
    parser.add_argument("--site", type=int, choices=range(count), help="be this site alone")
    parser.add_argument("--listen", default=LOOPBACK[0], help="with --site: multiaddr to listen on")
    parser.add_argument("--keep", metavar="DIR", default="", help="keep run directories, in DIR/SWARM/site-N")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.site is not None:
        where = (arguments.listen,)
        manifest = Manifest.model_validate(manifests[0])
        with (
            run_directory(arguments.keep, manifest.name, arguments.site) as folder,
            Swarm.join(arguments.link, run_dir=folder, listen=where)
            if arguments.link
            else Swarm.create(manifest, run_dir=folder, listen=where) as swarm,
        ):
            print(f"others join with: --seed {arguments.seed} --site N '{swarm.link}'", flush=True)
            print(train(swarm, arguments.site, arguments.seed))
        return
    end_by(arguments.deadline)
    curves = compare(run_all(train, manifests, count, arguments.seed, arguments.keep), arguments.seed)
    every = manifests[0]["training"]["every"]
    report(curves, arguments.plot, doc, (f"rounds of {every} local steps", measure))


def command_line(doc: str) -> argparse.ArgumentParser:
    """Return a parser of the options that all examples have, for an example with this docstring."""
    parser = argparse.ArgumentParser(description=doc.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=1, help="of the data and its division")
    parser.add_argument(
        "--plot", metavar="FILE", action="append", default=[],
        help="draw the curves, as the file's suffix says; needs matplotlib; may be repeated",
    )  # fmt: skip
    parser.add_argument("--deadline", type=int, default=DEADLINE_SECONDS, metavar="SECONDS", help="end all peers then")
    return parser


def end_by(deadline_seconds: int) -> None:
    """Make SIGTERM and the deadline end this process by `SystemExit`, so that it ends its peers."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    signal.signal(signal.SIGALRM, lambda *_: sys.exit(f"not done within {deadline_seconds} seconds"))
    signal.alarm(deadline_seconds)


def report(curves: Curves, plots: Sequence[str], doc: str, axes: tuple[str, str], at: Sequence[int] = ()) -> None:
    """Print the last value of each curve, and draw the curves to files.

    Args:
        curves: See `Curves`.
        plots: Paths; none draws nothing.
        doc: Of the example; its first line is the title.
        axes: Names of the horizontal axis and of the vertical one.
        at: Where the points of a curve stand horizontally; by default 1, 2, …
    """
    for name, curve in curves.items():
        print(f"{name} = {curve[-1]:.4f}")
    for path in plots:
        draw(curves, path, doc.partition("\n")[0], axes, at)


def run_directory(keep: str, swarm: str, site: int) -> contextlib.AbstractContextManager[str]:
    """Return a site's run directory: below ``keep``, or if that is empty one that ends with the block."""
    return contextlib.nullcontext(f"{keep}/{swarm}/site-{site}") if keep else tempfile.TemporaryDirectory()


def run_all(
    train: Train, manifests: Sequence[Mapping[str, Any]], count: int, seed: int, keep: str = ""
) -> dict[str, list[Any]]:
    """Run each swarm with all its sites as processes; return the sites' results by the name of the manifest."""
    found: dict[str, list[Any]] = {}
    with PROCESSES.Manager() as manager, PROCESSES.Pool(count) as pool:
        for manifest in map(Manifest.model_validate, manifests):
            run = functools.partial(run_site, train, manifest, manager.Queue(), seed, count, keep)
            found[manifest.name] = [
                result for _, result in sorted(pool.imap_unordered(run, range(count)), key=itemgetter(0))
            ]
    return found


def run_site(
    train: Train, manifest: Manifest, links: Queue[str], seed: int, count: int, keep: str, site: int
) -> tuple[int, Any]:
    """Run one site; return its number and its result. Site 0 starts the swarm, and the others join it."""
    torch.set_num_threads(1)
    with (
        run_directory(keep, manifest.name, site) as folder,
        Swarm.create(manifest, run_dir=folder, listen=LOOPBACK)
        if site == 0
        else Swarm.join(links.get(), run_dir=folder, listen=LOOPBACK) as swarm,
    ):
        for _ in range(count - 1 if site == 0 else 0):
            links.put(swarm.link)
        return site, train(swarm, site, seed)


def in_parallel(function: Callable[..., Any], tasks: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Call a function with each tuple of arguments, in two processes; return the results in order."""
    with PROCESSES.Pool(2, torch.set_num_threads, (1,)) as pool:
        return pool.starmap(function, tasks, chunksize=1)


def draw(curves: Curves, path: str, title: str, axes: tuple[str, str], at: Sequence[int]) -> None:
    """Draw the curves to a file; see `report`."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot, ticker

    figure, axis = pyplot.subplots(figsize=(7.5, 3.8), layout="constrained")
    for name, curve in curves.items():
        if len(curve) > 1:
            axis.plot(at or range(1, len(curve) + 1), curve, label=name.replace("_", " "), linewidth=1.5)
    axis.set_title(title.rstrip("."), fontsize=10, loc="left")
    axis.xaxis.set_major_locator(ticker.MaxNLocator(integer=True))
    axis.set_xlabel(axes[0])
    axis.set_ylabel(axes[1])
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(alpha=0.25)
    axis.legend(frameon=False, loc="center left", bbox_to_anchor=(1, 0.5))
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "p2ptrain"}):
        figure.savefig(path, metadata={"Date": None} if path.endswith(".svg") else None)
