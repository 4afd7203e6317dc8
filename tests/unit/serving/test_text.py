"""Text on the client's side: characters come whole, stop strings are found wherever tokens end."""

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from p2ptrain.models.tokenizers import byte_tokenizer
from p2ptrain.serving.errors import ChatTemplateError
from p2ptrain.serving.text import MAX_WINDOW_TOKENS, StopStrings, Text, TextStream
from tests.support.generators import END, tokenizer

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
SAMPLE = "Grüße aus 世界 👩‍👩‍👧 नमस्ते, и так далее.\n"


def learnt() -> Any:
    """A byte-level BPE tokenizer whose tokens end within characters."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator([SAMPLE[first:] for first in range(0, len(SAMPLE), 3)], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=made)  # type: ignore[no-untyped-call]


def falling_back() -> Any:
    """A tokenizer in SentencePiece's form: spaces are marks, and bytes stand for rare characters."""
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁Hello", "▁world", "lo", "ü"]
    made = Tokenizer(models.BPE({piece: place for place, piece in enumerate(pieces)}, [], byte_fallback=True))
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>")  # type: ignore[no-untyped-call]


BYTES, LEARNT, FALLING_BACK = Text(byte_tokenizer(128)), Text(learnt()), Text(falling_back())


def streamed(text: Text, ids: Sequence[int], context: Sequence[int] = ()) -> list[str]:
    stream = TextStream(text, context)
    return [stream.push(each) for each in ids]


@given(data=st.binary(max_size=300))
def test_pieces_make_up_the_text_of_any_bytes_but_for_an_unfinished_end(data: bytes) -> None:
    whole = data.decode(errors="replace")
    told = "".join(streamed(BYTES, list(data)))
    assert whole.startswith(told)
    assert whole.removeprefix(told).strip(REPLACEMENT) == ""
    assert len(whole) - len(told) <= 3


@given(text=st.text(max_size=100))
def test_text_comes_whole_and_without_a_replacement_of_ours(text: str) -> None:
    text = text.replace(REPLACEMENT, "?").encode(errors="replace").decode()
    for tokens in (BYTES, LEARNT):
        assert "".join(streamed(tokens, tokens.encode(text))) == text


def test_a_character_comes_with_its_last_byte_and_not_before() -> None:
    assert streamed(BYTES, list("aü€😀".encode())) == ["a", "", "ü", "", "", "€", "", "", "", "😀"]


def test_a_character_may_begin_in_the_prompt() -> None:
    first, *rest = "ü!".encode()
    assert streamed(BYTES, rest, context=[65, first]) == ["ü", "!"]


def test_spaces_between_pieces_are_kept_and_only_a_texts_first_is_stripped() -> None:
    ids = [FALLING_BACK._tokenizer.convert_tokens_to_ids(piece) for piece in ("▁Hello", "▁world", "▁Hello")]
    assert streamed(FALLING_BACK, ids) == ["Hello", " world", " Hello"]
    assert streamed(FALLING_BACK, ids[1:], context=ids[:1]) == [" world", " Hello"]
    euro = [FALLING_BACK._tokenizer.convert_tokens_to_ids(f"<0x{byte:02X}>") for byte in "€".encode()]
    assert streamed(FALLING_BACK, [*ids[:1], *euro, *ids[1:2]]) == ["Hello", "", "", "€", " world"]


@pytest.mark.parametrize("nonsense", [b"\xff", b"\xe2\x82", b"\xf0\x9f\x98", b"\x80"])
def test_endless_nonsense_takes_linear_time_and_a_character_after_it_comes_whole(nonsense: bytes) -> None:
    decoded = 0

    class Counting(Text):
        def decode(self, ids: Sequence[int]) -> str:
            nonlocal decoded
            decoded += len(ids)
            return super().decode(ids)

    data = nonsense * 2000 + "€.".encode()
    told = "".join(streamed(Counting(byte_tokenizer(128)), list(data)))
    assert told == data.decode(errors="replace")
    assert decoded < 4 * MAX_WINDOW_TOKENS * len(data)


def test_the_bytes_of_tokens_are_those_of_the_text() -> None:
    for text in (BYTES, LEARNT):
        assert b"".join(map(text.token_bytes, text.encode(SAMPLE))) == SAMPLE.encode()
    ids = FALLING_BACK._tokenizer.convert_tokens_to_ids(["▁Hello", "<0xC3>", "<0xBC>", "ü"])
    assert [FALLING_BACK.token_bytes(each) for each in ids] == [b" Hello", b"\xc3", b"\xbc", b"\xc3\xbc"]
    assert Text(tokenizer()).token_bytes(END) == b"<end>"
    assert BYTES.token_bytes(9999) == b""


def test_added_tokens_which_may_be_hundreds_are_not_read_for_each_token(monkeypatch: pytest.MonkeyPatch) -> None:
    text, read = Text(tokenizer()), list[object]()
    kind = type(text.tokenizer)
    honest = kind.added_tokens_decoder

    def counted(it: Any) -> Any:
        read.append(it)
        return honest.fget(it)

    monkeypatch.setattr(kind, "added_tokens_decoder", property(counted))
    assert b"".join(map(text.token_bytes, text.encode(SAMPLE))) == SAMPLE.encode()
    assert len(read) == 1


def found(stops: Sequence[str], pieces: Sequence[str]) -> tuple[str, bool]:
    finder, told = StopStrings(stops), ""
    for piece in pieces:
        text, is_stopped = finder.push(piece)
        told += text
        if is_stopped:
            return told, True
    return told + finder.close(), False


@given(
    data=st.data(), text=st.text("ab", max_size=30), stops=st.lists(st.text("ab", min_size=1, max_size=5), max_size=4)
)
def test_stop_strings_are_found_however_the_text_is_cut(data: st.DataObject, text: str, stops: list[str]) -> None:
    cuts = sorted({0, len(text), *data.draw(st.lists(st.integers(0, len(text)), max_size=8))})
    pieces = [text[first:last] for first, last in itertools.pairwise(cuts)]
    ends = [(place + len(stop), place) for stop in stops if (place := text.find(stop)) >= 0]
    expected = (text[: min(ends)[1]], True) if ends else (text, False)
    assert found(stops, pieces) == expected


def test_only_what_may_become_a_stop_string_is_held_back() -> None:
    finder = StopStrings(["\n\nUser:", "END"])
    assert [finder.push(piece)[0] for piece in ("one\n", "two E", "N", "E\n\nUs", "a")] == [
        "one", "\ntwo ", "", "ENE", "\n\nUsa",
    ]  # fmt: skip


def test_the_stop_string_that_ends_first_counts_in_one_piece_as_in_many() -> None:
    assert found(["abc", "b"], ["abc"]) == found(["abc", "b"], list("abc")) == ("a", True)


def test_a_conversation_takes_the_models_form() -> None:
    text = Text(tokenizer())
    ids = text.encode_chat([{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi ü"}])
    assert text.decode(ids) == "system: Be brief.\nuser: Hi ü\nassistant: "


def test_a_model_without_a_template_and_a_template_that_refuses_say_so() -> None:
    with pytest.raises(ChatTemplateError, match="no chat template: use generate or /v1/completions"):
        BYTES.encode_chat([{"role": "user", "content": "Hi"}])
    with pytest.raises(ChatTemplateError, match="a system message comes first"):
        Text(tokenizer()).encode_chat([{"role": "user", "content": ""}, {"role": "system", "content": ""}])
