"""The manifest: the settings of a swarm, identified by their digest and signed by the organizer.

The organizer writes a manifest as TOML (``run.toml``). Peers exchange it as a *signed manifest*: canonical msgpack with
sorted keys, and the organizer's signature. The swarm link holds its SHA-256 digest, which covers the organizer's id: no
peer can substitute another manifest or another organizer. The docstrings of the settings become the comments of
``run.toml``.
"""

from __future__ import annotations

import difflib
import hashlib
import logging
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, get_args

import msgpack
from pydantic import BaseModel, Field, ValidationError, ValidationInfo, field_validator, model_validator

from p2ptrain.disk import replace_file
from p2ptrain.errors import ManifestError
from p2ptrain.hashing import canonical_bytes
from p2ptrain.manifest.sections import Need, Section
from p2ptrain.signing import Signer, issuing_key, seeds_issuing_key

logger = logging.getLogger(__name__)

PROTOCOL_VERSION = 3
"""Version of the wire protocol; raised with each incompatible change. Peers of other versions are refused."""

MAX_PIPELINE_STAGES = 256
MAX_MANIFEST_BYTES = 256 * 1024
MAX_ANCHOR_KEYS = 16
PeerName = Annotated[str, Field(pattern=r"^[A-Za-z0-9_-]{1,64}$")]
SIGNED_FILE = "manifest.bin"
"""File name of a signed manifest, beside an organizer's ``run.toml`` and in each peer's run directory."""
INVITE_FILE = "invite.key"
REVOCATIONS_FILE = "revoked.bin"
ISSUER_FILE = "issuer.key"
"""File names, beside an organizer's manifest: the invite of the seed's link, the list of revocations, and the key with
which seeds sign passes."""


_SHARED = r"local:[\w.-]+|hub:[\w.-]+(/[\w.-]+)?(@[\w./-]+)?"
WEIGHTS_PATTERN = rf"^(|{_SHARED})$"
"""Location of a pretrained model."""

DATA_FORMS = {
    "source": (
        r"stdlib|own|custom|datasets:[\w.-]+/[\w.-]+(:[\w.-]+)?|path:.+",
        "stdlib, path:DIR_OR_FILE, datasets:OWNER/NAME (:CONFIG may follow), own (with [private]), or custom",
    ),
    "tokenizer": (rf"bytes|{_SHARED}|path:.+", "bytes, path:DIR, hub:OWNER/NAME (@REVISION may follow) or local:NAME"),
}
"""Pattern and description of settings of `DataSpec`. ``datasets:NAME`` without an owner is refused: NAME can be a
loader that reads the working directory."""

EXTENSION_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"
"""The name of an entry point, such as a codec's."""

PACKAGE_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}==[A-Za-z0-9][A-Za-z0-9.+!_-]{0,63}$"
"""An installed package and its version."""

OPEN_CHECKS = {"spot_checks": 4}
OPEN_MOMENTUM = {"worker_momentum": 0.5}
OPEN_RULES = {"norm_clip": {"clip_ratio": 1.0, "max_weight_ratio": 1.0}, "mean": {"max_weight_ratio": 1.0}}
"""Defaults of ``averaging`` in an open swarm: in all, with pseudo-gradients, and by rule. What each holds is in
docs/explanation/robustness.md."""

MAX_MASKED = 32
"""Members of a group under secure aggregation, each two of which share a mask."""

MASKED_DEFAULTS = {"aggregation": "mean", "codec": "fp32", "group_size": MAX_MASKED, "min_peers": 3}
"""Defaults of ``averaging`` under secure aggregation."""

SPARSE_FEEDBACK_DECAY = 0.95
"""Default of ``feedback_decay`` under ``topk``: SparseLoCo (arXiv 2508.15706)."""


