"""The package's own tests: the codec and the rule keep p2ptrain's contracts, the family's stages are its model."""

import torch
from lab_plugin.codec import Float8
from lab_plugin.family import Dilated
from lab_plugin.rule import Majority

from p2ptrain.averaging.vector.conformance import check_rule
from p2ptrain.codecs.conformance import check_codec, fingerprint
from p2ptrain.manifest import AveragingSpec, ModelSpec
from p2ptrain.models import Span

SPEC = ModelSpec(family="dilated", layers=3, hidden=16, vocabulary=32, context=16)


def test_the_codec_keeps_its_contract() -> None:
    check_codec(Float8())


def test_the_codec_makes_the_same_bits_as_ever() -> None:
    assert fingerprint(Float8()) == "5979884ca1c84dc3784c3c0888f71e93ccddf3b3e850684eacb80dad1a45dc5b"


def test_the_codec_rounds_to_two_bits_of_mantissa() -> None:
    vector = torch.tensor([1.0, -1.125, 1.25, 3.0, 0.0])
    found = torch.empty(5)
    Float8().decode_into(Float8().encode(vector), found)
    assert found.tolist() == [1.0, -1.0, 1.25, 3.0, 0.0]


def test_the_rule_keeps_its_contract() -> None:
    check_rule(Majority())


def test_the_majority_chooses_the_sign() -> None:
    parts = [torch.tensor(values) for values in ([1.0, 2.0, 0.0], [3.0, -2.0, 0.0], [-9.0, 0.0, 0.0])]
    assert Majority().combine(AveragingSpec(aggregation="majority"), parts).tolist() == [2.0, 0.0, 0.0]


def test_stages_of_the_family_are_its_model_and_do_not_look_ahead() -> None:
    blocks = Dilated().blocks(SPEC)
    whole = Dilated().stage(SPEC, Span(0, len(blocks)))
    shapes = {name: shape for block in blocks for name, shape in block.shapes.items()}
    assert {name: tuple(each.shape) for name, each in whole.named_parameters()} == shapes
    tokens = torch.arange(16)[None]
    changed = tokens.clone()
    changed[0, 9:] = 0
    assert torch.equal(whole(tokens)[:, :9], whole(changed)[:, :9])
    first, last = Dilated().stage(SPEC, Span(0, 2)), Dilated().stage(SPEC, Span(2, len(blocks)))
    first.load_state_dict(whole.state_dict(), strict=False)
    last.load_state_dict(whole.state_dict(), strict=False)
    assert torch.equal(last(first(tokens)), whole(tokens))
