"""Every decoder of the package that reads other people's bytes, as a function that raises what it declares or nothing.

Each target has seeds: valid inputs from which a fuzzer starts.
"""

from __future__ import annotations

import atexit
import json
import math
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgpack
import torch
from hypothesis.errors import NonInteractiveExampleWarning
from safetensors.torch import save

from p2ptrain.averaging.protocol.anchors import Anchor, AnchorBook
from p2ptrain.averaging.protocol.certificate import Body, Certificate, Head, Ticket, genesis, vote
from p2ptrain.averaging.protocol.table import founding_table
from p2ptrain.codecs import CODECS, CodecError, get_codec
from p2ptrain.errors import CheckpointError, IntegrityError, LinkError, ManifestError, ProtocolError
from p2ptrain.manifest import AveragingSpec, Manifest, SignedManifest
from p2ptrain.network.link import SwarmLink
from p2ptrain.network.records.record import PeerRecord, open_record, seal_record
from p2ptrain.network.rpc.frames import unpack
from p2ptrain.network.schema import from_bytes, to_bytes, to_wire
from p2ptrain.pipeline.messages import TensorHead
from p2ptrain.training.checkpoints.files import SHARED_FILE, _read_tensors, describe_checkpoint, save_checkpoint
from p2ptrain.training.checkpoints.sealed_json import seal
from p2ptrain.training.checkpoints.stage_list import STAGES_FILE, read_stage_list
from p2ptrain.training.state.digest import merkle_tree
from tests.support.fuzz import fitting
from tests.support.records import record_of
from tests.support.signers import NamedSigner
from tests.unit.averaging.protocol.test_table import make_body
from tests.unit.test_messages import HEADS, look_at, schemas

SWARM = b"s" * 32
MOST_VALUES = 1 << 12


class Credulous(NamedSigner):
    """Takes every signature for right: what is behind it is fuzzed, too."""

    def verify(self, peer_id: str, message: bytes, proof: bytes) -> bool:
        return True


TRUSTING = Credulous("fuzz")


@dataclass(frozen=True)
class Target:
    run: Callable[[bytes], None]
    seeds: Callable[[], Iterator[bytes]]


# --- messages: two bytes choose the schema

SCHEMAS: list[Any] = [*schemas(), Head, Ticket, Body, PeerRecord]


def messages(data: bytes) -> None:
    schema, data = SCHEMAS[int.from_bytes(data[:2], "big") % len(SCHEMAS)], data[2:]
    with suppress(ProtocolError):
        unpack(data, "peer", schema)
    with suppress(IntegrityError):
        message: object = from_bytes(schema, data)
        look_at(message)
        assert from_bytes(schema, to_bytes(message)) == message


def some_messages() -> Iterator[bytes]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NonInteractiveExampleWarning)
        for number, schema in enumerate(SCHEMAS[:-4]):
            values = fitting(schema, {TensorHead: HEADS}).example()
            yield number.to_bytes(2, "big") + msgpack.packb(values)
    for number, value in ((-4, genesis(SWARM, SWARM)), (-1, record_of("peer"))):
        yield (len(SCHEMAS) + number).to_bytes(2, "big") + msgpack.packb(to_wire(value))


# --- codecs: a byte chooses one, two say how many values

NAMES = sorted(CODECS.own)


def codecs(data: bytes) -> None:
    codec = get_codec(NAMES[int.from_bytes(data[:1], "big") % len(NAMES)])
    size, data = 1 + int.from_bytes(data[1:3], "big") % MOST_VALUES, data[3:]
    expected = codec.encoded_bytes(size)
    for each in (data, data[:expected].ljust(expected, b"\0")):
        try:
            codec.validate(each, size)
        except CodecError:
            continue
        out = torch.empty(size)
        codec.decode_into(each, out)
        assert bool(out.isfinite().all())
        largest, norm = codec.largest(each, size), codec.squared_norm(each, size)
        # The lowest code of `int4`, which no encoder writes, exceeds the bound by a seventh.
        assert float(out.abs().max()) <= largest * 8 / 7 * (1 + 1e-6)
        assert norm >= 0
        assert not math.isnan(norm)
        codec.accumulate_into(each, 0.5, torch.zeros(size))


def some_encoded() -> Iterator[bytes]:
    generator = torch.Generator().manual_seed(1)
    for number, name in enumerate(NAMES):
        for size in (1, 300):
            encoded = get_codec(name).encode(torch.randn(size, generator=generator))
            yield bytes([number]) + (size - 1).to_bytes(2, "big") + bytes(encoded)


# --- certificates, records, manifests, links


def certificates(data: bytes) -> None:
    with suppress(IntegrityError):
        certificate = Certificate.from_bytes(data, SWARM, TRUSTING)
        body = certificate.body
        body.check_allowed(AveragingSpec())
        head = genesis(SWARM, SWARM)
        with suppress(IntegrityError):
            body.check_follows(head)
        with suppress(IntegrityError):
            following = head.after(certificate, SWARM)
            assert from_bytes(Head, to_bytes(following)) == following
    with suppress(IntegrityError):
        Body.from_bytes(data)


