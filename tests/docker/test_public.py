"""The compose file for a public host: a bootstrap peer that relays and a status page, without the organizer's key."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from p2ptrain.cli.manifests import load_manifest, sign_manifest
from p2ptrain.network.identity import Identity
from p2ptrain.network.link import SwarmLink
from tests.support.containers.compose import Containers, compose_of, docker, inspect

pytestmark = pytest.mark.timeout(900)

HOST = "swarm.test"


@pytest.fixture(params=["v2", "1.29"])
def host(image: str, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Containers]:
    """Its services, of a swarm that was signed elsewhere; with each version of Compose."""
    compose = compose_of(request.param)
    with Identity.create_or_load(tmp_path / "home" / "organizer.key") as organizer:
        (tmp_path / "swarm").mkdir()
        sign_manifest(load_manifest(None, {"name": "public"}), organizer, tmp_path / "swarm" / "manifest.bin", tmp_path)
        (tmp_path / "swarm" / "invite.key").chmod(0o644)  # The container's user is another.
    files = ("deploy/public/compose.yaml", "tests/docker/internal.yaml")
    with Containers(
        *files, compose=compose, P2PTRAIN_HOST=HOST, P2PTRAIN_SWARM=str(tmp_path / "swarm"), P2PTRAIN_BIND="127.0.0.1"
    ) as made:
        made.compose("up", "-d", "--no-build")
        yield made


def test_it_lets_others_in_relays_and_shows_the_swarm(host: Containers) -> None:
    wait_for_health(host)
    for container in host.ids():
        assert inspect(container, "{{.HostConfig.ReadonlyRootfs}} {{.HostConfig.CapDrop}}") == "true [ALL]"
        assert inspect(container, "{{.HostConfig.RestartPolicy.Name}}") == "unless-stopped"
    link = SwarmLink.parse(docker("exec", host.only("seed"), "cat", "/link/link.txt"))
    assert [address.split("/p2p/")[0] for address in link.addresses] == [f"/dns4/{HOST}/tcp/31337"]
    shown = docker("exec", host.only("monitor"), "p2ptrain", "status", str(link), "--json")
    (seed,) = json.loads(shown[shown.index("{") :])["peers"]
    assert (seed["role"], seed["reachability"], seed["note"]) == ("bootstrap", "direct", "")

    key = docker("exec", host.only("seed"), "sha256sum", "/data/bootstrap/identity.key")
    host.compose("down")  # Without its volumes.
    host.compose("up", "-d", "--no-build")
    wait_for_health(host)
    assert docker("exec", host.only("seed"), "sha256sum", "/data/bootstrap/identity.key") == key
    assert docker("exec", host.only("seed"), "cat", "/link/link.txt") == str(link)
    host.compose("stop")
    assert {inspect(each, "{{.State.ExitCode}}") for each in host.ids()} == {"0"}


def wait_for_health(host: Containers) -> None:
    def is_well() -> bool:
        return [inspect(host.only(each), "{{.State.Health.Status}}") for each in ("seed", "monitor")] == ["healthy"] * 2

    host.wait_until("both services are healthy", is_well)
