"""`Swarm`: the API for existing training scripts."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sized
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from p2ptrain.errors import UsageError
from p2ptrain.manifest import LoraSpec, Manifest, SignedManifest
from p2ptrain.network.identity import Identity
from p2ptrain.network.libp2p.transport import Libp2pSettings
from p2ptrain.network.link import SwarmLink
from p2ptrain.node.peer import Pace, Peer, PeerOptions
from p2ptrain.node.signals import SigtermExit
from p2ptrain.node.thread import LoopThread
from p2ptrain.runtime import Runtime, real_runtime
from p2ptrain.training.checkpoints import SavePolicy

if TYPE_CHECKING:
    import torch

    from p2ptrain.pipeline.client.remote_model import PipelineModule
    from p2ptrain.pipeline.client.sender import MicrobatchSender
    from p2ptrain.pipeline.plan import PipelinePlan
    from p2ptrain.training.bridge import Bridge
    from p2ptrain.training.checkpoints.saving import Saver
    from p2ptrain.training.data.sampler import SwarmSampler
    from p2ptrain.training.optimizer import SwarmOptimizer
    from p2ptrain.training.state.shared_state import SharedState
    from p2ptrain.training.sync.synchronizer import Synchronizer

logger = logging.getLogger(__name__)


class Swarm:
    """One peer of a swarm inside this process; a context manager. Make it with `join` or `create`.

    At its end, the ``with`` block leaves the swarm in good order, and saves if there is a ``run_dir``. This holds for
    errors, Ctrl-C and SIGTERM, too. SIGTERM raises `SystemExit` (143) in the block; a second one ends the process at
    once. SIGTERM is not handled if the script has its own handler, or off the main thread; then call `close`.

    ::

        with Swarm.join(link) as swarm:
            opt = swarm.optimizer(model, torch.optim.AdamW(model.parameters(), 3e-4))
            for batch in loader:
                model(**batch).loss.backward()
                opt.step()
                opt.zero_grad()
    """

    def __init__(
        self,
        peer: Peer,
        thread: LoopThread,
        runtime: Runtime,
        resources: contextlib.ExitStack,
        saving: SavePolicy,
    ) -> None:
        """Private: use `join` or `create`."""
        self._saving = saving
        self._sigterm = SigtermExit()
        self._saver: Saver | None = None
        self._peer = peer
        self._thread = thread
        self._runtime = runtime
        self._resources = resources
        self._optimizer: SwarmOptimizer | None = None
        self._module: PipelineModule | None = None

    @classmethod
    def join(
        cls,
        link: str,
        *,
        run_dir: str | Path | None = None,
        name: str = "script",
        listen: tuple[str, ...] = ("/ip4/0.0.0.0/tcp/0",),
        saving: SavePolicy | None = None,
    ) -> Swarm:
        """Join the swarm that a link names.

        With ``run_dir``, a restarted script resumes with the swarm, even after SIGKILL: `optimizer` restores the newest
        checkpoint. Checkpoints are written as ``saving`` says, by `save`, and by `close`, which the end of a ``with``
        block calls.

        Args:
            link: ``p2ptrain://…`` from the organizer.
            run_dir: Folder of this peer's key and checkpoints; None creates a new identity each time.
            name: Shown to other people.
            listen: Multiaddrs to listen on.
            saving: Interval of background saves, and number of checkpoints kept; None saves every ten minutes and
                keeps three.

        Raises:
            LinkError: The link is malformed.
            BootstrapError: No peer of the link answers.
            ManifestError: The manifest is not the one that the link names.
            IdentityError: The key is unusable or in use.
        """
        return cls._start(run_dir, name, listen, saving or SavePolicy(), SwarmLink.parse(link), None)

    @classmethod
    def create(
        cls,
        manifest: Manifest,
        *,
        run_dir: str | Path | None = None,
        name: str = "organizer",
        listen: tuple[str, ...] = ("/ip4/0.0.0.0/tcp/0",),
        saving: SavePolicy | None = None,
        directory: str = "",
    ) -> Swarm:
        """Start a swarm with this peer as organizer and first member; `link` invites other peers.

        Args:
            manifest: The swarm's; for the other arguments see `join`.
            directory: Where peers find each other: ``https://…`` of a server such as examples/http_directory.py, or
                empty for their own DHT. The link names it.

        Raises:
            IdentityError: The key is unusable or in use.
            ResourceError: The network daemon does not start.
        """
        return cls._start(run_dir, name, listen, saving or SavePolicy(), None, manifest, directory)

    @classmethod
    def _start(
        cls,
        run_dir: str | Path | None,
        name: str,
        listen: tuple[str, ...],
        saving: SavePolicy,
        link: SwarmLink | None,
        manifest: Manifest | None,
        directory: str = "",
    ) -> Swarm:
        resources, identity = contextlib.ExitStack(), None
        try:
            folder = Path(run_dir) if run_dir is not None else None
            if folder is None:
                identity = Identity.ephemeral()
            else:
                folder.mkdir(parents=True, exist_ok=True)
                identity = Identity.create_or_load(folder / "identity.key")
            signed = SignedManifest.create(manifest, identity) if manifest is not None else None
            runtime = real_runtime("sync", folder)
            resources.callback(runtime.close)
            thread = LoopThread()
            resources.callback(thread.stop)
            settings = Libp2pSettings(listen=listen, auto_nat=True)
            options = PeerOptions("trainer", name, "cpu", folder, settings, directory=directory)
            peer = thread.call(Peer.start(identity, options, runtime, link=link, signed=signed))
        except BaseException:
            resources.close()
            if identity is not None:
                identity.close()
            raise
        resources.callback(lambda: thread.call(peer.close()))
        return cls(peer, thread, runtime, resources, saving)

    @property
    def manifest(self) -> Manifest:
        """The swarm's manifest."""
        return self._peer.manifest

    @property
    def link(self) -> str:
        """The swarm link with which others join through this peer."""
        return str(self._peer.link)

    @property
    def peer_id(self) -> str:
        """This peer's id."""
        return self._peer.identity.peer_id

    def optimizer(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        clip_norm: float = 0.0,
        samples_per_step: int | None = None,
        tokens_per_step: int | None = None,
        schedule: Callable[[int], float] | None = None,
    ) -> SwarmOptimizer:
        """Wrap an optimizer so that its steps are shared with the swarm; the model adopts the swarm's state.

        Args:
            model: The model whose trainable parameters ``optimizer`` updates; all peers need the same shapes.
            optimizer: Any torch optimizer that needs one gradient a step.
            clip_norm: Norm limit of each step's gradient, 0 for none. With ``every = 1`` it limits the averaged
                gradient, and must be the same on all peers. The manifest's limit applies to a script only if it is
                given here.
            samples_per_step: Samples in one local batch; None takes the manifest's local batch.
            tokens_per_step: Tokens in one local batch: the weight of a contribution. None takes ``samples_per_step``
                times the manifest's context; `SwarmOptimizer.count` overrides both batch by batch.
            schedule: Maps the round, counted from 0, to the factor of the learning rates; the same on all peers. None
                keeps the rates constant. It replaces a torch scheduler, which would count this peer's steps alone;
                `SwarmOptimizer.scheduler` serves training loops that step one.

        Raises:
            UsageError: This swarm has an optimizer already, or ``optimizer`` cannot train with a swarm.
            IncompatibleError: Other peers train a model of another shape, or with ``every = 1`` use another optimizer.
            CheckpointError: No checkpoint in ``run_dir`` is intact.
        """
        from p2ptrain.training.bridge import Bridge
        from p2ptrain.training.learning_rate import WrappedOptimizer, by_round
        from p2ptrain.training.optimizer import SwarmOptimizer
        from p2ptrain.training.optimizer_checks import check_optimizer
        from p2ptrain.training.state.initial_state import initial_state

        if self._optimizer is not None:
            raise UsageError("this swarm has an optimizer already: a peer trains one model")
        if isinstance(optimizer, SwarmOptimizer):
            raise UsageError("this is a swarm's optimizer already: give Swarm.optimizer the one that it wraps")
        spec = self.manifest.training
        for oddity in check_optimizer(model, optimizer, spec.every):
            logger.warning("%s", oddity)
        by_step = by_round(schedule, spec.steps_per_round) if schedule else None
        wrapped = WrappedOptimizer(optimizer, by_step, clip_norm)
        state = initial_state(model, wrapped, self.manifest, self._peer.swarm)
        samples = samples_per_step or spec.local_batch
        tokens = tokens_per_step or samples * self.manifest.model.context
        bridge = Bridge(self._thread.loop)

        def wrap(synchronizer: Synchronizer) -> SwarmOptimizer:
            return SwarmOptimizer(model, wrapped, synchronizer, bridge, spec, tokens)

        made = self._optimizer = self._enter(state, wrap)
        made.samples_per_step = samples
        # Without its daemon, this peer would believe that it is the last survivor, and train alone.
        self._cancel_without_network(bridge)
        self._tell_pace(lambda: Pace(made.loss, made.tokens_per_second, made.tokens_in_round))
        return made

    def _tell_pace(self, pace: Callable[[], Pace]) -> None:
        self._peer.activity = replace(self._peer.activity, pace=pace)

    def _cancel_without_network(self, bridge: Bridge) -> None:
        def watch() -> None:
            self._peer.network_lost.add_done_callback(lambda lost: bridge.cancel(lost.result()))

        self._thread.loop.call_soon_threadsafe(watch)

    def _enter(self, state: SharedState, wrap: Callable[[Synchronizer], SwarmOptimizer]) -> SwarmOptimizer:
        """Restore the newest checkpoint, adopt the swarm's state, and join its rounds."""
        from p2ptrain.node.roles.training import enter_training
        from p2ptrain.training.checkpoints.files import load_newest_valid
        from p2ptrain.training.checkpoints.saving import Saver, restore_shared

        swarm, run_dir = self._peer.swarm, self._peer.options.run_dir
        directory = run_dir / "checkpoints" if run_dir is not None else None
        checkpoint = load_newest_valid(directory, swarm) if directory is not None else None
        if checkpoint is not None:
            restore_shared(state, checkpoint)

        async def train() -> Synchronizer:
            return self._peer.train(state)

        synchronizer = self._thread.call(train())
        wrapped = wrap(synchronizer)
        saver = Saver(directory, self._saving, wrapped, swarm) if directory is not None else None
        if saver is not None and checkpoint is not None:
            saver.restore(checkpoint)
            logger.info("restored round %d from %s", checkpoint.head.round, checkpoint.path)
        self._thread.call(enter_training(self._peer, wrapped.work))
        if saver is not None:
            self._saver = saver
            wrapped.register_step_post_hook(lambda *_: saver.save_if_due())
        return wrapped

    def sampler(self, dataset: Sized, *, seed: int | None = None) -> SwarmSampler:
        """Return a sampler for a `torch.utils.data.DataLoader` that divides a data set among the peers.

        Iterate over it after the call of `optimizer`. `SwarmSampler` documents its guarantees.

        Args:
            dataset: Has the same samples in the same order on all peers.
            seed: Of the order of samples, the same on all peers; None takes the manifest's.

        Raises:
            ValueError: The data set is empty.
        """
        from p2ptrain.training.data.sampler import DataPosition, SwarmSampler

        def read() -> DataPosition:
            optimizer, synchronizer = self._optimizer, self._peer.synchronizer
            if optimizer is None or synchronizer is None:
                raise UsageError("the swarm's data position is not known yet: call Swarm.optimizer first")
            head = synchronizer.head
            return DataPosition(head.round, head.samples, synchronizer.place, optimizer.samples_in_round)

        return SwarmSampler(len(dataset), self.manifest.data.seed if seed is None else seed, self.peer_id, read)

    def save(self) -> Path:
        """Write a checkpoint now, on the training thread; return its folder, in ``checkpoints`` of ``run_dir``.

        Raises:
            UsageError: The swarm has no ``run_dir``, or no optimizer yet.
            ResourceError: The disk is full or not writable; earlier checkpoints are intact.
            CheckpointError: The shared state in memory is damaged; the next round repairs it.
        """
        if self._peer.options.run_dir is None:
            raise UsageError("there is nowhere to save: give Swarm.join or Swarm.create a run_dir")
        if self._saver is None:
            raise UsageError("there is nothing to save yet: call Swarm.optimizer first")
        return self._saver.save()

    def pipeline(self, *, lora: LoraSpec | None = None) -> PipelineModule:
        """Return the swarm's model as a module whose forward and backward run on the hosts of its stages.

        Args:
            lora: The adapters that this script expects to train; None accepts the manifest's.

        Raises:
            UsageError: The model is not cut into stages, the manifest trains other adapters, or this peer trains
                already.
        """
        from p2ptrain.pipeline.client.remote_model import PipelineModule
        from p2ptrain.pipeline.plan import PipelinePlan
        from p2ptrain.training.bridge import Bridge

        if not self.manifest.in_stages:
            raise UsageError("this swarm's model is not cut into stages: use Swarm.optimizer")
        if lora is not None and lora != self.manifest.lora:
            trained = "all of the model" if self.manifest.lora is None else repr(self.manifest.lora)
            raise UsageError(f"this swarm trains {trained}, not {lora!r}: what is trained is in its manifest")
        if self._optimizer is not None or self._module is not None:
            raise UsageError("this swarm has an optimizer or a pipeline already: a peer trains one model")
        plan, bridge = PipelinePlan(self.manifest), Bridge(self._thread.loop)
        sender = self._thread.call(self._feed(plan))
        self._cancel_without_network(bridge)
        module = self._module = PipelineModule(sender, plan, bridge)
        self._tell_pace(lambda: Pace(module.loss, 0.0, 0))
        return module

    async def _feed(self, plan: PipelinePlan) -> MicrobatchSender:
        from p2ptrain.node.roles.pipeline import start_sender
        from p2ptrain.pipeline.view import PipelineView

        view = PipelineView(plan, self.peer_id, self._runtime)
        self._peer.presence.listeners.append(view.update)
        self._peer.activity = replace(self._peer.activity, failovers=lambda: view.failovers)
        await self._peer.presence.refresh()
        sender = await start_sender(self._peer, view)
        self._peer.set_state("training")
        return sender

    def close(self) -> None:
        """Leave the swarm, stop the daemon, and save if there is a ``run_dir``; idempotent."""
        try:
            self._resources.close()
        finally:
            saver, self._saver = self._saver, None
            if saver is not None:  # The network has ended: no round changes the state now.
                saver.save_last()
            self._peer.identity.close()

    def __enter__(self) -> Swarm:
        self._sigterm.install()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._sigterm.closing():
            self.close()
