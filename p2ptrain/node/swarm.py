"""`Swarm`: the door for people who have a training script already."""

from __future__ import annotations

import contextlib
import logging
import tempfile
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from p2ptrain.errors import UsageError
from p2ptrain.manifest import LoraSpec, Manifest, SignedManifest
from p2ptrain.network.identity import Identity
from p2ptrain.network.libp2p import Libp2pSettings
from p2ptrain.network.link import SwarmLink
from p2ptrain.node.peer import Pace, Peer, PeerOptions
from p2ptrain.node.thread import LoopThread
from p2ptrain.runtime import Runtime, real_runtime

if TYPE_CHECKING:
    import torch

    from p2ptrain.pipeline.feeder import Feeder
    from p2ptrain.pipeline.plan import PipelinePlan
    from p2ptrain.training.optimizer import SwarmOptimizer
    from p2ptrain.training.pipeline_module import PipelineModule
    from p2ptrain.training.sync import Synchronizer

logger = logging.getLogger(__name__)


class Swarm:
    """One peer of a swarm inside this process; a context manager. Make it with `join` or `create`.

    ::

        with Swarm.join(link) as swarm:
            opt = swarm.optimizer(model, torch.optim.AdamW(model.parameters(), 3e-4))
            for batch in loader:
                model(**batch).loss.backward()
                opt.step()
                opt.zero_grad()
    """

    def __init__(self, peer: Peer, thread: LoopThread, runtime: Runtime, resources: contextlib.ExitStack) -> None:
        """Not for callers: use `join` or `create`."""
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
    ) -> Swarm:
        """Join the swarm that a link names.

        Args:
            link: ``p2ptrain://…`` from the organizer.
            run_dir: Where this peer's key is kept; None makes a peer that nobody will recognise next time.
            name: Shown to other people.
            listen: Multiaddrs to listen on.

        Raises:
            LinkError: The link is malformed.
            BootstrapError: Nobody that the link names answers.
            ManifestError: The manifest is not the one that the link names.
            IdentityError: The key is unusable or in use.
        """
        return cls._start(run_dir, name, listen, SwarmLink.parse(link), None)

    @classmethod
    def create(
        cls,
        manifest: Manifest,
        *,
        run_dir: str | Path | None = None,
        name: str = "organizer",
        listen: tuple[str, ...] = ("/ip4/0.0.0.0/tcp/0",),
    ) -> Swarm:
        """Start a swarm with this peer as its organizer and first member; `link` invites the others.

        Raises:
            IdentityError: The key is unusable or in use.
            ResourceError: The network daemon does not start.
        """
        return cls._start(run_dir, name, listen, None, manifest)

    @classmethod
    def _start(
        cls,
        run_dir: str | Path | None,
        name: str,
        listen: tuple[str, ...],
        link: SwarmLink | None,
        manifest: Manifest | None,
    ) -> Swarm:
        resources = contextlib.ExitStack()
        try:
            if run_dir is None:
                directory = Path(resources.enter_context(tempfile.TemporaryDirectory(prefix="p2ptrain-")))
            else:
                directory = Path(run_dir)
                directory.mkdir(parents=True, exist_ok=True)
            identity = resources.enter_context(contextlib.closing(Identity.create_or_load(directory / "identity.key")))
            signed = SignedManifest.create(manifest, identity) if manifest is not None else None
            runtime = real_runtime("sync")
            resources.callback(runtime.close)
            thread = LoopThread()
            resources.callback(thread.stop)
            options = PeerOptions("trainer", name, "cpu", directory, Libp2pSettings(listen=listen, auto_nat=True))
            peer = thread.call(Peer.start(identity, options, runtime, link=link, signed=signed))
        except BaseException:
            resources.close()
            raise
        resources.callback(lambda: thread.call(peer.close()))
        return cls(peer, thread, runtime, resources)

    @property
    def manifest(self) -> Manifest:
        """What the swarm agreed on."""
        return self._peer.manifest

    @property
    def link(self) -> str:
        """A swarm link that leads to this peer; give it to others who shall join."""
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
        clip_norm: float | None = None,
        tokens_per_step: int | None = None,
    ) -> SwarmOptimizer:
        """Wrap an optimizer so that its steps are shared with the swarm; the model takes on the swarm's state.

        Args:
            model: The model whose trainable parameters ``optimizer`` updates; all peers need the same shapes.
            optimizer: Any torch optimizer.
            clip_norm: Gradient norm limit of each step; None takes the manifest's.
            tokens_per_step: Tokens in one local batch: the weight of a contribution. None takes the manifest's local
                batch times its context; `SwarmOptimizer.count` overrides it batch by batch.

        Raises:
            UsageError: This swarm has an optimizer already.
            IncompatibleError: Other peers of the swarm train a model of another shape.
        """
        from p2ptrain.node.training import enter_training
        from p2ptrain.training.beginning import initial_state
        from p2ptrain.training.optimizer import Bridge, SwarmOptimizer

        if self._optimizer is not None:
            raise UsageError("this swarm has an optimizer already: a peer trains one model")
        spec = self.manifest.training
        clip = spec.clip_norm if clip_norm is None else clip_norm
        state = initial_state(model, optimizer, self.manifest, self._peer.swarm, clip)

        async def start() -> Synchronizer:
            synchronizer = self._peer.train(state)
            await enter_training(self._peer)
            return synchronizer

        synchronizer = self._thread.call(start())
        state.layout.write(state.vector, model)
        tokens = tokens_per_step or spec.local_batch * self.manifest.model.context
        bridge = Bridge(self._thread.loop)
        # Without its daemon this peer would take itself for a lone survivor, and train on by itself.
        self._thread.loop.call_soon_threadsafe(self._peer.on_network_lost, bridge.cancel)
        wrapped = SwarmOptimizer(model, optimizer, synchronizer, bridge, spec, tokens, clip_norm=clip)
        self._peer.status.pace = lambda: Pace(wrapped.loss, wrapped.tokens_per_second, wrapped.tokens_in_round)
        self._optimizer = wrapped
        return wrapped

    def pipeline(self, *, lora: LoraSpec | None = None) -> PipelineModule:
        """The swarm's model, which is cut into stages on its hosts, as a module whose forward and backward go there.

        Args:
            lora: The adapters that this script means to train; None if it does not care what its gradients train.

        Raises:
            UsageError: The swarm's model is not cut into stages, or other adapters are trained; or this peer trains
                already.
        """
        from p2ptrain.pipeline.plan import PipelinePlan
        from p2ptrain.training.optimizer import Bridge
        from p2ptrain.training.pipeline_module import PipelineModule

        if not self.manifest.in_stages:
            raise UsageError("this swarm's model is not cut into stages: use Swarm.optimizer")
        if lora is not None and lora != self.manifest.lora:
            trained = "all of the model" if self.manifest.lora is None else repr(self.manifest.lora)
            raise UsageError(f"this swarm trains {trained}, not {lora!r}: what is trained is in its manifest")
        if self._optimizer is not None or self._module is not None:
            raise UsageError("this swarm has an optimizer or a pipeline already: a peer trains one model")
        plan, bridge = PipelinePlan(self.manifest), Bridge(self._thread.loop)
        feeder = self._thread.call(self._feed(plan))
        self._thread.loop.call_soon_threadsafe(self._peer.on_network_lost, bridge.cancel)
        module = self._module = PipelineModule(feeder, plan, bridge)
        self._peer.status.pace = lambda: Pace(module.loss, 0.0, 0)
        return module

    async def _feed(self, plan: PipelinePlan) -> Feeder:
        from p2ptrain.node.pipeline import start_feeder
        from p2ptrain.training.pipeline_view import PipelineView

        view = PipelineView(plan, self.peer_id, self._runtime)
        self._peer.presence.on_records, self._peer.status.failovers = view.update, lambda: view.failovers
        await self._peer.presence.refresh()
        feeder = await start_feeder(self._peer, view)
        self._peer.set_state("training")
        return feeder

    def close(self) -> None:
        """Leave the swarm: say goodbye, stop the daemon; idempotent."""
        self._resources.close()

    def __enter__(self) -> Swarm:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
