"""Alerts by webhook: one POST for the events of one snapshot."""

from __future__ import annotations

import asyncio
import concurrent.futures
import http.client
import json
import logging
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Sequence

from p2ptrain.status.views import Event, plain

logger = logging.getLogger(__name__)

TIMEOUT_SECONDS = 10.0
ATTEMPTS = 3
PAUSE_SECONDS = 5.0
MAX_WAITING = 16


class Webhook:
    """Sends JSON: ``text``, which most chats show, with ``swarm`` (the name) and ``events`` for programs."""

    def __init__(self, url: str, swarm: str) -> None:
        self._url = url
        self._swarm = swarm
        self._waiting = 0

    async def send(self, events: Sequence[Event]) -> None:
        """Send events, with retries; drop them with a warning while `MAX_WAITING` posts wait."""
        if self._waiting >= MAX_WAITING:
            logger.warning("the webhook is too slow: %d events are not sent", len(events))
            return
        self._waiting += 1
        try:
            text = "\n".join(f"{self._swarm}: {event.text}" for event in events)
            values = {"text": text, "swarm": self._swarm, "events": events}
            await self._post(json.dumps(values, default=plain).encode())
        finally:
            self._waiting -= 1

    async def _post(self, body: bytes) -> None:
        for attempt in range(ATTEMPTS):
            if attempt:
                await asyncio.sleep(PAUSE_SECONDS)
            try:
                await _in_daemon_thread(lambda: self._post_once(body))
                return
            except (OSError, http.client.HTTPException, ValueError) as error:  # The errors of urllib.
                logger.warning("the webhook did not take an alert: %s", error)
                if isinstance(error, urllib.error.HTTPError):
                    error.close()

    def _post_once(self, body: bytes) -> None:
        headers = {"Content-Type": "application/json", "User-Agent": "p2ptrain-monitor"}
        request = urllib.request.Request(self._url, body, headers)
        with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as answer:
            answer.read(1024)


async def _in_daemon_thread(work: Callable[[], None]) -> None:
    """Run blocking work in a daemon thread, which does not delay the end of the process."""
    done: concurrent.futures.Future[None] = concurrent.futures.Future()

    def run() -> None:
        try:
            work()
        except Exception as error:  # The caller raises it.
            done.set_exception(error)
        else:
            done.set_result(None)

    # A running future cannot be cancelled: if the caller is, the request ends by its own timeout.
    done.set_running_or_notify_cancel()
    threading.Thread(target=run, name="webhook", daemon=True).start()
    await asyncio.wrap_future(done)
