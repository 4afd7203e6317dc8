"""A swarm of real processes on this machine, for ``p2ptrain up``.

The bootstrap peer writes its link, trainers join with it, and the live view reads the directory. At the end the
trainers drain, then the bootstrap peer, and the trainers' summaries are combined.
"""

from __future__ import annotations

import asyncio
import contextlib
import shlex
import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from p2ptrain.cli.manifests import LINK_FILE
from p2ptrain.cli.plan import Plan
from p2ptrain.cli.screen.live import Goal, SwarmScreen, stop_on_signals
from p2ptrain.cli.screen.table import printable
from p2ptrain.cli.supervise import Child, Supervisor
from p2ptrain.disk import replace_file
from p2ptrain.errors import DeadlineError, P2PTrainError
from p2ptrain.network.link import SwarmLink
from p2ptrain.node.reports.summary import SUMMARY_FILE, SwarmSummary, combine, read_summary, to_json
from p2ptrain.status.formats import human_bytes, human_count, human_loss
from p2ptrain.tasks import Tasks

READY_SECONDS = 60.0
DRAIN_SECONDS = 60.0
PAGE_PORT = 8080


async def run_swarm(plan: Plan, summary_file: Path | None) -> int:
    """Run a swarm from its start to its summary; return 0, or 130 if a second signal ended the run.

    Args:
        summary_file: Another path for the summary as JSON.

    Raises:
        P2PTrainError: The swarm did not start, or every trainer failed.
    """
    task = asyncio.current_task()
    assert task is not None
    async with Supervisor() as supervisor:

        def end_at_once() -> None:
            supervisor.kill_all()
            task.cancel()

        stop = stop_on_signals(end_at_once)
        try:
            with SwarmScreen(sys.stdout, plan.goal, draws=plan.chat is None) as view:
                view.say(f"run directory: {plan.run_dir}")
                if plan.manifest.private is not None:
                    texts = [(path.stem, path.with_suffix(".txt").stat().st_size) for path in plan.trainers]
                    view.say(f"text of its own: {', '.join(f'{name} {human_bytes(size)}' for name, size in texts)}")
                trainers = await _train(plan, supervisor, stop, view)
            _report(plan, trainers, summary_file, interrupted=stop.is_set())
            if plan.chat is None:
                await _show_result(plan, trainers)
        except asyncio.CancelledError:
            task.uncancel()
            return 130
        return 0


async def _train(plan: Plan, supervisor: Supervisor, stop: asyncio.Event, view: SwarmScreen) -> list[Child]:
    """Start the peers, wait for the end of the run, and drain them; return the trainers."""
    bootstrap = await supervisor.start("bootstrap", _peer_command(plan.bootstrap), plan.run_dir / "bootstrap.log")
    text = await _first_link(plan.run_dir / "bootstrap", bootstrap, stop)
    trainers: list[Child] = []
    if text is not None:
        link = SwarmLink.parse(text)
        page = await _start_page(plan, supervisor, link.plain) if plan.monitor else None
        if page is not None:
            view.say(f"status page: {page[1]}")
        view.say(f"look at it from elsewhere with: p2ptrain status {shlex.quote(str(link.plain))}")
        for path in plan.trainers:
            command = [*_peer_command(path), "--link", str(link)]
            trainers.append(await supervisor.start(path.stem, command, path.with_suffix(".log")))
        async with Tasks() as tasks:
            watcher = tasks.call(view.follow(link, plan.run_dir, trainers), "the live view")
            if plan.chat is not None:
                tasks.call(_chat(link, plan.chat, stop, view), "chat")
            await _wait_for_end(plan.goal, supervisor, trainers, stop)
            view.drain(trainers)
            await supervisor.drain(trainers, DRAIN_SECONDS)
            await supervisor.wait_all(trainers)
            error = watcher.exception() if watcher.done() else None
        view.show(None, trainers)
        if error is not None:
            view.say(f"the live view ended early: {error}")
        if page is not None:
            if page[0].exit_code is not None:
                view.say(f"the status page ended early: {page[0].last_error()}")
            await supervisor.drain([page[0]], DRAIN_SECONDS)
    await supervisor.drain([bootstrap], DRAIN_SECONDS)
    return trainers


async def _chat(link: SwarmLink, options: Sequence[str], stop: asyncio.Event, view: SwarmScreen) -> None:
    """Chat on this terminal until it ends, which ends the swarm."""
    words = [shlex.quote(str(link)), *map(shlex.quote, options)]
    view.say(
        f"serving; talk with the model from elsewhere, or serve OpenAI's API, with:\n  p2ptrain chat {' '.join(words)}"
    )
    view.say(f"  p2ptrain serve {' '.join(words)}")
    command = [sys.executable, "-m", "p2ptrain", "chat", str(link), "--wait", str(READY_SECONDS), *options]
    # Ctrl-C ends an answer, and reaches this process, too.
    asyncio.get_running_loop().add_signal_handler(signal.SIGINT, lambda: None)
    child = await asyncio.create_subprocess_exec(*command)
    try:
        await child.wait()
    finally:
        if child.returncode is None:
            child.terminate()
            await child.wait()
        stop.set()  # The next signal ends the swarm at once.
        asyncio.get_running_loop().add_signal_handler(signal.SIGINT, signal.raise_signal, signal.SIGTERM)


