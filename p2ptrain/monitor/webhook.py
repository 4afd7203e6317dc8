"""Alerts by webhook: one POST for the events of one snapshot."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Sequence

import httpx

from p2ptrain.status.views import Event, plain

logger = logging.getLogger(__name__)

TIMEOUT_SECONDS = 10.0
HEADERS = {"Content-Type": "application/json", "User-Agent": "p2ptrain-monitor"}
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
        async with httpx.AsyncClient(headers=HEADERS, timeout=TIMEOUT_SECONDS, follow_redirects=True) as client:
            for attempt in range(ATTEMPTS):
                if attempt:
                    await asyncio.sleep(PAUSE_SECONDS)
                try:
                    async with client.stream("POST", self._url, content=body) as answer:  # Nobody reads its body.
                        is_posted = answer.request.method == "POST"  # A redirect by 301 to 303 asks without the body.
                        if answer.is_success and is_posted:
                            return
                        trouble = f"{answer.status_code} {answer.reason_phrase}"
                        trouble = trouble if is_posted else "it has moved: start the monitor with its new address"
                except (httpx.HTTPError, httpx.InvalidURL) as error:
                    trouble = repr(error)
                logger.warning("the webhook did not take an alert: %s", trouble)
