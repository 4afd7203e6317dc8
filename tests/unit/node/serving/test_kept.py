"""The newest weights of a host that only serves, in its run directory."""

from pathlib import Path

from p2ptrain.averaging.protocol.certificate import genesis
from p2ptrain.node.serving.kept import KeptWeights

HEAD = genesis(b"s" * 32, b"d" * 32)


def kept_in(folder: Path | None, data: bytes) -> KeptWeights:
    kept = KeptWeights(folder, "unit", len(data))
    memory = kept.allocate()
    memory[:] = data
    kept.keep(memory, HEAD)
    return KeptWeights(folder, "unit", len(data))


def test_a_later_process_reads_the_newest(tmp_path: Path) -> None:
    kept_in(tmp_path, b"old weights!")
    found = kept_in(tmp_path, b"new weights!").read()
    assert found is not None
    assert (bytes(found[0]), found[1]) == (b"new weights!", HEAD)
    assert KeptWeights(tmp_path, "unit", 8).read() is None
    assert KeptWeights(tmp_path, "another", 12).read() is None


def test_torn_files_do_not_count(tmp_path: Path) -> None:
    kept = kept_in(tmp_path, b"weights")
    (tmp_path / "served-unit").write_bytes(b"Weights")
    assert kept.read() is None
    head = kept_in(tmp_path, b"weights")._head
    assert head is not None
    head.write_bytes(head.read_bytes()[:40])
    assert kept.read() is None


def test_without_a_folder_nothing_is_kept(tmp_path: Path) -> None:
    assert kept_in(None, b"weights").read() is None
