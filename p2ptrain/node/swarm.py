"""`Swarm`: the API for existing training scripts."""

from __future__ import annotations

from collections.abc import Callable, Sequence, Sized
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

from p2ptrain.errors import UsageError
from p2ptrain.manifest import LoraSpec, Manifest
from p2ptrain.network.libp2p.settings import Libp2pSettings
from p2ptrain.node.process import SigtermExit
from p2ptrain.node.thread import PeerThread
from p2ptrain.training.checkpoints import SavePolicy

if TYPE_CHECKING:
    import torch

    from p2ptrain.node.serving.language_model import LanguageModel, Settings
    from p2ptrain.pipeline.client.remote_model import PipelineModule
    from p2ptrain.training.checkpoints.saving import Saver
    from p2ptrain.training.data.sampler import SwarmSampler
    from p2ptrain.training.optimizer import SwarmOptimizer


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

    Attributes:
        manifest: The swarm's manifest.
        peer_id: This peer's id.
    """

    def __init__(self, running: PeerThread, saving: SavePolicy) -> None:
        """Private: use `join` or `create`."""
        self._running = running
        self._peer = running.peer
        self.manifest: Manifest = running.peer.manifest
        self.peer_id: str = running.peer.identity.peer_id
        self._saving = saving
        self._saver: Saver | None = None
        self._sigterm = SigtermExit()
        self._optimizer: SwarmOptimizer | None = None
        self._module: PipelineModule | None = None
        self._language_model: LanguageModel | None = None

    @classmethod
    def join(
        cls,
        link: str,
        *,
        run_dir: str | Path | None = None,
        name: str = "script",
        listen: tuple[str, ...] = ("/ip4/0.0.0.0/tcp/0",),
        saving: SavePolicy | None = None,
        policy: str | Path | None = None,
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
            policy: The site's policy in a private swarm, a TOML file; None for none. It needs ``run_dir``.

        Raises:
            ConfigError: The policy forbids to take part.
            LinkError: The link is malformed.
            BootstrapError: No peer of the link answers.
            ManifestError: The manifest is not the one that the link names.
            IdentityError: The key is unusable or in use.
        """
        network = Libp2pSettings(listen=listen, auto_nat=True)
        folder = Path(run_dir) if run_dir is not None else None
        rules = Path(policy) if policy is not None else None
        return cls(PeerThread(folder, name, network, link=link, policy=rules), saving or SavePolicy())

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

        The swarm is that of this peer's key: a script that starts it again needs the same ``run_dir``.

        Args:
            manifest: The swarm's; for the other arguments see `join`.
            directory: Where peers find each other: ``https://…`` of a server (examples/loops/http_directory.py), or
                empty for their own DHT. The link names it.

        Raises:
            IdentityError: The key is unusable or in use.
            ResourceError: The network daemon does not start.
        """
        network = Libp2pSettings(listen=listen, auto_nat=True, directory=directory)
        folder = Path(run_dir) if run_dir is not None else None
        return cls(PeerThread(folder, name, network, manifest=manifest), saving or SavePolicy())

    @property
    def link(self) -> str:
        """The swarm link with which others join through this peer."""
        return str(self._peer.network.link)

    def optimizer(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        clip_norm: float = 0.0,
        samples_per_step: int | None = None,
        tokens_per_step: int | None = None,
        schedule: Callable[[int], float] | None = None,
        site_samples: int | None = None,
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
            site_samples: In a private swarm, the number of this peer's training samples.

        Raises:
            UsageError: This swarm has an optimizer already, ``optimizer`` cannot train with a swarm, or
                ``site_samples`` is missing or in vain.
            IncompatibleError: Other peers train a model of another shape, or with ``every = 1`` use another optimizer.
            CheckpointError: No checkpoint in ``run_dir`` is intact.
        """
        from p2ptrain.node.roles.script import share_optimizer
        from p2ptrain.training.optimizer import SwarmOptimizer

        if self._optimizer is not None:
            raise UsageError("this swarm has an optimizer already: a peer trains one model")
        if isinstance(optimizer, SwarmOptimizer):
            raise UsageError("this is a swarm's optimizer already: give Swarm.optimizer the one that it wraps")
        samples = samples_per_step or self.manifest.training.local_batch
        self._optimizer, self._saver = share_optimizer(
            self._running, model, optimizer, self._saving, clip_norm=clip_norm, samples=samples,
            tokens=tokens_per_step or samples * self.manifest.model.context, schedule=schedule,
            site_samples=site_samples,
        )  # fmt: skip
        return self._optimizer

    def batches(self, dataset: Sized) -> torch.utils.data.Sampler[list[int]]:
        """Return the batches of this site's samples under differential privacy, for ``DataLoader(batch_sampler=…)``.

        Each is a list of indices, for one step. Its size varies: each sample is drawn by itself, as the bound assumes.
        Call it after `optimizer`, and let ``opt.step()`` follow each batch.

        Raises:
            UsageError: The swarm has no differential privacy, or the data set has not ``site_samples`` samples.
        """
        site = None if self._optimizer is None else self._optimizer.site
        if site is None or site.privacy is None:
            raise UsageError("batches are drawn for [differential_privacy] alone, after Swarm.optimizer: use sampler")
        return site.privacy.batches(len(dataset))

    def sampler(self, dataset: Sized, *, seed: int | None = None) -> SwarmSampler:
        """Return a sampler for a `torch.utils.data.DataLoader` that divides a data set among the peers.

        In a private swarm the data set is this peer's own, and the sampler reads all of it.

        Iterate over it after the call of `optimizer`. `SwarmSampler` documents its guarantees.

        Args:
            dataset: Has the same samples in the same order on all peers.
            seed: Of the order of samples, the same on all peers; None takes the manifest's.

        Raises:
            ValueError: The data set is empty.
        """
        from p2ptrain.training.data.sampler import DataPosition, SwarmSampler

        def read() -> DataPosition:
            optimizer, synchronizer = self._optimizer, self._peer.held.synchronizer
            if optimizer is None or synchronizer is None:
                raise UsageError("the swarm's data position is not known yet: call Swarm.optimizer first")
            head = synchronizer.head
            if self.manifest.private is not None:
                return DataPosition(head.round, optimizer.total_steps * optimizer.samples_per_step, (0, 1), 0)
            return DataPosition(head.round, head.samples, synchronizer.place, optimizer.work.samples)

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
        from p2ptrain.node.roles.script import share_model

        if not self.manifest.in_stages:
            raise UsageError("this swarm's model is not cut into stages: use Swarm.optimizer")
        if lora is not None and lora != self.manifest.lora:
            trained = "all of the model" if self.manifest.lora is None else repr(self.manifest.lora)
            raise UsageError(f"this swarm trains {trained}, not {lora!r}: what is trained is in its manifest")
        if self._optimizer is not None or self._module is not None:
            raise UsageError("this swarm has an optimizer or a pipeline already: a peer trains one model")
        self._module = share_model(self._running)
        return self._module

    def language_model(
        self, *, weights: str | Path | None = None, allow_path: Sequence[str | Path] = (), wait_seconds: float = 30.0,
        draft: str | Path | None = None,
    ) -> LanguageModel:  # fmt: skip
        """Return the swarm's model to generate with; peers that serve compute it.

        The same object each time: the arguments of the first call count.

        Args:
            weights: The model's folder, if each peer brings the tokenizer.
            allow_path: Folders that the manifest may name for the tokenizer.
            wait_seconds: How long to wait for a stage without a host.
            draft: Folder of a small model, by ``p2ptrain draft train``, that guesses tokens on this machine. The hosts
                check its guesses, so no answer changes.

        Raises:
            ManifestError: The model is not one that generates.
            ConfigError: The draft is of another model, or the tokenizer to compare with is not here.
        """
        from p2ptrain.node.serving.language_model import open_language_model

        if self._language_model is None:
            given, guessing = (Path(each) if each is not None else None for each in (weights, draft))
            allowed = tuple(map(Path, allow_path))
            self._language_model = open_language_model(self._running, given, allowed, wait_seconds, guessing)
        return self._language_model

    def generate(self, prompt: str, **settings: Unpack[Settings]) -> str:
        """Return the continuation of a text by the swarm's model; see `LanguageModel.generate`.

        Raises:
            ConfigError: The tokenizer is not here: call `language_model` first, and give its folder.
            UsageError: A setting is out of range, or prompt and answer exceed the context.
            TemporaryError: A stage has no host, or all are full.
        """
        return self.language_model().complete(prompt, **settings)

    def close(self) -> None:
        """Leave the swarm, stop the daemon, and save if there is a ``run_dir``; idempotent."""
        try:
            self._running.close()
        finally:
            saver, self._saver = self._saver, None
            if saver is not None:  # The network has ended: no round changes the state now.
                saver.save_last()
            self._peer.identity.close()

    def __enter__(self) -> Swarm:
        self._sigterm.install()
        return self

    def __exit__(self, *_: object) -> None:
        with self._sigterm.closing():
            self.close()
