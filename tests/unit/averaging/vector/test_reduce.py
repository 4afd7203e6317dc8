"""An owner's share: what is refused, and that the result is the rule's, whatever the pieces."""

import asyncio
import random

import pytest
import torch
from torch import Tensor

from p2ptrain.averaging.vector import chunks
from p2ptrain.averaging.vector import reduce as reduction
from p2ptrain.averaging.vector.reduce import EncodedStream, OwnShare
from p2ptrain.averaging.vector.rules import VotingRule, get_rule
from p2ptrain.codecs import CODECS, CodecError, PartList, get_codec
from p2ptrain.manifest import AveragingSpec
from p2ptrain.runtime import Runtime
from tests.support.codecs import round_trip
from tests.support.sim.shares import claims

RULES = ["mean", "norm_clip", "centered_clip", "trimmed", "median"]


def combined(spec: AveragingSpec, parts: list[torch.Tensor]) -> torch.Tensor:
    rule = get_rule(spec)
    assert isinstance(rule, VotingRule)
    return rule.combine(spec, parts)


def make_spec(rule: str = "norm_clip", **settings: object) -> AveragingSpec:
    return AveragingSpec.model_validate({"aggregation": rule, **settings})


def make_parts(count: int, num_values: int = 3000, scales: dict[int, float] | None = None) -> list[Tensor]:
    generator = torch.Generator().manual_seed(count)
    return [torch.randn(num_values, generator=generator) * (scales or {}).get(i, 1.0) for i in range(count)]


def owned(
    spec: AveragingSpec, parts: list[Tensor], codec_name: str = "fp32", owner: int = 0,
    piece_values: int = chunks.PIECE_VALUES,
) -> OwnShare:  # fmt: skip
    """The share of member ``owner`` once all parts are in, checked in pieces of this size."""
    share = OwnShare(get_codec(codec_name), spec, parts[owner], owner, len(parts))
    return filled(share, parts, owner, [codec_name] * len(parts), piece_values)


def owned_sparsely(spec: AveragingSpec, parts: list[Tensor], owner: int, lists_parts: bool) -> OwnShare:
    """The same with parts in topk, that of the owner, too."""
    share = OwnShare(get_codec("int8"), spec, parts[owner], owner, len(parts), get_codec("topk"), lists_parts)
    return filled(share, parts, owner, ["topk"] * len(parts))


def filled(
    share: OwnShare, parts: list[Tensor], owner: int, codecs: list[str], piece_values: int = chunks.PIECE_VALUES
) -> OwnShare:
    """The share once all parts are in, each in its codec."""
    share.measure_own()
    for index, (part, name) in enumerate(zip(parts, codecs, strict=True)):
        if index != owner:
            codec = get_codec(name)
            encoded, check = codec.encode(part), share.new_check(codec)
            for low, high in chunks.cut(len(part), codec.block_size, piece_values):
                check(memoryview(encoded)[codec.encoded_bytes(low) : codec.encoded_bytes(high)], low, high)
            share.add(index, encoded, check)
    return share


def reduced(share: OwnShare, contributors: list[int], tokens: list[int], codec_name: str = "fp32") -> Tensor:
    codec, num_values = get_codec(codec_name), len(share.own)
    mean = EncodedStream(bytearray(codec.encoded_bytes(num_values)))
    pieces = asyncio.run(share.reduce(Runtime(random.Random(0)), contributors, claims(*tokens), mean))
    assert (pieces is not None) == codec.lossy
    if pieces is None:
        exact = torch.empty(num_values)
        codec.decode_into(mean.data, exact)
        return exact
    exact = torch.cat([piece.clone() for _, _, piece in pieces])
    assert codec.encode(exact) == mean.data
    return exact


