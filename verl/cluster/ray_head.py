"""The head of a Ray cluster: finds its address, and checks that it accepts our token."""

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

import psutil
from ray._private import parameter, ray_constants, services
from ray._private.utils import get_ray_address_file  # type: ignore[attr-defined]
from ray._raylet import AuthenticationTokenLoader, Config, GcsClient  # type: ignore[attr-defined]
from ray.exceptions import AuthenticationError, RpcError

from verl.cluster.network import reachable
from verl.config.errors import ConfigError

TOKEN_FIX = (
    "set RAY_AUTH_TOKEN to the cluster's token, or RAY_AUTH_TOKEN_PATH to a file that holds it; the head has it there "
    "or in ~/.ray/auth_token"
)

LONGEST_ADDRESS = 1000
"""Characters of the longest address that is read."""


def cluster_address() -> str:
    """Return ``host:port`` of the cluster that a run uses; empty: the run starts its own.

    RAY_ADDRESS, or the cluster that ``ray start`` started on this machine or joined. RAY_ADDRESS=local ignores it.

    Raises:
        ConfigError: RAY_ADDRESS is of a kind that a run cannot use.
    """
    wanted = os.environ.get("RAY_ADDRESS", "")
    if wanted == "local":
        return ""
    if wanted and wanted != "auto":
        if "://" in wanted:
            raise ConfigError(
                f"RAY_ADDRESS={wanted}: a run is part of the cluster; set it to head:6379, or to http://head:8265 for "
                "train.sh and eval.sh, which submit a job"
            )
        return wanted
    started = _started_address()
    if started and _joined(started):
        return started
    if wanted == "auto":
        raise ConfigError("RAY_ADDRESS=auto: no Ray cluster runs on this machine; unset it, or set it to head:6379")
    return ""


def _started_address() -> str:
    """Read the address from the file of ``ray start``, which any user can write and a killed head leaves behind."""
    file = Path(get_ray_address_file(None))
    try:
        # A pipe may never end.
        return file.read_text().strip() if file.is_file() and file.stat().st_size <= LONGEST_ADDRESS else ""
    except (OSError, UnicodeDecodeError):
        return ""


def _joined(address: str) -> bool:
    """Return whether this user has a process on this machine that is part of the cluster of the head at ``address``."""
    flag, user = f"--gcs-address={address}", os.getuid()
    found = [process.info for process in psutil.process_iter(["name", "cmdline", "uids"])]
    raylets = [info for info in found if info["name"] == "raylet" and info["uids"].real == user]
    return any(flag in (info["cmdline"] or ()) for info in raylets)


def check_head(address: str, patience_s: float = 0.0) -> None:
    """Raise ``ConfigError`` unless the head at ``host:port`` answers and takes our token.

    Ray itself would repeat the same error for a minute.

    Args:
        patience_s: how long the token may be wrong before that is an error.
    """
    named = os.environ.get("RAY_ADDRESS", "") not in ("", "auto")
    where = f"RAY_ADDRESS={address}" if named else f"a running Ray cluster was found at {address}"
    ignored = "" if named else "; RAY_ADDRESS=local ignores it, and the run starts a cluster of its own"
    if not reachable(address, timeout_s=10):
        raise ConfigError(f"{where}: nothing answers there; it is the head's name and port, head:6379{ignored}")
    use_token()
    deadline = time.monotonic() + patience_s
    while True:
        try:
            with _without_rays_lines():
                GcsClient(address=address).get_all_node_info(timeout=10)
            return
        except AuthenticationError:
            if time.monotonic() >= deadline:
                line = f"{where}: the cluster refuses the token of {_source()}; {TOKEN_FIX}{ignored}"
                raise ConfigError(line) from None
        except RpcError as error:
            raise ConfigError(f"{where}: does not answer as a Ray cluster ({error}){ignored}") from None
        time.sleep(1)
        AuthenticationTokenLoader.instance().reset_cache()


@contextmanager
def small_local_ray() -> Iterator[None]:
    """Start Ray within the block with few processes, and reachable from this machine only.

    All of Ray listens on 127.0.0.1. Ray turns that address into another one, and has most of its processes listen on
    all interfaces, unless it believes that the platform has no clusters. The dashboard and the monitors of autoscaler
    and logs, which a run does not need, would take about two seconds of a core to start.
    """
    small = partial(parameter.RayParams, no_monitor=True, include_log_monitor=cast(Any, False))
    ours: dict[tuple[Any, str], Any] = {
        (ray_constants, "ENABLE_RAY_CLUSTER"): False,
        (services, "start_api_server"): lambda *_, **__: ("", None),
        (parameter, "RayParams"): small,
    }
    rays = {place: getattr(*place) for place in ours}
    for place, value in ours.items():
        setattr(*place, value)
    try:
        yield
    finally:
        for place, value in rays.items():
            setattr(*place, value)


@contextmanager
def _without_rays_lines() -> Iterator[None]:
    """Discard stderr: Ray's C++ side writes a line for every refusal, whatever its log level."""
    sys.stderr.flush()
    kept, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nowhere)


def has_token() -> bool:
    """Return whether Ray finds a token."""
    AuthenticationTokenLoader.instance().reset_cache()
    return bool(AuthenticationTokenLoader.instance().has_token(ignore_auth_mode=True))


def use_token() -> None:
    """Have Ray send its token, if there is one: it looks for a token only where it finds the address by itself."""
    if has_token():
        os.environ.setdefault("RAY_AUTH_MODE", "token")
        Config.initialize("")  # reads the environment again


def _source() -> str:
    """Return the source of the token, for a message."""
    if not has_token():
        return "this machine, which has none"
    return next((n for n in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH") if os.environ.get(n)), "~/.ray/auth_token")
