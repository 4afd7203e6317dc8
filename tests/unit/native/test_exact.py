"""The library of exact kernels is found, verified, and optional; this CPU's fastest build is chosen."""

from pathlib import Path

import pytest

from p2ptrain.manifest import ModelSpec
from p2ptrain.models import build_model
from p2ptrain.models.exact import exact_stage
from p2ptrain.native import build, exact
from p2ptrain.native.exact import all_kernels, load_kernels, open_kernels
from p2ptrain.native.load import cached_library
from tests.support.exact import kernels
from tests.support.tools import needed

pytestmark = needed("" if kernels() else "there is no library of exact kernels", "kernels")


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the library is kept during a test; none is installed."""
    path = tmp_path / "cache" / "libexact.so"
    monkeypatch.setattr(exact, "cached_library", lambda source: path)
    monkeypatch.setattr(exact, "INSTALLED", tmp_path / "libexact.so")
    return path


def test_the_fastest_build_of_this_cpu_is_chosen() -> None:
    flags = Path("/proc/cpuinfo").read_text()
    expected = ["plain"]
    if " fma " in flags and " avx2 " in flags:
        expected.insert(0, "v3")
        if " avx512vl " in flags:
            expected.insert(0, "v4")
    assert list(all_kernels()) == expected
    best = load_kernels()
    assert best is not None
    assert best.build == expected[0]


def test_a_damaged_library_is_replaced_once(
    cached: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    library = cached_library(build.EXACT_SOURCE).read_bytes()
    built: list[bytes] = []

    def build_exact() -> bytes:
        built.append(library)
        return library

    monkeypatch.setattr(exact, "build_exact", build_exact)
    cached.parent.mkdir()
    cached.write_bytes(library[:-50])
    assert "plain" in all_kernels()
    assert "plain" in all_kernels()
    assert len(built) == 1
    assert cached.read_bytes() == library
    assert "is damaged" in caplog.text


def test_a_library_without_a_function_is_refused(cached: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(exact, "exact_builds", lambda machine: {"plain": (), "v9": ()})
    (tmp_path / "library.so").write_bytes(cached_library(build.EXACT_SOURCE).read_bytes())
    with pytest.raises(OSError, match="lacks run_v9"):
        open_kernels(tmp_path / "library.so")


def test_without_a_library_stages_compute_with_torch_and_say_so(
    cached: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse() -> bytes:
        raise build.BuildError("no C compiler found")

    monkeypatch.setattr(exact, "build_exact", refuse)
    load_kernels.cache_clear()
    try:
        spec = ModelSpec(layers=1, hidden=16, heads=2, intermediate=16, vocabulary=20, context=20)
        assert exact_stage(build_model(spec), spec).arithmetic == "torch-1/fp32"
    finally:
        load_kernels.cache_clear()
    assert "no C compiler" in caplog.text


def test_all_libraries_go_into_the_wheel(tmp_path: Path) -> None:
    assert [path.name for path in build.write_libraries(tmp_path)] == ["libcodecs.so", "libexact.so"]
    assert "plain" in open_kernels(tmp_path / "libexact.so")
