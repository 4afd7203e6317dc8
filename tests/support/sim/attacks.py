"""A small classifier that a group trains together while some of its members lie, and the lies.

Every round, each of the group's peers takes some SGD steps from the common parameters on data of its own, and adds
worker momentum. The owners of the shares reduce the pseudo-gradients as they do in a real round: encoded parts, checked
and measured, judged and combined by the rule of the manifest. Only the network is left out, and owners do not lie here.
"""

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from fractions import Fraction

import torch
from torch import Tensor

from p2ptrain.averaging.allreduce.bandwidth import split_shares
from p2ptrain.averaging.protocol.table import FULL_TRUST
from p2ptrain.averaging.vector.error_feedback import Momentum
from p2ptrain.averaging.vector.reduce import EncodedStream, OwnShare
from p2ptrain.averaging.vector.rules import Claim
from p2ptrain.codecs import CodecError, get_codec
from p2ptrain.manifest import AveragingSpec
from p2ptrain.runtime import Runtime

PIXELS, HIDDEN, CLASSES = 36, 24, 10
SHAPES = ((PIXELS, HIDDEN), (HIDDEN,), (HIDDEN, CLASSES), (CLASSES,))
NUM_VALUES = sum(torch.Size(shape).numel() for shape in SHAPES)
NUM_PEERS = 10
LOCAL_STEPS, BATCH, RATE, OUTER_RATE = 6, 32, 0.15, 1.0
LABEL_NOISE = 0.1
"""The fraction of labels drawn at random: the loss has a floor, as on real data."""
LOUD_TOKENS = 10**9

Generator = torch.Generator


@dataclass
class Situation:
    """What an omniscient attacker knows when it chooses its contributions to a round, counted from 0.

    ``own`` is what the hostile peers would send if they were honest, and ``honest`` what the others send, fp32
    ``[peers, NUM_VALUES]``. ``memory`` is what the attack keeps from round to round.
    """

    round: int
    own: Tensor
    honest: Tensor
    memory: list[Tensor]
    random: Generator


@dataclass(frozen=True)
class Attack:
    """What hostile peers send, ``[hostile, NUM_VALUES]``, and the weight that they claim; None for the true one."""

    lie: Callable[[Situation], Tensor] = lambda now: now.own
    flips_labels: bool = False
    tokens: int | None = None


def a_little_is_enough(deviations: float) -> Callable[[Situation], Tensor]:
    """Baruch et al., arXiv 1902.06156: some standard deviations from the mean, so as not to stand out.

    By the formula of its section 3 a fifth of the peers can afford 0.32 in a large group, and none in a group of ten.
    """
    return lambda now: torch.sub(now.honest.mean(0), now.honest.std(0), alpha=deviations).expand_as(now.own)


def inner_product(scale: float) -> Callable[[Situation], Tensor]:
    """Xie et al., arXiv 1903.03936: the mean of the honest, reversed and scaled."""
    return lambda now: (-scale * now.honest.mean(0)).expand_as(now.own)


def stale(now: Situation) -> Tensor:
    now.memory.append(now.own)
    return now.memory[max(0, now.round - 10)]


def replay(now: Situation) -> Tensor:
    now.memory.append(now.own)
    return now.memory[0]


def noise(now: Situation) -> Tensor:
    """A random direction, three times as long as an honest contribution."""
    direction = torch.randn(now.own.shape, generator=now.random)
    length = 3 * torch.linalg.vector_norm(now.honest, dim=1).mean()
    return direction.mul_(length / torch.linalg.vector_norm(direction, dim=1, keepdim=True))


ATTACKS: dict[str, Attack] = {
    "nobody lies": Attack(),
    "sign flip": Attack(lambda now: -now.own),
    "sign flip x 10": Attack(lambda now: -10 * now.own),
    "sign flip x 1000": Attack(lambda now: -1000 * now.own),
    "a little is enough": Attack(a_little_is_enough(0.32)),
    "more than a little": Attack(a_little_is_enough(1.5)),
    "inner product x 0.5": Attack(inner_product(0.5)),
    "inner product x 4": Attack(inner_product(4.0)),
    "label flip": Attack(flips_labels=True),
    "stale": Attack(stale),
    "replay": Attack(replay),
    "zero": Attack(lambda now: torch.zeros_like(now.own)),
    "noise": Attack(noise),
    "sign flip, 1e9 tokens": Attack(lambda now: -now.own, tokens=LOUD_TOKENS),
}


@dataclass
class Outcome:
    """Cross-entropy on held-out data after a training, and in how many rounds an owner refused a peer's part."""

    loss: float
    refused: dict[int, int] = field(default_factory=dict)


