"""A container's health check: does the peer, or the status page, in it say that it is well?

Peers serve ``/healthz`` at port 9464 (``--metrics-port``, which the entrypoint gives them), status pages at 8080.
"""

from __future__ import annotations

import sys
import urllib.error
import urllib.request

PORTS = (9464, 8080)
TIMEOUT_SECONDS = 4.0


def main() -> int:
    """0 when it is well; otherwise 1, and why on standard output, where Docker keeps it."""
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    for port in PORTS:
        try:
            with direct.open(f"http://127.0.0.1:{port}/healthz", timeout=TIMEOUT_SECONDS) as answer:
                print(answer.read(200).decode(errors="replace").strip())
                return 0
        except urllib.error.HTTPError as error:
            print(f"port {port}: {error.read(200).decode(errors='replace').strip()}")
            return 1
        except urllib.error.URLError as error:
            if not isinstance(error.reason, ConnectionRefusedError):
                print(f"port {port}: {error.reason}")
                return 1
        except OSError as error:  # The answer did not come in time.
            print(f"port {port}: {error}")
            return 1
    print("nothing answers yet")
    return 1


if __name__ == "__main__":
    sys.exit(main())
