import math
import tomllib
from collections.abc import Callable
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2ptrain.cli.toml import commented_toml
from p2ptrain.errors import ManifestError
from p2ptrain.hashing import canonical_bytes
from p2ptrain.manifest import MAX_MANIFEST_BYTES, AdmissionSpec, Manifest, SignedManifest, parse_manifest
from p2ptrain.signing import issuing_key
from tests.support.signers import NamedSigner

VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 63) - 1) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=12,
)


ALICE, MALLORY = NamedSigner("alice"), NamedSigner("mallory")


@given(VALUES)
def test_canonical_bytes_do_not_depend_on_the_order_of_keys(value: Any) -> None:
    def reversed_keys(item: Any) -> Any:
        if isinstance(item, dict):
            return {key: reversed_keys(item[key]) for key in reversed(item)}
        return [reversed_keys(element) for element in item] if isinstance(item, list) else item

    assert canonical_bytes(value) == canonical_bytes(reversed_keys(value))


def test_a_number_spelled_as_an_integer_gives_the_same_digest() -> None:
    whole, real = (parse_manifest({"training": {"learning_rate": rate}}, "a") for rate in (1, 1.0))
    assert whole == real
    assert whole.digest == real.digest


@pytest.mark.parametrize("change", [{"name": "b"}, {"model": {"layers": 5}}, {"averaging": {"codec": "fp16"}}])
def test_any_change_is_another_swarm(change: dict[str, Any]) -> None:
    assert parse_manifest(change, "a").digest != Manifest().digest


def test_a_signed_manifest_survives_the_wire() -> None:
    signed = SignedManifest.create(Manifest(name="x"), ALICE)
    received = SignedManifest.from_bytes(signed.to_bytes(), signed.manifest.digest, MALLORY)
    assert received.manifest == signed.manifest
    key = issuing_key(ALICE).public_key().public_bytes_raw().hex()
    assert signed.manifest == Manifest(name="x", organizer="alice", admission=AdmissionSpec(key=key))
    assert received.proof == signed.proof


def test_another_manifest_than_the_links_is_refused() -> None:
    theirs = SignedManifest.create(Manifest(name="theirs"), MALLORY)
    with pytest.raises(ManifestError, match="digest"):
        SignedManifest.from_bytes(theirs.to_bytes(), Manifest(name="mine").digest, ALICE)


def test_a_manifest_that_its_organizer_did_not_sign_is_refused() -> None:
    signed = SignedManifest.create(Manifest(), ALICE)
    forged = SignedManifest(signed.manifest, SignedManifest.create(Manifest(), MALLORY).proof)
    for digest in (signed.manifest.digest, None):
        with pytest.raises(ManifestError, match="not signed"):
            SignedManifest.from_bytes(forged.to_bytes(), digest, ALICE)


@pytest.mark.fault(47)
def test_a_manifest_that_another_key_signed_again_is_not_the_links() -> None:
    signed, again = (SignedManifest.create(Manifest(), organizer) for organizer in (ALICE, MALLORY))
    assert again.manifest.model_copy(update={"organizer": "alice", "admission": signed.manifest.admission}) == (
        signed.manifest
    )
    with pytest.raises(ManifestError, match="another organizer's"):
        SignedManifest.from_bytes(again.to_bytes(), signed.manifest.digest, ALICE)


def test_the_seed_founds_the_swarm_unless_the_manifest_names_founders() -> None:
    assert SignedManifest.create(Manifest(), ALICE, "seed").manifest.founders == ("seed",)
    assert SignedManifest.create(Manifest(founders=("a", "b")), ALICE, "seed").manifest.founders == ("a", "b")
    assert SignedManifest.create(Manifest(), ALICE).manifest.founders == ()


DIGESTS = ["0" * 64]
FORGERIES: dict[str, Callable[[str], dict[str, Any]]] = {
    "data.source": lambda text: {"data": {"source": f"path:/a{text}b"}},
    "data.tokenizer": lambda text: {"data": {"tokenizer": f"path:/a{text}b"}},
    "lora.targets": lambda text: {"training": {"every": 1}, "lora": {"targets": ["q_proj", f"a{text}b"]}},
    "name": lambda text: {"name": f"a{text}b"},
    "model.family": lambda text: {"model": {"family": f"a{text}b"}},
    "model.weights": lambda text: {"model": {"weights": f"local:a{text}b", "weight_digests": DIGESTS}},
    "averaging.codec": lambda text: {"averaging": {"codec": f"a{text}b"}},
    "packages.0": lambda text: {"packages": [f"a{text}b==1"]},
    "organizer": lambda text: {"organizer": f"a{text}b"},
    "founders.0": lambda text: {"founders": [f"a{text}b"]},
    "admission.members.0": lambda text: {"admission": {"mode": "allowlist", "members": [f"a{text}b"]}},
}
"""Of each setting that takes free text: a manifest with a text in its middle."""


