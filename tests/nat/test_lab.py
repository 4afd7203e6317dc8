"""One scenario of the laboratory with real processes; ``python -m tests.lab --real all`` runs the others."""

import pytest

from tests.lab.__main__ import run
from tests.lab.scenario import SCENARIOS
from tests.support.processes.nat import why_unavailable
from tests.support.tools import needed

pytestmark = [needed(why_unavailable(), "ip", "nft"), pytest.mark.timeout(1500)]


def test_real_peers_train_on_while_a_stranger_sends_garbage_and_one_of_them_is_killed() -> None:
    verdict = run(SCENARIOS / "strangers.toml", "real", 1)
    assert verdict.is_as_expected, str(verdict)
