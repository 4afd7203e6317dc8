"""Text is the same everywhere, split without leaking, cached safely, and missing text is explained."""

import json
import logging
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from p2ptrain.errors import ConfigError
from p2ptrain.manifest import DataSpec
from p2ptrain.training.data import corpus as text
from p2ptrain.training.data.corpus import Document, load_corpus, read_documents, split_documents
from tests.support.jobs import ToldJobs


def write_texts(folder: Path, count: int = 80) -> Path:
    folder.mkdir(exist_ok=True)
    for number in range(count):
        (folder / f"text{number:03}.txt").write_text(f"document {number}\n" * (5 + number % 7))
    return folder


def spec(folder: Path, **changes: object) -> DataSpec:
    return DataSpec.model_validate({"source": f"path:{folder}", "held_out_fraction": 0.1, **changes})


def test_standard_library_is_there_without_a_network_and_is_reproducible() -> None:
    first, again = load_corpus(DataSpec(), 128, 256), load_corpus(DataSpec(), 128, 256)
    assert first.fingerprint == again.fingerprint
    assert len(first.train) > 4_000_000
    assert 0.015 < len(first.held_out) / (len(first.train) + len(first.held_out)) < 0.03
    assert first.train.dtype == np.uint8
    names = [document.name for document in read_documents("stdlib")]
    assert "asyncio/tasks.py" in names
    assert names == sorted(names)
    unwanted = ("site-packages", "/tests/", "encodings/", "sitecustomize", "_sysconfigdata", "__pycache__")
    assert not [name for name in names if name.startswith("test/") or any(part in name for part in unwanted)]


def test_tokens_are_bytes_with_an_end_mark_after_each_document(tmp_path: Path) -> None:
    write_texts(tmp_path)
    corpus = load_corpus(spec(tmp_path), 8, 256)
    parts = bytes(corpus.train).split(b"\0") + bytes(corpus.held_out).split(b"\0")
    assert sorted(part for part in parts if part) == sorted(path.read_bytes() for path in tmp_path.iterdir())


documents = st.lists(st.binary(min_size=1, max_size=400), min_size=1, max_size=120)


@settings(max_examples=50)
@given(contents=documents, fraction=st.sampled_from([0.02, 0.1, 0.3]), seed=st.integers(0, 9))
@example(contents=[b"x" * 50] * 200, fraction=0.1, seed=1)
def test_split_keeps_everything_once_and_is_pure(contents: list[bytes], fraction: float, seed: int) -> None:
    given_documents = [Document(f"{index}", content) for index, content in enumerate(contents)]
    train, held_out = split_documents(given_documents, fraction, seed)
    assert (train, held_out) == split_documents(given_documents, fraction, seed)
    assert not {document.name for document in train} & {document.name for document in held_out}
    assert sum(len(d.content) for d in train + held_out) == sum(map(len, contents))
    assert sum(len(d.content) for d in held_out) <= 2.5 * fraction * sum(map(len, contents))
    if len(contents) == 200:
        assert (len(train), len(held_out)) == (180, 20)
        assert split_documents(given_documents, fraction, 2)[1] != held_out


def test_one_large_file_is_split_at_line_ends(tmp_path: Path) -> None:
    file = tmp_path / "book.txt"
    file.write_text("".join(f"line number {number}\n" for number in range(3000)))
    corpus = load_corpus(spec(file), 16, 256)
    pieces = [piece for piece in bytes(corpus.held_out).split(b"\0") if piece]
    assert len(pieces) > 3
    assert all(piece.startswith(b"line number") and piece.endswith(b"\n") for piece in pieces)


def test_fingerprint_follows_text_seed_and_fraction(tmp_path: Path) -> None:
    write_texts(tmp_path)
    original = load_corpus(spec(tmp_path), 8, 256).fingerprint
    assert load_corpus(spec(tmp_path, seed=2), 8, 256).fingerprint != original
    assert load_corpus(spec(tmp_path, held_out_fraction=0.2), 8, 256).fingerprint != original
    (tmp_path / "text000.txt").write_text("another\n")
    assert load_corpus(spec(tmp_path), 8, 256).fingerprint != original


def test_cache_is_used_memory_mapped_and_follows_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, cache = write_texts(tmp_path / "texts"), tmp_path / "cache"
    first = load_corpus(spec(folder), 8, 256, cache)
    assert isinstance(first.train, np.memmap)
    assert [path.name[0] for path in cache.iterdir()] != ["."]
    with monkeypatch.context() as patch:
        patch.setattr(text, "_build", None)
        again = load_corpus(spec(folder), 8, 256, cache)
    assert again.fingerprint == first.fingerprint
    assert np.array_equal(again.train, load_corpus(spec(folder), 8, 256).train)
    (folder / "text000.txt").write_text("changed and longer than before " * 9)
    assert load_corpus(spec(folder), 8, 256, cache).fingerprint != first.fingerprint


