"""Starts the Ray cluster of a run, selects the workers' device, and keeps Ray's files private."""

import logging
import os
import secrets
import shutil
import signal
import stat
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil
import ray
import torch

from verl.cluster.environment import signals_blocked
from verl.cluster.machines import machines_with, wait_for_machines
from verl.cluster.network import LOOPBACK
from verl.cluster.ray_head import check_head, cluster_address, has_token, small_local_ray
from verl.config.errors import ConfigError
from verl.utils.process import private_files

ALONE = (
    "this machine is alone. Start the same command on every machine with NNODES, NODE_RANK and MASTER_ADDR, or with "
    "srun, or set RAY_ADDRESS to a cluster (docs/multinode.md)"
)

SMALLEST_STORE_MB = 256
"""Minimum shared memory of a cluster in MiB, which is enough for small batches."""

BYTES_PER_TOKEN = 4 * 4
"""Maximum number of bytes sent per token, for the token id and three values, such as two log-probabilities and an
advantage (:class:`verl.batch.serialization.Packed`)."""

SHARED_MEMORY = Path("/dev/shm")

START_TRIES = 4
"""Number of attempts to start a local cluster."""
SLOW_START = "timed out during startup"
"""Substring of Ray's error message if its processes do not start within half a minute."""
KILL_S = 10.0
"""Seconds to wait until a killed Ray process has exited."""

PRIVATE = 0o077
DEVICE_FILES = Path("/dev")
LONGEST_FOLDER = 107 - len("/ray/session_2026-01-01_00-00-00_000000_4194304/sockets/plasma_store")
"""Maximum length of the private folder's path. The operating system limits socket paths to 107 characters."""


