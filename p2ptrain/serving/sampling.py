"""Draws tokens from logits: a pure function with equal results on all machines.

Logits get repetition penalty (Keskar et al., *CTRL*, 2019), frequency and presence penalties, and bias, in double
precision, and are rounded to fp32. Ids are ordered by logit, the largest first, and then by id. Top-k keeps the first
``k``. Top-p (Holtzman et al., 2019) adds ``exp(z)`` in this order, ``z = (logit - max) / temperature``, and keeps ids
up to the first sum of at least ``top_p`` of all. The id with the largest sum of ``z`` and Gumbel noise is drawn, which
is a draw from the softmax. The noise is a function of seed, position and id (Philox4x32-10, Salmon et al., 2011). Of
equal ids the lowest wins.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from msgspec import Meta

from p2ptrain.errors import ConfigError, IntegrityError
from p2ptrain.models.exact.elementary import Doubles, exp, log
from p2ptrain.native.exact import Kernels, load_kernels
from p2ptrain.network.schema import Count, Message, from_wire

MAX_LOGIT_BIASES = 1024
MAX_TOP_LOGPROBS = 20
MAX_GRAMMAR_BYTES = 32 * 1024
LEAST = 1e-6
"""Lower bound of settings that must not be 0, and of a temperature that is not: smaller ones would overflow."""

Ids = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]
Id = Annotated[int, Meta(ge=0, lt=1 << 31)]
Penalty = Annotated[float, Meta(ge=-2.0, le=2.0)]


class Grammar(Message, frozen=True):
    """The form of an answer; see `p2ptrain.serving.grammar`.

    Attributes:
        text: UTF-8.
        engine: `p2ptrain.serving.grammar.Grammars.engine` of the hosts that may draw; empty before they are chosen.
    """

    text: Annotated[bytes, Meta(min_length=1, max_length=MAX_GRAMMAR_BYTES)]
    engine: Annotated[str, Meta(max_length=64)] = ""


class Sampling(Message, frozen=True):
    """How tokens are drawn.

    Attributes:
        temperature: 0 takes the largest logit.
        top_k: 0 keeps all ids.
        frequency_penalty, presence_penalty: Subtracted from drawn ids: once for each time, and once.
        repetition_penalty: Divides positive logits, and multiplies others, of all earlier ids.
        logit_bias: Added to the logits of some ids.
        logprobs: Most probable ids to tell beside each token.
        want_logprob: Whether to tell the token's own log probability; implied by ``logprobs``.
        grammar: The form that the answer has; None for any.
    """

    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] = 1.0
    top_p: Annotated[float, Meta(ge=LEAST, le=1.0)] = 1.0
    top_k: Annotated[int, Meta(ge=0, lt=1 << 31)] = 0
    seed: Count = 0
    frequency_penalty: Penalty = 0.0
    presence_penalty: Penalty = 0.0
    repetition_penalty: Annotated[float, Meta(ge=LEAST, le=100.0)] = 1.0
    logit_bias: Annotated[
        tuple[tuple[Id, Annotated[float, Meta(ge=-100.0, le=100.0)]], ...], Meta(max_length=MAX_LOGIT_BIASES)
    ] = ()
    logprobs: Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)] = 0
    want_logprob: bool = False
    grammar: Grammar | None = None


OWN_SETTINGS = ("temperature", "top_p", "top_k", "repetition_penalty")
"""Settings that a model's ``generation_config.json`` may name."""


def default_sampling(own: Mapping[str, Any]) -> Sampling:
    """Return the sampling of all who name none: a model's own settings, and `Sampling`'s where it names none.

    Raises `ConfigError` if one of the model's is out of range.
    """
    try:
        return from_wire(Sampling, {name: own[name] for name in OWN_SETTINGS if own.get(name) is not None})
    except IntegrityError as error:
        raise ConfigError(f"the model's generation_config.json: {error}") from error


class Drawn(NamedTuple):
    """A drawn token.

    Attributes:
        logprob: Log probability before penalties, bias, temperature and filters; 0 if it was not asked for.
        top: The most probable ids with their log probabilities, the first ones first.
    """

    id: int
    logprob: float
    top: tuple[tuple[int, float], ...]


def draw(
    logits: torch.Tensor,
    position: int,
    ids: Sequence[int],
    settings: Sampling,
    prompt: int,
    allowed: Ids | None = None,
    *,
    kernels: Kernels | None = None,
) -> Drawn:
    """Draw the token of a position.

    Args:
        logits: ``[vocabulary]``, fp32 and finite.
        ids: All tokens before the position.
        prompt: How many of them are the prompt.
        allowed: Ids that may be drawn, ascending; None for all.
        kernels: Those that compute; None for the best of this CPU. The result is the same.

    Raises:
        ValueError: The bias names an id beyond the vocabulary, or no id is allowed.
    """
    kernels = kernels or load_kernels()
    raw: Floats = logits.numpy()
    values = _adjust(raw, ids, settings, prompt)
    candidates = np.arange(len(raw)) if allowed is None else allowed
    if not len(candidates):
        raise ValueError("no token is allowed")
    values = values if allowed is None else values[allowed]
    if settings.temperature == 0:
        chosen = int(candidates[np.argmax(values)])
    else:
        chosen = _draw(values, candidates, position, settings, kernels)
    if not settings.logprobs and not settings.want_logprob:
        return Drawn(chosen, 0.0, ())
    scaled = raw.astype(np.float64) - float(raw.max())
    total = float(log(np.cumsum(exponentials(scaled, kernels))[-1:])[0])
    best = order(raw, np.arange(len(raw)))[: settings.logprobs] if settings.logprobs else ()
    return Drawn(
        chosen, float(scaled[chosen]) - total, tuple((int(each), float(scaled[each]) - total) for each in best)
    )


