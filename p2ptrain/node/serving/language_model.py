"""`LanguageModel`: a swarm's model for synchronous scripts and notebooks, in transformers' manner."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, TypedDict, Unpack

import torch
from transformers.modeling_outputs import CausalLMOutput

from p2ptrain.errors import IntegrityError, TemporaryError, UsageError
from p2ptrain.models.pretrained import end_marks, generation_settings, manifest_tokenizer
from p2ptrain.network.schema import from_wire
from p2ptrain.node.serving.client import SwarmModel
from p2ptrain.node.thread import PeerThread
from p2ptrain.pipeline.plan import stage_blocks
from p2ptrain.serving.client.draft import load_draft
from p2ptrain.serving.messages import MAX_STOPS
from p2ptrain.serving.sampling import OWN_SETTINGS, Sampling
from p2ptrain.serving.text import Text
from p2ptrain.training.bridge import Bridge

MAX_NEW_TOKENS = 20
"""Default length of an answer, as in transformers."""
MAX_BATCH = 64
LOOK_SECONDS = 1.0
"""Interval of looks for a network that has ended, while no token comes."""


class Settings(TypedDict, total=False):
    """How tokens are drawn.

    Attributes:
        max_new_tokens: Tokens to draw at most; 20 by default.
        do_sample: False takes the likeliest token.
        temperature, top_p, top_k, repetition_penalty: As in transformers. They and ``do_sample`` are by default the
            pretrained model's own, if its files are here; else the likeliest token is taken.
        eos_token_id: Tokens that end an answer; by default the tokenizer's, and those that the model's files name. An
            empty list stands for none.
        seed: Of the draws; the second row draws from the next seed, and so on. By default any.
    """

    max_new_tokens: int
    do_sample: bool
    temperature: float
    top_p: float
    top_k: int
    repetition_penalty: float
    eos_token_id: int | Sequence[int] | None
    seed: int


class Output(CausalLMOutput):
    """The output of `LanguageModel.forward`, which always has logits, and the states if they were asked for."""

    logits: torch.Tensor
    hidden_states: tuple[torch.Tensor, ...]


class LanguageModel:
    """A swarm's model, computed by peers that serve; `Swarm.language_model` makes it.

    Any thread may call it. An interrupted call cancels its generation.

    Attributes:
        generator: Generates on the network's event loop.
    """

    def __init__(
        self, bridge: Bridge, model: SwarmModel, load_text: Callable[[], Text], own: Mapping[str, Any]
    ) -> None:
        """``load_text`` is called once, when the tokenizer is needed; ``own`` has the settings by default."""
        self._bridge = bridge
        self._own = own
        self.generator = model.generator
        self._load_text = load_text

    @cached_property
    def _text(self) -> Text:
        return self._load_text()

    @cached_property
    def tokenizer(self) -> Any:
        """The model's transformers tokenizer; raises `ConfigError` if it is not here."""
        text = self._text
        return text.tokenizer

    @property
    def context(self) -> int:
        """Most tokens of a prompt and its answer; 0 while a stage has no host."""
        return self.generator.context

    def complete(self, prompt: str, **settings: Unpack[Settings]) -> str:
        """Return the continuation of a text, to the end of that text at most; raises as `generate`."""
        text = self._text
        return text.decode([id for id in self.stream(text.encode(prompt), **settings) if id not in text.end_ids])

    def generate(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        pad_token_id: int | None = None,
        streamer: Any = None,
        **settings: Unpack[Settings],
    ) -> torch.Tensor:
        """Return prompts with their continuations, int64 ``[batch, length]``; shorter ones are padded at the end.

        Args:
            input_ids: Prompts, ``[batch, length]``.
            attention_mask: 0 where a prompt is padding, which the model does not see; the same shape.
            pad_token_id: Default: an end token, or 0.
            streamer: A `transformers.TextStreamer`, or anything with its ``put`` and ``end``; for one prompt.

        Raises:
            ConfigError: The default end token is the tokenizer's, and that is not here.
            UsageError: A setting is out of range, prompt and answer exceed the context, or the shapes do not fit.
            TemporaryError: A stage has no host, all are full, or hosts failed and none could take their place.
        """
        prompts = _prompts(input_ids, attention_mask)
        if streamer is not None and len(prompts) > 1:
            raise UsageError("streamer: takes one prompt at a time")
        ends = self._ends(settings)
        opened = [self._open(ids, settings, ends, row) for row, ids in enumerate(prompts)]
        found: list[list[int]] = []
        try:
            if streamer is not None:
                streamer.put(input_ids.cpu())
            for tokens in opened:
                found.append([])
                for id in tokens:
                    found[-1].append(id)
                    if streamer is not None:
                        streamer.put(torch.tensor([id]))
            if streamer is not None:
                streamer.end()
        finally:
            for tokens in opened:
                tokens.close()
        pad = pad_token_id if pad_token_id is not None else min(ends, default=0)
        longest = max(map(len, found))
        padded = torch.tensor([[*ids, *[pad] * (longest - len(ids))] for ids in found], dtype=torch.int64, device="cpu")
        return torch.cat([input_ids.cpu().long(), padded], dim=1)

    def stream(
        self, input_ids: Sequence[int] | torch.Tensor, **settings: Unpack[Settings]
    ) -> Generator[int, None, None]:
        """Yield the continuation of one prompt, a token at a time; closing the iterator cancels the generation.

        ``input_ids`` is a list, ``[length]`` or ``[1, length]``. Raises as `generate`.
        """
        ids = torch.as_tensor(input_ids).reshape(1, -1)
        tokens = self._open(_prompts(ids, None)[0], settings, self._ends(settings), 0)
        try:
            yield from tokens
        finally:
            tokens.close()

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        *,
        output_hidden_states: bool = False,
    ) -> Output:
        """Return the logits after each token, fp32 ``[batch, length, vocabulary]``, 0 where a prompt is padding.

        With ``output_hidden_states`` also ``hidden_states``: a tuple of the last layer's alone, after the last
        normalisation, as transformers' last one, fp32 ``[batch, length, hidden]``.

        They have no gradient: `Swarm.pipeline` trains. Takes and raises what `generate` does.
        """
        prompts = _prompts(input_ids, attention_mask)
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        waiting = [self._bridge.start(self.generator.logits(ids, output_hidden_states)) for ids in prompts]
        found = torch.zeros(0, dtype=torch.float32, device="cpu")
        try:
            for row, future in enumerate(waiting):
                rows = self._bridge.finish(future)
                found = found if row else found.new_zeros(*input_ids.shape, rows.shape[1])
                found[row, mask[row].bool().cpu()] = rows
        finally:
            for future in waiting:
                future.cancel()
        vocabulary = self.generator.vocabulary
        states: Any = (found[..., vocabulary:],) if output_hidden_states else None
        return Output(logits=found[..., :vocabulary], hidden_states=states)

    __call__ = forward

    def _ends(self, settings: Settings) -> list[int]:
        given = settings.get("eos_token_id")
        if given is None:
            return sorted(self._text.end_ids)
        ends = [given] if isinstance(given, int) else list(given)
        if len(ends) > MAX_STOPS or not all(0 <= each < self.generator.vocabulary for each in ends):
            raise UsageError(
                f"eos_token_id: {given}: give up to {MAX_STOPS} ids below {self.generator.vocabulary}, or [] for no end"
            )
        return ends

    def _open(self, ids: Sequence[int], settings: Settings, ends: Sequence[int], row: int) -> _Tokens:
        most = settings.get("max_new_tokens", MAX_NEW_TOKENS)
        if most < 1:
            raise UsageError(f"max_new_tokens: {most} is not above 0")
        return _Tokens(self._bridge, partial(self.generator.generate, ids, _sampling({**self._own, **settings}, row),
                                             max_tokens=most, stops=ends))  # fmt: skip


