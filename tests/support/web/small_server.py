"""A real HTTP server with a small random model, on a thread of its own."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

from p2ptrain.manifest import ModelSpec
from p2ptrain.node.thread import LoopThread
from p2ptrain.serving.http.preparing import Limits
from p2ptrain.serving.http.serve import serving_http
from tests.support.generators import TEMPLATE, SmallModel, tokenizer

SECONDS = 60.0


@contextmanager
def small_server(limits: Limits | None = None, context: int = 512) -> Iterator[str]:
    """Yield the URL of a server whose chat template takes tools; at the end, check that no generation is left."""
    spec = ModelSpec(layers=1, hidden=32, heads=4, kv_heads=2, intermediate=48, vocabulary=257, context=context)
    made = tokenizer()
    made.chat_template = "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}" + TEMPLATE
    generator = SmallModel(spec, made)
    urls: list[str] = []
    ready, stop = asyncio.Event(), asyncio.Event()

    async def serve() -> None:
        async with serving_http(generator, made, port=0, limits=limits) as (url, _):
            urls.append(url)
            ready.set()
            await stop.wait()

    thread = LoopThread()
    try:
        running = asyncio.run_coroutine_threadsafe(serve(), thread.loop)
        thread.call(asyncio.wait_for(ready.wait(), SECONDS))
        yield urls[0]
        thread.loop.call_soon_threadsafe(stop.set)
        running.result(SECONDS)
        assert not generator.running
    finally:
        thread.stop()
