"""HTTP server that gives agents access to the policy. The server runs in a thread of the driver.

Every session has a separate address with a secret in its path. Requests to other addresses are rejected. Each session's
requests are passed to the sampling thread as events and wait for its replies.
"""

import asyncio
import json
import secrets
import shutil
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Handler

from verl.config.errors import ConfigError
from verl.rollout.agents.completions import CompletionRequest, read_completion_request
from verl.rollout.agents.protocol import MODEL, ChatRequest, ProtocolError, read_request, stream_events
from verl.rollout.agents.responses import chat_body, response_body
from verl.utils.background import drain

MAX_BODY_BYTES = 8 << 20
"""Maximum size of a request's body in bytes."""

BODY_TIMEOUT_S = 30.0
"""Time limit in seconds for receiving the body of a request."""

STOPPED_S = 1.5
"""Number of seconds in which processes stop agents whose sessions are carried over, so that these see no error."""

MAX_PENDING = 64
"""Maximum number of pending requests per session."""


@dataclass(frozen=True)
class Asked:
    """Event that signals a session's request for a turn."""

    session: int
    request: ChatRequest | CompletionRequest
    reply: Future[dict[str, Any]]
    """Future for the completion or a ``ProtocolError``, which any thread may set once."""


@dataclass(frozen=True)
class Began:
    """Event that signals the start of an agent."""

    session: int


@dataclass(frozen=True)
class Ended:
    """Event that signals the end of an agent or its process."""

    session: int
    reward: float = 0.0
    failure: str = ""
    """Reason for the agent's failure, or an empty string if the agent succeeded."""


Event = Asked | Began | Ended


