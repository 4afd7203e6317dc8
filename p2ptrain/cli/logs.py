"""The log on standard error, as text or JSON."""

from __future__ import annotations

import json
import logging
import os
import sys
import time

# Not logging.getLevelName: some libraries rename the levels of the whole process at import.
_LEVELS = {10: "debug", 20: "info", 30: "warning", 40: "error", 50: "critical"}
_PLAIN_ATTRIBUTES = set(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}


class JsonFormatter(logging.Formatter):
    """Formats one JSON object a line: time (ISO 8601, UTC), level, logger, message, and the fields of ``extra``."""

    def format(self, record: logging.LogRecord) -> str:
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(record.created))
        values: dict[str, object] = {
            "time": f"{stamp}.{int(record.msecs):03d}Z",
            "level": _LEVELS.get(record.levelno, record.levelname.lower()),
            "logger": record.name,
            "message": record.getMessage(),
        }
        values |= {key: value for key, value in vars(record).items() if key not in _PLAIN_ATTRIBUTES}
        if record.exc_info:
            values["exception"] = self.formatException(record.exc_info)
        return json.dumps(values, default=str)


def configure_logging(log_format: str, level: str) -> None:
    """Log to standard error, as ``text`` or ``json``; ``level`` applies to p2ptrain, other libraries log warnings.

    Unless that is a terminal, libraries that are imported later draw no progress bars.
    """
    if not sys.stderr.isatty():
        os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # transformers follows it, too.
    handler = logging.StreamHandler(sys.stderr)
    text = logging.Formatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s", datefmt="%H:%M:%S")
    handler.setFormatter(JsonFormatter() if log_format == "json" else text)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    # Its import warns of missing 4-bit kernels, which are not used.
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
    logging.getLogger("asyncio").addFilter(_is_ours)
    logging.getLogger("p2ptrain").setLevel(level.upper())


def _is_ours(record: logging.LogRecord) -> bool:
    """True unless a record reports the pending wait that a timed-out search of ``hivemind.dht.traverse`` leaves.

    Tasks of this package have names (`p2ptrain.tasks`), so an unnamed one is hivemind's.
    """
    message = record.getMessage()
    is_lost = message.startswith("Task was destroyed but it is pending!")
    return not (is_lost and "name='Task-" in message and "coro=<Event.wait()" in message)
