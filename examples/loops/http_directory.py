"""A directory for the swarms of a lab, on one web server; `p2ptrain.network.http_directory` says how it is asked.

    python examples/loops/http_directory.py --port 8080
    p2ptrain seed DIR --directory http://192.0.2.7:8080

With --tls it serves HTTPS. It holds records in memory, for any swarm: peers publish theirs every few seconds, so
nothing is lost when it starts again. It takes signed records alone, and the newest of each peer.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import re
import time
from dataclasses import dataclass

import msgpack
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from p2ptrain.errors import IntegrityError
from p2ptrain.network.directory import Entry, Sample
from p2ptrain.network.http_server import listen, serving, url_of
from p2ptrain.network.identity import Identity
from p2ptrain.network.records.record import MAX_RECORD_BYTES, RecordGuard, shard_of

MAX_KEYS = 256
KEY = re.compile(r"p2ptrain/([0-9a-f]{64})/peers/([0-7])")


@dataclass
class Shelf:
    """A bounded sample of the records under one key."""

    guard: RecordGuard
    sample: Sample


class Server:
    """Holds records in memory."""

    def __init__(self) -> None:
        self._verifier = Identity.ephemeral()
        self._shelves: dict[str, Shelf] = {}

    async def look_up(self, request: Request) -> Response:
        """Answer with the unexpired records of a key."""
        self._forget_expired()
        shelf = self._shelves.get(request.path_params["key"])
        records = [entry.value for entry in shelf.sample.entries(time.time()).values()] if shelf is not None else []
        return Response(msgpack.packb({"now": time.time(), "records": records}), media_type="application/msgpack")

    async def publish(self, request: Request) -> Response:
        """Take a record, unless it is refused, older than the one that is here, or the sample keeps others."""
        key, value = request.path_params["key"], bytearray()
        async for piece in request.stream():
            value += piece
            if len(value) > MAX_RECORD_BYTES:
                return PlainTextResponse("the record is too large", 413)
        found = KEY.fullmatch(key)
        if found is None:
            return PlainTextResponse("no key of a swarm", 404)
        self._forget_expired()
        swarm = bytes.fromhex(found[1])
        shelf = self._shelves.get(key) or Shelf(RecordGuard(swarm, self._verifier, time.time), Sample(key))
        try:
            peer, expires_at = shelf.guard.check(bytes(value))
        except IntegrityError as error:
            return PlainTextResponse(str(error), 422)
        if shard_of(peer) != int(found[2]):
            return PlainTextResponse("the record belongs under another key", 422)
        if key not in self._shelves and len(self._shelves) >= MAX_KEYS:
            return PlainTextResponse("the directory is full", 429)
        if shelf.sample.put(peer, Entry(bytes(value), expires_at), time.time()):
            self._shelves[key] = shelf
        return Response(status_code=204)

    def _forget_expired(self) -> None:
        now = time.time()
        self._shelves = {key: shelf for key, shelf in self._shelves.items() if shelf.sample.entries(now)}


def make_app() -> Starlette:
    """Return the web application of one server."""
    server = Server()
    routes = [
        Route("/{key:path}", server.look_up, methods=["GET"]),
        Route("/{key:path}", server.publish, methods=["POST"]),
    ]
    return Starlette(routes=routes)


async def serve(options: argparse.Namespace) -> None:
    """Serve until the server ends."""
    listener = listen(options.host, options.port, "--port")
    async with serving(make_app(), listener, [options.host, *options.host_name], options.tls) as server:
        print(url_of(listener).replace("http", "https" if options.tls else "http", 1), flush=True)
        await server


def main() -> None:
    """Serve until Ctrl-C."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", default="127.0.0.1", help="the address to serve at (default %(default)s)")
    parser.add_argument("--port", type=int, default=8080)
    parser.add_argument("--host-name", action="append", default=[], help="a name of this machine in peers' URLs")
    parser.add_argument("--tls", nargs=2, metavar=("CERTIFICATE", "KEY"), help="PEM files")
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve(parser.parse_args()))


if __name__ == "__main__":
    main()