def _adjust(raw: Floats, ids: Sequence[int], settings: Sampling, prompt: int) -> Floats:
    """Return the logits after penalties and bias."""
    if not (
        settings.repetition_penalty != 1
        or settings.frequency_penalty
        or settings.presence_penalty
        or settings.logit_bias
    ):
        return raw
    values = raw.astype(np.float64)
    if settings.repetition_penalty != 1:
        seen = np.unique(np.asarray(ids, dtype=np.int64))
        found, by = values[seen], settings.repetition_penalty
        values[seen] = np.where(found > 0, found / by, found * by)
    if settings.frequency_penalty or settings.presence_penalty:
        drawn, counts = np.unique(np.asarray(ids[prompt:], dtype=np.int64), return_counts=True)
        values[drawn] -= counts * settings.frequency_penalty + settings.presence_penalty
    for each, bias in settings.logit_bias:
        if each >= len(values):
            raise ValueError(f"logit_bias names token {each}, and the model has {len(values)} tokens")
        values[each] += bias
    return values.astype(np.float32)


def _draw(values: Floats, candidates: Ids, position: int, settings: Sampling, kernels: Kernels | None) -> int:
    scaled = values.astype(np.float64)
    scaled = (scaled - scaled.max()) / max(settings.temperature, LEAST)
    if settings.top_k or settings.top_p < 1:
        kept = order(values, np.arange(len(values)))
        kept = kept[: settings.top_k or None]
        if settings.top_p < 1:
            sums = np.cumsum(exponentials(scaled[kept], kernels))  # one after another, unlike np.sum
            kept = kept[: int(np.searchsorted(sums, settings.top_p * sums[-1])) + 1]
        kept.sort()
        scaled, candidates = scaled[kept], candidates[kept]
    # ids ascend, and argmax returns the first of equal ones
    return int(candidates[np.argmax(scaled + gumbel(settings.seed, position, candidates, kernels))])


def order(values: Floats, ids: Ids) -> Ids:
    """Return ids by value, the largest first, and then ascending."""
    bits = (values + np.float32(0)).view(np.uint32)  # no -0
    descending = np.where(bits >> 31, bits, ~bits & np.uint32(0x7FFFFFFF)).astype(np.uint64)
    return (np.sort(descending << np.uint64(32) | ids.astype(np.uint64)) & np.uint64(0xFFFFFFFF)).astype(np.int64)


def exponentials(values: Doubles, kernels: Kernels | None) -> Doubles:
    """Return `p2ptrain.models.exact.elementary.exp`, by a kernel if there is one."""
    if kernels is None:
        return exp(values)
    values, found = np.ascontiguousarray(values), np.empty(len(values))
    kernels.exponentials(values.ctypes.data, found.ctypes.data, len(values))
    return found


def gumbel(seed: int, position: int, ids: Ids, kernels: Kernels | None) -> Doubles:
    """Return the noise of some ids at a position; the kernel computes what the plain code does."""
    if kernels is not None:
        ids, found = np.ascontiguousarray(ids), np.empty(len(ids))
        kernels.gumbel(ids.ctypes.data, found.ctypes.data, len(ids), seed, position)
        return found
    words = np.stack(_philox(seed, position, ids.astype(np.uint64) >> np.uint64(2)))[ids & 3, np.arange(len(ids))]
    return -log(-log((words.astype(np.float64) + 0.5) * 2.0**-32))


def _philox(seed: int, position: int, blocks: npt.NDArray[np.uint64]) -> tuple[npt.NDArray[np.uint64], ...]:
    """Return the four words of each block."""
    low, half = np.uint64(0xFFFFFFFF), np.uint64(32)
    c0, c1 = blocks, np.full_like(blocks, position & 0xFFFFFFFF)
    c2, c3 = np.full_like(blocks, position >> 32), np.zeros_like(blocks)
    k0, k1 = seed & 0xFFFFFFFF, seed >> 32
    for _ in range(10):
        one, other = c0 * np.uint64(0xD2511F53), c2 * np.uint64(0xCD9E8D57)
        c0, c1 = (other >> half) ^ c1 ^ np.uint64(k0), other & low
        c2, c3 = (one >> half) ^ c3 ^ np.uint64(k1), one & low
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c0, c1, c2, c3
