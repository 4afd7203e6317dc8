"""What peers say of what they train and hold is refused, or within its bounds."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from p2ptrain.training.sync.agreement import Trained
from p2ptrain.training.sync.heads import HeldHead
from p2ptrain.training.sync.state_server import HeldState
from tests.support import fuzz


@given(st.data())
def test_any_message_is_refused_or_survives(data: st.DataObject) -> None:
    fuzz.check_any(data, Trained, HeldHead, HeldState)
