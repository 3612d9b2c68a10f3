"""Stands in for an engine in tests of starting and stopping: serves /health, has a child.

Usage: fake_engine.py PORT [never-healthy | ends-at-once]
"""

import subprocess
import sys
import tempfile
from http.server import BaseHTTPRequestHandler, HTTPServer


class Health(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        del format, args


def main() -> None:
    port, kind = int(sys.argv[1]), (sys.argv[2:] or ["healthy"])[0]
    if kind == "ends-at-once":
        sys.exit("the model is nowhere to be found")
    tempfile.mkdtemp()  # left behind, as engines do
    # Like an engine core: a process in a session of its own that nobody stops.
    subprocess.Popen(
        [sys.executable, "-c", "import signal; signal.pause()"], start_new_session=True
    )
    HTTPServer(("127.0.0.1", port + (kind == "never-healthy")), Health).serve_forever()


if __name__ == "__main__":
    main()
