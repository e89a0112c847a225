"""Requests to a JSON service that may be down, slow or hostile."""

import json
import os
from collections.abc import Mapping
from typing import Any

import aiohttp

MAX_BYTES = 1 << 20
"""Default maximum size of a response body in bytes."""

REPEATED = (408, 429, 500, 502, 503, 504)
"""HTTP status codes after which a retry of the same request may succeed."""


class ServerError(Exception):
    """Raised if the server does not respond or responds incorrectly.

    Args:
        again: Whether the same request may succeed later.
    """

    def __init__(self, message: str, again: bool) -> None:
        super().__init__(message)
        self.again = again


def key_session(key_variable: str, timeout_s: float | None) -> aiohttp.ClientSession:
    """Return a session that sends the API key from the environment variable ``key_variable``, if it is set."""
    key = os.environ.get(key_variable)
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    return aiohttp.ClientSession(headers=headers, timeout=aiohttp.ClientTimeout(total=timeout_s))


def without_key(session: aiohttp.ClientSession, text: str) -> str:
    """Return ``text`` with the session's API key replaced by ``***``."""
    return text.replace(session.headers.get("Authorization", "\0").removeprefix("Bearer "), "***")


async def ask_json(
    session: aiohttp.ClientSession, method: str, url: str, body: Mapping[str, Any] | None, max_bytes: int = MAX_BYTES
) -> Any:
    """Return the JSON value of a response. Raises a one-line ``ServerError`` that does not contain the API key."""
    try:
        async with session.request(method, url, json=body, allow_redirects=False) as answer:
            data = bytearray()
            async for chunk in answer.content.iter_any():
                data += chunk
                if len(data) > max_bytes:
                    raise ServerError(f"{url} answered more than {max_bytes} bytes", again=False)
    except TimeoutError:
        raise ServerError(f"{url} did not answer within {session.timeout.total:g} s", again=True) from None
    except (aiohttp.ClientError, ValueError, OSError) as error:  # an address or a key that no request can have
        raise ServerError(f"{url} does not answer ({' '.join(str(error).split()):.200})", again=True) from None
    # A server may repeat the key that it was given, in JSON with its characters as escapes.
    text = without_key(session, data.decode(errors="replace"))
    if answer.status != 200:
        said = f"{url} answered {answer.status}: {' '.join(text.split()):.200}"
        raise ServerError(said, again=answer.status in REPEATED)
    try:
        value = json.loads(text)
        return json.loads(without_key(session, json.dumps(value, ensure_ascii=False))) if "\\" in text else value
    except (ValueError, RecursionError):
        raise ServerError(f"{url} answered no JSON: {' '.join(text.split()):.200}", again=True) from None
