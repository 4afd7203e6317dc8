"""In which encodings parts and means travel: alike for all members, and no sparse part where zeros would vote."""

import pytest
import torch

from p2ptrain.averaging.commit.attempt import lists_parts, mean_codec, mean_codec_of, part_codecs
from p2ptrain.averaging.protocol.certificate import Body
from p2ptrain.codecs import CODECS, Codec, PartList, codec_at, dense_codec, get_codec
from p2ptrain.codecs.mixed import by_size
from p2ptrain.manifest import AveragingSpec

NUM_VALUES = 100 * 4096
WEIGHTED = ["mean", "norm_clip"]
RULES = [*WEIGHTED, "centered_clip", "trimmed", "median"]
MIXED = by_size(get_codec("topk"), get_codec("bf16"), [4096 * 60, 40, 4096 * 39, 4056], 40)


def spec(rule: str) -> AveragingSpec:
    return AveragingSpec.model_validate({"aggregation": rule})


@pytest.mark.parametrize("rule", WEIGHTED)
def test_a_sparse_mean_is_a_list_up_to_the_size_at_which_int8_is_shorter(rule: str) -> None:
    codec = get_codec("topk")
    most = max(n for n in range(1, 257) if lists_parts(spec(rule), codec, NUM_VALUES, n))
    assert most == 49
    for members in (1, 2, most, most + 1, 256):
        found = mean_codec(spec(rule), codec, NUM_VALUES, members, members)
        lengths = {True: members * (codec.encoded_bytes(NUM_VALUES) + 4), False: 100 * 4160}
        assert isinstance(found, PartList) == (members <= most)
        assert found.encoded_bytes(NUM_VALUES) == lengths[members <= most]
        assert found.encoded_bytes(NUM_VALUES) <= min(lengths.values()) + 4 * members


@pytest.mark.parametrize("codec", [get_codec("topk"), MIXED], ids=lambda codec: str(codec.name))
def test_who_contributed_changes_the_length_of_a_list_but_not_whether_there_is_one(codec: Codec) -> None:
    listed, dense = (
        [mean_codec(spec("mean"), codec, NUM_VALUES, members, n) for n in (1, members)] for members in (40, 60)
    )
    sizes = [each.encoded_bytes(NUM_VALUES) for each in listed]
    assert sizes == [n * (codec.encoded_bytes(NUM_VALUES) + 4) for n in (1, 40)]
    assert not any(isinstance(each, PartList) for each in dense)


@pytest.mark.parametrize("rule", RULES)
def test_all_other_means_are_dense_and_encoded_like_dense_parts(rule: str) -> None:
    for name in CODECS.own:
        found = mean_codec(spec(rule), get_codec(name), NUM_VALUES, 4, 4)
        if name != "topk":
            assert found is get_codec(name)
        elif rule not in WEIGHTED:
            assert found is get_codec("int8")


@pytest.mark.parametrize("rule", RULES)
def test_slow_members_send_sparse_parts_only_where_zeros_do_not_vote(rule: str) -> None:
    names = [codec.name for codec in part_codecs(spec(rule), get_codec("int8"), NUM_VALUES)]
    assert names == (["int8", "int4"] if rule in ("trimmed", "median") else ["int8", "int4", "topk"])
    for codec in (get_codec("topk"), MIXED, get_codec("fp32")):
        assert part_codecs(spec(rule), codec, NUM_VALUES) == (codec,), "sparse and lossless codecs are used by all"


@pytest.mark.parametrize("level", [0, 1])
@pytest.mark.parametrize("name", ["int8", "topk"])
def test_exact_tensors_are_exact_in_slow_members_parts_and_in_delegates_sums_too(name: str, level: int) -> None:
    sizes = [NUM_VALUES - 300, 300]
    vector = torch.randn(NUM_VALUES, generator=torch.Generator().manual_seed(1))
    whole = codec_at(by_size(get_codec(name), get_codec("fp32"), sizes, 300), level)
    names = ["mixed(int8/1,fp32/1)", "mixed(int4/1,fp32/1)"] if level or name == "int8" else ["mixed(topk/1,fp32/1)"]
    codecs = part_codecs(spec("mean"), whole, NUM_VALUES)
    assert [codec.name for codec in codecs] == names
    cut = NUM_VALUES - 100 * whole.block_size
    for codec in codecs:
        part, out = codec.part(cut, NUM_VALUES), torch.empty(NUM_VALUES - cut)
        part.decode_into(part.encode(vector[cut:]), out)
        assert torch.equal(out[-300:], vector[-300:])


def test_the_dense_form_of_a_mixture_keeps_its_small_tensors_and_its_cuts() -> None:
    dense = dense_codec(MIXED)
    vector = torch.randn(NUM_VALUES, generator=torch.Generator().manual_seed(1))
    encoded, out = dense.encode(vector), torch.empty(NUM_VALUES)
    dense.decode_into(encoded, out)
    small = slice(4096 * 60, 4096 * 60 + 40)
    assert torch.equal(out[small], vector[small].bfloat16().float())
    assert float((out - vector).abs().max()) < 0.05
    pieces = [(low, low + 4096) for low in range(0, NUM_VALUES, 4096)]
    assert b"".join(dense.part(low, high).encode(vector[low:high]) for low, high in pieces) == encoded
    assert not dense.sparse
    assert dense_codec(dense) is dense


def test_delegates_average_means_densely() -> None:
    def body(level: int) -> Body:
        """Of two members."""
        return Body(
            b"s" * 32, 3, b"l" * 32, b"d" * 32, 0, 0, b"g" * 32, ("a", "b"), ((0, 1, 1), (1, 1, 1)), "",
            (0, 4096, NUM_VALUES), (b"h" * 32,) * 2, 4, level, 2, (2, 2), (),
        )  # fmt: skip

    codecs = [mean_codec_of(spec("mean"), get_codec("topk"), body(level)) for level in (0, 1)]
    assert isinstance(codecs[0], PartList)
    assert codecs[1] is get_codec("int8")
