"""Measured speeds, what tickets tell of them, and what everybody concludes from the same tickets."""

from fractions import Fraction
from itertools import permutations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from p2ptrain.averaging.allreduce.bandwidth import (
    MAX_REPORTED,
    SendRates,
    SharePlan,
    agreed_rates,
    owner_rates,
    share_weights,
)
from p2ptrain.averaging.protocol.certificate import MAX_RATES_BYTES, Ticket
from p2ptrain.codecs import get_codec, smaller_codecs

MEGABYTE = 1 << 20


def seen(rates: dict[str, float]) -> bytes:
    speeds = SendRates()
    for peer, rate in rates.items():
        speeds.observe(peer, 10 * MEGABYTE, 10 * MEGABYTE / rate, 1)
    return speeds.encoded()


def ticket(peer: str, rates: bytes = b"", bandwidth: int = 0, reachable: bool = True) -> Ticket:
    return Ticket(
        peer, 0, b"l" * 32, b"d" * 32, b"y" * 32, 10, 1, bandwidth, reachable, rates, peer.encode().ljust(16, b"-")
    )


@given(st.floats(8.0, 1e9))
@example(8.75)
def test_a_told_rate_is_within_a_sixteenth_and_an_eighth_of_what_was_seen(rate: float) -> None:
    alone = agreed_rates([ticket("a"), ticket("b", seen({"a": rate}))])
    assert rate * 0.87 <= alone[0] <= rate * 1.01


def test_what_comes_slowly_is_measured_however_little_it_is_and_what_is_there_at_once_is_not() -> None:
    for num_bytes, seconds, expected in ((20_000, 2.5, 8_000), (20_000, 0.1, 1_000_000)):
        speeds = SendRates()
        speeds.observe("b", 10 * MEGABYTE, 10 * MEGABYTE / 1e6, 1)
        speeds.observe("a", num_bytes, seconds, 1)
        slow, _, _ = agreed_rates([ticket("a"), ticket("b", speeds.encoded()), ticket("c", speeds.encoded())])
        assert 0.8 * expected <= slow <= expected * 4 / 3


def test_everybody_concludes_the_same_whatever_order_the_speeds_were_seen_in() -> None:
    rates = {"a": 1e6, "b": 3e5, "c": 9e5}
    told = [seen({peer: rates[peer] for peer in order}) for order in permutations(rates)]
    assert len(set(told)) == 1


def test_speeds_that_differ_by_less_than_a_quarter_count_as_equal() -> None:
    told = seen({"a": 1.0e6, "b": 0.85e6, "c": 0.95e6})
    assert len(set(agreed_rates([ticket(peer, told) for peer in "abc"]))) == 1


def test_a_minority_that_lies_moves_nobody() -> None:
    honest = {peer: 1e6 for peer in "abcde"} | {"slow": 1e5}
    lies = {peer: 1.0 for peer in "abcde"} | {"slow": 1e9}
    peers = [*"abcde", "slow"]
    fair = agreed_rates([ticket(peer, seen(honest)) for peer in peers])
    assert agreed_rates([ticket(peer, seen(lies if peer in "ab" else honest)) for peer in peers]) == fair
    assert fair[-1] < 0.15 * fair[0]


def test_what_a_peer_says_of_itself_does_not_count() -> None:
    fair = agreed_rates([ticket(peer, seen({"a": 1e6, "b": 1e6, "c": 1e5})) for peer in "abc"])
    own = agreed_rates([ticket(peer, seen({"a": 1e6, "b": 1e6, "c": 1e5 if peer != "c" else 1e9})) for peer in "abc"])
    assert own == fair


def test_a_ticket_s_own_limit_can_only_lower_its_rate() -> None:
    told = seen({"a": 1e6, "b": 1e6, "c": 1e6})
    plain = agreed_rates([ticket(peer, told) for peer in "abc"])
    limited = agreed_rates([ticket(peer, told, bandwidth={"a": 1000, "b": 10**9}.get(peer, 0)) for peer in "abc"])
    assert limited[0] < plain[0] / 100
    assert limited[1:] == plain[1:]


@pytest.mark.parametrize("told", [b"", b"x", b"\xff" * 10, b"\xff" * MAX_RATES_BYTES])
def test_without_observations_and_with_garbage_all_are_alike(told: bytes) -> None:
    assert agreed_rates([ticket("a", told), ticket("b"), ticket("c")]) == [1, 1, 1]


def test_what_is_told_stays_within_a_ticket_s_bound_and_has_nothing_of_parts_too_small_to_measure() -> None:
    assert len(seen({f"peer{i}": 1e6 for i in range(1000)})) == 9 * MAX_REPORTED <= MAX_RATES_BYTES
    speeds = SendRates()
    speeds.observe("a", 1000, 0.5, 1)
    assert speeds.encoded() == b""


def test_an_owner_that_was_late_counts_as_slower_until_it_was_in_time_often_enough() -> None:
    speeds = SendRates()

    def rate() -> int:
        speeds.observe("a", 10 * MEGABYTE, 1.0, 1)
        return agreed_rates([ticket("a"), ticket("b", speeds.encoded())])[0]

    usual = rate()
    speeds.was_late("a")
    assert rate() <= 0.3 * usual
    for _ in range(10):
        speeds.was_in_time("a")
    assert rate() == usual


def test_members_that_cannot_be_reached_own_nothing_unless_nobody_can() -> None:
    tickets = [ticket("a", reachable=False), ticket("b"), ticket("c")]
    assert owner_rates(tickets, [5, 7, 9]) == [0.0, 7.0, 9.0]
    assert owner_rates([ticket("a", reachable=False)] * 2, [5, 7]) == [5.0, 7.0]


def codec_of(rates: list[int], index: int, name: str = "int8", grace_seconds: float = 0.0) -> str:
    weights: list[Fraction] = share_weights([float(rate) for rate in rates])
    codec = get_codec(name)
    plan = SharePlan(rates, weights, (0, 10_000_000))
    return plan.part_codec((codec, *smaller_codecs(codec, 10_000_000)), index, grace_seconds).name


def test_only_a_member_for_which_the_others_would_not_wait_sends_fewer_bits() -> None:
    assert {codec_of([10**6] * 4, index) for index in range(4)} == {"int8"}
    rates = [10**6, 10**6, 10**6, 10**5]
    assert [codec_of(rates, index) for index in range(3)] == ["int8"] * 3
    assert get_codec(codec_of(rates, 3)).encoded_bytes(1 << 20) < get_codec("int8").encoded_bytes(1 << 20)
    assert codec_of(rates, 3, grace_seconds=1000.0) == "int8"
    assert codec_of([10**6, 10**6, 10**3], 2, "fp32") == "fp32", "where nothing is lost, nobody loses anything"


def test_smaller_codecs_are_smaller_and_smaller() -> None:
    for name in ("fp16", "bf16", "int8", "int4"):
        codec = get_codec(name)
        sizes = [each.encoded_bytes(1 << 20) for each in (codec, *smaller_codecs(codec, 1 << 20))]
        assert sizes == sorted(set(sizes), reverse=True)