@pytest.mark.fault(47)
@pytest.mark.parametrize("field", FORGERIES)
@given(
    character=st.sampled_from("\n\r\t\x1b\x7f\x85\u200b\u200d\u2028\u2029\u202a\u202e\u2066\u2069") | st.characters()
)
def test_every_text_of_a_manifest_prints_on_one_line(field: str, character: str) -> None:
    if character.isprintable():
        return
    with pytest.raises(ManifestError, match=rf"^run\.toml: {field}") as caught:
        parse_manifest(FORGERIES[field](character), "run.toml")
    assert str(caught.value).isprintable()


def test_the_character_that_does_not_print_is_named() -> None:
    with pytest.raises(ManifestError, match=r"data\.source holds the character U\+202E.*remove it"):
        parse_manifest({"data": {"source": "path:/srv/\u202etxt"}}, "run.toml")
    parse_manifest({"data": {"source": "path:/srv/Übung 1/日本.txt"}}, "run.toml")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"source": "web"}, r"data\.source: 'web' is unknown: use stdlib, path:DIR_OR_FILE, datasets:OWNER/NAME"),
        ({"source": "path:"}, "'path:' is unknown"),
        ({"source": "datasets:text"}, "'datasets:text' is unknown"),  # It would read the working directory.
        ({"source": "datasets:/home/ada"}, "is unknown"),
        ({"source": "datasets:a/b/c"}, "is unknown"),
        ({"tokenizer": "words"}, r"data\.tokenizer: 'words' is unknown: use bytes, path:DIR, hub:OWNER/NAME"),
        ({"tokenizer": "hub:/home/ada"}, "is unknown"),
        ({"tokenizer": "hub:~/models/x"}, "is unknown"),
    ],
)
def test_text_and_tokenizer_have_a_known_form(values: dict[str, str], words: str) -> None:
    with pytest.raises(ManifestError, match=words):
        parse_manifest({"data": values}, "run.toml")


SIGNED = SignedManifest.create(Manifest(), ALICE).to_bytes()
GARBAGE = [
    b"\xc1", b"\x00" * 40, b"\x93\x01\x02\x03", b"x" * (MAX_MANIFEST_BYTES + 1), SIGNED[:-1], SIGNED + b"\x00",
    msgpack.packb({"manifest": 1, "proof": 3}),
    msgpack.packb({"manifest": b"\xc1", "proof": b""}),
    msgpack.packb({"manifest": msgpack.packb([1]), "proof": b""}),
    msgpack.packb({"manifest": msgpack.packb({}), "proof": b""}),
    msgpack.packb({"manifest": msgpack.packb({"organizer": 2}), "proof": b""}),
    msgpack.packb({"manifest": msgpack.packb({"organizer": "alice"}), "proof": 3}),
]  # fmt: skip