async def _start_page(plan: Plan, supervisor: Supervisor, link: SwarmLink) -> tuple[Child, str]:
    """Start the status page; return its process and its URL."""
    port = _free_port(PAGE_PORT)
    command = [sys.executable, "-m", "p2ptrain", "monitor", str(link), "--port", str(port)]
    history = ["--db", str(plan.run_dir / "monitor.sqlite")]
    child = await supervisor.start("monitor", [*command, *history], plan.run_dir / "monitor.log")
    return child, f"http://127.0.0.1:{port}/"


def _free_port(wanted: int) -> int:
    for port in (wanted, 0):
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)) as listener:
            return int(listener.getsockname()[1])
    return wanted


def _peer_command(role_file: Path) -> list[str]:
    return [sys.executable, "-m", "p2ptrain", "peer", str(role_file)]


async def _first_link(run_dir: Path, bootstrap: Child, stop: asyncio.Event) -> str | None:
    """Return the link that the bootstrap peer writes once it is reachable; None if a signal came first."""
    path, deadline = run_dir / LINK_FILE, time.monotonic() + READY_SECONDS
    path.unlink(missing_ok=True)
    while not stop.is_set():
        if path.exists():
            return path.read_text(encoding="utf-8").strip()
        if bootstrap.exit_code is not None:
            raise bootstrap.failure()
        if time.monotonic() >= deadline:
            raise DeadlineError(f"the bootstrap peer was not ready after {READY_SECONDS:.0f} s: see {bootstrap.log}")
        await asyncio.sleep(0.1)
    return None


async def _wait_for_end(goal: Goal, supervisor: Supervisor, trainers: list[Child], stop: asyncio.Event) -> None:
    async with Tasks() as tasks:
        ends = [tasks.call(stop.wait(), "stop"), tasks.call(supervisor.wait_all(trainers), "trainers")]
        await asyncio.wait(ends, timeout=60 * goal.minutes or None, return_when=asyncio.FIRST_COMPLETED)


def _report(plan: Plan, trainers: list[Child], summary_file: Path | None, *, interrupted: bool) -> None:
    found = {child.name: read_summary(plan.run_dir / child.name / SUMMARY_FILE) for child in trainers}
    summary = combine({name: values for name, values in found.items() if values is not None}, len(plan.trainers))
    # SIGTERM ends a trainer that is still starting.
    failed = [child for child in trainers if child.exit_code not in (0, -signal.SIGTERM if interrupted else 0)]
    if failed and len(failed) == len(trainers):
        # An explained error comes before a kill, whose exit code is negative.
        raise max(failed, key=lambda child: child.exit_code or 0).failure()
    for child in failed:
        print(f"p2ptrain: warning: {child.failure()}", file=sys.stderr)
    if plan.chat is None:
        print(f"\n{to_text(summary)}")
    for path in (plan.run_dir / SUMMARY_FILE, *([summary_file] if summary_file is not None else [])):
        path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, to_json(summary))


async def _show_result(plan: Plan, trainers: Sequence[Child]) -> None:
    """Print some text by the trained model, and the commands that go on from here."""
    from p2ptrain.cli.commands.serving.sample import sample

    if not (saved := [child.name for child in trainers if any((plan.run_dir / child.name).glob("checkpoints/*"))]):
        return
    of = shlex.quote(str(plan.run_dir if plan.manifest.in_stages else plan.run_dir / saved[0]))
    export = f"export the model for transformers:  p2ptrain checkpoint export {of} my-model"
    commands = ["train with others:                  p2ptrain init my-swarm && p2ptrain seed my-swarm"]
    if plan.is_own_family:
        commands.insert(0, export)
    try:
        text = await sample(plan.run_dir, saved[0], plan.manifest, plan.weights)
        print("\nwhat it writes now:\n" + "\n".join(f"  | {printable(line)}" for line in text.splitlines()))
        commands.append(
            "talk with the model as it learns:   join that swarm with --serve, then p2ptrain generate LINK TEXT"
        )
    except P2PTrainError as error:
        print(f"\nno sample of the model: {error}")
    print("\n" + "\n".join(commands))


def to_text(summary: SwarmSummary) -> str:
    states = summary.states
    num_stages = len({stage for stage, _ in states})
    equal = f"equal in each of {num_stages} stages" if num_stages > 1 else "all equal"
    digests = "none" if not states else equal if len(states) == num_stages else "they differ"
    shown = " ".join(f"{stage}:{digest[:8]}" if summary.stages else digest[:8] for stage, digest in states)
    before, after = human_loss(summary.heldout_loss_before), human_loss(summary.heldout_loss_after)
    tokens, rate = human_count(summary.tokens), human_count(summary.tokens_per_second)
    sent, received = human_bytes(summary.bytes_sent), human_bytes(summary.bytes_received)
    return (
        f"held-out loss     {before} -> {after} nats\n"
        f"throughput        {rate} tokens/s, {tokens} tokens in {summary.seconds:.0f} s\n"
        f"rounds            {summary.rounds_committed} committed, {summary.rounds_aborted} aborted\n"
        f"traffic           {sent} sent, {received} received\n"
        f"state digests     {f'{digests} {shown}'.rstrip()}\n"
        f"peers             {summary.reporting_peers} of {summary.peers} ended in good order"
    )