@pytest.mark.parametrize("damage", ["flip", "truncate", "about"])
def test_a_damaged_cache_is_rebuilt(tmp_path: Path, damage: str, caplog: pytest.LogCaptureFixture) -> None:
    folder, cache = write_texts(tmp_path / "texts"), tmp_path / "cache"
    fingerprint = load_corpus(spec(folder), 8, 256, cache).fingerprint
    (entry,) = cache.iterdir()
    content = bytearray((entry / "train.npy").read_bytes())
    if damage == "flip":
        content[-5] ^= 1
        (entry / "train.npy").write_bytes(content)
    elif damage == "truncate":
        (entry / "train.npy").write_bytes(content[:100])
    else:
        (entry / "corpus.json").write_text(json.dumps({"vocabulary": 256}))
    with caplog.at_level(logging.WARNING):
        assert load_corpus(spec(folder), 8, 256, cache).fingerprint == fingerprint
    assert "damaged corpus cache" in caplog.text
    assert load_corpus(spec(folder), 8, 256, cache).fingerprint == fingerprint


def test_an_unwritable_cache_costs_only_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "file").write_text("in the way")
    corpus = load_corpus(spec(write_texts(tmp_path / "texts")), 8, 256, tmp_path / "file" / "cache")
    assert len(corpus.train) > 0
    assert "cannot cache the corpus" in caplog.text


def test_binary_hidden_and_empty_files_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "good.txt").write_text("good")
    (tmp_path / "image.bin").write_bytes(b"\x89\0\1")
    (tmp_path / ".hidden").write_text("secret")
    (tmp_path / "empty.txt").touch()
    assert [document.name for document in read_documents(f"path:{tmp_path}")] == ["good.txt"]


def test_text_that_cannot_be_used_is_explained_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "short.txt").write_text("too short")
    cases = {
        f"path:{tmp_path}/none": "data.source or --data: .* does not exist",
        f"path:{tmp_path}/empty": "holds no text",
        f"path:{tmp_path}/short.txt": "too short",
        "custom": "run the organizer's script",
    }
    for source, message in cases.items():
        with pytest.raises(ConfigError, match=message) as caught:
            load_corpus(DataSpec(source=source), 128, 256)
        assert "\n" not in str(caught.value)


def test_a_tokenizer_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="to at least that"):
        load_corpus(DataSpec(), 128, 100)
    with pytest.raises(ConfigError, match="holds no usable tokenizer"):
        load_corpus(DataSpec(tokenizer=f"path:{tmp_path}"), 128, 256)


def test_a_hugging_face_tokenizer_gives_the_tokens(tmp_path: Path) -> None:
    from p2ptrain.models.tokenizers import byte_tokenizer

    byte_tokenizer(128).save_pretrained(tmp_path / "tokenizer")
    folder = write_texts(tmp_path / "texts")
    corpus = load_corpus(spec(folder, tokenizer=f"path:{tmp_path / 'tokenizer'}"), 8, 256)
    plain = load_corpus(spec(folder), 8, 256)
    assert bytes(corpus.train) == bytes(plain.train).replace(b"\0", b"")


def test_a_missing_datasets_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match="pip install datasets"):
        load_corpus(DataSpec(source="datasets:some/name"), 128, 256)


class Rows(list[dict[str, str]]):
    column_names = ("text",)


def test_a_data_set_is_read_by_its_text_column(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def load_dataset(name: str, config: str | None, split: str, trust_remote_code: bool) -> Rows:
        asked.append((name, config, split, trust_remote_code))
        return Rows({"text": f"row {number}\0"} if number else {"text": ""} for number in range(3))

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    found = [document.content for document in read_documents("datasets:some/name:small")]
    assert found == [b"row 1", b"row 2"]
    assert asked == [("some/name", "small", "train", False)]


@pytest.mark.fault(47)
@pytest.mark.parametrize("names", [{"source": "datasets:some/name"}, {"tokenizer": "hub:some/name"}])
def test_a_local_folder_is_never_read_in_place_of_the_hub(
    names: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from p2ptrain.models.tokenizers import byte_tokenizer

    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=lambda *names, **options: Rows()))
    byte_tokenizer(128).save_pretrained("some/name")
    with pytest.raises(ConfigError, match=r"data\..*'some/name' is to come from the hub.* start in another folder"):
        load_corpus(DataSpec.model_validate(names), 128, 256)


def test_reading_and_encoding_are_told_as_jobs_unless_the_cache_has_the_text(tmp_path: Path) -> None:
    folder, jobs = write_texts(tmp_path / "texts"), ToldJobs()
    load_corpus(spec(folder), 8, 256, tmp_path / "cache", jobs)
    size = jobs.told["reading the text"][-1][0]
    assert jobs.told["turning the text into tokens"][-1] == (size, size)
    again = ToldJobs()
    load_corpus(spec(folder), 8, 256, tmp_path / "cache", again)
    assert again.told == {}
