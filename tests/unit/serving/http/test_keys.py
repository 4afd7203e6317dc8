"""API keys: unknown ones are refused, limits hold for each, and the file may change while the server runs."""

import asyncio
import logging
from pathlib import Path

import httpx
import pytest

from p2ptrain.errors import ConfigError, IdentityError
from p2ptrain.serving.errors import OverloadedError
from p2ptrain.serving.http import keys
from p2ptrain.serving.http.keys import Client, Keys, read_keys
from tests.support.coroutines import on_loop, simulated
from tests.support.generators import CHAT, Repeater, chat, error_of, http_server

ADA, BOB, EVE = "sk-ada-0123456789", "sk-bob-0123456789", "sk-eve-0123456789"


def write(path: Path, *lines: str) -> Path:
    path.touch(mode=0o600)
    path.write_text("".join(f"{line}\n" for line in lines))
    return path


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def status(client: httpx.AsyncClient, key: str) -> int:
    return (await client.post(CHAT, json=chat(), headers=bearer(key))).status_code


@on_loop
async def test_only_known_keys_are_let_in(tmp_path: Path) -> None:
    generator = Repeater()
    path = write(tmp_path / "keys", "# two friends", "", f"{ADA} name=ada", f"{BOB}  # bob")
    async with http_server(generator, keys=path) as client:
        refused = [
            {},
            bearer(EVE),
            {"authorization": "Bearer"},
            bearer(ADA[:-1]),
            {"authorization": ADA},
            {"authorization": f"Basic {ADA}"},
        ]
        for headers in refused:
            for response in (
                await client.post(CHAT, json=chat(), headers=headers), await client.get("/v1/models", headers=headers),
            ):  # fmt: skip
                assert error_of(response, 401)["code"] == "invalid_api_key"
                assert response.headers["www-authenticate"] == "Bearer"
                assert ADA not in response.text
        assert generator.opened == []
        assert [await status(client, key) for key in (ADA, BOB)] == [200, 200]
        for path_ in ("/", "/health", "/metrics", "/openapi.json"):
            assert (await client.get(path_)).status_code == 200
    assert [name for *_, name in generator.opened] == ["ada", keys._digest(BOB).hex()[:8], ""]  # A probe.


@on_loop
async def test_without_a_file_everybody_is_let_in_with_any_key() -> None:
    async with http_server(Repeater()) as client:
        assert await status(client, "anything") == 200


@on_loop
async def test_a_key_has_so_many_requests_at_once_and_others_are_not_held_up(tmp_path: Path) -> None:
    generator = Repeater(b"a", steps=asyncio.Semaphore(0))
    path = write(tmp_path / "keys", f"{ADA} requests=2", BOB)
    async with http_server(generator, keys=path) as client, asyncio.TaskGroup() as tasks:
        first = [tasks.create_task(status(client, ADA)) for _ in range(2)]
        await generator.until(running=2)
        response = await client.post(CHAT, json=chat(stream=True), headers=bearer(ADA))
        assert "2 requests at once" in error_of(response, 429)["message"]
        bob = tasks.create_task(status(client, BOB))
        await generator.until(running=3)
        generator.steps = None
        for task in (*first, bob):
            task.cancel()
        await generator.until(running=0)
        assert await status(client, ADA) == 200


@on_loop
async def test_a_key_has_so_many_tokens_a_minute_and_is_told_when_there_are_more(tmp_path: Path) -> None:
    used = len("user: Hi\nassistant: ") + len("Hello, world.") + 1
    path = write(tmp_path / "keys", f"{ADA} tokens_per_minute={used - 4}", BOB)
    async with http_server(Repeater(), keys=path) as client:
        assert await status(client, ADA) == 200
        assert await status(client, BOB) == 200
        response = await client.post(CHAT, json=chat(), headers=bearer(ADA))
        assert f"{used - 4} tokens a minute" in error_of(response, 429)["message"]
        assert response.headers["retry-after"] == "10", "5 tokens at half a token a second"


@simulated()
async def test_a_budget_fills_up_again_but_not_above_a_minutes_worth() -> None:
    client = Client(tokens_per_minute=60)
    client.check()
    client.spend(90)
    with pytest.raises(OverloadedError) as error:
        client.check()
    assert error.value.retry_after == pytest.approx(31)
    await asyncio.sleep(error.value.retry_after)
    client.check()
    await asyncio.sleep(1000)
    client.spend(60)
    with pytest.raises(OverloadedError):
        client.check()


@on_loop
async def test_a_file_that_changes_is_followed_and_a_broken_one_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(keys, "CHECK_SECONDS", 0.0)
    path = write(tmp_path / "keys", f"{ADA} tokens_per_minute=1")
    async with http_server(Repeater(), keys=path) as client:
        assert await status(client, ADA) == 200
        write(path, f"{ADA} tokens_per_minute=1", BOB)
        assert [await status(client, key) for key in (ADA, BOB)] == [429, 200], "the budget is not filled by a change"
        with caplog.at_level(logging.ERROR):
            write(path, f"{BOB} colour=red")
            assert [await status(client, key) for key in (BOB, EVE)] == [200, 401]
            path.unlink()
            assert await status(client, BOB) == 200
        assert "line 1" in caplog.text
        assert "the keys stay as they were" in caplog.text
        write(path, EVE)
        assert [await status(client, key) for key in (ADA, BOB, EVE)] == [401, 401, 200]


@pytest.mark.parametrize(
    ("lines", "told"),
    [
        ([], "hold no key"), (["# nobody"], "hold no key"), (["short"], "line 1: a key has 16 characters or more"),
        ([ADA, f"{BOB} requests=0"], "line 2: 'requests'"), ([f"{BOB} tokens_per_minute=many"], "'tokens_per_minute'"),
        ([f"{BOB} name="], "'name'"), ([ADA, ADA], "a key twice"), ([f"{BOB} requests=" + "9" * 40], "'requests'"),
    ],
)  # fmt: skip
def test_a_file_that_cannot_be_used_is_told_by_line(tmp_path: Path, lines: list[str], told: str) -> None:
    path = write(tmp_path / "keys", *lines)
    with pytest.raises(ConfigError, match=told) as error:
        Keys(path)
    assert ADA not in str(error.value)


def test_a_file_that_others_can_read_or_nobody_is_refused(tmp_path: Path) -> None:
    path = write(tmp_path / "keys", ADA)
    path.chmod(0o640)
    with pytest.raises(IdentityError, match="can be read by other users: run 'chmod 600"):
        read_keys(path)
    with pytest.raises(ConfigError, match="cannot read the keys"):
        read_keys(tmp_path / "missing")
    path.chmod(0o600)
    path.write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="not text"):
        read_keys(path)
