"""Spot checks of a share: an honest owner passes every one, a false chunk convicts its owner before anybody."""

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from p2ptrain.averaging.protocol.certificate import Roster
from p2ptrain.averaging.protocol.table import NOTHING_TOLD
from p2ptrain.averaging.vector.chunks import CHUNK_VALUES
from p2ptrain.averaging.vector.reduce import OwnShare
from p2ptrain.averaging.verification.audit import FalseMeanError
from p2ptrain.averaging.verification.opening import Answer, Evidence, FalseChunk, Rules, Slice, verify_evidence
from p2ptrain.codecs import CODECS, get_codec
from p2ptrain.codecs.mixed import by_size
from p2ptrain.errors import IntegrityError
from p2ptrain.manifest import AveragingSpec
from p2ptrain.network.schema import from_bytes, to_bytes
from tests.support.coroutines import on_loop
from tests.support.sim.shares import SWARM, VERIFIER, Group, claims, run_check, vectors

RULES = ["mean", "norm_clip", "centered_clip", "trimmed", "median"]
SIZE = 3 * (2 * CHUNK_VALUES + 4096)
"""A share of three has two whole chunks and one that is shorter."""


def make_group(rule: str = "norm_clip", codec: str = "int8", count: int = 3, size: int = SIZE) -> Group:
    each = vectors(count, size)
    each[-1] *= 5  # So that norm_clip clips.
    spec = AveragingSpec.model_validate({"aggregation": rule} | ({"clip_ratio": 1.0} if rule == "norm_clip" else {}))
    return Group(spec, get_codec(codec), each, tokens=list(range(10, 10 + count)))


Falsify = Callable[[OwnShare, bytearray], None]


def nothing(share: OwnShare, mean: bytearray) -> None:
    """Be honest."""


@pytest.mark.parametrize(
    ("rule", "codec"),
    [(rule, "int8") for rule in RULES] + [("norm_clip", name) for name in CODECS.own if name != "topk"],
)
def test_an_honest_owner_passes_every_check(rule: str, codec: str) -> None:
    run_check(make_group(rule, codec), 1, nothing, [0, 1, 2])


@pytest.mark.parametrize("count", [2, 3, 5])
def test_so_does_one_with_parts_in_other_codecs(count: int) -> None:
    group = make_group(count=count)
    group.part_codecs = {0: get_codec("topk"), count - 1: get_codec("int4")}
    for owner in (0, count - 1):
        run_check(group, owner, nothing, [0])


def test_so_does_one_whose_codec_depends_on_the_place() -> None:
    each = vectors(2, 2 * 65536 * 2 + 5000)
    mixed = by_size(get_codec("int8"), get_codec("fp16"), [100, 60_000, 1000, len(each[0]) - 61_100], 4096)
    run_check(Group(AveragingSpec(), mixed, each), 1, nothing, [0, 3, 8])


def flip(share: OwnShare, mean: bytearray) -> None:
    """Change a value in the middle of the first chunk."""
    mean[1000] ^= 1


def encode_again(contributors: list[int], tokens: list[int], scale_own: float = 1.0) -> Falsify:
    """Reduce again from these members, with these weights."""

    def falsify(share: OwnShare, mean: bytearray) -> None:
        size, weights = len(share.own), share.weights(contributors, claims(*tokens))
        share.own.mul_(scale_own)
        share.reduce_piece(0, size, weights, torch.empty(size), mean)

    return falsify


SWAPPED = encode_again([0, 1, 2], [12, 11, 10])
ONE_LEFT_OUT = encode_again([0, 1], [10, 11])


@pytest.mark.parametrize(
    ("lie", "rule"),
    [(flip, rule) for rule in RULES] + [(lie, rule) for lie in (SWAPPED, ONE_LEFT_OUT) for rule in RULES[:2]],
)
def test_a_false_mean_is_evidence_that_anybody_can_verify(lie: Falsify, rule: str) -> None:
    group = make_group(rule)
    with pytest.raises(FalseMeanError) as found:
        run_check(group, 1, lie, [2, 0])
    accused, fault = verify_evidence(found.value.evidence, SWARM, lambda share: group.rules, VERIFIER)
    assert accused == "member1"
    assert fault == str(found.value) == "its mean is not that of the parts"


def test_a_false_chunk_is_found_only_where_it_is_looked_for() -> None:
    run_check(make_group(), 1, flip, [1, 2])


def test_an_owner_s_own_part_is_bound_to_the_norm_that_it_counts_with() -> None:
    """Else it would claim a short one, and have a long one count in full."""
    with pytest.raises(FalseMeanError, match="norm of its own part"):
        run_check(make_group(), 1, encode_again([0, 1, 2], [10, 11, 12], scale_own=100), [0])


