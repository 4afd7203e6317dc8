"""A manifest describes a pretrained model; peers begin with its parameters, wherever they have them from."""

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from p2ptrain.errors import ConfigError, ManifestError, UsageError
from p2ptrain.manifest import DataSpec, Manifest, ModelSpec, parse_manifest
from p2ptrain.models import Span, build_model, build_stage, export_hugging_face, model_blocks
from p2ptrain.models.pretrained import (
    describe_pretrained,
    end_marks,
    generation_settings,
    local_data,
    served_context,
    weights_folder,
)
from p2ptrain.models.smollm2 import NAME, smollm2_folder
from p2ptrain.models.tokenizers import byte_tokenizer, load_pretrained_tokenizer
from p2ptrain.models.weights import INDEX, SINGLE
from tests.support.models import SPECS, each, write_shards

OTHER = {"weights", "weight_digests", "initial_seed"}


def written(spec: ModelSpec, folder: Path) -> Path:
    """A model as Hugging Face's tools write it."""
    other = spec.model_copy(update={"initial_seed": 5})
    export_hugging_face(build_model(other), other, folder)
    return folder


def change(folder: Path, **settings: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))


@each
def test_a_description_builds_the_model_that_was_described(spec: ModelSpec, tmp_path: Path) -> None:
    described = describe_pretrained(str(written(spec, tmp_path / "model")))
    assert described.model_dump(exclude=OTHER) == spec.model_dump(exclude=OTHER)
    assert described.weights == "local:model", "where the organizer keeps it is nobody's business"
    found = build_model(described, weights_folder(described, Span(0, 1), tmp_path / "model"))
    expected = build_model(spec.model_copy(update={"initial_seed": 5})).state_dict()
    for name, value in found.state_dict().items():
        assert torch.equal(value, expected[name]), name


def test_a_copy_in_another_precision_that_holds_the_same_values_will_do(tmp_path: Path) -> None:
    folder = written(SPECS["llama"], tmp_path / "model")
    half = {name: value.bfloat16() for name, value in load_file(folder / SINGLE).items()}
    save_file(half, folder / SINGLE)
    described = describe_pretrained(str(folder))
    save_file({name: value.float() for name, value in half.items()}, folder / SINGLE)
    build_model(described, folder)
    assert describe_pretrained(str(folder)) == described