ROTARY_FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""Families that `p2ptrain.models.families.llama` builds."""
OWN_FAMILIES = (*ROTARY_FAMILIES, "gpt2", "vit")
"""Built-in model families. A family of another package, or ``custom``, may use any key."""


def _families(*names: str) -> Need:
    *others, last = names
    words = f"{', '.join(others)} or {last}" if others else last
    return Need("family", lambda family: family in names or family not in OWN_FAMILIES, f"family = {words}")


_Factor = Annotated[float, Field(gt=0, le=1e6)]
RopeScaling = tuple[_Factor, _Factor, _Factor, Annotated[int, Field(ge=1, le=1 << 24)]]
"""Factor, factor of low frequencies, factor of high frequencies, and context of `ModelSpec.rope_scaling`."""


class ModelSpec(Section):
    """Which model the swarm trains."""

    needs: ClassVar[dict[str, Need]] = {
        "kv_heads": _families(*ROTARY_FAMILIES),
        "head_width": _families(*ROTARY_FAMILIES),
        "vocabulary": _families(*ROTARY_FAMILIES, "gpt2"),
        "context": _families(*ROTARY_FAMILIES, "gpt2"),
        "tied_embeddings": _families(*ROTARY_FAMILIES, "gpt2"),
        "rope_theta": _families(*ROTARY_FAMILIES),
        "rope_scaling": _families(*ROTARY_FAMILIES),
        "image_size": _families("vit"),
        "patch_size": _families("vit"),
        "channels": _families("vit"),
        "classes": _families("vit"),
    }
    family: str = Field("llama", pattern=EXTENSION_PATTERN)
    """``llama``, ``mistral``, ``qwen2``, ``qwen3``, ``gpt2`` or ``vit`` (built here from the settings below), one that
    an installed package brings, or ``custom`` (the researcher's own script builds it)."""
    layers: int = Field(4, ge=1, le=1024)
    """Transformer blocks."""
    hidden: int = Field(128, ge=8, le=65536)
    """Width of the residual stream."""
    heads: int = Field(4, ge=1, le=1024)
    """Attention heads; must divide ``hidden``, unless ``head_width`` is given."""
    kv_heads: int = Field(default_factory=lambda given: given.get("heads", 4), ge=1, le=1024)
    """Key/value heads (grouped-query attention); must divide ``heads``, and are as many unless given."""
    head_width: int | None = Field(None, ge=2, le=65536, examples=[64])
    """Values of a head; ``hidden / heads`` unless given."""
    intermediate: int = Field(352, ge=8, le=1 << 20)
    """Width of the feed-forward layer."""
    vocabulary: int = Field(256, ge=2, le=1 << 20)
    """Tokens; 256 for byte-level text."""
    context: int = Field(128, ge=2, le=1 << 20)
    """Sequence length in tokens."""
    tied_embeddings: bool = True
    """Whether input and output embeddings share one matrix."""
    rope_theta: float = Field(10_000.0, gt=0, le=1e12)
    """The base of the rotary positions' wavelengths."""
    rope_scaling: RopeScaling | None = Field(None, examples=[[8.0, 1.0, 4.0, 8192]])
    """Of a model that was stretched as Llama 3.1 was: the factor, the factors of low and of high frequencies, and the
    context before. 'p2ptrain init --model' writes it."""
    norm_epsilon: float = Field(1e-5, gt=0, le=1)
    """Added by normalisation layers to the variance, or to the mean square."""
    image_size: int = Field(28, ge=1, le=1 << 16)
    """Pixels on a side of an image."""
    patch_size: int = Field(7, ge=1, le=1 << 16)
    """Pixels on a side of a patch; must divide ``image_size``."""
    channels: int = Field(1, ge=1, le=1024)
    """Values of a pixel."""
    classes: int = Field(10, ge=2, le=1 << 20)
    """Number of classes of images."""
    initial_seed: int = Field(1, ge=0, lt=1 << 63)
    """Seed of the initial parameters: every peer builds the same ones."""
    weights: str = Field("", max_length=1024, pattern=WEIGHTS_PATTERN)
    """A pretrained model whose parameters to begin with, instead: ``hub:OWNER/NAME`` (with ``@REVISION``, if not the
    newest), or ``local:NAME`` of one that every peer gives with ``--weights DIR``. 'p2ptrain init --model' writes it,
    with what is above it."""
    weight_digests: tuple[Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")], ...] = Field((), max_length=1026)
    """Of ``weights``: the SHA-256 of each block's parameters, by which peers know that theirs are the same."""

    @model_validator(mode="after")
    def _fits_together(self) -> ModelSpec:
        if bool(self.weights) != bool(self.weight_digests):
            raise ValueError(
                f"model.weights = {self.weights!r} with {len(self.weight_digests)} model.weight_digests: both, or"
                " neither; 'p2ptrain init --model' writes them"
            )
        if self.head_width is None and self.hidden % self.heads:
            raise ValueError(f"model.heads = {self.heads} must divide model.hidden = {self.hidden}")
        if self.heads % self.kv_heads:
            raise ValueError(f"model.kv_heads = {self.kv_heads} must divide model.heads = {self.heads}")
        if self.rope_scaling is not None and not self.rope_scaling[1] < self.rope_scaling[2]:
            raise ValueError("model.rope_scaling: the second number, of low frequencies, must be less than the third")
        return self

    @property
    def width_of_head(self) -> int:
        """The values of an attention head."""
        return self.head_width or self.hidden // self.heads


class DataSpec(Section):
    """Which text the swarm reads."""

    source: str = "stdlib"
    """``stdlib`` (the Python standard library's sources), ``datasets:OWNER/NAME``, ``path:DIR_OR_FILE`` of a copy that
    every peer has there and allows with ``--allow-path`` (the path is public), ``own`` (text that each peer names with
    ``--data``, and that nobody else has; needs ``[private]``), or ``custom``."""
    tokenizer: str = "bytes"
    """``bytes``; ``hub:OWNER/NAME`` (and, if not the newest, ``@REVISION``) of a Hugging Face tokenizer to download;
    ``path:DIR`` of one that every peer has there, and allows; or ``local:NAME``, that of ``model.weights``."""
    held_out_fraction: float = Field(0.02, gt=0, lt=0.5)
    """Share of the text kept for measuring loss, never trained on."""
    seed: int = Field(1, ge=0, lt=1 << 63)
    """Seed of the order in which samples are read."""

    @field_validator(*DATA_FORMS)
    @classmethod
    def _is_known(cls, value: str, info: ValidationInfo) -> str:
        pattern, words = DATA_FORMS[info.field_name or ""]
        if not re.fullmatch(pattern, value):
            raise ValueError(f"{value!r} is unknown: use {words}")
        return value


OUTER_LEARNING_RATES = {"average": 1.0, "nesterov": 0.7, "adam": 0.01}
_LOCAL_STEPS = Need("every", lambda every: every > 1, "every > 1")
_ADAM = Need("outer", lambda outer: outer == "adam", 'outer = "adam"')


class TrainingSpec(Section):
    """How peers train between and at synchronisations."""

    needs: ClassVar[dict[str, Need]] = {
        "fragments": _LOCAL_STEPS,
        "overlap_steps": _LOCAL_STEPS,
        "mixing": Need("overlap_steps", bool, "overlap_steps > 0"),
        "global_batch": Need("every", lambda every: every == 1, "every = 1"),
        "final_rate": Need("schedule", lambda schedule: schedule == "cosine", 'schedule = "cosine"'),
        "outer": _LOCAL_STEPS,
        "outer_learning_rate": _LOCAL_STEPS,
        "outer_momentum": Need("outer", lambda outer: outer != "average", 'outer = "nesterov" or "adam"'),
        "outer_second_momentum": _ADAM,
        "outer_epsilon": _ADAM,
    }
    every: int = Field(32, ge=1, le=100_000)
    """Inner steps between outer steps (H). 1: gradients are averaged each global batch."""
    fragments: int = Field(1, ge=1, le=256)
    """Parts of the model that take turns (P, Streaming DiLoCo): a round synchronises one, every H / P inner steps."""
    overlap_steps: int = Field(0, ge=0, lt=100_000)
    """Inner steps that a peer may take while a round is under way (Streaming DiLoCo's tau; up to 5 are advised): its
    result is applied as soon as it is there, and after so many steps training waits for it. 0: it always waits."""
    mixing: float = Field(0.5, ge=0, lt=1)
    """How much of a peer's own parameters stays when a result is applied (Streaming DiLoCo's
    alpha)."""
    global_batch: int = Field(24, ge=1, le=1 << 24)
    """Samples in the swarm's global batch."""
    local_batch: int = Field(4, ge=1, le=1 << 16)
    """Samples in one local batch."""
    learning_rate: float = Field(1.5e-3, gt=0, le=10)
    """Inner AdamW learning rate."""
    warmup_steps: int = Field(20, ge=0, le=1 << 24)
    """Linear warm-up of the inner learning rate, in optimizer steps of the swarm (with ``every = 1``: rounds)."""
    schedule: Literal["constant", "cosine"] = "constant"
    """The inner learning rate after the warm-up. ``cosine`` ends with the run, so it needs ``rounds``."""
    final_rate: float = Field(0.1, ge=0, le=1)
    """Where the cosine ends, in multiples of ``learning_rate``."""
    weight_decay: float = Field(0.01, ge=0, le=1)
    """Inner AdamW weight decay."""
    clip_norm: float = Field(1.0, ge=0)
    """Gradient norm limit of every optimizer step; 0 switches clipping off. A script has to ask for it:
    ``Swarm.optimizer(clip_norm=swarm.manifest.training.clip_norm)``."""
    outer: Literal["nesterov", "average", "adam"] = "average"
    """Outer optimizer on averaged pseudo-gradients: ``average`` for runs of tens to hundreds of rounds,
    in which momentum was measured to gain nothing or to overshoot; ``nesterov`` (DiLoCo) for longer ones; ``adam``
    (FedAdam) where parameters differ much in scale."""
    outer_learning_rate: float = Field(
        default_factory=lambda given: OUTER_LEARNING_RATES.get(given.get("outer", ""), 0.7), gt=0, le=10
    )
    """Outer learning rate. Unless given, 1 with ``average``, 0.7 with ``nesterov`` (DiLoCo), and 0.01 with ``adam``,
    where it is about how far each parameter moves a round."""
    outer_momentum: float = Field(0.9, ge=0, lt=1)
    """Outer momentum (DiLoCo: 0.9); with ``adam`` its beta1 (FedAdam: 0.9)."""
    outer_second_momentum: float = Field(0.99, ge=0, lt=1)
    """beta2 (FedAdam: 0.99)."""
    outer_epsilon: float = Field(1e-3, gt=0, le=10)
    """Added to the root of the second moment (FedAdam: 0.001). Parameters whose pseudo-gradients are
    far smaller move in proportion to them."""
    rounds: int = Field(0, ge=0, le=1 << 40)
    """Stop after this many rounds (of one fragment each); 0 trains until stopped."""

    @property
    def steps_per_round(self) -> int:
        """Inner steps between two rounds: H / P."""
        return self.every // self.fragments

    @model_validator(mode="after")
    def _fits_together(self) -> TrainingSpec:
        if self.every % self.fragments:
            raise ValueError(
                f"training.fragments = {self.fragments} must divide training.every = {self.every}: rounds are "
                "every / fragments inner steps apart"
            )
        steps = self.rounds * self.steps_per_round
        if self.schedule == "cosine" and steps <= self.warmup_steps:
            raise ValueError(
                f'training.schedule = "cosine" ends with training.rounds = {self.rounds}, after {steps} steps, and'
                f" training.warmup_steps = {self.warmup_steps}: give more rounds"
            )
        if self.overlap_steps >= self.steps_per_round:
            raise ValueError(
                f"training.overlap_steps = {self.overlap_steps} must be less than the inner steps between two rounds, "
                f"every / fragments = {self.steps_per_round}"
            )
        if self.outer == "adam" and self.outer_learning_rate > 0.1 and self.outer_epsilon < 0.01:
            raise ValueError(
                f"training.outer_learning_rate = {self.outer_learning_rate:g} with outer = 'adam' moves each parameter "
                "by about as much every round: start at 0.01, or raise outer_epsilon"
            )
        return self


RULES = ("mean", "norm_clip", "centered_clip", "trimmed", "median")


def _rules(*names: str) -> Need:
    words = " or ".join(f'aggregation = "{name}"' for name in names)
    return Need("aggregation", lambda rule: rule in names or rule not in RULES, words)


class AveragingSpec(Section):
    """How a round is averaged."""

    needs: ClassVar[dict[str, Need]] = {
        "small_values": Need("small_tensors", bool, "small_tensors"),
        "clip_ratio": _rules("norm_clip"),
        "center_ratio": _rules("centered_clip"),
        "trim_fraction": _rules("trimmed"),
        "max_weight_ratio": _rules("mean", "norm_clip"),
        **{key: Need("anchors", bool, "anchors") for key in ("anchors", "anchor_quorum", "anchor_rounds")},
    }
    codec: str = Field("int8", pattern=EXTENSION_PATTERN)
    """``fp32``, ``fp16``, ``bf16``, ``int8``, ``int4`` or ``topk``, from exact to compact; or a codec of an installed
    package."""
    small_tensors: Literal["", "fp32", "fp16", "bf16"] = ""
    """A codec of their own for small tensors such as norms and biases; empty for the one of all others."""
    small_values: int = Field(4096, ge=1, le=1 << 24)
    """Tensors of up to so many values are small."""
    feedback_decay: float = Field(1.0, ge=0, le=1)
    """How much is kept, from round to round, of what the codec dropped (error feedback): 1 keeps all of it, 0 nothing.
    With ``topk``, 0.95 unless another is given (SparseLoCo)."""
    group_size: int = Field(64, ge=1, le=256)
    """Peers that average together at most."""
    min_peers: int = Field(1, ge=1, le=256)
    """Fewer peers than this do not commit a round."""
    below_min: Literal["pause", "continue"] = "pause"
    """Action of a trainer below ``min_peers``: wait, or go on with inner steps without synchronising."""
    quorum: float = Field(0.5, gt=0, le=1)
    """Share of the expected peers that must be ready before the round may close without the rest."""
    grace_seconds: float = Field(3.0, ge=0, le=600)
    """How long the rest may take once the quorum is ready."""
    late_decay: float = Field(0.9, ge=0, le=1)
    """Fraction kept of a contribution that missed a round and waits for the next: 1 keeps all of it, 0 drops it."""
    matchmaking_seconds: float = Field(20.0, gt=0, le=3600)
    """Deadline of finding a group. A founder waits as long, once, for most of the trainers that it knows to begin."""
    round_seconds: float = Field(60.0, gt=0, le=3600)
    """Deadline of one attempt at averaging, once the group stands."""
    max_weight: float = Field(1e9, gt=0)
    """Largest token weight that a contribution may claim."""
    aggregation: str = Field("norm_clip", pattern=EXTENSION_PATTERN)
    """How an owner combines the contributions to its share: ``mean``, ``norm_clip``, ``centered_clip``, ``trimmed``,
    ``median`` (compared in docs/explanation/robustness.md), or a rule of an installed package, which may use all of
    the rules' settings below."""
    clip_ratio: float = Field(2.0, ge=0.1, le=1000)
    """The longest that a contribution counts, in multiples of the group's median norm. At 2 nothing is
    clipped in an honest group; 1 bounds liars best."""
    center_ratio: float = Field(1.0, ge=0.1, le=1000)
    """The furthest that a contribution pulls from, in multiples of the median distance."""
    trim_fraction: float = Field(0.2, ge=0, lt=0.5)
    """The fraction of the contributors whose values are dropped at each end of every coordinate."""
    max_weight_ratio: float = Field(10.0, ge=1, le=1e9)
    """The most that a contribution weighs, in multiples of the group's median tokens."""
    max_norm_ratio: float = Field(200.0, ge=2, le=1e9)
    """A contribution is refused when its norm is more than this many times the group's median."""
    max_value: float = Field(1e6, gt=0, le=1e30)
    """A contribution is refused when one of its values is larger in magnitude."""
    spot_checks: int = Field(0, ge=0, le=1024)
    """Chunks of each share that the group computes again, all members together, before it signs: 4 among strangers,
    which makes rounds of 10M values over links of 100 Mbit/s up to 9 % longer. 0 trusts owners: right where all
    machines are one person's."""
    worker_momentum: float = Field(0.0, ge=0, lt=1)
    """The part of a contribution that is the mean of the peer's earlier ones: 0.5 among strangers, where it halves what
    liars within the noise of honest updates cost. 0 sends each update alone. Needs ``training.every`` above 1."""
    history_rounds: int = Field(8, ge=1, le=256)
    """Encoded results that each peer keeps for laggards; with ``training.fragments``, so many of each."""
    anchors: tuple[PeerName, ...] = Field((), max_length=MAX_ANCHOR_KEYS)
    """Peer ids whose keys sign anchors, past which no peer goes back; each must be a founder, or train. Empty for the
    first 16 founders in an ``open`` swarm, and for no anchors in others."""
    anchor_quorum: int = Field(0, ge=0, le=MAX_ANCHOR_KEYS)
    """How many of ``anchors`` must sign; 0 for more than half. With half or fewer, keys that do not know of each other
    may anchor two pasts."""
    anchor_rounds: int = Field(64, ge=1, le=4096)
    """Rounds from one anchor to the next."""

    @model_validator(mode="before")
    @classmethod
    def _sparse_residuals_decay(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("codec") == "topk":
            return {"feedback_decay": SPARSE_FEEDBACK_DECAY, **values}
        return values

    @model_validator(mode="after")
    def _rule_fits_codec(self) -> AveragingSpec:
        if self.codec == "topk" and self.aggregation in ("median", "trimmed"):
            raise ValueError(
                f"averaging.aggregation = {self.aggregation!r} makes zeros of what topk sends, because most peers "
                "leave out any one value: use norm_clip or centered_clip"
            )
        return self

    @model_validator(mode="after")
    def _anchors_suffice(self) -> AveragingSpec:
        if len(set(self.anchors)) < len(self.anchors):
            raise ValueError("averaging.anchors names a key twice")
        if self.anchor_quorum > len(self.anchors):
            raise ValueError(
                f"averaging.anchor_quorum = {self.anchor_quorum}, and averaging.anchors names {len(self.anchors)} keys:"
                " name more, or lower the quorum"
            )
        return self


class PipelineSpec(Section):
    """How a model that is too large for one volunteer is cut into stages."""

    stages: Annotated[int, Field(ge=1, le=MAX_PIPELINE_STAGES)] | Literal["auto"] = 1
    """How many stages of equal work; 1: every trainer holds the whole model. ``auto``: as few as fit into
    ``stage_memory``."""
    cuts: tuple[int, ...] = ()
    """Instead of ``stages``: the blocks at which the second stage and those after it begin."""
    stage_memory: int = Field(0, ge=0, le=1 << 50)
    """With ``stages = "auto"``: the bytes that a volunteer has for a stage, its optimizer and activations included."""
    codec: Literal["int8", "int4", "fp16", "bf16", "fp32"] = "int8"
    """How activations and their gradients travel."""
    moments: Literal["fp32", "8bit"] = "fp32"
    """How AdamW's moments are held. ``8bit``: 2 bytes a parameter instead of 8, and half the download for newcomers."""
    quant: Literal["", "int8"] = ""
    """``int8``: stages hold the model's parameters as int8, a quarter of the memory. They are frozen then: ``[lora]``
    says what is trained."""

    @property
    def is_used(self) -> bool:
        """True if the model is cut into stages."""
        return self.stages != 1 or bool(self.cuts)

    @field_validator("stages", mode="before")
    @classmethod
    def _is_a_number_or_auto(cls, value: Any) -> Any:
        if value != "auto" and (type(value) is not int or not 1 <= value <= MAX_PIPELINE_STAGES):
            raise ValueError(f'{value!r} is no number of stages: give 1 to {MAX_PIPELINE_STAGES}, or "auto"')
        return value

    @model_validator(mode="after")
    def _says_one_thing(self) -> PipelineSpec:
        if self.cuts and self.stages != 1:
            raise ValueError(f"pipeline.stages = {self.stages!r} and pipeline.cuts: give one of them")
        if (self.stages == "auto") != (self.stage_memory > 0):
            raise ValueError(
                f"pipeline.stages = {self.stages!r} with pipeline.stage_memory = {self.stage_memory}: the memory of a"
                ' stage, in bytes, goes with stages = "auto", and with nothing else'
            )
        return self


KEY_PATTERN = r"^[0-9a-f]{64}$"
"""An Ed25519 public key."""
MAX_NAMED_PEERS = 1024


class AdmissionSpec(Section):
    """Rules of admission to the swarm. In an ``open`` swarm a member votes after 64 rounds, in others after 4."""

    needs: ClassVar[dict[str, Need]] = {
        "members": Need("mode", lambda mode: mode == "allowlist", 'mode = "allowlist"'),
        "puzzle_bits": Need("mode", lambda mode: mode == "open", 'mode = "open"'),
        "peers_per_network": Need("mode", lambda mode: mode == "open", 'mode = "open"'),
    }
    mode: Literal["open", "invite", "allowlist"] = "invite"
    """``invite``: peers with an invite link, or a pass of their own; ``allowlist``: ``members``, and peers with a pass;
    ``open``: everybody who solves a puzzle."""
    key: str = Field("", pattern=rf"^$|{KEY_PATTERN}")
    """The public key behind the organizer's invites and passes; it is set when the manifest is signed."""
    issuers: tuple[Annotated[str, Field(pattern=KEY_PATTERN)], ...] = Field((), max_length=64)
    """Public keys whose invites and passes count like the organizer's. 'p2ptrain init' prints the one of a new key."""
    members: tuple[PeerName, ...] = Field((), max_length=MAX_NAMED_PEERS)
    """Peer ids."""
    puzzle_bits: int = Field(21, ge=0, le=32)
    """Difficulty of the puzzle, which each bit doubles: 21 take about a second of a core, once for each peer."""
    peers_per_network: int = Field(0, ge=0, le=16384)
    """Most peers of one network (the first 24 bits of an IPv4 address, 48 of IPv6) that a seed lets in within a week; 0
    for no limit. With a limit newcomers need a seed that is up."""


class LoraSpec(Section):
    """Low-rank adapters (LoRA, as peft has them), which are trained instead of the model; the model is frozen."""

    targets: tuple[Annotated[str, Field(min_length=1, max_length=256)], ...] = Field(
        min_length=1, max_length=256, examples=[["q_proj", "v_proj"]]
    )
    """The linear layers that get them, by their Hugging Face names or the ends of those: ``["q_proj", "v_proj"]``."""
    rank: int = Field(8, ge=1, le=1 << 16)
    """Of the product of two matrices that is added to a layer's."""
    alpha: float = Field(16.0, gt=0, le=1e6)
    """The product is added ``alpha / rank`` times."""
    seed: int = Field(1, ge=0, lt=1 << 63)
    """Of their initial values: every peer makes the same ones."""


class PrivateSpec(Section):
    """Each peer trains on data of its own, which stays on its machine: a *site*."""

    weights: Literal["bucketed", "samples", "equal"] = "bucketed"
    """Weight of a site's update, for each local step: ``samples``, its number of training samples (FedAvg);
    ``bucketed``, the largest power of two in that number, which hides one sample more or less; ``equal``, 1."""
    proximal: float = Field(0.0, ge=0, le=1000)
    """Pull of each local step towards the shared parameters (FedProx's mu), which keeps unlike sites together; 0 for
    none."""
    personal: tuple[Annotated[str, Field(min_length=1, max_length=256)], ...] = Field((), max_length=64)
    """Patterns of tensors that stay with each site and are not averaged, such as ``["*.bn*"]`` (FedBN). ``*`` stands
    for any characters. Each pattern must match a parameter or buffer of the model."""
    drift_correction: bool = False
    """Correct each local step by the difference between the site's last update and the swarm's (SCAFFOLD), so that
    unlike sites reach the optimum of all. For ``training.outer = "average"``."""
    participation: float = Field(1.0, ge=0.01, le=1)
    """Share of the sites that train in a round, drawn by a hash that all peers know; at least ``averaging.min_peers``.
    Newcomers and sites that were in none of the last 8 rounds always train. Needs another ``admission.mode`` than
    ``open``."""

    @property
    def unused(self) -> set[str]:
        return super().unused | ({"participation"} if self.participation == 1 else set())


class PrivacySpec(Section):
    """Differential privacy of each training sample (DP-SGD), in a private swarm. A site whose budget is spent stops
    contributing."""

    epsilon: float = Field(8.0, gt=0, le=1000)
    """The most that a site may spend."""
    delta: float = Field(1e-5, gt=0, le=0.1)
    """The probability with which the bound may fail; below one in the number of a site's samples."""
    clip_norm: float = Field(1.0, gt=0, le=1e6)
    """Norm to which each sample's gradient is clipped."""
    noise_multiplier: float = Field(1.0, ge=0.1, le=1000)
    """Standard deviation of a step's noise, in multiples of ``clip_norm``."""


class SecureAggregationSpec(Section):
    """Sites mask what they average: nobody, the owner of a share included, learns more than the sum of their group.

    Robust rules and checks are off then, because masked updates cannot be judged one by one.
    """

    range: float = Field(16.0, gt=0, le=1e6)
    """Largest magnitude of a value of an update, in the units of the parameters; larger ones count as this, and are
    logged. Values are rounded to steps of ``range / 2^31``."""
    threshold: float = Field(2 / 3, gt=0.5, le=1)
    """Share of a group's members that must take part in unmasking its sum; always more than half of them and one. The
    rest may drop out. Fewer than these cannot uncover an update together."""
    min_contributors: int = Field(3, ge=3, le=MAX_MASKED)
    """A sum of fewer updates is not unmasked. ``averaging.min_peers`` must be as many."""


class Manifest(Section):
    """Everything that peers of one swarm must agree on."""

    name: str = Field("my-swarm", min_length=1, max_length=64, pattern=r"^[A-Za-z0-9][A-Za-z0-9 ._-]*$")
    """A name for people; not unique."""
    protocol: int = PROTOCOL_VERSION
    """The wire protocol's version."""
    organizer: str = Field("", pattern=r"^[A-Za-z0-9]{0,64}$")
    """The peer id of the key that signs the manifest; 'p2ptrain seed' and 'p2ptrain up' set it."""
    founders: tuple[PeerName, ...] = Field((), max_length=256)
    """Peer ids of the peers that vote from the beginning; empty for the seed alone."""
    model: ModelSpec = ModelSpec()
    data: DataSpec = DataSpec()
    training: TrainingSpec = TrainingSpec()
    averaging: AveragingSpec = AveragingSpec()
    admission: AdmissionSpec = AdmissionSpec()
    pipeline: PipelineSpec = PipelineSpec()
    lora: LoraSpec | None = None
    private: PrivateSpec | None = None
    differential_privacy: PrivacySpec | None = None
    secure_aggregation: SecureAggregationSpec | None = None
    packages: tuple[Annotated[str, Field(pattern=PACKAGE_PATTERN)], ...] = Field((), max_length=16)
    """``PACKAGE==VERSION`` of each package that brings the model's family, the codec or the rule: all peers need it.
    'p2ptrain seed' adds what this machine has."""

    @property
    def unused(self) -> set[str]:
        return super().unused | (set() if self.in_stages else {"pipeline"})

    @property
    def in_stages(self) -> bool:
        """True if stage hosts hold the model, and trainers send microbatches through them."""
        return self.pipeline.is_used or self.lora is not None

    @model_validator(mode="before")
    @classmethod
    def _strict_among_strangers(cls, values: Any) -> Any:
        if not isinstance(values, dict):
            return values
        admission, averaging, training = (values.get(key, {}) for key in ("admission", "averaging", "training"))
        mode = admission.get("mode") if isinstance(admission, dict) else getattr(admission, "mode", None)
        if mode != "open" or not isinstance(averaging, dict):
            return values
        every = training.get("every") if isinstance(training, dict) else getattr(training, "every", None)
        momentum = {} if every == 1 else OPEN_MOMENTUM
        strict = OPEN_RULES.get(str(averaging.get("aggregation", "norm_clip")), {})
        return {**values, "averaging": {**OPEN_CHECKS, **momentum, **strict, **averaging}}

    @model_validator(mode="before")
    @classmethod
    def _masked_by_default(cls, values: Any) -> Any:
        """Runs before `_strict_among_strangers`, as pydantic runs the last one first."""
        if not isinstance(values, dict) or values.get("secure_aggregation") is None:
            return values
        averaging = values.get("averaging", {})
        return {**values, "averaging": {**MASKED_DEFAULTS, **averaging}} if isinstance(averaging, dict) else values

    @model_validator(mode="after")
    def _is_printable(self) -> Manifest:
        for key, text in _texts(self.model_dump()):
            for character in text:
                if not character.isprintable():
                    raise ValueError(
                        f"{key} holds the character U+{ord(character):04X}, which does not print: remove it"
                    )
        return self

    @model_validator(mode="after")
    def _fits_together(self) -> Manifest:
        if self.averaging.worker_momentum and self.training.every == 1:
            raise ValueError(
                f"averaging.worker_momentum = {self.averaging.worker_momentum:g} is for pseudo-gradients, and"
                " training.every = 1 averages gradients, whose optimizer has momentum: remove it, or raise every"
            )
        idle = self.pipeline.model_fields_set - {"stages", "cuts", "stage_memory"}
        if idle and not self.in_stages:
            raise ValueError(
                f"pipeline.{min(idle)} is used with pipeline.stages, pipeline.cuts or [lora] alone: remove it, or say"
                " how the model is cut"
            )
        if self.pipeline.quant and self.lora is None:
            raise ValueError(
                f"pipeline.quant = {self.pipeline.quant!r} freezes the model: say under [lora] which of its layers get"
                ' adapters, such as targets = ["q_proj", "v_proj"]'
            )
        if self.differential_privacy is not None and self.private is None:
            raise ValueError("[differential_privacy] is for samples of one's own: add a section [private]")
        if self.secure_aggregation is not None:
            self._check_secure_aggregation(self.secure_aggregation)
        if self.private is not None:
            self._check_private(self.private)
        elif self.data.source == "own":
            raise ValueError(
                'data.source = "own" is private: add a section [private], or name text that all peers have'
            )
        spec = self.training
        if self.in_stages and spec.every != 1:
            raise ValueError(
                f"training.every = {spec.every} does not go with a pipeline or adapters: stages step together after"
                " every global batch; set training.every = 1"
            )
        if self.in_stages and spec.global_batch % spec.local_batch:
            raise ValueError(
                f"training.local_batch = {spec.local_batch}, the samples of a microbatch, must divide"
                f" training.global_batch = {spec.global_batch}"
            )
        return self

    def _check_secure_aggregation(self, spec: SecureAggregationSpec) -> None:
        averaging = self.averaging
        if self.admission.mode == "open":
            raise ValueError(
                '[secure_aggregation] with admission.mode = "open": one stranger with many identities would learn a'
                ' sum of its own updates and one other. Set mode = "invite" or "allowlist"'
            )
        cannot = "masked updates cannot be judged one by one, and nobody sees a single one"
        if averaging.aggregation != "mean":
            raise ValueError(
                f"[secure_aggregation] with averaging.aggregation = {averaging.aggregation!r}: {cannot}. Choose privacy"
                ' from each other, with aggregation = "mean", or robustness against each other, without the section'
            )
        if averaging.spot_checks:
            raise ValueError(
                f"[secure_aggregation] with averaging.spot_checks = {averaging.spot_checks}: {cannot}. Set it to 0, or"
                " remove the section"
            )
        if averaging.codec != "fp32" or averaging.small_tensors:
            raise ValueError(
                f"[secure_aggregation] with averaging.codec = {averaging.codec!r} and small_tensors ="
                f' {averaging.small_tensors!r}: masked integers have 32 bits. Set codec = "fp32", and no small_tensors'
            )
        if averaging.group_size > MAX_MASKED:
            raise ValueError(
                f"[secure_aggregation] with averaging.group_size = {averaging.group_size}: each two members share a"
                f" mask, so set at most {MAX_MASKED}"
            )
        if averaging.min_peers < spec.min_contributors:
            raise ValueError(
                f"averaging.min_peers = {averaging.min_peers} is less than secure_aggregation.min_contributors ="
                f" {spec.min_contributors}: a smaller group has no sum to hide in"
            )
        if self.in_stages:
            raise ValueError("[secure_aggregation] with a model in stages: hosts of stages see samples; remove one")

    def _check_private(self, spec: PrivateSpec) -> None:
        if self.data.source not in ("own", "custom"):
            raise ValueError(
                f'[private] with data.source = {self.data.source!r}: set "own" for text that each peer names with'
                ' --data, or "custom" for a script that reads its data'
            )
        if self.in_stages:
            raise ValueError("[private] with a model in stages: hosts of stages see samples; remove one of them")
        if self.training.every == 1:
            raise ValueError("[private] with training.every = 1: a gradient tells more of samples; set every above 1")
        if spec.participation < 1 and self.admission.mode == "open":
            raise ValueError(
                '[private] with participation below 1 and admission.mode = "open": strangers with many identities would'
                ' be most of a small draw. Set mode = "invite" or "allowlist"'
            )
        training, corrects = self.training, spec.drift_correction
        is_plain = training.outer == "average" and training.outer_learning_rate == 1
        if corrects and not (is_plain and training.fragments == 1 and not training.overlap_steps):
            raise ValueError(
                'private.drift_correction is for training.outer = "average" at outer_learning_rate = 1, with one'
                " fragment and no overlap_steps"
            )
        if corrects and spec.participation < 1:
            raise ValueError(
                "private.drift_correction with private.participation below 1: corrections would lead to the sites that"
                " were drawn, in place of all. Remove one of them"
            )

    def to_bytes(self) -> bytes:
        """Return canonical msgpack, the same bytes on every machine, without unused settings."""
        return canonical_bytes(self.model_dump(mode="json", exclude_none=True))

    @property
    def digest(self) -> bytes:
        """The swarm's identity, once it names its organizer: SHA-256 of `to_bytes`, 32 bytes."""
        return hashlib.sha256(self.to_bytes()).digest()


def _texts(value: Any, key: str = "") -> Iterator[tuple[str, str]]:
    """Yield each text in plain values, with its dotted key."""
    if isinstance(value, str):
        yield key, value
    elif isinstance(value, dict):
        for name, inner in value.items():
            yield from _texts(inner, f"{key}.{name}" if key else name)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _texts(inner, key)


def explain(error: ValidationError, where: str, model: type[BaseModel]) -> str:
    """Return a one-line message for a pydantic error: the first faulty field, and the nearest valid key if unknown.

    Args:
        where: The source of the values, such as a file.
        model: The model that refuses them.
    """
    first = error.errors()[0]
    path = ".".join(str(part) for part in first["loc"])
    if first["type"] == "extra_forbidden":
        known = _known_keys(model, first["loc"])
        near = difflib.get_close_matches(str(first["loc"][-1]), known, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else f"; known keys: {', '.join(sorted(known))}"
        return f"{where}: unknown key {path!r}{hint}"
    message = first["msg"].removeprefix("Value error, ").replace("a valid tuple", 'a list, such as ["a", "b"]')
    return f"{where}: {path}: {message}" if path else f"{where}: {message}"


def _known_keys(root: type[BaseModel], location: tuple[int | str, ...]) -> list[str]:
    model: Any = root
    for part in location[:-1]:
        field = model.model_fields.get(str(part)) if hasattr(model, "model_fields") else None
        kinds = (field.annotation, *get_args(field.annotation)) if field is not None else ()
        model = next((kind for kind in kinds if hasattr(kind, "model_fields")), None)
    return list(model.model_fields) if model is not None and hasattr(model, "model_fields") else []


def parse_manifest(values: dict[str, Any], where: str) -> Manifest:
    """Return the manifest of plain values; raise `ManifestError`, naming the key, if one is unknown or out of range."""
    try:
        return Manifest.model_validate(values)
    except ValidationError as error:
        raise ManifestError(explain(error, where, Manifest)) from error


class SignedManifest:
    """A manifest that names its organizer, with the organizer's signature."""

    def __init__(self, manifest: Manifest, proof: bytes) -> None:
        self.manifest = manifest
        self.proof = proof

    @classmethod
    def create(cls, manifest: Manifest, organizer: Signer, seed: str = "") -> SignedManifest:
        """Return the manifest signed; ``organizer`` and its key replace those that it names.

        ``seed`` is the founder if the manifest names none.
        """
        admission: dict[str, Any] = {"key": issuing_key(organizer).public_key().public_bytes_raw().hex()}
        if manifest.admission.peers_per_network:
            seeds_key = seeds_issuing_key(organizer).public_key().public_bytes_raw().hex()
            admission["issuers"] = tuple(dict.fromkeys((*manifest.admission.issuers, seeds_key)))
        changes: dict[str, Any] = {
            "organizer": organizer.peer_id,
            "admission": manifest.admission.model_copy(update=admission),
            "founders": manifest.founders or ((seed,) if seed else ()),
        }
        manifest = manifest.model_copy(update=changes)
        return cls(manifest, organizer.sign(b"p2ptrain manifest" + manifest.digest))

    def to_bytes(self) -> bytes:
        """Return the wire and file format."""
        return canonical_bytes({"manifest": self.manifest.to_bytes(), "proof": self.proof})

    def keep(self, path: Path) -> None:
        """Save it beside checkpoints, so that they can be exported after the swarm is gone; a failure is logged."""
        data = self.to_bytes()
        try:
            if path.is_file() and path.read_bytes() == data:
                return
            replace_file(path, data)
        except OSError as error:
            logger.warning("cannot keep the manifest in %s, going on without: %s", path, error.strerror)

    @classmethod
    def from_bytes(cls, data: bytes, digest: bytes | None, verifier: Signer) -> SignedManifest:
        """Parse and verify the bytes of a signed manifest.

        Args:
            digest: The digest in the swarm link, 32 bytes; None accepts any, for a trusted file.
            verifier: Any signer; only its ``verify`` is used.

        Raises:
            ManifestError: The manifest is malformed, has another digest, or is not signed by its organizer.
        """
        if len(data) > MAX_MANIFEST_BYTES:
            raise ManifestError(
                f"the manifest is larger than {MAX_MANIFEST_BYTES} bytes: ask the organizer for another"
            )
        try:
            outer = msgpack.unpackb(data, raw=False)
            body, proof = outer["manifest"], outer["proof"]
            values = msgpack.unpackb(body, raw=False)
            organizer = values["organizer"]
            if not (isinstance(organizer, str) and isinstance(proof, bytes) and isinstance(values, dict)):
                raise ValueError("fields have the wrong types")
        except (ValueError, TypeError, KeyError, msgpack.UnpackException) as error:
            raise ManifestError("the manifest cannot be parsed: ask the organizer for a new link") from error
        actual = hashlib.sha256(body).digest()
        if digest is not None and actual != digest:
            raise ManifestError(
                "the manifest does not match the link's digest, so it is another one, or another organizer's: do not"
                " trust the peer that sent it"
            )
        if not verifier.verify(organizer, b"p2ptrain manifest" + actual, proof):
            raise ManifestError(
                "the manifest is not signed by the organizer that it names: do not trust the peer that sent it"
            )
        return cls(parse_manifest(values, "manifest"), proof)


def former_manifest(path: Path, verifier: Signer) -> Manifest | None:
    """Return the signed manifest in a file; None if there is none."""
    try:
        return SignedManifest.from_bytes(path.read_bytes(), None, verifier).manifest
    except (OSError, ManifestError):
        return None