def test_parts_that_were_not_committed_to_prove_nothing_and_pass_nothing() -> None:
    def forge(share: OwnShare, mean: bytearray) -> None:
        part = share.parts[0][1]
        assert isinstance(part, bytearray)
        part[1000] ^= 1

    with pytest.raises(IntegrityError, match="did not commit") as refused:
        run_check(make_group(), 1, forge, [0])
    assert not isinstance(refused.value, FalseMeanError)


def evidence_of_a_flip() -> tuple[bytes, Rules]:
    group = Group(AveragingSpec(), get_codec("int4"), vectors(3, 3 * 512))
    with pytest.raises(FalseMeanError) as found:
        run_check(group, 1, lambda share, mean: mean.__setitem__(100, mean[100] ^ 1), [0])
    return found.value.evidence, group.rules


EVIDENCE, EVIDENCE_RULES = evidence_of_a_flip()


@settings(max_examples=300)
@given(st.integers(0, 8 * len(EVIDENCE) - 1))
def test_evidence_with_any_bit_flipped_convicts_nobody_else(bit: int) -> None:
    changed = bytearray(EVIDENCE)
    changed[bit // 8] ^= 1 << bit % 8
    try:
        # A chunk of the mean is bound to the statement, parts to their senders, the rest to the owner: whatever still
        # verifies says the same.
        assert verify_evidence(bytes(changed), SWARM, lambda share: EVIDENCE_RULES, VERIFIER)[0] == "member1"
    except IntegrityError:
        return
    assert from_bytes(Evidence, bytes(changed)) == from_bytes(Evidence, EVIDENCE)


@on_loop
async def test_an_honest_owner_s_opening_is_no_evidence() -> None:
    group = make_group()

    def verify(evidence: bytes) -> None:
        verify_evidence(evidence, SWARM, lambda share: group.rules, VERIFIER)

    audit, _, mean = await group.reduced(1)
    tree = group.tree(1, mean)
    await audit.state(range(3), tree.root[0])
    answer = from_bytes(Answer, await audit.answer([1]))
    codec = group.codec
    low, high = codec.encoded_bytes(CHUNK_VALUES), codec.encoded_bytes(2 * CHUNK_VALUES)
    chunk = FalseChunk(answer.opened, 0, answer.openings[0], bytes(mean[low:high]), tree.proof(1))
    with pytest.raises(IntegrityError, match="is right"):
        verify(to_bytes(chunk))
    other = bytes([mean[low] ^ 1]) + bytes(mean[low + 1 : high])
    with pytest.raises(IntegrityError, match="another mean"):
        verify(to_bytes(structs.replace(chunk, mean=other)))


def test_evidence_is_of_one_swarm() -> None:
    other = Rules(bytes(32), EVIDENCE_RULES.spec, EVIDENCE_RULES.codec, EVIDENCE_RULES.num_values)
    assert EVIDENCE_RULES.swarm == SWARM
    with pytest.raises(IntegrityError):
        verify_evidence(EVIDENCE, other.swarm, lambda share: other, VERIFIER)


@pytest.mark.parametrize(("round_", "level"), [(3, 0), (3, 1)])
def test_evidence_is_judged_by_the_rules_of_its_round_and_level(round_: int, level: int) -> None:
    group = make_group()
    child, census = b"c" * 32 * level, NOTHING_TOLD if level else None
    group.roster = Roster(
        tuple(replace(ticket, round=round_, level=level, child=child, census=census) for ticket in group.roster.tickets)
    )
    with pytest.raises(FalseMeanError) as found:
        run_check(group, 1, flip, [0])
    asked = []

    def rules_of(share: Slice) -> Rules:
        asked.append((share.round, share.level))
        return group.rules

    assert verify_evidence(found.value.evidence, SWARM, rules_of, VERIFIER)[0] == "member1"
    assert asked == [(round_, level)]
    with pytest.raises(IntegrityError, match="another vector"):  # A shorter fragment's.
        verify_evidence(found.value.evidence, SWARM, lambda share: replace(group.rules, num_values=64), VERIFIER)


def test_a_member_draws_its_part_of_the_checks_and_each_chunk_at_most_once() -> None:
    group = Group(AveragingSpec(spot_checks=6), get_codec("int8"), vectors(5, 5 * 8 * CHUNK_VALUES))

    async def draw(seed: int) -> list[int]:
        group.seed = seed
        return group.audit(0)[0].draw(1, 4)

    drawn = [asyncio.run(draw(seed)) for seed in range(200)]
    assert all(len(set(chunks)) == len(chunks) and len(chunks) in (1, 2) for chunks in drawn)
    assert {chunk for chunks in drawn for chunk in chunks} == set(range(8))
    assert sum(map(len, drawn)) / 200 == pytest.approx(6 / 4, abs=0.15)
