"""Program that runs an agent's command in the sandbox, and connects it with the endpoint.

The sandbox has no network. The program listens on a port of the sandbox's loopback interface, and forwards each
connection to the Unix socket of the endpoint, which is mounted at ``SOCKET``. It needs no other module of VERL.
"""

import os
import socket
import subprocess
import sys
import threading
import time
from contextlib import suppress
from urllib.parse import urlsplit

SOCKET = "/endpoint"


def forward(source: socket.socket, target: socket.socket) -> None:
    """Copy bytes until the source ends or the target is closed."""
    with suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
    with suppress(OSError):
        target.shutdown(socket.SHUT_WR)


def connect(client: socket.socket) -> None:
    """Connect a client with the endpoint."""
    endpoint = socket.socket(socket.AF_UNIX)
    try:
        endpoint.connect(SOCKET)
        for pair in ((client, endpoint), (endpoint, client)):
            threading.Thread(target=forward, args=pair, daemon=True).start()
    except BaseException:
        for side in (client, endpoint):
            with suppress(OSError):
                side.shutdown(socket.SHUT_RDWR)
        raise


def serve(listener: socket.socket) -> None:
    """Connect each client with the endpoint, and go on if there are too many open files or threads for one."""
    while True:
        try:
            connect(listener.accept()[0])
        except (OSError, RuntimeError) as error:
            print(f"no connection with the endpoint: {error}", file=sys.stderr, flush=True)
            time.sleep(0.1)


def main(*words: str) -> int:
    """Run the command ``words``, with the address that it can reach as base URL, and return its exit code."""
    listener = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=serve, args=(listener,), daemon=True).start()
    address = f"127.0.0.1:{listener.getsockname()[1]}"
    url = urlsplit(os.environ["OPENAI_BASE_URL"])._replace(netloc=address).geturl()
    code = subprocess.call(words, env=os.environ | {"OPENAI_BASE_URL": url})
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
