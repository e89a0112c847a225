"""Finds the head of a Ray cluster and checks that it accepts the user's token."""

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
"""Maximum size of an address file in bytes. Larger files are ignored."""


def cluster_address() -> str:
    """Return ``host:port`` of the run's cluster, or "" if the run starts a local cluster, as with RAY_ADDRESS=local.

    If RAY_ADDRESS is unset or ``auto``, this is the cluster that ``ray start`` started or joined on this machine, if
    any. Raises ``ConfigError`` if RAY_ADDRESS is a URL, or if it is ``auto`` and no cluster runs on this machine.
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
    """Return the address saved by ``ray start``. Any user can write the file, and it remains if the head is killed."""
    file = Path(get_ray_address_file(None))
    try:
        # Reading a pipe might never return.
        return file.read_text().strip() if file.is_file() and file.stat().st_size <= LONGEST_ADDRESS else ""
    except (OSError, UnicodeDecodeError):
        return ""


def _joined(address: str) -> bool:
    """Return whether a Ray process of this user on this machine belongs to the cluster whose head is at ``address``."""
    flag, user = f"--gcs-address={address}", os.getuid()
    found = [process.info for process in psutil.process_iter(["name", "cmdline", "uids"])]
    raylets = [info for info in found if info["name"] == "raylet" and info["uids"].real == user]
    return any(flag in (info["cmdline"] or ()) for info in raylets)


def check_head(address: str, patience_s: float = 0.0) -> None:
    """Raise ``ConfigError`` if the head at ``address`` does not respond or rejects the token.

    Without this check, Ray would repeat the same error for a minute.

    Args:
        patience_s: Number of seconds during which a wrong token is tolerated.
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
    """Make Ray start fewer processes and accept only local connections inside the block.

    All of Ray's processes listen on 127.0.0.1, because Ray is told that the platform does not support clusters. By
    default, Ray replaces the address, and most processes listen on all interfaces. The dashboard and the monitors for
    autoscaling and logs are omitted: a run does not need them, and they take about two CPU seconds to start.
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
    """Discard stderr inside the block. Ray's C++ code writes a line for each rejected token at any log level."""
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
    """Make Ray send its token, if any. By default, Ray sends tokens only to clusters that it discovers itself."""
    if has_token():
        os.environ.setdefault("RAY_AUTH_MODE", "token")
        Config.initialize("")  # reads the environment again


def _source() -> str:
    """Return the source of the token, for error messages."""
    if not has_token():
        return "this machine, which has none"
    return next((n for n in ("RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH") if os.environ.get(n)), "~/.ray/auth_token")