@pytest.mark.parametrize("rule", ["mean", "norm_clip"])
@pytest.mark.parametrize("codec", CODECS.own)
def test_the_result_is_the_weighted_and_clipped_mean(rule: str, codec: str) -> None:
    parts, tokens = make_parts(5, scales={3: 7.0}), [10, 20, 30, 20, 20]
    found = reduced(owned(make_spec(rule), parts, codec), [0, 1, 2, 3, 4], tokens, codec)
    seen = [parts[0], *(round_trip(get_codec(codec), part) for part in parts[1:])]
    norms = [float(part.norm()) for part in seen]
    factors = [1.0] * 5
    if rule == "norm_clip":
        limit = sorted(norms)[2]
        pace = sorted(norm / count for norm, count in zip(norms, tokens, strict=True))[2]
        factors = [min(1.0, 2 * max(limit, pace * c) / norm) for norm, c in zip(norms, tokens, strict=True)]
    expected = sum((p * (t / 100) * f for p, t, f in zip(seen, tokens, factors, strict=True)), torch.zeros(3000))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("rule", ["centered_clip", "trimmed", "median"])
def test_a_rule_by_votes_is_applied_to_each_chunk(rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reduction, "STACK_VALUES", 1024)
    monkeypatch.setattr(chunks, "CHUNK_VALUES", 1024)
    spec, parts = make_spec(rule), make_parts(5)
    found = reduced(owned(spec, parts), [0, 2, 3, 4], [1] * 4)
    for low in (0, 1024, 2048):
        stack = [parts[i][low : low + 1024].clone() for i in (0, 2, 3, 4)]
        assert torch.equal(found[low : low + 1024], combined(spec, stack))


@pytest.mark.parametrize("rule", RULES)
def test_an_owner_that_did_not_contribute_reduces_all_the_same(rule: str) -> None:
    parts = make_parts(4, scales={0: 50.0})
    found = reduced(owned(make_spec(rule), parts), [1, 2, 3], [1] * 3)
    assert float(found.norm()) < 2 * float(parts[1].norm())


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("codec", ["fp32", "int8"])
def test_equal_parts_give_that_part(rule: str, codec: str) -> None:
    part = get_codec(codec).encode(make_parts(1)[0])
    exact = torch.empty(3000)
    get_codec(codec).decode_into(part, exact)
    found = reduced(owned(make_spec(rule), [exact] * 4, codec), [0, 1, 2, 3], [10] * 4, codec)
    assert torch.equal(found, exact)


@pytest.mark.parametrize("codec", CODECS.own)
def test_norms_do_not_depend_on_how_a_part_is_encoded_or_cut(codec: str) -> None:
    parts = make_parts(3, 70_000)
    whole = owned(make_spec(), parts, codec)
    for index, part in enumerate(parts):
        seen = round_trip(get_codec(codec), part) if index else part
        assert whole.norms()[index] == pytest.approx(float(seen.double().norm()), rel=1e-5)
    assert owned(make_spec(), parts, codec, piece_values=8192).norms() == pytest.approx(whole.norms(), rel=1e-6)


def test_parts_in_other_codecs_than_the_results_are_reduced_with_them() -> None:
    spec, parts = make_spec("median"), make_parts(3, 10_000)
    share = filled(OwnShare(get_codec("int8"), spec, parts[0], 0, 3), parts, 0, ["int8", "int4", "topk"])
    seen = [parts[0], round_trip(get_codec("int4"), parts[1]), round_trip(get_codec("topk"), parts[2])]
    assert torch.equal(reduced(share, [0, 1, 2], [1] * 3, "int8"), torch.stack(seen).median(0).values.add(0.0))


@pytest.mark.parametrize("codec", ["fp32", "int8"])
def test_an_owner_keeps_the_part_of_another_contributor_at_random(codec: str) -> None:
    parts, kept = make_parts(4), set()
    for _ in range(64):
        share = owned(make_spec(), parts, codec, owner=1)
        reduced(share, [0, 1, 3], [1] * 3, codec)
        assert share.kept is not None
        index, of, data = share.kept
        values = torch.empty(3000)
        of.decode_into(memoryview(data), values)
        assert torch.equal(values, round_trip(get_codec(codec), parts[index]))
        kept.add(index)
    assert kept == {0, 3}


def test_an_owner_that_contributes_alone_keeps_no_part() -> None:
    share = owned(make_spec(), make_parts(2), owner=0)
    reduced(share, [0], [1])
    assert share.kept is None


