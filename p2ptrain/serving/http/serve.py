"""``serving_http``: serve OpenAI's API and a chat page over a generator."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
from collections.abc import AsyncIterator, Collection
from pathlib import Path
from typing import Any

from p2ptrain.network.http_server import listen, serving, url_of
from p2ptrain.serving.generation import Generator
from p2ptrain.serving.http.app import Api
from p2ptrain.serving.http.generating import Generating
from p2ptrain.serving.http.keys import Keys
from p2ptrain.serving.http.preparing import Limits, Preparing
from p2ptrain.serving.sampling import Sampling
from p2ptrain.serving.text import Text

logger = logging.getLogger(__name__)


@contextlib.asynccontextmanager
async def serving_http(
    generator: Generator, tokenizer: Any, *, host: str = "127.0.0.1", port: int = 8000, names: Collection[str] = (),
    keys: Path | None = None, end_ids: Collection[int] = (), sampling: Sampling | None = None,
    limits: Limits | None = None,
) -> AsyncIterator[tuple[str, asyncio.Task[None]]]:  # fmt: skip
    """Serve during the block; at its end refuse further requests, and give those in progress time to end.

    Yield the URL, and the task that ends early if the server fails.

    Args:
        tokenizer: The model's transformers tokenizer.
        names: Host names to answer under, beside ``host``, IP addresses and ``localhost``.
        keys: File of the API keys (see `p2ptrain.serving.http.keys`); None lets everybody in.
        end_ids: Tokens that end an answer, beside the tokenizer's own.
        sampling: The settings that a request leaves out.

    Raises:
        ConfigError: The file of keys cannot be used.
        IdentityError: Other users can read the file of keys.
        ResourceError: The port is taken.
    """
    limits = limits or Limits()
    if keys is None and not _is_loopback(host):
        logger.warning("everybody who reaches %s port %d may use the model: give a file of API keys", host, port)
    text = Text(tokenizer, end_ids)
    preparing = Preparing(generator, text, limits, sampling or Sampling())
    api = Api(generator, Generating(generator, text), preparing, Keys(keys), limits)
    listener = listen(host, port, "--port")
    async with serving(api.app(), listener, [host, *names]) as web:
        try:
            yield url_of(listener), web
        finally:
            await api.drain()


def _is_loopback(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
