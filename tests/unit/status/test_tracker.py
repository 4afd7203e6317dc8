"""How fast a swarm trains: over whole rounds, whatever they last; and a head that no peers can have made."""

import asyncio
from collections.abc import Sequence

import pytest

from p2ptrain.manifest import Manifest, SignedManifest
from p2ptrain.network.link import SwarmLink
from p2ptrain.network.records.record import Look, PeerRecord
from p2ptrain.status.tracker import JUMP_ROUNDS, MAX_ROUNDS_PER_SECOND, RATE_SECONDS, Looking, TokenRate
from tests.support.signers import NamedSigner
from tests.support.web.watched import START, SWARM, after_looks, trainer

PEER = "QmZHepEU53WX4FouwkgctgJvcFK7amhhhf8ADBZPvGT1ZJ"


def observed(rate: TokenRate, now: float, tokens: int | None) -> float | None:
    """The rate after one more look."""
    rate.update(now, tokens)
    return rate.tokens_per_second


@pytest.mark.parametrize("seconds", [0.2, 1.0, 40.0], ids=str)
def test_the_speed_is_the_average_over_whole_rounds_however_long_they_last(seconds: float) -> None:
    rate = TokenRate()
    assert observed(rate, 0.0, 0) is None
    assert observed(rate, 0.5 * seconds, 0) is None
    for number in range(1, 100):
        assert observed(rate, number * seconds, number * 1000) == pytest.approx(1000 / seconds)
        # Between two rounds nothing new is known, so nothing changes.
        assert observed(rate, (number + 0.9) * seconds, number * 1000) == pytest.approx(1000 / seconds)


def test_the_speed_forgets_what_is_long_ago_and_a_lineage_that_was_given_up() -> None:
    rate = TokenRate()
    for second in range(60):
        observed(rate, second, second * 1000)
    for second in range(60, 60 + int(RATE_SECONDS) + 1):
        last = observed(rate, second, 60_000 + (second - 60) * 10)
    assert last is not None
    assert last < 100
    assert observed(rate, 100.0, 5000) is None


@pytest.mark.parametrize("tokens", [60_000, None], ids=["stalled", "gone"])
def test_a_swarm_that_stands_still_comes_to_have_no_speed(tokens: int | None) -> None:
    rate = TokenRate()
    for second in range(61):
        assert observed(rate, second, second * 1000) in (None, pytest.approx(1000))
    assert observed(rate, 60 + RATE_SECONDS, tokens) == pytest.approx(1000)
    assert observed(rate, 60 + 2 * RATE_SECONDS, tokens) == pytest.approx(500)
    assert (observed(rate, 3660, tokens) or 0.0) < 5


def test_a_clock_that_is_set_back_makes_no_speed() -> None:
    rate = TokenRate()
    for second in range(30):
        observed(rate, 3600 + second, second * 1000)
    for second in range(30):
        assert observed(rate, second, (30 + second) * 1000) in (None, pytest.approx(1000))


def test_a_first_look_in_the_middle_of_a_round_is_no_end_of_one() -> None:
    rate = TokenRate()
    assert observed(rate, 9.9, 7000) is None
    assert observed(rate, 10.0, 8000) is None
    assert observed(rate, 20.0, 9000) == pytest.approx(100.0)


def test_a_peer_whose_own_record_has_expired_is_not_told_that_it_is_down() -> None:
    signed = SignedManifest.create(Manifest(), NamedSigner("organizer"))
    link = SwarmLink(signed.manifest.digest, (f"/ip4/127.0.0.1/tcp/1/p2p/{PEER}",))

    async def look() -> Look:
        return Look(START, [])

    async def alerts(own: str) -> list[str]:
        return [alert.rule for alert in (await Looking(look, signed, link, own).look()).alerts]

    assert asyncio.run(alerts(PEER)) == []
    assert asyncio.run(alerts("")) == ["bootstrap"]


def at(round_: int, tokens: int = 8000, peers: str = "abc", state: str = "training") -> list[PeerRecord]:
    """Peers that announce this head."""
    return [trainer(peer, round=round_, lineage_tokens=tokens, state=state) for peer in peers]


MOST = JUMP_ROUNDS + 2 * MAX_ROUNDS_PER_SECOND
"""Rounds that a head may advance in the two seconds between two looks."""
WEIGHT = 3 * int(SWARM.max_weight)
"""Tokens that three peers may contribute to a round."""


@pytest.mark.parametrize(
    ("looks", "jumps"),
    [
        ([at(8), at(8 + MOST + 1)], True),
        ([at(8), at(8 + MOST)], False),
        ([at(8), at(9, 8001 + WEIGHT)], True),
        ([at(8), at(9, 8000 + WEIGHT)], False),
        ([at(8), at(8, 8001 + WEIGHT)], True),
        ([at(8), at(10, 8000 + 2 * WEIGHT)], False),
        ([at(8), at(9, 8000 + WEIGHT, peers="a")], False),
        ([at(8), at(8, state="syncing"), at(5000)], True),
        ([at(0, state="syncing"), at(5000)], False),
        ([[], at(5000)], False),
        ([at(8), [*at(8), *at(1 << 40, peers="xy")]], False),
        ([at(5000), at(8)], False),
    ],
)
def test_a_head_jumps_that_its_peers_cannot_have_made(looks: Sequence[list[PeerRecord]], jumps: bool) -> None:
    rules = [alert.rule for alert in after_looks(*looks).alerts]
    assert ("jump" in rules) is jumps


def test_a_jump_is_shown_for_a_while_also_when_all_goes_on() -> None:
    looks = [at(8), at(5000), *(at(5001 + number) for number in range(9))]
    assert "jump" in [alert.rule for alert in after_looks(*looks, seconds=60.0).alerts]
    assert "jump" not in [alert.rule for alert in after_looks(*looks, at(5011), at(5012), seconds=60.0).alerts]
