"""The samples that each peer reads: a pure function, so that training resumes exactly and members never overlap.

The training tokens are cut into ``W`` windows of ``context`` tokens (a sample has one more, the last target). The
swarm consumes *positions*: position ``p`` is slot ``p % W`` of pass ``p // W``, and each pass has its own keyed
permutation from slots to windows. At the start of a round the lineage knows the consumed positions (the *cursor*) and
the members of the last round. The member of rank ``k`` of ``n`` reads positions ``cursor + k``, ``cursor + k + n``,
``cursor + k + 2n``, … (`advance` returns the next cursor). While membership is stable no window is read twice within a
pass, at any speeds of the members. A newcomer, not yet in a certificate, reads windows by a keyed hash.

The permutation is a Feistel network over the next power of four with cycle-walking (Black and Rogaway, *Ciphers with
Arbitrary Finite Domains*, CT-RSA 2002): constant memory, same on every machine.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Collection, Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from p2ptrain.disk import replace_file
from p2ptrain.errors import ConfigError

logger = logging.getLogger(__name__)

_FEISTEL_ROUNDS = 6
_MASK = (1 << 64) - 1

Place = tuple[int, int]
"""A peer's rank among the readers, and their number."""


def place_among(members: Collection[str], peer: str) -> Place | None:
    return (sorted(members).index(peer), len(members)) if peer in members else None


class SampleOrder:
    """Assigns samples to peers by index; ``seed`` is the manifest's ``data.seed``."""

    def __init__(self, num_samples: int, seed: int) -> None:
        self.num_samples = num_samples
        self.seed = seed

    def index(self, cursor: int, place: Place | None, peer: str, round: int, number: int) -> int:
        """Return the sample that ``peer`` reads as number ``number`` (0, 1, …) of a round.

        ``cursor`` counts the positions that the lineage consumed before this round. A peer without a place in the last
        round is a newcomer: its samples depend on the round, and may overlap with other peers'.
        """
        if place is not None:
            rank, count = place
            return self.at(cursor + rank + count * number)
        return self.of_newcomer(peer, round, number)

    def at(self, position: int) -> int:
        """Return the sample at a global position: a bijection within each pass."""
        data_pass, slot = divmod(position, self.num_samples)
        return permute(slot, self.num_samples, _pass_keys(self.seed, data_pass))

    def of_newcomer(self, peer: str, round: int, number: int) -> int:
        """Return the sample that a peer without a place reads as number ``number`` of a round."""
        return _keyed_hash("newcomer", self.seed, peer, round, number) % self.num_samples


class Sampler:
    """Assigns windows of ``context`` training tokens to peers; ``seed`` is the manifest's ``data.seed``.

    ``tokens``, ``[num_tokens]``, may be memory-mapped. Too few for one window raise `ConfigError`.
    """

    def __init__(self, tokens: npt.NDArray[np.unsignedinteger[Any]], context: int, seed: int) -> None:
        self.tokens = tokens
        self.context = context
        self.num_windows = (len(tokens) - 1) // context
        if self.num_windows < 1:
            raise ConfigError(f"{len(tokens)} training tokens are too few for a context of {context}: give more text")
        self.order = SampleOrder(self.num_windows, seed)

    def batch(
        self, cursor: int, place: Place | None, peer: str, round: int, first_index: int, size: int
    ) -> npt.NDArray[np.int64]:
        """Return samples ``first_index`` to ``first_index + size - 1`` of a peer's round (see `SampleOrder.index`).

        Returns:
            Token ids, ``[size, context + 1]``: columns ``[:-1]`` are inputs, ``[1:]`` targets.
        """
        return self.windows(self.order.index(cursor, place, peer, round, first_index + row) for row in range(size))

    def of_site(self, first: int, size: int) -> npt.NDArray[np.int64]:
        """Return samples ``first`` to ``first + size - 1`` of a peer that reads all of its own text; as `batch`."""
        return self.windows(self.order.at(first + row) for row in range(size))

    def windows(self, indices: Iterable[int]) -> npt.NDArray[np.int64]:
        """Return the windows of these numbers, ``[count, context + 1]``."""
        starts = [index * self.context for index in indices]
        return np.stack([self.tokens[start : start + self.context + 1] for start in starts]).astype(np.int64)


class ReadingPosition:
    """A reader's position in its order of windows, kept on disk: no window is read twice, even after SIGKILL.

    The file names a position that no earlier process has reached. It runs ahead of the reader, so the process after a
    SIGKILL skips up to `RESERVED` windows. `save` sets it to the exact position.

    Args:
        path: The file, created on first use; None keeps nothing.
        order: Name of the order of windows; a file of another order is ignored.
    """

    RESERVED = 1024

    def __init__(self, path: Path | None, order: str) -> None:
        self._path = path
        self._order = order
        self._next = self._reserved = self._load()

    def take(self, count: int) -> int:
        """Reserve ``count`` consecutive positions; return the first."""
        first, self._next = self._next, self._next + count
        if self._next > self._reserved:
            self._reserved = self._next + self.RESERVED
            self._store(self._reserved)
        return first

    def save(self) -> None:
        """Store the exact position; call after the last `take`."""
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
        try:
            replace_file(self._path, json.dumps({"order": self._order, "next": position}).encode())
        except OSError as error:
            logger.warning(
                "cannot keep the reading position in %s, a restart reads windows again: %s", self._path, error
            )


def advance(cursor: int, counts: Collection[int]) -> int:
    """Return the cursor after a round; ``counts`` are the samples of each member at its start (0 for one that left)."""
    return cursor + len(counts) * max(counts, default=0)


def permute(slot: int, size: int, keys: Sequence[int]) -> int:
    """Return the image of ``slot`` in a pseudo-random permutation of ``range(size)`` by ``keys`` (64 bits each)."""
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    mask = (1 << half_bits) - 1
    while True:
        left, right = slot >> half_bits, slot & mask
        for key in keys:
            left, right = right, left ^ (_mix(right ^ key) & mask)
        slot = (left << half_bits) | right
        if slot < size:
            return slot


@lru_cache(maxsize=1 << 12)  # A pass over few samples mixes few values, again and again.
def _mix(value: int) -> int:
    """Mix 64 bits: the finalizer of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014)."""
    value = (value + 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


@lru_cache(maxsize=256)
def _pass_keys(seed: int, data_pass: int) -> tuple[int, ...]:
    return tuple(_keyed_hash("pass", seed, data_pass, number) for number in range(_FEISTEL_ROUNDS))


def _keyed_hash(*parts: str | int) -> int:
    return int.from_bytes(hashlib.sha256(repr(parts).encode()).digest()[:8], "little")
