"""Messages of all protocols: those within their bounds are read as they were sent, and others are refused."""

import importlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2ptrain.codecs import CODECS
from p2ptrain.network.schema import Message
from p2ptrain.pipeline.messages import IDS, HopRequest, OutputRequest, TensorHead
from tests.support.fuzz import check

ROOT = Path(__file__).parents[2]
HEADS = st.builds(
    TensorHead, st.sampled_from([IDS, *CODECS.own]), st.lists(st.integers(1, 30), min_size=1, max_size=8).map(tuple)
)


def schemas() -> Iterator[type[Message]]:
    """Yield each message of the package that is not only the base of others."""
    for path in sorted((ROOT / "p2ptrain").rglob("*.py")):
        if "(Message, frozen=True" in path.read_text():
            module = importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))
            for value in vars(module).values():
                is_own = isinstance(value, type) and value.__module__ == module.__name__
                if is_own and issubclass(value, Message) and not value.__subclasses__():
                    yield value


def look_at(message: object) -> None:
    """Do what a peer does with a message before it has looked at anything else."""
    str(message)
    if isinstance(message, HopRequest):
        hop = message.to_hop(0)
        assert hop.request == message
        assert hop.num_bytes > 0
    if isinstance(message, OutputRequest):
        assert message.output.num_bytes > 0


@pytest.mark.parametrize("schema", list(schemas()), ids=lambda schema: f"{schema.__module__}.{schema.__name__}")
@settings(max_examples=40)
@given(data=st.data())
def test_a_message_is_read_as_it_was_sent_and_what_is_out_of_bounds_is_refused(
    schema: type[Message], data: st.DataObject
) -> None:
    message = check(schema, data, {TensorHead: HEADS})
    if message is not None:
        look_at(message)