@pytest.mark.parametrize("loud", [0, 2], ids=["the owner's", "another's"])
def test_a_part_out_of_proportion_is_left_out_of_the_mask_with_a_reason(loud: int) -> None:
    share = owned(make_spec(), make_parts(4, scales={loud: 1000.0}))
    assert share.judge([8] * 4) == {0, 1, 2, 3} - {loud}
    assert list(share.refused) == [loud]
    assert "times the group's median" in share.refused[loud]
    assert sorted(share.parts) == sorted({1, 2, 3} - {loud})


@pytest.mark.parametrize(("count", "scales"), [(5, {0: 0.0, 1: 0.02, 4: 50.0}), (2, {1: 1e5})])
def test_unusual_but_honest_norms_pass(count: int, scales: dict[int, float]) -> None:
    assert owned(make_spec(), make_parts(count, scales=scales)).judge([8] * count) == set(range(count))


@pytest.mark.parametrize("codec", CODECS.own)
def test_a_value_beyond_the_limit_is_refused_at_the_limit_it_is_not(codec: str) -> None:
    spec, part = make_spec(max_value=100.0), torch.zeros(3000)
    part[1700] = -100.0
    owned(spec, [part, part], codec)
    part[1700] = -103.0
    with pytest.raises(CodecError, match="max_value"):
        owned(spec, [torch.zeros(3000), part], codec)
    with pytest.raises(CodecError, match="max_value"):
        owned(spec, [part, torch.zeros(3000)], codec)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_an_own_part_that_is_not_finite_is_refused(bad: float) -> None:
    with pytest.raises(CodecError):
        owned(make_spec(), [torch.tensor([0.0, bad]), torch.zeros(2)])


@pytest.mark.parametrize("rule", ["mean", "norm_clip"])
@pytest.mark.parametrize("owner", [0, 2])
def test_a_list_holds_every_contributor_s_part_and_its_clipped_weight(rule: str, owner: int) -> None:
    parts, codec = make_parts(5, 9000, scales={3: 7.0}), get_codec("topk")
    share, contributors, tokens = owned_sparsely(make_spec(rule), parts, owner, True), [0, 2, 3, 4], [10, 20, 30, 40]
    reader = PartList(codec, 4)
    mean = EncodedStream(bytearray(reader.encoded_bytes(9000)))
    assert asyncio.run(share.reduce(Runtime(random.Random(0)), contributors, claims(*tokens), mean)) is None
    weights, listed = reader.split(mean.data, 9000)
    assert [bytes(part) for part in listed] == [bytes(codec.encode(parts[i])) for i in contributors]
    norms = [float(round_trip(get_codec("topk"), parts[i]).norm()) for i in contributors]
    pace = sorted(norm / count for norm, count in zip(norms, tokens, strict=True))[1]
    limits = [2 * max(sorted(norms)[1], pace * count) for count in tokens]
    factors = [1.0 if rule == "mean" else min(1.0, limit / norm) for limit, norm in zip(limits, norms, strict=True)]
    assert weights == pytest.approx([t / 100 * f for t, f in zip(tokens, factors, strict=True)], rel=1e-5)
    assert (sum(weights) < 0.99) == (rule == "norm_clip")


@pytest.mark.parametrize("rule", RULES)
def test_a_dense_mean_of_sparse_parts_counts_the_owner_s_part_as_others_would(rule: str) -> None:
    parts = make_parts(4, 9000)
    seen = [round_trip(get_codec("topk"), part) for part in parts]
    found = reduced(owned_sparsely(make_spec(rule), parts, 1, False), [0, 1, 2, 3], [1] * 4, "int8")
    if isinstance(get_rule(make_spec(rule)), VotingRule):
        assert torch.equal(found, combined(make_spec(rule), [part.clone() for part in seen]))
    else:
        torch.testing.assert_close(found, torch.stack(seen).mean(0))


def test_an_owner_s_own_part_is_judged_as_it_is_sent() -> None:
    parts = make_parts(5, 9000)
    share = owned_sparsely(make_spec(), parts, 2, True)
    assert share.norms() == pytest.approx(
        {i: float(round_trip(get_codec("topk"), p).norm()) for i, p in enumerate(parts)}, rel=1e-5
    )
    assert share.own_part == get_codec("topk").encode(parts[2])