@given(st.binary(max_size=200))
def test_garbage_is_refused_with_one_line(data: bytes) -> None:
    for garbage in (data, *GARBAGE):
        with pytest.raises(ManifestError) as caught:
            SignedManifest.from_bytes(garbage, Manifest().digest, ALICE)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"trainin": {}}, "did you mean 'training'"),
        ({"training": {"evry": 1}}, "did you mean 'every'"),
        ({"model": {"heads": 3}}, "must divide"),
        ({"model": {"family": "vit", "rope_theta": 1e4}}, "rope_theta is used with family = llama, mistral, qwen2 or"),
        ({"model": {"heads": 3, "head_width": 1}}, "head_width"),
        ({"model": {"rope_scaling": [8, 4, 4, 8192]}}, "must be less than the third"),
        ({"model": {"rope_scaling": [8, 1, 4]}}, "rope_scaling"),
        ({"model": {"family": "gpt2", "kv_heads": 4}}, "family is 'gpt2': remove kv_heads"),
        ({"model": {"image_size": 28}}, "image_size is used with family = vit alone"),
        ({"training": {"global_batch": 24}}, "global_batch is used with every = 1 alone, and every is 32"),
        ({"training": {"every": 1, "outer": "average"}}, "outer is used with every > 1 alone"),
        ({"training": {"outer_momentum": 0.5}}, 'outer_momentum is used with outer = "nesterov" or "adam" alone'),
        ({"training": {"outer": "nesterov", "outer_epsilon": 1e-3}}, 'outer_epsilon is used with outer = "adam" alone'),
        ({"training": {"final_rate": 0.5}}, 'final_rate is used with schedule = "cosine" alone'),
        ({"training": {"schedule": "cosine"}}, "training.rounds = 0, after 0 steps"),
        ({"training": {"schedule": "cosine", "every": 1, "rounds": 20}}, "warmup_steps = 20: give more rounds"),
        ({"training": {"mixing": 0.5}}, "mixing is used with overlap_steps > 0 alone"),
        ({"training": {"every": 32, "fragments": 5}}, "must divide training.every"),
        ({"training": {"every": 1, "fragments": 2}}, "every > 1 alone"),
        ({"training": {"every": 8, "fragments": 2, "overlap_steps": 4}}, "must be less"),
        ({"training": {"every": 1, "overlap_steps": 1}}, "every > 1 alone"),
        ({"training": {"outer": "adam", "outer_learning_rate": 0.7}}, "start at 0.01"),
        ({"averaging": {"trim_fraction": 0.1}}, 'trim_fraction is used with aggregation = "trimmed" alone'),
        ({"averaging": {"small_values": 9}}, "small_values is used with small_tensors alone"),
        ({"pipeline": {"moments": "8bit"}}, "pipeline.moments is used with pipeline.stages"),
        ({"averaging": {"aggregation": "median", "codec": "topk"}}, "use norm_clip"),
        ({"pipeline": {"stges": 2}}, "did you mean 'stages'"),
        ({"pipeline": {"stages": 0}}, 'pipeline.stages: 0 is no number of stages: give 1 to 256, or "auto"'),
        ({"pipeline": {"stages": 3, "cuts": [1]}}, "pipeline.stages = 3 and pipeline.cuts: give one of them"),
        ({"pipeline": {"stages": "auto"}}, 'goes with stages = "auto"'),
        ({"pipeline": {"stage_memory": 1 << 30}}, 'goes with stages = "auto"'),
        ({"pipeline": {"stages": 2, "stage_memory": 1 << 30}}, "pipeline.stages = 2 with pipeline.stage_memory"),
        ({"pipeline": {"stages": "auto", "stage_memory": 1 << 30, "cuts": [1]}}, "give one of them"),
        ({"private": {}}, "[private] with data.source = 'stdlib': set \"own\" for text"),
        ({"data": {"source": "own"}}, 'data.source = "own" is private: add a section [private]'),
        ({"private": {}, "data": {"source": "own"}, "training": {"every": 1}}, "set every above 1"),
        ({"private": {}, "data": {"source": "own"}, "pipeline": {"stages": 2}}, "hosts of stages see samples"),
        ({"private": {"wieghts": "equal"}}, "did you mean 'weights'"),
        (
            {"private": {"participation": 0.5}, "data": {"source": "own"}, "admission": {"mode": "open"}},
            "strangers with many identities would be most of a small draw",
        ),
        (
            {"private": {"participation": 0.5, "drift_correction": True}, "data": {"source": "own"}},
            "corrections would lead to the sites that were drawn",
        ),
        (
            {"secure_aggregation": {}, "averaging": {"aggregation": "median"}},
            "masked updates cannot be judged one by one, and nobody sees a single one. Choose privacy",
        ),
        ({"secure_aggregation": {}, "averaging": {"spot_checks": 4}}, "masked updates cannot be judged one by one"),
        ({"secure_aggregation": {}, "averaging": {"codec": "int8"}}, 'Set codec = "fp32"'),
        ({"secure_aggregation": {}, "averaging": {"small_tensors": "bf16"}}, "no small_tensors"),
        ({"secure_aggregation": {}, "averaging": {"group_size": 33}}, "so set at most 32"),
        ({"secure_aggregation": {}, "averaging": {"min_peers": 2}}, "a smaller group has no sum to hide in"),
        ({"secure_aggregation": {"min_contributors": 5}}, "averaging.min_peers = 3 is less than"),
        ({"secure_aggregation": {}, "admission": {"mode": "open"}}, "one stranger with many identities"),
        ({"secure_aggregation": {}, "pipeline": {"stages": 2}, "training": {"every": 1}}, "hosts of stages see"),
        ({"pipeline": {"stages": 2}}, "training.every = 32 does not go with a pipeline"),
        ({"pipeline": {"stages": 2}}, "set training.every = 1"),
        (
            {"pipeline": {"stages": 2}, "training": {"every": 1, "global_batch": 10, "local_batch": 4}},
            "training.local_batch = 4, the samples of a microbatch, must divide training.global_batch = 10",
        ),
    ],
)
def test_a_wrong_value_is_refused_with_one_line_that_names_it(values: dict[str, Any], words: str) -> None:
    with pytest.raises(ManifestError) as caught:
        parse_manifest(values, "run.toml")
    assert str(caught.value).startswith("run.toml: ")
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


