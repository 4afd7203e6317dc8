"""A language model of a swarm, for scripts: its settings."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from p2ptrain.errors import UsageError
from p2ptrain.models.tokenizers import END_OF_TEXT, byte_tokenizer
from p2ptrain.node.serving.language_model import LanguageModel, Settings
from p2ptrain.serving.text import Text
from tests.support.generators import tokenizer


@pytest.mark.parametrize("ends", [-1, [2, 257], list(range(17))])
def test_end_tokens_that_no_host_takes_are_refused(ends: Any) -> None:
    generator = SimpleNamespace(vocabulary=257)
    model = LanguageModel(
        cast(Any, None), cast(Any, SimpleNamespace(generator=generator)), lambda: Text(tokenizer()), {}
    )
    with pytest.raises(UsageError, match=r"eos_token_id: .* give up to 16 ids below 257, or \[\] for no end"):
        model.generate(torch.tensor([[1, 2]]), eos_token_id=ends)


def test_a_text_of_bytes_ends_where_those_that_the_model_learnt_from_do(monkeypatch: pytest.MonkeyPatch) -> None:
    generator = SimpleNamespace(vocabulary=256)
    model = LanguageModel(
        cast(Any, None), cast(Any, SimpleNamespace(generator=generator)),
        lambda: Text(byte_tokenizer(64), [END_OF_TEXT]), {},
    )  # fmt: skip

    def opened(ids: list[int], settings: Settings, ends: list[int], row: int) -> Iterator[int]:
        assert ends == [END_OF_TEXT]
        yield from b"Hi\0"

    monkeypatch.setattr(model, "_open", opened)
    assert model.complete("So: ") == "Hi"