@pytest.mark.parametrize("quant", [None, "int8"])
@pytest.mark.parametrize(
    ("name", "holders", "told"),
    [("model.layers.1.mlp.up_proj.weight", {2}, "layer 1"), ("model.embed_tokens.weight", {0, 4}, "embeddings")],
    ids=["a layer", "tied embeddings"],
)
def test_a_host_with_other_parameters_is_told_which_and_others_do_not_matter(
    name: str, holders: set[int], told: str, quant: str | None, tmp_path: Path
) -> None:
    folder = written(SPECS["llama"], tmp_path / "model")
    spec = describe_pretrained(str(folder))
    values = load_file(folder / SINGLE)
    values[name][0, 0] += 1e-3
    save_file(values, folder / SINGLE)
    for number in range(len(model_blocks(spec))):
        if number in holders:
            with pytest.raises(ConfigError, match=rf"{told} .*not those that the swarm's manifest names"):
                build_stage(spec, Span(number, number + 1), folder, quant)
        else:
            build_stage(spec, Span(number, number + 1), folder, quant)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu', and this version computes 'silu'"),
        ({"rms_norm_eps": 2.0}, "norm_epsilon"),
        ({"attention_bias": True}, "attention_bias"),
        ({"head_dim": 64}, "should be"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}}, "rope_parameters"),
        ({"model_type": "mistral"}, "sliding_window = 4096"),
        ({"model_type": "qwen2", "use_sliding_window": True}, "sliding_window = 4096"),
        ({"model_type": "qwen2", "sliding_window": None}, "no parameter"),
        ({"model_type": "mamba"}, "family 'mamba', and this version has llama"),
        ({"num_hidden_layers": 0}, "layers"),
        ({"num_hidden_layers": 30}, "no parameter"),
        ({"hidden_size": 128, "head_dim": 32}, "should be"),
    ],
)
def test_models_that_would_be_computed_otherwise_are_refused(
    settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    folder = written(SPECS["llama"], tmp_path / "model")
    change(folder, **settings)
    with pytest.raises((ManifestError, ConfigError), match=message):
        describe_pretrained(str(folder))


def test_what_is_no_model_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config.json cannot be read"):
        describe_pretrained(str(tmp_path))
    with pytest.raises(UsageError, match="hub:OWNER/NAME"):
        describe_pretrained("https://example.org/model")


def test_a_sample_has_as_many_tokens_as_asked_for_if_the_model_has_them(tmp_path: Path) -> None:
    llama, gpt2 = written(SPECS["llama"], tmp_path / "llama"), written(SPECS["gpt2"], tmp_path / "gpt2")
    assert describe_pretrained(str(llama), 4).context == 4
    with pytest.raises(ManifestError, match="a context of 4096 tokens"):
        describe_pretrained(str(llama), 4096)
    assert describe_pretrained(str(gpt2)).context == describe_pretrained(str(gpt2), 16).context == 16
    with pytest.raises(ManifestError, match="positions are parameters"):
        describe_pretrained(str(gpt2), 8)
    with pytest.raises(ManifestError, match="has no context"):
        describe_pretrained(str(written(SPECS["vit"], tmp_path / "vit")), 8)


def test_weights_and_their_digests_come_together(tmp_path: Path) -> None:
    digests = ["0" * 64]
    for model in ({"weights": "local:somewhere"}, {"weight_digests": digests}):
        with pytest.raises(ManifestError, match="both, or neither"):
            parse_manifest({"model": model}, "run.toml")
    for weights in ("somewhere", "path:/home/ada/model", "local:/home/ada", "http://host/x", "hub:a/b/c", "hub:../x@"):
        with pytest.raises(ManifestError, match=r"model\.weights"):
            parse_manifest({"model": {"weights": weights, "weight_digests": digests}}, "run.toml")


def test_a_folder_that_only_its_name_is_known_of_has_to_be_given(tmp_path: Path) -> None:
    spec = ModelSpec(weights="local:model", weight_digests=("0" * 64,))
    with pytest.raises(ConfigError, match="--weights"):
        weights_folder(spec, Span(0, 1))
    manifest = Manifest(model=spec, data=DataSpec(tokenizer="local:model"))
    with pytest.raises(ConfigError, match=r"data\.tokenizer is local:model.*--weights"):
        local_data(manifest, None, [])
    assert local_data(manifest, tmp_path, []).tokenizer == f"path:{tmp_path}"
    assert weights_folder(spec, Span(0, 1), tmp_path) == tmp_path
    assert weights_folder(ModelSpec(), Span(0, 1), tmp_path) is None


@pytest.mark.fault(47)
def test_settings_of_generation_are_those_of_the_model_itself(tmp_path: Path) -> None:
    """Whose own they are not, and what is no such file, names none; SmolLM2's package has none, its folder does."""
    spec = ModelSpec(weights="local:model", weight_digests=("0" * 64,))
    own, file = DataSpec(tokenizer="local:model"), tmp_path / "generation_config.json"
    manifest = Manifest(model=spec, data=own)
    assert generation_settings(manifest, tmp_path) == {}
    file.write_text('{"temperature": 0.3, "top_p": 0.8}')
    assert generation_settings(manifest, tmp_path) == {"temperature": 0.3, "top_p": 0.8}
    assert generation_settings(manifest) == {}
    assert generation_settings(Manifest(model=spec, data=DataSpec(tokenizer="bytes")), tmp_path) == {}
    for text in ("[1]", "{", "\udcff"):
        file.write_text(text, errors="surrogateescape")
        assert generation_settings(manifest, tmp_path) == {}
    (tmp_path / NAME).mkdir()
    (tmp_path / NAME / SINGLE).touch()  # An earlier version made the folder.
    found = generation_settings(manifest, smollm2_folder(tmp_path))
    assert (found["temperature"], found["top_p"], found["eos_token_id"]) == (0.2, 0.9, 2)


@pytest.mark.parametrize(
    ("tokenizer", "named", "ends"),
    [
        ("local:model", None, ()), ("local:model", 7, (7,)), ("local:model", [7, 3, 7], (7, 3)), ("bytes", [5], (0, 5)),
        ("local:model", ["7", None, True, -1, 256], ()), ("local:model", "7", ()),
        ("local:model", [*range(20)], tuple(range(8))),
    ],
)  # fmt: skip
def test_tokens_that_the_model_s_files_name_end_a_text(tokenizer: str, named: Any, ends: tuple[int, ...]) -> None:
    """Llama 3 and Qwen name the end of a turn and that of a text; their tokenizers name one of them."""
    spec = ModelSpec(weights="local:model", weight_digests=("0" * 64,))
    manifest = Manifest(model=spec, data=DataSpec(tokenizer=tokenizer))
    assert end_marks(manifest, {"eos_token_id": named}) == ends


def test_a_path_of_the_manifest_counts_where_its_links_lead(tmp_path: Path) -> None:
    shared, private = tmp_path / "shared", tmp_path / "private"
    for folder in (shared, private):
        folder.mkdir()
    (tmp_path / "alias").symlink_to(shared)
    (shared / "way-out").symlink_to(private)

    def reads(place: Path | str, *allowed: Path) -> bool:
        try:
            return local_data(Manifest(data=DataSpec(source=f"path:{place}")), None, allowed) is not None
        except ConfigError:
            return False

    assert reads(shared, shared)
    assert reads(shared / "not-there-yet.txt", private, shared)
    assert reads(tmp_path / "alias" / "text", tmp_path / "alias")
    assert reads(shared / "way-out", tmp_path)
    for place in (private, shared / "way-out" / "diary.txt", f"{shared}/../private", f"{shared}-too", "~", "/"):
        assert not reads(place, shared), place
    assert not reads(shared)


@pytest.mark.fault(47)
def test_nothing_is_looked_up_at_a_path_that_is_not_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looked_up: list[str] = []

    def watched(real: Callable[..., Any]) -> Callable[..., Any]:
        def look(path: Any, *more: Any, **named: Any) -> Any:
            looked_up.append(str(path))
            return real(path, *more, **named)

        return look

    for name in ("stat", "lstat", "readlink", "open", "scandir", "listdir"):
        monkeypatch.setattr(os, name, watched(getattr(os, name)))
    manifest = Manifest(data=DataSpec(source="path:/net/mallory.example/probe"))
    with pytest.raises(ConfigError, match="--allow-path"):
        local_data(manifest, None, [tmp_path])
    assert not [path for path in looked_up if "mallory" in path]
    local_data(manifest, None, [Path("/net")])
    assert [path for path in looked_up if "mallory" in path], "the test sees no look-up"


@pytest.mark.fault(47)
def test_a_tokenizer_and_a_model_that_bring_code_do_not_run_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("builtins.input", lambda question: "yes")  # To the question of transformers.
    folder, has_run = tmp_path / "evil", tmp_path / "has-run"
    byte_tokenizer(128).save_pretrained(folder)
    (folder / "evil.py").write_text(f"open({str(has_run)!r}, 'w')\nclass Evil: pass\n")
    brings = {"tokenizer_class": "Evil", "auto_map": {"AutoTokenizer": ["evil.Evil", None]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(brings))
    (folder / "config.json").write_text(json.dumps({"model_type": "evil", "auto_map": {"AutoConfig": "evil.Evil"}}))
    with pytest.raises(ConfigError, match="custom code"):
        load_pretrained_tokenizer(f"path:{folder}")
    with pytest.raises(ConfigError, match="custom code"):
        describe_pretrained(str(folder))
    assert not has_run.exists()


REVISION = "5" * 40
MISSING = "weights_folder(ModelSpec(weights='hub:owner/other', weight_digests=['0' * 64] * 6), Span(0, 1))"


@contextmanager
def hub(folder: Path) -> Iterator[tuple[str, list[str]]]:
    """A hub on loopback that has one model; yields its address, and the files that were asked for."""
    asked: list[str] = []

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self._answer(with_body=False)

        def do_GET(self) -> None:
            self._answer(with_body=True)

        def _answer(self, *, with_body: bool) -> None:
            name = self.path.partition("/resolve/")[2].partition("/")[2]
            file, headers, status = folder / name, {"X-Repo-Commit": REVISION}, 200
            if self.path.startswith("/api/models/owner/small/tree"):
                files = [{"type": "file", "path": path.name, "size": 1, "oid": "0"} for path in folder.iterdir()]
                body = json.dumps(files).encode()
            elif self.path.startswith("/api/models/owner/small"):
                names = [{"rfilename": path.name} for path in sorted(folder.iterdir())]
                body = json.dumps({"id": "owner/small", "sha": REVISION, "siblings": names}).encode()
            elif self.path.startswith("/owner/small/resolve/") and name and file.is_file():
                body = file.read_bytes()
                headers["ETag"] = f'"{name}"'
                if with_body:
                    asked.append(name)
            elif "owner/busy" in self.path:
                body, status = b"{}", 520  # Unlike 503, which the library asks for again for half a minute.
            else:
                body, status = b"{}", 404
                headers["X-Error-Code"] = "EntryNotFound" if "owner/small" in self.path else "RepoNotFound"
            self.send_response(status)
            for key, value in {**headers, "Content-Length": str(len(body))}.items():
                self.send_header(key, value)
            self.end_headers()
            if with_body:
                self.wfile.write(body)

        def log_message(self, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", asked
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


def ask(address: str, home: Path, code: str) -> str:
    """Output of a process of its own, for which that address is the hub."""
    kept = {key: value for key, value in os.environ.items() if not key.startswith("HF_") and "proxy" not in key.lower()}
    environment = {**kept, "HF_ENDPOINT": address, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1"}
    lead = "from p2ptrain.models.pretrained import *\nfrom p2ptrain.models import *\nfrom p2ptrain.manifest import *\n"
    done = subprocess.run(
        [sys.executable, "-c", lead + code], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    return done.stdout.strip() if done.returncode == 0 else done.stderr.strip().splitlines()[-1]


def test_models_come_from_the_hub_and_a_host_downloads_the_files_of_its_stage_alone(tmp_path: Path) -> None:
    folder = written(SPECS["llama, untied"], tmp_path / "model")
    with hub(folder) as (address, asked):
        said = ask(address, tmp_path / "one", "print(describe_pretrained('hub:owner/small').model_dump_json())")
        spec = ModelSpec.model_validate_json(said)
        assert spec.weights == f"hub:owner/small@{REVISION}"
        assert spec.weight_digests == describe_pretrained(str(folder)).weight_digests
        parameters = load_file(folder / SINGLE)
        (folder / SINGLE).unlink()
        write_shards(parameters, tmp_path / "shards")
        for file in (tmp_path / "shards").iterdir():
            file.rename(folder / file.name)
        asked.clear()
        build = f"spec = ModelSpec.model_validate_json({said!r})\nspan = Span(1, 3)\n"
        build += "print(num_parameters(spec, span)); build_stage(spec, span, weights_folder(spec, span))"
        said = ask(address, tmp_path / "two", build)
        assert said == str(sum(block.num_parameters for block in model_blocks(spec)[1:3])), said
        files = json.loads((folder / INDEX).read_text())["weight_map"]
        assert sorted(asked) == sorted(
            [INDEX, *(files[name] for block in model_blocks(spec)[1:3] for name in block.shapes)]
        )
        assert "ConfigError: the hub has no model 'owner/other'" in ask(address, tmp_path / "two", MISSING)


def test_a_hub_that_does_not_answer_may_do_so_later(tmp_path: Path) -> None:
    with hub(tmp_path) as (address, _):
        assert "TemporaryError: 'owner/busy'" in ask(address, tmp_path, MISSING.replace("owner/other", "owner/busy"))
    # The library pauses between its six attempts for 23 s in all.
    without_pauses = "import time; time.sleep = lambda seconds: None\n"
    said = ask(address, tmp_path, without_pauses + MISSING)
    assert "TemporaryError: 'owner/other' is not on this machine" in said


@pytest.mark.parametrize(("family", "wanted", "context"), [("llama", 4096, 4096), ("gpt2", 4096, 64), ("gpt2", 0, 64)])
def test_no_positions_are_served_that_a_model_lacks(family: str, wanted: int, context: int) -> None:
    spec = ModelSpec(family=family, layers=1, hidden=8, heads=2, intermediate=8, context=64)
    assert served_context(spec, None, wanted) == context