class _Tokens(Iterator[int]):
    """The tokens of a generation that runs on the network's event loop."""

    def __init__(self, bridge: Bridge, generate: Callable[[], Any]) -> None:
        self._bridge = bridge
        self._queue: queue.SimpleQueue[int | None] = queue.SimpleQueue()

        async def run() -> None:
            try:
                async with generate() as generation:
                    async for token in generation:
                        self._queue.put(token.id)
            finally:
                self._queue.put(None)

        self._running = bridge.start(run())

    def __next__(self) -> int:
        while True:
            try:
                found = self._queue.get(timeout=LOOK_SECONDS)
            except queue.Empty:
                if self._bridge.is_over():
                    raise TemporaryError("the swarm is closed: call Swarm.join again to go on") from None
                continue
            if found is None:
                self._bridge.finish(self._running)
                self._queue.put(None)
                raise StopIteration
            return found

    def close(self) -> None:
        """Cancel the generation, unless it has ended."""
        self._running.cancel()


def open_language_model(
    running: PeerThread, weights: Path | None, allowed: Sequence[Path], wait_seconds: float, draft: Path | None = None
) -> LanguageModel:
    """Return the model of a peer's swarm; see `Swarm.language_model`."""
    manifest = running.peer.manifest
    model = SwarmModel(running.peer, stage_blocks(manifest), wait_seconds)
    own = generation_settings(manifest, weights)

    def load_text() -> Text:
        return Text(manifest_tokenizer(manifest, weights, allowed), end_marks(manifest, own))

    found = LanguageModel(running.bridge(), model, load_text, own)
    if draft is not None:
        model.generator.draft = load_draft(draft, manifest.model.vocabulary, found.tokenizer)
    return found


def _prompts(input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> list[list[int]]:
    """Return each row's tokens without its padding; raise `UsageError` if the shapes do not fit."""
    if input_ids.dim() != 2 or input_ids.is_floating_point() or not 1 <= len(input_ids) <= MAX_BATCH:
        raise UsageError(
            f"input_ids: is {input_ids.dtype} {list(input_ids.shape)}: give ids [up to {MAX_BATCH} prompts, length]"
        )
    if attention_mask is not None and attention_mask.shape != input_ids.shape:
        raise UsageError(f"attention_mask: is {list(attention_mask.shape)}, and input_ids {list(input_ids.shape)}")
    mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
    return [ids[kept.bool()].tolist() for ids, kept in zip(input_ids.cpu(), mask.cpu(), strict=True)]


def _sampling(settings: Mapping[str, Any], row: int) -> Sampling:
    """Return the settings of one row; raise `UsageError` for a value out of range."""
    known = {name: settings[name] for name in OWN_SETTINGS if settings.get(name) is not None}
    known |= {} if settings.get("do_sample") else {"temperature": 0.0}
    seed = settings.get("seed", time.time_ns() & 0xFFFFFFFF) + row
    try:
        return from_wire(Sampling, {**known, "seed": seed})
    except IntegrityError as error:
        raise UsageError(str(error)) from error
