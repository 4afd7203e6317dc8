from hypothesis import given
from hypothesis import strategies as st

from p2ptrain.hashing import EMPTY_HASH, HASH_BYTES, BulkHasher, bulk_hash


def test_golden_hashes() -> None:
    # The first two inputs of BLAKE3's official test vectors: nothing, and one zero byte.
    assert EMPTY_HASH.hex() == "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"
    assert bulk_hash(b"\x00").hex() == "2d3adedff11b61f14c886e35afa036736dcd87a74d27b5c1510225d0f592e213"


@given(st.lists(st.binary(max_size=3000), max_size=5))
def test_a_hash_depends_on_the_bytes_alone_not_on_how_they_are_cut(pieces: list[bytes]) -> None:
    hasher = BulkHasher()
    for piece in pieces:
        hasher.update(piece)
    assert bulk_hash(*pieces) == hasher.digest() == bulk_hash(b"".join(pieces))
    assert len(hasher.digest()) == HASH_BYTES