def store_megabytes(num_rows: int, num_tokens: int, weight_bytes: int = 0) -> int:
    """Return the shared memory in MiB for sending and returning a batch of ``num_rows * num_tokens`` tokens.

    Processes exchange only tokens, per-token values and ``weight_bytes`` of weights. Weights count twice, since old
    ones may still exist when new ones arrive. The result is at most 80% of free shared memory, but at least 256 MiB.
    """
    needed = 2 * (num_rows * num_tokens * BYTES_PER_TOKEN + weight_bytes) >> 20
    there = shutil.disk_usage(SHARED_MEMORY).free if SHARED_MEMORY.is_dir() else sys.maxsize
    return max(SMALLEST_STORE_MB, min(needed, there * 4 // 5 >> 20))


def resolve_device(device: str, nnodes: int = 1, workers_per_node: int = 1, timeout_s: float = 60.0) -> str:
    """Return ``cuda`` or ``cpu``. Resolve ``auto`` to ``cuda`` if there is a GPU, otherwise to ``cpu``.

    With ``auto``, a GPU that torch cannot use is an error, so that a run does not use the CPU for days unnoticed.

    On a cluster, ``auto`` checks all machines for GPUs, since they may differ from this machine.

    Raises ``ConfigError`` if ``nnodes`` is above 1 and there is no cluster, or if torch finds no GPU although
    ``device`` is ``cuda``, or is ``auto`` and this machine has a GPU.
    """
    if not cluster_address():
        if nnodes > 1:
            raise ConfigError(f"trainer.nnodes={nnodes}: {ALONE}")
        available = torch.cuda.is_available()
        if device == "cuda" and not available:
            raise ConfigError("device='cuda': torch sees no GPU; set device=auto or cpu")
        if device == "auto" and not available and (gpu := unused_gpu()):
            raise ConfigError(
                f"device='auto': this machine has a GPU ({gpu}) that torch {torch.__version__} cannot use; install the "
                "build of torch for its driver (`bash scripts/setup.sh --gpu` says what is wrong), or set device=cpu"
            )
        return ("cuda" if available else "cpu") if device == "auto" else device
    if device != "auto":
        return device
    with ray_cluster(nnodes * workers_per_node, device):
        # Machines with GPUs may join later than machines without GPUs.
        wait_for_machines(nnodes, 0, "cpu", timeout_s, lambda text: None)
        return "cuda" if machines_with(1, "cuda") else "cpu"


def unused_gpu() -> str:
    """Return the device file of an NVIDIA GPU that this process may open, or an empty string if there is none."""
    if os.environ.get("CUDA_VISIBLE_DEVICES", "all") in ("", "-1", "NoDevFiles"):
        return ""
    for path in sorted(DEVICE_FILES.glob("nvidia[0-9]*")):
        # A container or job may see the device file of a GPU that is not assigned to it.
        with suppress(OSError):
            os.close(os.open(path, os.O_RDWR))
            return str(path)
    return ""


def gpus_per_machine() -> int:
    """Return this machine's number of GPUs or, on a cluster, the smallest number among machines with GPUs."""
    if not cluster_address():
        return torch.cuda.device_count()
    with ray_cluster(1, "cuda"):
        counts = [int(machine.resources["GPU"]) for machine in machines_with(1, "cuda").values()]
    return min(counts, default=0)


@contextmanager
def ray_cluster(world_size: int, device_type: str, object_store_mb: int = SMALLEST_STORE_MB) -> Iterator[None]:
    """Connect to the Ray cluster at :func:`cluster_address`, or start a local cluster, for the duration of the block.

    A local cluster has ``object_store_mb`` MiB of shared memory and is stopped after the block. No processes and no
    token in the home folder are left behind. Ray's files are kept only if the block raised an exception.

    Raises ``ConfigError`` if the cluster does not respond or rejects the token, or if a local cluster does not start.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # Workers have their own environment, so processes that Ray starts in advance would never be used.
    os.environ.setdefault("RAY_prestart_worker_first_driver", "0")
    # Ray kills a driver that has lost its head for this long; the driver's own check runs earlier and reports the loss.
    os.environ.setdefault("RAY_gcs_rpc_server_reconnect_timeout_s", "600")
    address = cluster_address()
    options: dict[str, Any] = {"address": address or "local"}
    own_token = not address and not has_token()
    if address:
        check_head(address)
    else:
        # One CPU per worker: on a machine with fewer cores, workers share them instead of waiting forever.
        cpus = max(os.cpu_count() or 1, world_size)
        options |= {"num_cpus": cpus, "object_store_memory": object_store_mb << 20, "include_dashboard": False}
        options |= {"_node_ip_address": LOOPBACK, "_temp_dir": str(private_folder() / "ray")}
        # Ray counts GPUs with NVML, which some containers lack although torch can use the GPUs.
        options |= {"num_gpus": torch.cuda.device_count()} if device_type == "cuda" else {}
    if own_token:
        # Ray would write a token to the home folder, and a later `ray start` would require it from everyone.
        os.environ["RAY_AUTH_TOKEN"] = secrets.token_hex(32)
    on_terminate = signal.getsignal(signal.SIGTERM)
    make_private(Path.home() / ".ray" / "auth_token")
    with signals_blocked(signal.SIGUSR1), private_files(), ExitStack() as local:
        if not address:
            local.enter_context(small_local_ray())
        _init_ray(**options)
    if threading.current_thread() is threading.main_thread():
        # Ray's own handler prints a stack trace and aborts the process.
        signal.signal(signal.SIGTERM, on_terminate)
    node: Any = ray._private.worker._global_node
    session = None if address else Path(node.get_session_dir_path())
    try:
        yield
    except BaseException:
        session = None  # keep the logs, which may show the cause
        raise
    finally:
        ray.shutdown()
        if own_token:
            del os.environ["RAY_AUTH_TOKEN"]
        if session is not None:
            shutil.rmtree(session, ignore_errors=True)


def _init_ray(**options: Any) -> None:
    """Call ``ray.init``, and retry if a local cluster does not start within Ray's timeout of half a minute.

    Ray starts slowly on a busy machine, where processes of the previous attempt may still be exiting. Raises
    ``ConfigError`` after the last attempt.
    """
    for tries_left in reversed(range(START_TRIES)):
        before = set(psutil.Process().children(recursive=True))
        try:
            ray.init(log_to_driver=False, logging_level=logging.ERROR, **options)
            return
        except Exception as error:
            if SLOW_START not in str(error):
                raise
            # Ray stops the processes that it has started so far only when this process exits.
            for process in set(psutil.Process().children(recursive=True)) - before:
                with suppress(psutil.Error):
                    if options["_temp_dir"] in " ".join(process.cmdline()):
                        process.kill()
                        process.wait(KILL_S)
            if not tries_left:
                raise ConfigError(
                    f"Ray's processes did not start within half a minute, {START_TRIES} times: this machine is too "
                    f"busy; free some of it, and start the same command again{_last_words(Path(options['_temp_dir']))}"
                ) from error


def _last_words(folder: Path) -> str:
    """Return the last line that Ray's node process of the latest attempt printed, as a clause, or an empty string."""
    errors = folder / "session_latest" / "logs" / "raylet.err"
    with suppress(OSError):
        if lines := errors.read_text(errors="replace").strip().splitlines():
            return f". If that does not help, {errors} ends with: {lines[-1].strip()[:300]}"
    return ""


def private_folder() -> Path:
    """Return the user's private folder for Ray's temporary files. Folders that Ray creates itself are world-writable.

    The private folder is in RAY_TMPDIR (default: /tmp).

    Raises ``ConfigError`` if the folder's path is too long for the sockets that Ray creates in it.
    """
    parent = Path(os.environ.get("RAY_TMPDIR") or "/tmp").absolute()  # noqa: S108
    folder = parent / f"verl-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        # Another user may have created it to read the run's files, or as a link to a folder that would be changed.
        if not folder.is_symlink():
            make_private(folder)
        status = folder.lstat()
        private = status.st_uid == os.getuid() and stat.S_ISDIR(status.st_mode) and not status.st_mode & PRIVATE
        folder = folder if private else Path(tempfile.mkdtemp(prefix="verl-", dir=parent))
    except OSError:
        folder = Path(tempfile.mkdtemp(prefix="verl-"))
    if len(os.fsencode(folder)) > LONGEST_FOLDER:
        raise ConfigError(
            f"{folder}: Ray's sockets below it would have longer paths than the system allows; set RAY_TMPDIR to a "
            f"folder of at most {LONGEST_FOLDER - len(folder.name) - 1} characters"
        )
    return folder


def make_private(path: Path) -> None:
    """Revoke all permissions of other users on a file or folder that belongs to this user."""
    with suppress(OSError):
        mode = path.stat().st_mode & 0o777
        if mode & PRIVATE and path.stat().st_uid == os.getuid():
            path.chmod(mode & ~PRIVATE)
