"""``serve_http``: serve OpenAI's API and a chat page over a generator until asked to stop."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
from collections.abc import AsyncIterator, Callable, Collection
from pathlib import Path
from typing import Any

from p2ptrain.network.http_server import listen, serving, url_of
from p2ptrain.serving.generation import Generator
from p2ptrain.serving.http.app import Api
from p2ptrain.serving.http.generating import Generating
from p2ptrain.serving.http.keys import Keys
from p2ptrain.serving.http.preparing import Limits, Preparing
from p2ptrain.serving.text import Text
from p2ptrain.tasks import Tasks

logger = logging.getLogger(__name__)


async def serve_http(
    generator: Generator, tokenizer: Any, stop: asyncio.Event, *, host: str = "127.0.0.1", port: int = 8000,
    names: Collection[str] = (), keys: Path | None = None, end_ids: Collection[int] = (), limits: Limits | None = None,
    on_ready: Callable[[str], None] = lambda url: None,
) -> None:  # fmt: skip
    """Serve until ``stop`` is set; then refuse further requests, and give those in progress time to end.

    Args:
        tokenizer: The model's transformers tokenizer.
        names: Host names to answer under, beside ``host``, IP addresses and ``localhost``.
        keys: File of the API keys (see `p2ptrain.serving.http.keys`); None lets everybody in.
        end_ids: Tokens that end an answer, beside the tokenizer's own.
        on_ready: Called with the server's URL once it answers.

    Raises:
        ConfigError: The file of keys cannot be used.
        IdentityError: Other users can read the file of keys.
        ResourceError: The port is taken.
    """
    opened = serving_http(
        generator, tokenizer, host=host, port=port, names=names, keys=keys, end_ids=end_ids, limits=limits
    )
    async with opened as (url, web), Tasks() as tasks:
        on_ready(url)
        await asyncio.wait({web, tasks.call(stop.wait(), "stop")}, return_when=asyncio.FIRST_COMPLETED)
        if web.done():
            web.result()


@contextlib.asynccontextmanager
async def serving_http(
    generator: Generator, tokenizer: Any, *, host: str = "127.0.0.1", port: int = 8000, names: Collection[str] = (),
    keys: Path | None = None, end_ids: Collection[int] = (), limits: Limits | None = None,
) -> AsyncIterator[tuple[str, asyncio.Task[None]]]:  # fmt: skip
    """Serve during the block, as `serve_http`; yield the URL, and the task that ends early if the server fails."""
    limits = limits or Limits()
    if keys is None and not _is_loopback(host):
        logger.warning("everybody who reaches %s port %d may use the model: give a file of API keys", host, port)
    text = Text(tokenizer, end_ids)
    api = Api(generator, Generating(generator, text), Preparing(generator, text, limits), Keys(keys), limits)
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
