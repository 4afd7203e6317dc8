"""What comes over the wire of a chunk transfer is refused, or within its bounds."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from p2ptrain.network.chunks.messages import Ask, Enough, Open
from tests.support import fuzz


@given(st.data())
def test_any_message_is_refused_or_survives(data: st.DataObject) -> None:
    fuzz.check_any(data, Open, Ask, Enough)
