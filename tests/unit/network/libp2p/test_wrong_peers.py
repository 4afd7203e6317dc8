"""What the daemon's refusals say about the peers at an address."""

from p2ptrain.network.libp2p.wrong_peers import MAX_REMEMBERED_PEERS, WrongPeers

FAILED = "failed to dial: failed to dial QmWanted: all dials failed\n"


def attempt(port: int, reason: str) -> str:
    return f"  * [/ip4/10.0.0.1/tcp/{port}] {reason}\n"


def mismatch(port: int, holder: str) -> str:
    said = f"peer id mismatch: expected QmWanted, but remote key matches {holder}"
    return attempt(port, f"failed to negotiate security protocol: {said}")


def test_a_mismatch_is_remembered_behind_the_daemons_backoff() -> None:
    seen = WrongPeers()
    assert seen.holder("QmWanted", FAILED + mismatch(1, "QmOther")) == "QmOther"
    assert seen.holder("QmWanted", FAILED + attempt(1, "dial backoff")) == "QmOther"
    assert seen.holder("QmElse", FAILED + attempt(1, "dial backoff")) is None


def test_an_address_that_failed_otherwise_may_still_answer() -> None:
    seen = WrongPeers()
    timeout = attempt(2, "dial tcp4 10.0.0.1:2: i/o timeout")
    assert seen.holder("QmWanted", FAILED + mismatch(1, "QmOther") + timeout) is None
    assert seen.holder("QmWanted", FAILED + attempt(1, "dial backoff")) == "QmOther"


def test_a_mismatch_is_forgotten_once_the_address_fails_otherwise() -> None:
    seen = WrongPeers()
    seen.holder("QmWanted", FAILED + mismatch(1, "QmOther"))
    assert seen.holder("QmWanted", FAILED + attempt(1, "dial tcp4 10.0.0.1:1: connection refused")) is None
    assert seen.holder("QmWanted", FAILED + attempt(1, "dial backoff")) is None


def test_memory_is_bounded() -> None:
    seen = WrongPeers()
    for number in range(MAX_REMEMBERED_PEERS + 1):
        seen.holder(f"Qm{number}", FAILED + mismatch(1, "QmOther"))
    assert seen.holder("Qm0", FAILED + attempt(1, "dial backoff")) is None
    assert seen.holder("Qm1", FAILED + attempt(1, "dial backoff")) == "QmOther"