class Endpoint:
    """Server of chat and text completions for the open sessions.

    Args:
        address: IP address or host name at which the server listens.
        socket: Path of a Unix socket, in a folder of its own, at which the server listens too, or None.

    Raises:
        ConfigError: If the server cannot listen there.
    """

    def __init__(self, address: str, socket: Path | None = None) -> None:
        self.address, self._socket = address, socket
        self.events = SimpleQueue[Event]()
        """Events that have not been read yet."""
        self._sessions: dict[str, int] = {}
        """Numbers of the open sessions, keyed by the secrets in their addresses."""
        self._pending = Counter[int]()
        """Number of pending requests of each session."""
        self._over = set[int]()
        """Numbers of closed sessions whose processes may still be running."""
        self._control = secrets.token_urlsafe(24)
        self._loop = asyncio.new_event_loop()
        self._thread = Thread(target=self._loop.run_forever, name="agent-endpoint", daemon=True)
        self._thread.start()
        try:
            self.port = asyncio.run_coroutine_threadsafe(self._start(), self._loop).result()
        except OSError as error:
            self._stop_loop()
            field = "rollout.multi_turn.agent.address"
            raise ConfigError(f"{field}={self.address!r}: {error}; name an address of this machine") from error

    @property
    def origin(self) -> str:
        """Common prefix of all addresses."""
        host = f"[{self.address}]" if ":" in self.address else self.address
        return f"http://{host}:{self.port}"

    @property
    def control_url(self) -> str:
        """URL to which agent processes send their reports."""
        return f"{self.origin}/{self._control}"

    def open(self, numbers: list[int]) -> dict[int, str]:
        """Open sessions and return the base URL of each. Addresses and events of earlier sessions are discarded."""
        self.events, self._control, self._pending = SimpleQueue(), secrets.token_urlsafe(24), Counter()
        self._keys = {number: secrets.token_urlsafe(24) for number in numbers}
        self._over.clear()
        self._sessions = {key: number for number, key in self._keys.items()}
        return {number: f"{self.origin}/{key}/v1" for number, key in self._keys.items()}

    def close_session(self, number: int) -> None:
        """Close a session: reject its requests, and tell its process to stop it."""
        self._over.add(number)
        self._sessions.pop(self._keys[number], None)

    def stop(self, numbers: Sequence[int], replies: Sequence[Future[dict[str, Any]]]) -> None:
        """Close sessions. ``replies`` and unread requests become errors after processes have stopped the agents."""
        self._over |= set(numbers)  # at once, or a process would stop some of them and start others in their place
        self._sessions = {key: number for key, number in self._sessions.items() if number not in self._over}
        events = self.events

        def fail() -> None:
            for reply in [*replies, *(event.reply for event in drain(events) if isinstance(event, Asked))]:
                reply.set_exception(ProtocolError(404, "no_session", "the session has ended"))

        self._loop.call_soon_threadsafe(self._loop.call_later, STOPPED_S, fail)

    def close(self) -> None:
        """Stop the server."""
        with suppress(Exception):
            asyncio.run_coroutine_threadsafe(self._finish(), self._loop).result(timeout=5)
        self._stop_loop()
        if self._socket is not None:
            shutil.rmtree(self._socket.parent, ignore_errors=True)

    async def _finish(self) -> None:
        """Stop listening, and cancel requests that still wait for turns, such as those of an attempt that failed."""
        await self._runner.cleanup()
        pending = asyncio.all_tasks() - {asyncio.current_task()}
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)

    def _stop_loop(self) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout=5)

    async def _start(self) -> int:
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[_errors])
        app.router.add_post("/{key}/v1/chat/completions", self._chat)
        app.router.add_post("/{key}/v1/responses", self._response)
        app.router.add_post("/{key}/v1/completions", self._completion)
        app.router.add_get("/{key}/v1/models", self._models)
        app.router.add_post("/{key}", self._report)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0, keepalive_timeout=30.0)
        await self._runner.setup()
        site = web.TCPSite(self._runner, self.address, 0)
        await site.start()
        if self._socket is not None:
            self._socket.parent.mkdir(mode=0o700)
            await web.UnixSite(self._runner, str(self._socket)).start()
            self._socket.chmod(0o666)  # programs in the sandbox run as another user, and the folder keeps out others
        return int(self._runner.addresses[0][1])

    def _session(self, request: web.Request) -> int:
        session = self._sessions.get(request.match_info["key"])
        if session is None:
            raise ProtocolError(404, "no_session", "there is no such session, or it has ended")
        return session

    async def _body(self, request: web.Request) -> Any:
        """Return the JSON body of a session's request; the session may end before the body has arrived."""
        self._session(request)
        return await _json(request)

    async def _turn(self, session: int, asked: ChatRequest | CompletionRequest) -> dict[str, Any]:
        """Wait for the turn that a session requests, and return the completion."""
        if self._pending[session] >= MAX_PENDING:
            raise ProtocolError(429, "too_many_requests", f"{MAX_PENDING} requests of this session are waiting")
        reply = Future[dict[str, Any]]()
        reply.set_running_or_notify_cancel()  # a client that leaves cancels only its own waiting
        pending = self._pending
        pending[session] += 1
        try:
            self.events.put(Asked(session, asked, reply))
            return await asyncio.wrap_future(reply)
        finally:
            pending[session] -= 1

    async def _response(self, request: web.Request) -> web.Response:
        asked = read_request(chat_body(await self._body(request)))
        return web.json_response(response_body(await self._turn(self._session(request), asked)))

    async def _completion(self, request: web.Request) -> web.Response:
        asked = read_completion_request(await self._body(request))
        return web.json_response(await self._turn(self._session(request), asked))

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        asked = read_request(await self._body(request))
        whole = await self._turn(self._session(request), asked)
        if not asked.stream:
            return web.json_response(whole)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream", "Cache-Control": "no-cache"})
        await response.prepare(request)
        for event in stream_events(whole, asked.include_usage):
            await response.write(f"data: {event}\n\n".encode())
        await response.write_eof()
        return response

    async def _models(self, request: web.Request) -> web.Response:
        self._session(request)
        model = {"id": MODEL, "object": "model", "created": 0, "owned_by": "verl"}
        return web.json_response({"object": "list", "data": [model]})

    async def _report(self, request: web.Request) -> web.Response:
        """Receive a process's reports of started and ended sessions, and return the sessions that it must stop."""
        if not secrets.compare_digest(request.match_info["key"], self._control):
            raise web.HTTPNotFound
        for session, reward, failure in await _json(request):
            self.events.put(Began(session) if reward is None else Ended(session, reward, failure))
        return web.json_response(sorted(self._over))


@web.middleware
async def _errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Convert a ``ProtocolError`` to a response in the protocol's error format."""
    try:
        return await handler(request)
    except ProtocolError as error:
        return web.json_response(error.body(), status=error.status)


async def _json(request: web.Request) -> Any:
    try:
        async with asyncio.timeout(BODY_TIMEOUT_S):
            return json.loads(await request.read())
    except TimeoutError as error:
        raise ProtocolError(408, "timeout", f"the body did not arrive within {BODY_TIMEOUT_S:g} s") from error
    except web.HTTPRequestEntityTooLarge as error:
        raise ProtocolError(413, "too_large", f"the body has more than {MAX_BODY_BYTES} bytes") from error
    except (ValueError, RecursionError) as error:
        raise ProtocolError(400, "invalid_json", "the body is no JSON") from error
