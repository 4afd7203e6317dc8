"""What each codec writes and decodes is what it was when its version was last raised, with kernels and without.

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

from p2ptrain.codecs import codec_names, get_codec
from p2ptrain.codecs.native import KernelCodec
from p2ptrain.codecs.warm import kernels_of
from p2ptrain.kernels import load_kernels

PATH = Path(__file__).parent / "golden" / "codecs.json"
NUM_VALUES = 649
"""Two whole blocks and an odd one of 256; five and an odd one of 128."""


def golden_vector() -> torch.Tensor:
    """Numbers from 2**-27 to 2**13 with either sign, a run of zeros, of one value, and of halves."""
    state, values = 1, []
    for index in range(NUM_VALUES):
        state = (1_664_525 * state + 1_013_904_223) % 2**32
        magnitude = (100 + (state >> 24) % 40 if index % 256 < 200 else 126) << 23 | state % 2**23
        values.append(magnitude | state & 2**31)
    values[128:160] = [0, 2**31] * 16
    values[384:512] = [0x3F333333] * 128  # 0.7
    halves = [struct.unpack("<I", struct.pack("<f", step / 2))[0] for step in range(-40, 41)]
    values[520 : 520 + len(halves)] = halves
    return torch.frombuffer(bytearray(struct.pack(f"<{NUM_VALUES}I", *values)), dtype=torch.float32)


def bits(vector: torch.Tensor) -> bytes:
    return struct.pack(f"<{len(vector)}i", *vector.view(torch.int32).tolist())


def summary(data: bytes | bytearray) -> dict[str, Any]:
    """Enough to tell whether bytes are the same, and where to begin to look if not."""
    return {"bytes": len(data), "first": data[:48].hex(), "sha256": hashlib.sha256(data).hexdigest()}


def entry_of(codec: KernelCodec) -> dict[str, Any]:
    vector = golden_vector()
    encoded = codec.encode(vector)
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
@pytest.mark.parametrize("native", [False, True], ids=["torch", "kernels"])
def test_bytes_and_decoded_bits_are_those_of_this_version(name: str, native: bool) -> None:
    codec = type(get_codec(name))()
    if native:
        codec.kernels = kernels_of(codec, load_kernels())
        if not codec.kernels:
            pytest.skip("this machine has no kernels")
    assert entry_of(codec) == read()[name], f"raise {name}'s version if its format has to change"


def test_the_input_is_what_it_was() -> None:
    digest = hashlib.sha256(bits(golden_vector())).hexdigest()
    assert digest == "c61d49bb27417ac3b1c337749720bfb5f9b9966b9eb7f5357a6b239c88af1cf3"


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