OUT_OF_BOUNDS: dict[str, tuple[Any, ...]] = {
    "training.every": (0,), "averaging.aggregation": ("a mean",), "averaging.trim_fraction": (0.5,),
    "averaging.clip_ratio": (0,), "averaging.center_ratio": (-1,), "averaging.max_norm_ratio": (1,),
    "averaging.max_value": (math.inf,), "averaging.max_weight": (math.inf,), "training.clip_norm": (math.inf, math.nan),
    "averaging.max_weight_ratio": (math.nan,), "averaging.small_tensors": ("int8",),
    "averaging.small_values": (0,), "averaging.feedback_decay": (1.01, -0.1),
    "averaging.worker_momentum": (1, -0.1), "pipeline.cuts": ([1.5],),
    "pipeline.stages": (0, 257, "many", 2.5, True), "pipeline.codec": ("topk",), "packages": (["something"],),
    "name": ("",), "model": (3,), "private.weights": ("tokens",), "private.proximal": (-0.1, 1001),
    "private.personal": ([""], ["x"] * 65), "private.participation": (0, 1.1), "secure_aggregation.range": (0, 1e7),
    "secure_aggregation.threshold": (0.5, 1.1), "secure_aggregation.min_contributors": (2, 33),
}  # fmt: skip


@pytest.mark.parametrize("name", OUT_OF_BOUNDS)
def test_a_value_out_of_bounds_is_refused_by_name(name: str) -> None:
    section, _, key = name.partition(".")
    for value in OUT_OF_BOUNDS[name]:
        with pytest.raises(ManifestError, match=f"^run.toml: {name}"):
            parse_manifest({section: {key: value} if key else value}, "run.toml")


@pytest.mark.parametrize(
    ("mode", "averaging", "expected"),
    [
        ("invite", {}, (2.0, 10.0, 0, 0.0)),
        ("open", {}, (1.0, 1.0, 4, 0.5)),
        ("open", {"clip_ratio": 1.5, "spot_checks": 0, "worker_momentum": 0.2}, (1.5, 1.0, 0, 0.2)),
        ("open", {"aggregation": "centered_clip"}, (2.0, 10.0, 4, 0.5)),
        ("open", {"aggregation": "mean"}, (2.0, 1.0, 4, 0.5)),
    ],
)
def test_an_open_swarm_clips_strictly_and_checks_owners_unless_the_organizer_says_otherwise(
    mode: str, averaging: dict[str, Any], expected: tuple[float, float, int, float]
) -> None:
    manifest = Manifest.model_validate({"admission": {"mode": mode}, "averaging": averaging})
    spec = manifest.averaging
    assert (spec.clip_ratio, spec.max_weight_ratio, spec.spot_checks, spec.worker_momentum) == expected
    assert Manifest.model_validate(manifest.model_dump()) == manifest


def test_gradients_have_no_worker_momentum() -> None:
    values: dict[str, Any] = {"admission": {"mode": "open"}, "training": {"every": 1}}
    assert Manifest.model_validate(values).averaging.worker_momentum == 0
    with pytest.raises(ManifestError, match="worker_momentum"):
        parse_manifest({**values, "averaging": {"worker_momentum": 0.5}}, "run.toml")


@pytest.mark.parametrize("admission", [3, "open", None, ["open"]])
def test_an_admission_that_is_no_table_is_refused_as_such(admission: object) -> None:
    with pytest.raises(ManifestError, match="admission"):
        parse_manifest({"admission": admission}, "run.toml")


