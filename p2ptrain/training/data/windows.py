"""Which samples a peer reads: a pure function, so that training resumes exactly and members never overlap.

The training tokens are cut into ``W`` windows of ``context`` tokens (each sample has one more, the last target). The
swarm consumes *positions*: position ``p`` lies in pass ``p // W`` at slot ``p % W``, and each pass has its own keyed
permutation from slots to windows. At the start of a round the lineage says how many positions are consumed (the
*cursor*) and who took part in the last round; the peer of rank ``k`` of ``n`` reads positions ``cursor + k``,
``cursor + k + n``, ``cursor + k + 2n``, … (`advance` gives the next cursor). So while membership holds nothing is read
twice within a pass, whatever each member's speed. A newcomer, who is in no certificate yet, reads windows drawn by a
keyed hash instead.

The permutation is a Feistel network over the next power of four, walked until it lands inside (Black and Rogaway,
*Ciphers with Arbitrary Finite Domains*, CT-RSA 2002, section "cycle-walking"): constant memory, same on every machine.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Collection, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from p2ptrain.errors import ConfigError

logger = logging.getLogger(__name__)

_FEISTEL_ROUNDS = 6
_MASK = (1 << 64) - 1

Place = tuple[int, int]
"""A peer's rank among those that read, and their number."""


def place_among(members: Collection[str], peer: str) -> Place | None:
    """The place of one of the members, in the order of their ids; None for others."""
    return (sorted(members).index(peer), len(members)) if peer in members else None


class Shares:
    """Gives each peer its share of a set of samples, by their indices.

    Args:
        num_samples: How many there are; at least 1.
        seed: The manifest's ``data.seed``.
    """

    def __init__(self, num_samples: int, seed: int) -> None:
        self.num_samples = num_samples
        self.seed = seed

    def index(self, cursor: int, place: Place | None, peer: str, round: int, number: int) -> int:
        """The sample that ``peer`` reads as number ``number`` (0, 1, …) of a round.

        Args:
            cursor: Positions that the lineage consumed before this round.
            place: The peer's among those of the last round; if it has none, its samples may overlap with anybody's.
            peer: Who reads.
            round: The round; changes a newcomer's samples only.
            number: How many samples the peer has read in this round before.
        """
        if place is not None:
            rank, count = place
            return self.at(cursor + rank + count * number)
        return self.of_newcomer(peer, round, number)

    def at(self, position: int) -> int:
        """The sample at a global position: a bijection within each pass."""
        data_pass, slot = divmod(position, self.num_samples)
        return permute(slot, self.num_samples, _pass_keys(self.seed, data_pass))

    def of_newcomer(self, peer: str, round: int, number: int) -> int:
        """The sample that a peer without a place reads as number ``number`` of a round."""
        return _keyed_hash("newcomer", self.seed, peer, round, number) % self.num_samples


class Sampler:
    """Gives each peer its windows of the training tokens.

    Args:
        tokens: The training tokens, shape ``[num_tokens]``; may be memory-mapped.
        context: Tokens per window.
        seed: The manifest's ``data.seed``.

    Raises:
        ConfigError: There are too few tokens for one window.
    """

    def __init__(self, tokens: npt.NDArray[np.unsignedinteger[Any]], context: int, seed: int) -> None:
        self.tokens = tokens
        self.context = context
        self.num_windows = (len(tokens) - 1) // context
        if self.num_windows < 1:
            raise ConfigError(f"{len(tokens)} training tokens are too few for a context of {context}: give more text")
        self.shares = Shares(self.num_windows, seed)

    def batch(
        self, cursor: int, place: Place | None, peer: str, round: int, first_index: int, size: int
    ) -> npt.NDArray[np.int64]:
        """Samples ``first_index`` to ``first_index + size - 1`` of a peer's round (arguments as in `Shares.index`).

        Returns:
            Token ids, shape ``[size, context + 1]``: columns ``[:-1]`` are inputs, ``[1:]`` targets.
        """
        samples = np.empty((size, self.context + 1), dtype=np.int64)
        for row in range(size):
            start = self.shares.index(cursor, place, peer, round, first_index + row) * self.context
            samples[row] = self.tokens[start : start + self.context + 1]
        return samples


class ReadingPosition:
    """A reader's place in its own order of windows, kept on disk: no window is read twice, also after SIGKILL.

    The file names a position that no earlier process has reached. It runs ahead of what was read, so a process that was
    killed makes the next one skip up to `RESERVED` windows; `save` sets it back to what was read.

    Args:
        path: The file; made on first use. None keeps nothing.
        order: Names the order of windows: a file of another order is ignored.
    """

    RESERVED = 1024

    def __init__(self, path: Path | None, order: str) -> None:
        self._path = path
        self._order = order
        self._next = self._reserved = self._load()

    def take(self, count: int) -> int:
        """The first of so many consecutive positions, which nobody gets again."""
        first, self._next = self._next, self._next + count
        if self._next > self._reserved:
            self._reserved = self._next + self.RESERVED
            self._store(self._reserved)
        return first

    def save(self) -> None:
        """Keep what was read, to be called when nothing is taken any more."""
        self._reserved = self._next
        self._store(self._next)

    def _load(self) -> int:
        try:
            values = json.loads(self._path.read_text()) if self._path is not None else {}
            position = values.get("next", 0) if values.get("order") == self._order else 0
        except FileNotFoundError:
            return 0
        except (OSError, ValueError, AttributeError) as error:
            logger.warning("cannot read %s, reading the text from its beginning: %s", self._path, error)
            return 0
        return position if type(position) is int and position >= 0 else 0

    def _store(self, position: int) -> None:
        if self._path is None:
            return
        partial = self._path.with_name(f".{self._path.name}.partial")
        try:
            partial.write_text(json.dumps({"order": self._order, "next": position}))
            partial.replace(self._path)
        except OSError as error:
            logger.warning(
                "cannot keep the reading position in %s, a restart reads windows again: %s", self._path, error
            )


def advance(cursor: int, counts: Collection[int]) -> int:
    """The cursor after a round.

    Args:
        cursor: The cursor at its start.
        counts: For each member of the round's start, the samples that it read (0 for who left).
    """
    return cursor + len(counts) * max(counts, default=0)


def permute(slot: int, size: int, keys: Sequence[int]) -> int:
    """Where ``slot`` goes in a pseudo-random permutation of ``range(size)`` that ``keys`` (64 bits each) select."""
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half_bits) - 1
    while True:
        left, right = slot >> half_bits, slot & mask
        for key in keys:
            left, right = right, left ^ (_mix(right ^ key) & mask)
        slot = (left << half_bits) | right
        if slot < size:
            return slot


def _mix(value: int) -> int:
    """The finalizer of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014): 64 bits to 64 well-mixed bits."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


@lru_cache(maxsize=16)
def _pass_keys(seed: int, data_pass: int) -> tuple[int, ...]:
    return tuple(_keyed_hash("pass", seed, data_pass, number) for number in range(_FEISTEL_ROUNDS))


def _keyed_hash(*parts: str | int) -> int:
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "little")
