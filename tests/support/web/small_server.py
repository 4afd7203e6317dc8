"""A real HTTP server with a small random model, on a thread of its own."""

from collections.abc import Iterator
from contextlib import contextmanager

from p2ptrain.manifest import ModelSpec
from p2ptrain.node.thread import LoopThread
from p2ptrain.serving.http.preparing import Limits
from p2ptrain.serving.http.serve import serving_http
from tests.support.generators import TEMPLATE, SmallModel, tokenizer


@contextmanager
def small_server(limits: Limits | None = None, context: int = 512) -> Iterator[str]:
    """Yield the URL of a server whose chat template takes tools; at the end, check that no generation is left."""
    spec = ModelSpec(layers=1, hidden=32, heads=4, kv_heads=2, intermediate=48, vocabulary=257, context=context)
    made = tokenizer()
    made.chat_template = "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}" + TEMPLATE
    generator = SmallModel(spec, made)
    thread = LoopThread()
    try:
        with thread.holding(serving_http(generator, made, port=0, limits=limits)) as (url, _):
            yield url
        assert not generator.running
    finally:
        thread.stop()