def test_residuals_decay_under_topk_unless_the_organizer_says_otherwise() -> None:
    cases = [({}, 1.0), ({"codec": "topk"}, 0.95), ({"codec": "topk", "feedback_decay": 1}, 1.0)]
    for averaging, decay in cases:
        manifest = parse_manifest({"averaging": averaging}, "a")
        assert manifest.averaging.feedback_decay == decay
        assert parse_manifest(manifest.model_dump(mode="json"), "a") == manifest


def test_an_adam_that_does_not_move_parameters_by_their_own_size_may_go_fast() -> None:
    manifest = parse_manifest({"training": {"outer": "adam", "outer_learning_rate": 0.7, "outer_epsilon": 0.1}}, "a")
    assert (manifest.training.outer_learning_rate, manifest.training.outer_epsilon) == (0.7, 0.1)


def test_each_outer_optimizer_has_a_learning_rate_of_its_own() -> None:
    for outer, rate in (("average", 1.0), ("nesterov", 0.7), ("adam", 0.01)):
        assert parse_manifest({"training": {"outer": outer}}, "a").training.outer_learning_rate == rate


@pytest.mark.parametrize("family", ["llama", "qwen3", "gpt2", "vit"])
@pytest.mark.parametrize("every", [1, 32])
def test_settings_without_a_use_are_neither_on_the_wire_nor_in_a_file(family: str, every: int) -> None:
    manifest = parse_manifest({"model": {"family": family}, "training": {"every": every}}, "a")
    sent = msgpack.unpackb(manifest.to_bytes())
    assert ("rope_theta" in sent["model"]) == (family in ("llama", "qwen3"))
    assert "head_width" not in sent["model"]
    assert ("image_size" in sent["model"]) == (family == "vit")
    assert ("outer" in sent["training"]) == (every > 1)
    assert ("global_batch" in sent["training"]) == (every == 1)
    assert "pipeline" not in sent
    assert "lora" not in sent
    assert "private" not in sent
    assert "secure_aggregation" not in sent
    assert parse_manifest(sent, "a") == manifest
    assert parse_manifest(tomllib.loads(commented_toml(manifest)), "a") == manifest


def test_a_swarm_in_which_all_take_part_has_the_id_that_it_had() -> None:
    values = {"private": {}, "data": {"source": "own"}}
    sent = parse_manifest(values, "a").to_bytes()
    assert "participation" not in msgpack.unpackb(sent)["private"]
    assert parse_manifest(values | {"private": {"participation": 1.0}}, "a").to_bytes() == sent
    assert msgpack.unpackb(parse_manifest(values | {"private": {"participation": 0.5}}, "a").to_bytes())["private"][
        "participation"
    ] == pytest.approx(0.5)


def test_settings_of_families_that_are_not_known_here_are_all_kept() -> None:
    sent = msgpack.unpackb(parse_manifest({"model": {"family": "new", "rope_theta": 5.0}}, "a").to_bytes())
    assert (sent["model"]["rope_theta"], sent["model"]["image_size"]) == (5.0, 28)


def test_a_pipeline_survives_the_wire_and_names_the_swarm() -> None:
    pipelines = [
        {"stages": 2}, {"stages": 3}, {"cuts": [1, 3]}, {"cuts": [3]}, {"stages": "auto", "stage_memory": 1 << 30},
        {"stages": 2, "codec": "fp16"},
    ]  # fmt: skip
    manifests = [parse_manifest({"training": {"every": 1}, "pipeline": pipeline}, "a") for pipeline in pipelines]
    for manifest in manifests:
        signed = SignedManifest.create(manifest, ALICE)
        received = SignedManifest.from_bytes(signed.to_bytes(), signed.manifest.digest, MALLORY)
        assert received.manifest == signed.manifest
    assert len({manifest.digest for manifest in manifests}) == 6


def test_secure_aggregation_brings_the_settings_that_it_needs() -> None:
    spec = parse_manifest({"secure_aggregation": {}}, "a").averaging
    assert (spec.aggregation, spec.codec, spec.group_size, spec.min_peers) == ("mean", "fp32", 32, 3)
    given = parse_manifest({"secure_aggregation": {}, "averaging": {"group_size": 8, "min_peers": 5}}, "a").averaging
    assert (given.codec, given.group_size, given.min_peers) == ("fp32", 8, 5)
