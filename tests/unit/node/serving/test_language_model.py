"""A language model of a swarm, for scripts: settings that cannot work are refused before anybody is asked."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from p2ptrain.errors import UsageError
from p2ptrain.node.serving.language_model import LanguageModel
from tests.support.generators import tokenizer


@pytest.mark.parametrize("ends", [-1, [2, 257], list(range(17))])
def test_end_tokens_that_no_host_takes_are_refused(ends: Any) -> None:
    generator = SimpleNamespace(vocabulary=257)
    model = LanguageModel(cast(Any, None), cast(Any, SimpleNamespace(generator=generator)), tokenizer, {})
    with pytest.raises(UsageError, match=r"eos_token_id: .* give up to 16 ids below 257, or \[\] for no end"):
        model.generate(torch.tensor([[1, 2]]), eos_token_id=ends)
