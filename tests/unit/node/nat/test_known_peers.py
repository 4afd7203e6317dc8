"""The addresses of peers that a restarted peer dials."""

import json
import logging
from pathlib import Path

import pytest

from p2ptrain.network.libp2p.settings import Libp2pSettings
from p2ptrain.node.nat.contacts import KNOWN_FILE, KnownPeers
from tests.support.records import record_of

GOOD = "/ip4/45.10.0.7/tcp/4001/p2p/QmZHepEU53WX4FouwkgctgJvcFK7amhhhf8ADBZPvGT1ZJ"


def test_an_address_that_a_peer_made_up_does_not_keep_others_from_starting_again(tmp_path: Path) -> None:
    liar, honest = record_of("liar", addresses=("nowhere", "/ip4/1/p2p/x")), record_of("honest", addresses=(GOOD,))
    KnownPeers(tmp_path).remember([liar, honest])
    assert json.loads((tmp_path / KNOWN_FILE).read_text()) == [GOOD]
    assert Libp2pSettings(bootstrap=tuple(KnownPeers(tmp_path).addresses())).bootstrap == (GOOD,)


@pytest.mark.parametrize(
    ("content", "known"),
    [("null", []), ("7", []), ("", []), ('["', []), (json.dumps([GOOD, "nowhere", 7, GOOD[:40]]), [GOOD])],
)
def test_of_a_damaged_file_the_good_addresses_count(content: str, known: list[str], tmp_path: Path) -> None:
    (tmp_path / KNOWN_FILE).write_text(content)
    assert KnownPeers(tmp_path).addresses() == known


def test_a_full_disk_is_told_once_and_not_every_few_seconds(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    known, peers = KnownPeers(tmp_path), [record_of("honest", addresses=(GOOD,))]
    with monkeypatch.context() as full:
        full.setattr("p2ptrain.node.nat.contacts.replace_file", refuse)
        for _ in range(3):
            known.remember(peers)
    known.remember(peers)
    assert [each.levelno for each in caplog.records] == [logging.ERROR, logging.WARNING]
    assert known.addresses() == [GOOD]


def test_without_a_run_directory_nothing_is_kept() -> None:
    KnownPeers(None).remember([record_of("honest", addresses=(GOOD,))])
    assert KnownPeers(None).addresses() == []
