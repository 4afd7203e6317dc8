"""A small training in rounds in which peers work, or pretend to, and one that owns a share audits them."""

import random
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt
import torch

from p2ptrain.averaging.commit.attempt import PeerPart
from p2ptrain.codecs import get_codec
from p2ptrain.training.data.windows import Sampler, advance
from p2ptrain.training.evaluate import language_model_loss
from p2ptrain.training.state.layout import Layout
from p2ptrain.training.worth import ClaimedWork, WorthAudits

VOCABULARY, CONTEXT, SAMPLES, SHARES = 64, 16, 32, 3
BATCH = 4
Peer = Callable[[int], torch.Tensor]
"""Returns the update of the peer with this number: the state before minus the state after its work."""


class AuditedTraining:
    """Peers contribute ``claims`` samples each, by what they say; the auditor has a third of the vector.

    ``tokens`` are text with something to learn by default: half of the tokens follow from the one before. ``rate`` is
    the learning rate; at a tenth of the default the loss falls all the time.
    """

    def __init__(self, seed: int, tokens: npt.NDArray[np.uint16] | None = None, rate: float = 3e-3) -> None:
        torch.manual_seed(seed)
        generator = np.random.default_rng(seed)
        text = generator.integers(0, VOCABULARY, 400_000, dtype=np.uint16)
        follows = generator.random(len(text)) < 0.5
        text[1:][follows[1:]] = (5 * text[:-1][follows[1:]] + 3) % VOCABULARY
        self.sampler = Sampler(text if tokens is None else tokens, CONTEXT, seed)
        self.module = torch.nn.Sequential(
            torch.nn.Embedding(VOCABULARY, 32),
            torch.nn.Linear(32, 64),
            torch.nn.Tanh(),
            torch.nn.Linear(64, VOCABULARY),
        )
        self.layout = Layout.from_module(self.module)
        self.state = self.layout.new_vector()
        self.layout.read(self.module, self.state)
        self._rate = rate
        self.mean = torch.randn(self.layout.num_values)
        self.cursor = self.round = 0
        self.num_peers = 0
        self.audits = WorthAudits(self.module, self.sampler, self._loss, SAMPLES, random.Random(seed))

    def _loss(self, batch: npt.NDArray[np.int64]) -> torch.Tensor:
        return language_model_loss(self.module, torch.from_numpy(batch))

    def work(self, peer: int, samples: int = SAMPLES) -> torch.Tensor:
        """Train on the samples of a peer; a number that no peer has stands for samples that nobody is to read."""
        self.layout.write(self.state, self.module)
        optimizer = torch.optim.AdamW(self.module.parameters(), lr=self._rate)
        place = (peer, self.num_peers) if peer < self.num_peers else None
        for first in range(0, samples, BATCH):
            batch = self.sampler.batch(self.cursor, place, f"peer {peer}", self.round, first, BATCH)
            optimizer.zero_grad()
            self._loss(batch).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        live = self.layout.new_vector()
        self.layout.read(self.module, live)
        return self.state - live

    def play(self, rounds: int, peers: Sequence[Peer], claims: Sequence[int]) -> None:
        """Play rounds with these peers; all are audited after each."""
        codec, size = get_codec("int8"), self.layout.num_values // SHARES
        self.num_peers = len(peers)
        for _ in range(rounds):
            updates = [peer(number) for number, peer in enumerate(peers)]
            self.mean = torch.stack(updates).mean(0)
            self.state = self.state - self.mean
            self.layout.write(self.state, self.module)
            start = size * (self.round % SHARES)
            for number, (update, samples) in enumerate(zip(updates, claims, strict=True)):
                data = codec.encode(update[start : start + size].contiguous())
                part = PeerPart(f"peer {number}", samples, start, size, codec, data)
                work = ClaimedWork(part, self.layout.whole, self.round, self.cursor, (number, len(peers)))
                self.audits.audit(work)
            self.cursor = advance(self.cursor, claims)
            self.round += 1


PRETENDERS: dict[str, Callable[[AuditedTraining, int], torch.Tensor]] = {
    "zeros": lambda training, peer: torch.zeros(training.layout.num_values),
    "noise": lambda training, peer: 1e-3 * torch.randn(training.layout.num_values),
    "the last mean": lambda training, peer: training.mean,
    "a copy of another peer's update": lambda training, peer: training.work(0),
    "work on other samples": lambda training, peer: training.work(1_000),
}
"""Ways to pretend to work, by name."""
