"""Keys and shares of masks: used once, opened by their recipients alone, and checked when they are recovered."""

import random
from dataclasses import replace

import pytest

from p2ptrain.averaging.masking.codec import Stream
from p2ptrain.averaging.masking.keys import (
    CHANNEL,
    KEY_BYTES,
    OWN,
    PAIR,
    MaskError,
    Masking,
    MaskKeys,
    clamped,
    is_secret_of,
    least_to_unmask,
    public_of,
)
from p2ptrain.averaging.protocol.certificate import Roster, Ticket
from p2ptrain.errors import IntegrityError
from p2ptrain.manifest import SecureAggregationSpec

SPEC = SecureAggregationSpec()
SMALL_ORDER = bytes(32)


def make_keys(count: int) -> dict[str, MaskKeys]:
    return {f"site{index}": MaskKeys(SPEC, random.Random(index), f"site{index}") for index in range(count)}


def make_roster(keys: dict[str, MaskKeys]) -> Roster:
    hash_ = b"h" * 32
    return Roster(
        tuple(
            Ticket(peer, 0, hash_, hash_, hash_, 10, 1, 0, True, b"", each.new_nonce()) for peer, each in keys.items()
        )
    )


def make_maskings(count: int) -> list[Masking]:
    keys = make_keys(count)
    roster = make_roster(keys)
    return [each.masking(roster, [1 / count] * count) for each in keys.values()]


def altered(roster: Roster, index: int, nonce: bytes) -> Roster:
    tickets = list(roster.tickets)
    tickets[index] = replace(tickets[index], nonce=nonce)
    return Roster(tuple(tickets))


def test_a_ticket_serves_one_roster() -> None:
    keys = make_keys(4)
    roster = make_roster(keys)
    keys["site0"].masking(roster, [0.25] * 4)
    with pytest.raises(MaskError, match="in two rosters"):
        keys["site0"].masking(Roster(roster.tickets[:3]), [1 / 3] * 3)


def test_a_roster_of_two_has_no_sum_to_hide_in() -> None:
    keys = make_keys(2)
    with pytest.raises(IntegrityError, match="at least 3"):
        keys["site0"].masking(make_roster(keys), [0.5] * 2)


@pytest.mark.parametrize("kind", ["no keys", "small order", "another's", "one key thrice"])
def test_false_keys_are_refused_and_their_sender_named(kind: str) -> None:
    keys = make_keys(4)
    roster = make_roster(keys)
    honest = roster.tickets[2].nonce
    nonce = {
        "no keys": b"n" * 16,
        "small order": honest[:KEY_BYTES] + SMALL_ORDER + honest[2 * KEY_BYTES :],
        "another's": roster.tickets[1].nonce,
        "one key thrice": 3 * honest[:KEY_BYTES],
    }[kind]
    with pytest.raises(MaskError) as failure:
        keys["site0"].masking(altered(roster, 2, nonce), [0.25] * 4)
    assert failure.value.peer == "site2"


def test_of_the_secrets_of_a_public_key_only_the_clamped_one_is_right() -> None:
    secret = clamped(random.Random(1).randbytes(32))
    other = bytes([secret[0] | 1, *secret[1:]])
    assert public_of(other) == public_of(secret)
    assert is_secret_of(public_of(secret), secret)
    assert not is_secret_of(public_of(secret), other)


def test_a_box_opens_for_its_recipient_alone() -> None:
    first, second, third, _ = make_maskings(4)
    boxes = first.boxes()
    assert [len(share) for share in second.open_box(0, boxes[1])] == [33, 33]
    for box in (boxes[2], bytes([boxes[1][0] ^ 1]) + boxes[1][1:], b""):
        with pytest.raises(MaskError) as failure:
            second.open_box(0, box)
        assert failure.value.peer == "site0"
    with pytest.raises(MaskError):
        third.open_box(1, boxes[2])


def revealed(maskings: list[Masking], contributors: list[int], tellers: list[int]) -> dict[int, list[bytes]]:
    """What each teller reveals: its share of `OWN` of each contributor, and of `PAIR` of the others."""
    boxes = [each.boxes() for each in maskings]
    return {
        teller: [
            maskings[teller].open_box(dealer, boxes[dealer][teller])[dealer in contributors]
            for dealer in range(len(maskings))
        ]
        for teller in tellers
    }


@pytest.mark.parametrize("gone", [[], [0], [5], [1, 4]])
def test_a_threshold_of_members_recovers_exactly_the_masks_of_the_sum(gone: list[int]) -> None:
    maskings = make_maskings(6)
    contributors = [index for index in range(6) if index not in gone]
    streams = maskings[0].recovered(contributors, revealed(maskings, contributors, [0, 2, 3, 5]))
    assert streams is not None
    masks = [stream for index in contributors for stream in maskings[index].codec()._streams]
    # Each mask of the sum, and of the pairs that do not cancel, comes back once with the other sign.
    left = sorted((*masks, *streams))
    for stream in [*left]:
        opposite = Stream(stream.key, not stream.negative)
        if stream in left and opposite in left:
            left.remove(stream)
            left.remove(opposite)
    assert left == []


def test_fewer_than_the_threshold_recover_nothing() -> None:
    maskings = make_maskings(6)
    assert maskings[0].threshold == 4
    assert maskings[0].recovered(range(6), revealed(maskings, [*range(6)], [0, 2, 5])) is None


def test_pairs_of_keys_are_apart() -> None:
    """A revealed `PAIR` tells nothing of key shares, which `CHANNEL` encrypts."""
    masking = make_maskings(3)[0]
    assert len({masking.secrets[kind] for kind in (CHANNEL, PAIR, OWN)}) == 3


@pytest.mark.parametrize("count", range(3, 33))
def test_the_threshold_survives_a_third_and_stops_a_liar(count: int) -> None:
    least = least_to_unmask(count, SPEC.threshold)
    assert 2 * least - count > 1, "two sets of contributors need two honest halves, and share an honest member"
    if count > 3:
        assert count - least >= count // 3
