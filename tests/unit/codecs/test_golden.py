"""What each codec writes and decodes is what it was when its version was last raised, natively and not.

`golden/codecs.json` holds, for a vector that integer arithmetic makes: the encoded bytes, the bits they decode to, and
those that a weighted sum has. Who changes a format raises the codec's version, and runs this file to write new entries:

    python tests/unit/codecs/test_golden.py

It leaves the entries of versions that have one as they are.
"""

from __future__ import annotations

import hashlib
import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch

from p2ptrain.codecs import Codec, codec_names, get_codec
from p2ptrain.codecs.native import NativeCodec
from p2ptrain.native import load_functions
from tests.support.tools import unavailable

PATH = Path(__file__).parent / "golden" / "codecs.json"
NUM_VALUES = {"topk": 12_418}
"""Three whole chunks of 4096 and one of 130."""
DEFAULT_NUM_VALUES = 649
"""Two whole blocks and an odd one of 256; five and an odd one of 128."""


def golden_vector(num_values: int) -> torch.Tensor:
    """Numbers from 2**-27 to 2**13 with either sign, a run of zeros, of one value, of halves, and of one magnitude."""
    state, values = 1, []
    for index in range(num_values):
        state = (1_664_525 * state + 1_013_904_223) % 2**32
        magnitude = (100 + (state >> 24) % 40 if index % 256 < 200 else 126) << 23 | state % 2**23
        values.append(magnitude | state & 2**31)
    values[128:160] = [0, 2**31] * 16
    values[384:512] = [0x3F333333] * 128  # 0.7
    halves = [struct.unpack("<I", struct.pack("<f", step / 2))[0] for step in range(-40, 41)]
    values[520 : 520 + len(halves)] = halves
    if num_values > 12_288:
        values[8192:12_288] = [0x3F333333, 0xBF333333] * 2048
    return torch.frombuffer(bytearray(struct.pack(f"<{num_values}I", *values)), dtype=torch.float32)


def bits(vector: torch.Tensor) -> bytes:
    return struct.pack(f"<{len(vector)}i", *vector.view(torch.int32).tolist())


def summary(data: bytes | bytearray) -> dict[str, Any]:
    """Enough to tell whether bytes are the same, and where to begin to look if not."""
    return {"bytes": len(data), "first": data[:48].hex(), "sha256": hashlib.sha256(data).hexdigest()}


def entry_of(codec: Codec) -> dict[str, Any]:
    vector = golden_vector(NUM_VALUES.get(codec.name, DEFAULT_NUM_VALUES))
    encoded = codec.encode(vector)
    codec.validate(encoded, len(vector))
    decoded, summed = torch.full_like(vector, torch.nan), vector.flip(0).contiguous()
    codec.decode_into(encoded, decoded)
    codec.accumulate_into(encoded, 1 / 3, summed)
    return {
        "version": codec.version,
        "encoded": summary(encoded),
        "decoded": summary(bits(decoded)),
        "summed": summary(bits(summed)),
    }


def read() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(PATH.read_text(encoding="utf-8"))
    return found


def test_every_codec_has_an_entry_of_its_current_version() -> None:
    assert {name: entry["version"] for name, entry in read().items()} == {
        name: get_codec(name).version for name in codec_names()
    }


@pytest.mark.parametrize("name", codec_names())
def test_bytes_and_decoded_bits_are_those_of_this_version(name: str) -> None:
    codec = type(get_codec(name))()
    assert entry_of(codec) == read()[name], f"raise {name}'s version if its format has to change"


@pytest.mark.parametrize("name", [name for name in codec_names() if isinstance(get_codec(name), NativeCodec)])
def test_native_codecs_make_the_same_bytes_and_bits(name: str) -> None:
    codec = type(get_codec(name))()
    assert isinstance(codec, NativeCodec)
    codec.functions = load_functions().get(name, {})
    unavailable("" if codec.functions else "this machine has no native library", "kernels")
    assert entry_of(codec) == read()[name], f"raise {name}'s version if its format has to change"


@pytest.mark.parametrize(
    ("num_values", "digest"),
    [
        (DEFAULT_NUM_VALUES, "c61d49bb27417ac3b1c337749720bfb5f9b9966b9eb7f5357a6b239c88af1cf3"),
        (NUM_VALUES["topk"], "85f920f86e869c585a12a6a3f7de892ec7bdfe671356151b0ee5a7df57d08a8c"),
    ],
)
def test_the_input_is_what_it_was(num_values: int, digest: str) -> None:
    assert hashlib.sha256(bits(golden_vector(num_values))).hexdigest() == digest


def write() -> None:
    """Add entries for codecs, and versions of codecs, that have none."""
    known = read() if PATH.exists() else {}
    for name in codec_names():
        codec = type(get_codec(name))()
        if known.get(name, {}).get("version") != codec.version:
            known[name] = entry_of(codec)
    PATH.write_text(json.dumps({name: known[name] for name in codec_names()}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write()
