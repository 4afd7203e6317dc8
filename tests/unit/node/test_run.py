"""A peer as its role file describes it."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from p2ptrain.config import PeerConfig
from p2ptrain.errors import ConfigError, ManifestError
from p2ptrain.manifest import ISSUER_FILE, SIGNED_FILE, Manifest, SignedManifest
from p2ptrain.network.identity import Identity
from p2ptrain.network.link import SwarmLink
from p2ptrain.node.options import peer_options
from p2ptrain.node.reports.summary import SUMMARY_FILE
from p2ptrain.node.run import run_peer

SEED = "/ip4/192.0.2.1/tcp/31337/p2p/QmYyQSo1c1Ym7orWxLYvCrM2EmxFTANf8wXmmE7DWjhx5N"


def test_a_peer_listens_as_its_role_file_says_but_a_seed_moves_nothing_in_bulk() -> None:
    network: dict[str, Any] = {"listen": ["/ip4/0.0.0.0/tcp/4001"], "bootstrap": [SEED], "direct_port": 4002}
    trainer, seed = (
        PeerConfig.model_validate({"role": role, "link": "p2ptrain://x", "network": network})
        for role in ("trainer", "bootstrap")
    )
    assert dict(trainer.network).items() <= dict(peer_options(trainer, "Qm").network).items()
    assert peer_options(seed, "Qm").network.direct == "off"


def test_a_seed_does_not_start_with_half_of_the_key_for_passes(tmp_path: Path) -> None:
    (tmp_path / ISSUER_FILE).write_bytes(bytes(16))
    config = PeerConfig.model_validate({"role": "bootstrap", "manifest": tmp_path / SIGNED_FILE})
    with pytest.raises(ConfigError, match="copy it again"):
        peer_options(config, "Qm")


def test_the_summary_of_an_earlier_run_is_not_taken_for_that_of_a_killed_one(tmp_path: Path) -> None:
    (tmp_path / SUMMARY_FILE).write_bytes(b"{}")
    config = PeerConfig.load(None, {"role": "trainer", "run_dir": tmp_path, "manifest": tmp_path / "none"})
    with pytest.raises(ConfigError, match="cannot read the manifest"):
        asyncio.run(run_peer(config))
    assert not (tmp_path / SUMMARY_FILE).exists()


@pytest.mark.fault(47)
def test_a_kept_manifest_that_the_links_organizer_did_not_sign_is_refused(tmp_path: Path) -> None:
    kept = tmp_path / SIGNED_FILE
    overrides = {"role": "trainer", "run_dir": tmp_path, "manifest": kept}
    with Identity.ephemeral() as organizer, Identity.ephemeral() as stranger:
        signed, again = (SignedManifest.create(Manifest(), each) for each in (organizer, stranger))
    link = str(SwarmLink(signed.manifest.digest, (SEED,)))
    for forged, reason in (
        (again, "another organizer's"),
        (SignedManifest(signed.manifest, again.proof), "not signed"),
    ):
        kept.write_bytes(forged.to_bytes())
        with pytest.raises(ManifestError, match=reason):
            asyncio.run(run_peer(PeerConfig.load(None, {**overrides, "link": link})))