class Study:
    """One data set and one start, for any number of trainings that can be compared."""

    def __init__(self, seed: int = 0, rounds: int = 32, skew: float = 0.0) -> None:
        """``skew`` is the fraction of a peer's samples that are all of one class, another for each peer."""
        self.rounds = rounds
        self._seed = seed
        self._skew = skew
        generator = Generator().manual_seed(seed)
        self._prototypes = torch.randn(CLASSES, PIXELS, generator=generator)
        self._held_out = self._draw(generator, 1, 4000)
        self._start = torch.cat([torch.randn(shape, generator=generator).flatten() * 0.1 for shape in SHAPES])

    def _draw(self, generator: Generator, peers: int, samples: int) -> tuple[Tensor, Tensor]:
        """Inputs [peers, samples, PIXELS] and labels [peers, samples]."""
        labels = torch.randint(0, CLASSES, (peers, samples), generator=generator)
        if peers > 1 and self._skew:
            favoured = torch.rand(labels.shape, generator=generator) < self._skew
            labels = torch.where(favoured, (torch.arange(peers) % CLASSES)[:, None], labels)
        inputs = self._prototypes[labels] + 3.0 * torch.randn(peers, samples, PIXELS, generator=generator)
        other = torch.randint(0, CLASSES, labels.shape, generator=generator)
        return inputs, torch.where(torch.rand(labels.shape, generator=generator) < LABEL_NOISE, other, labels)

    def run(self, spec: AveragingSpec, attack: Attack, num_hostile: int = 2, num_shares: int = 1) -> Outcome:
        """Train from the start; the last ``num_hostile`` peers lie."""
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # Tensors are tiny: more threads only wait for each other.
        try:
            return self._run(spec, attack, num_hostile, num_shares)
        finally:
            torch.set_num_threads(threads)

    def _run(self, spec: AveragingSpec, attack: Attack, num_hostile: int, num_shares: int) -> Outcome:
        generator, dice = Generator().manual_seed(self._seed + 1), Generator().manual_seed(self._seed + 2)
        parameters, memory, refused = self._start.clone(), list[Tensor](), dict[int, int]()
        honest, momenta = NUM_PEERS - num_hostile, [Momentum(spec.worker_momentum) for _ in range(NUM_PEERS)]
        tokens = [LOCAL_STEPS * BATCH] * NUM_PEERS
        if attack.tokens is not None:
            tokens[honest:] = [attack.tokens] * num_hostile
        for number in range(self.rounds):
            updates = self._local_updates(parameters, generator, honest if attack.flips_labels else NUM_PEERS)
            for momentum, update in zip(momenta, updates, strict=True):
                momentum.blend(update)
                momentum.keep(update, None)
            if num_hostile:
                now = Situation(number, updates[honest:], updates[:honest], memory, dice)
                updates = torch.cat([updates[:honest], attack.lie(now)])
            mean, left_out = reduce_round(spec, updates, tokens, num_shares)
            for index in left_out:
                refused[index] = refused.get(index, 0) + 1
            parameters = parameters - OUTER_RATE * mean
        inputs, labels = self._held_out
        return Outcome(float(_loss(parameters[None], inputs, labels)), refused)

    def _local_updates(self, parameters: Tensor, generator: Generator, first_flipped: int) -> Tensor:
        """Start minus end of every peer's local steps, ``[peers, NUM_VALUES]``."""
        local = parameters.repeat(NUM_PEERS, 1)
        inputs, labels = self._draw(generator, NUM_PEERS, LOCAL_STEPS * BATCH)
        labels[first_flipped:] = CLASSES - 1 - labels[first_flipped:]
        for step in range(LOCAL_STEPS):
            batch = slice(step * BATCH, (step + 1) * BATCH)
            local.requires_grad_()
            # The sum over peers of each one's mean loss: nobody's gradient depends on the others.
            loss = _loss(local, inputs[:, batch], labels[:, batch]) * NUM_PEERS
            (gradient,) = torch.autograd.grad(loss, local)
            local = local.detach() - RATE * gradient
        return parameters - local


def _loss(parameters: Tensor, inputs: Tensor, labels: Tensor) -> Tensor:
    """Mean cross-entropy of models [peers, NUM_VALUES] on inputs [peers, samples, PIXELS], each on its own."""
    pieces = torch.split(parameters, [torch.Size(shape).numel() for shape in SHAPES], dim=1)
    first, bias, second, last_bias = (p.view(-1, *s) for p, s in zip(pieces, SHAPES, strict=True))
    hidden = torch.relu(inputs @ first + bias[:, None])
    scores = hidden @ second + last_bias[:, None]
    return torch.nn.functional.cross_entropy(scores.flatten(0, 1), labels.flatten())


def reduce_round(
    spec: AveragingSpec, updates: Tensor, tokens: list[int], num_shares: int
) -> tuple[Tensor, frozenset[int]]:
    """What a group's owners make of ``updates`` [peers, values]; with the peers that any of them left out."""
    codec, num_peers = get_codec(spec.codec), len(updates)
    spans = split_shares(updates.shape[1], [Fraction(1)] * num_shares, codec.block_size)
    shares = []
    for owner, (low, high) in enumerate(spans):
        share = OwnShare(codec, spec, updates[owner, low:high], owner, num_peers)
        share.measure_own()
        for index in (i for i in range(num_peers) if i != owner):
            part, check = codec.encode(updates[index, low:high]), share.new_check(codec)
            try:
                check(memoryview(part), 0, high - low)
            except CodecError:
                continue
            share.add(index, part, check)
        shares.append(share)
    contributors = sorted(frozenset.intersection(*(share.judge([FULL_TRUST] * num_peers) for share in shares)))
    mean, runtime = torch.empty(updates.shape[1]), Runtime(random.Random(0))

    async def reduce_all() -> None:
        for share, (low, high) in zip(shares, spans, strict=True):
            encoded = EncodedStream(bytearray(codec.encoded_bytes(high - low)))
            await share.reduce(runtime, contributors, [Claim(tokens[i]) for i in contributors], encoded)
            codec.decode_into(encoded.data, mean[low:high])

    asyncio.run(reduce_all())
    return mean, frozenset(range(num_peers)) - frozenset(contributors)