def some_certificates() -> Iterator[bytes]:
    for size in (1, 3):
        names = tuple(f"peer{index}" for index in range(size))
        head = genesis(SWARM, SWARM)
        body = Body(
            SWARM, 0, head.lineage, SWARM, 0, 0, SWARM, names, tuple((i, 10, 1) for i in range(size)), "int8/1",
            tuple(range(size + 1)), (SWARM,) * size, peers=(1,) * size,
        )  # fmt: skip
        votes = tuple((name, NamedSigner(name).sign(vote(body.body_hash))) for name in names)
        yield Certificate(body, votes).to_bytes()
        yield body.to_bytes()


def anchors(data: bytes) -> None:
    book = AnchorBook(SWARM, TRUSTING, lambda raw: Certificate.from_bytes(raw, SWARM, TRUSTING), ["key"], every=1)
    with suppress(IntegrityError):
        complete = book.check(from_bytes(Anchor, data))
        assert complete is not None
        book.adopt(complete, is_off=False)
        assert book.newest == complete.head


def some_anchors() -> Iterator[bytes]:
    first = genesis(SWARM, SWARM, founding_table(["peer0"]))
    body = make_body(first.table, 0, ["peer0"])
    body = replace(body, lineage=first.lineage, digest=SWARM)
    body = first.table.completed(body)
    proofs = (("peer0", NamedSigner("peer0").sign(vote(body.body_hash))),)
    yield to_bytes(Anchor(first.after(Certificate(body, proofs), SWARM), (("key", b"proof"),)))


def records(data: bytes) -> None:
    with suppress(IntegrityError):
        opened = open_record(data, SWARM, TRUSTING)
        record = PeerRecord.from_payload(opened.peer, opened.payload)
        assert PeerRecord.from_payload(opened.peer, record.to_payload()) is not None


def some_records() -> Iterator[bytes]:
    yield seal_record(SWARM, record_of("fuzz").to_payload(), 1, 1e9, TRUSTING)


def manifests(data: bytes) -> None:
    with suppress(ManifestError):
        signed = SignedManifest.from_bytes(data, None, TRUSTING)
        assert SignedManifest.from_bytes(signed.to_bytes(), None, TRUSTING).manifest == signed.manifest


def some_manifests() -> Iterator[bytes]:
    yield SignedManifest.create(Manifest(name="fuzz"), TRUSTING).to_bytes()


def links(data: bytes) -> None:
    text = data.decode(errors="replace")
    with suppress(LinkError):
        link = SwarmLink.parse(text)
        assert SwarmLink.parse(str(link)) == link


def some_links() -> Iterator[bytes]:
    peer = "QmZPYbhNyy5ALEyuLEDwXTjXSAUvvHZjruXi7u7vyueW8j"
    yield str(SwarmLink(SWARM, (f"/ip4/203.0.113.5/tcp/31337/p2p/{peer}",))).encode()
    yield str(SwarmLink(SWARM, (f"/dns4/a.example/tcp/1/p2p/{peer}",), "https://a.example/x")).encode()


# --- checkpoints: a byte chooses the file; descriptions are sealed anew, so that the checksum hides nothing

FOLDER = Path(tempfile.mkdtemp(prefix="p2ptrain-fuzz-"))
atexit.register(shutil.rmtree, FOLDER, ignore_errors=True)


def checkpoints(data: bytes) -> None:
    kind, data = data[:1], data[1:]
    if kind == b"t":
        (FOLDER / SHARED_FILE).write_bytes(data)
        with suppress(CheckpointError):
            _read_tensors(FOLDER / SHARED_FILE)
        return
    name = STAGES_FILE if kind == b"s" else "checkpoint.json"
    with suppress(ValueError, RecursionError):
        description = json.loads(data)
        if isinstance(description, dict):
            description.pop("checksum", None)
            data = seal(description)
    (FOLDER / name).write_bytes(data)
    with suppress(CheckpointError):
        _ = read_stage_list(FOLDER) if kind == b"s" else describe_checkpoint(FOLDER)


def some_checkpoints() -> Iterator[bytes]:
    tensors = [("vector", torch.zeros(8))]
    head = genesis(SWARM, merkle_tree(tensors).root)
    with tempfile.TemporaryDirectory() as folder:
        path = save_checkpoint(Path(folder), head=head, tensors=tensors, local={}, extra={}, swarm=SWARM, keep_last=1)
        yield b"t" + (path / SHARED_FILE).read_bytes()
        yield b"d" + (path / "checkpoint.json").read_bytes()
    stages = {"format": 1, "swarm": SWARM.hex(), "round": 1, "digests": {"0": SWARM.hex()}}
    yield b"s" + seal(stages)
    yield b"t" + save({"a": torch.zeros(2)}, {"order": '["a"]'})


TARGETS: dict[str, Target] = {
    "messages": Target(messages, some_messages),
    "codecs": Target(codecs, some_encoded),
    "certificates": Target(certificates, some_certificates),
    "anchors": Target(anchors, some_anchors),
    "records": Target(records, some_records),
    "manifests": Target(manifests, some_manifests),
    "links": Target(links, some_links),
    "checkpoints": Target(checkpoints, some_checkpoints),
}
