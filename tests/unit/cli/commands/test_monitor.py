"""Options of ``p2ptrain monitor`` are checked before anything starts."""

from __future__ import annotations

import argparse
import re

import pytest

from p2ptrain.cli.commands import monitor
from p2ptrain.errors import LinkError, UsageError


def parsed(*options: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    monitor.add_arguments(parser)
    return parser.parse_args(["p2ptrain://nonsense", *options])


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("--port", "65536", "from 0 to 65535"),
        ("--port", "-1", "from 0 to 65535"),
        ("--stall-minutes", "0", "above 0"),
        ("--stall-minutes", "nan", "above 0"),
        ("--webhook", "example.org/hook", "http://"),
        ("--webhook", "file:///etc/passwd", "http://"),
        ("--webhook", "http://", "http://"),
        ("--webhook", "http://::1]/", "http://"),
        ("--webhook", "http://example.org:port/", "http://"),
    ],
)
def test_an_option_out_of_range_is_named_with_what_would_do(option: str, value: str, words: str) -> None:
    with pytest.raises(UsageError, match=re.escape(f"{option} {value}")) as caught:
        monitor.run(parsed(f"{option}={value}"))
    assert words in str(caught.value)


def test_a_link_that_is_none_is_refused() -> None:
    with pytest.raises(LinkError):
        monitor.run(parsed())


def test_by_default_only_this_machine_can_see_the_page() -> None:
    assert parsed().host == "127.0.0.1"
