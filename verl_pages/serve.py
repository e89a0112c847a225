"""Serves the page of runs that are still training to a browser on this machine."""

import hashlib
import secrets
import socket
import sys
from collections.abc import Sequence
from contextlib import suppress
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock
from time import monotonic
from typing import Any

from verl.config.errors import ConfigError
from verl.config.run_file import RUN_CONFIG
from verl_pages.run import make_page
from verl_pages.run_folder import METRICS, SAMPLES, SUMMARY

HOST = "127.0.0.1"

REBUILT_EVERY = 5.0
"""Least seconds between two pages, and least times the seconds that one takes to make."""


class LivePage:
    """The page of these folders, made again when they have changed."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self.folders = folders
        self._lock = Lock()
        self._version = ""
        self._text = b""
        self._next = 0.0

    def version(self) -> str:
        """Changes when the runs go on; at most as often as the page is made."""
        with self._lock:
            if self._version and monotonic() < self._next:
                return self._version
        return version_of(self.folders)

    def text(self) -> bytes:
        """The page of now, or of a few seconds ago.

        Raises:
            ConfigError: a folder has never held a run.
        """
        with self._lock:
            start = monotonic()
            current = version_of(self.folders)
            if current != self._version and start >= self._next:
                try:
                    self._text = make_page(self.folders, version=current)[0].encode()
                except ConfigError:
                    # A folder was moved away: the last page stays.
                    if not self._text:
                        raise
                self._version = current
                self._next = monotonic() + REBUILT_EVERY * max(1.0, monotonic() - start)
            return self._text


def version_of(folders: Sequence[Path]) -> str:
    """A digest of the names, sizes and times of what the page is made of."""
    digest = hashlib.sha256()
    for path in (folder / name for folder in folders for name in (METRICS, SUMMARY, RUN_CONFIG, SAMPLES)):
        with suppress(OSError):
            facts = path.stat()
            digest.update(f"{path} {facts.st_size} {facts.st_mtime_ns}\n".encode(errors="surrogateescape"))
    return digest.hexdigest()[:16]


LONGEST_REQUEST_S = 60.0
"""Seconds after which a connection is closed, whatever it is waiting for."""
MAX_CONNECTIONS = 64
"""Connections at a time, each of which holds a thread; further ones are closed."""


class Server(ThreadingHTTPServer):
    """Serves under a path that nobody can guess, and does not wait for clients that never finish their request."""

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler], page: LivePage) -> None:
        super().__init__(address, handler)
        self.page = page
        # Every account of this machine reaches the port; the path stands in no command line and in no file.
        self.path = f"/{secrets.token_urlsafe(24)}/"
        self._since: dict[socket.socket, float] = {}

    @property
    def url(self) -> str:
        """The address for the browser."""
        return f"http://{HOST}:{self.server_port}{self.path}"

    def process_request(self, request: Any, client_address: Any) -> None:
        if len(self._since) >= MAX_CONNECTIONS:
            self.shutdown_request(request)
            return
        self._since[request] = monotonic()
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._since.pop(request, None)
        super().shutdown_request(request)

    def service_actions(self) -> None:
        """Called by ``serve_forever`` at least twice a second."""
        for request, since in list(self._since.items()):
            if monotonic() - since > LONGEST_REQUEST_S:
                with suppress(OSError):  # its thread sees the end of the connection
                    request.shutdown(socket.SHUT_RDWR)

    def handle_error(self, request: Any, client_address: Any) -> None:
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)


class Handler(BaseHTTPRequestHandler):
    """Answers with the page, or its version, and nothing else."""

    server: Server

    def do_GET(self) -> None:
        # A page of another site must not read this one through a name that it points at this machine.
        names = {f"{HOST}:{self.server.server_port}", f"localhost:{self.server.server_port}"}
        path = self.path.encode(errors="replace")
        if self.headers.get("Host") not in names:
            self.send_error(HTTPStatus.FORBIDDEN)
        elif secrets.compare_digest(path, self.server.path.encode()):
            self._answer("text/html; charset=utf-8", self.server.page.text())
        elif secrets.compare_digest(path, f"{self.server.path}version".encode()):
            self._answer("text/plain; charset=utf-8", self.server.page.version().encode())
        else:
            self.send_error(HTTPStatus.NOT_FOUND)

    def _answer(self, kind: str, body: bytes) -> None:
        self.send_response(HTTPStatus.OK)
        headers = {
            "Content-Type": kind,
            "Content-Length": str(len(body)),
            "Cache-Control": "no-store",
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
            "X-Frame-Options": "DENY",
            "Cross-Origin-Resource-Policy": "same-origin",
        }
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Nothing: the console is the user's."""


def make_server(folders: Sequence[Path], port: int) -> Server:
    """A server of the page, on this machine alone; ``serve_forever`` starts it.

    Raises:
        ConfigError: a folder is not a run folder.
        OSError: the port is taken.
    """
    page = LivePage(folders)
    page.text()
    return Server((HOST, port), Handler, page)
