"""Runs a command on the Ray cluster at ``RAY_ADDRESS``, or on a new cluster of several machines.

python -m verl.cluster.launch PYTHON -m MODULE ARGUMENT ...

scripts/cluster.sh runs this module with the variables described in docs/multinode.md. Machine 0 starts the cluster and
runs the command. All other machines join the cluster, wait for the command, and exit with its exit code. The exit code
is sent through the cluster itself, so no shared folder is needed.
"""

import os
import secrets
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import psutil
from ray._raylet import GcsClient  # type: ignore[attr-defined]
from ray.exceptions import RpcError

from verl.cluster.environment import REQUEUE, SIGNALS, signals_blocked
from verl.cluster.network import address_towards, own_addresses, reachable
from verl.cluster.ray_head import check_head, use_token
from verl.config.errors import ConfigError
from verl.utils.process import private_files

NAMESPACE = b"verl"
EXIT_CODE = b"exit code"
PATIENCE_S = 20.0
"""Seconds for which a wrong token is tolerated, since the folder may be outdated or on a slow network drive."""
LOST_S = 30.0
"""Seconds without a reply from the head after which a machine gives up."""
GOODBYE_S = 15.0
"""Seconds to wait for other machines to read the exit code, and for a stopped cluster to free its port."""
FAILED_S = 10.0
"""Seconds for which machine 0 keeps the file ``failed``. Files older than 1.5 times this value are ignored."""
FILES = ("token", "address", "failed", "ray-*.log")
"""Patterns of the names of files written to ``VERL_CLUSTER_DIR``."""

RayProcess = subprocess.Popen[bytes]


class Start(NamedTuple):
    """Settings of one machine of a cluster: MASTER_ADDR, MASTER_PORT, VERL_CLUSTER_DIR, NNODES and NODE_RANK."""

    host: str
    port: int
    folder: Path
    nnodes: int = 1
    rank: int = 0

    @property
    def ray_options(self) -> tuple[str, str]:
        """Options of ``ray start`` that every machine needs."""
        # CPU workers share cores; their number is limited by trainer.n_gpus_per_node, not by the number of cores.
        return f"--num-cpus={max(64, len(os.sched_getaffinity(0)))}", f"--labels=verl-rank={self.rank}"


def lead(start: Start, command: Sequence[str]) -> int:
    """Start the cluster as machine 0, run the command, publish its exit code, and return it."""
    for number in SIGNALS:
        signal.signal(number, lambda *_: sys.exit(REQUEUE))
    own = claim(start)
    head = f"{own}:{start.port}"
    make_token(start.folder)
    (start.folder / "failed").unlink(missing_ok=True)
    (start.folder / "address").write_text(head)
    options = ("--head", f"--port={start.port}", f"--ray-client-server-port={start.port + 1}", *start.ray_options)
    try:
        with ray_started(start.folder, own, "--include-dashboard=false", *options):
            os.environ["RAY_ADDRESS"] = head
            code = run_child(with_nnodes(command, start.nnodes))
            publish(head, code, start.nnodes - 1)
    except ConfigError:
        # Without this mark, all other machines would wait for VERL_JOIN_TIMEOUT.
        (start.folder / "failed").write_text(f"ray start failed on {socket.gethostname()}")
        time.sleep(FAILED_S)
        remove(start.folder, FILES[:3])
        raise
    remove(start.folder, FILES)
    return code


def join(start: Start) -> int:
    """Join machine 0's cluster, wait until machine 0's command has finished, and return its exit code."""
    if not os.environ.get("RAY_AUTH_TOKEN"):
        os.environ.setdefault("RAY_AUTH_TOKEN_PATH", str(start.folder / "token"))
    head = wait(start, float(os.environ.get("VERL_JOIN_TIMEOUT", 1800)))
    own = address(head.rpartition(":")[0])
    with ray_started(start.folder, own, f"--address={head}", *start.ray_options) as ray:
        name = f"machine {start.rank} of {start.nnodes} ({socket.gethostname()}, {own})"
        say(f"{name} has joined {head} and waits for the end of the run")
        return follow(head, start.rank, ray)


def use(head: str, command: list[str]) -> int:
    """Run the command on the cluster at ``head``, joining the cluster temporarily if necessary."""
    check_head(head)
    nodes = GcsClient(address=head).get_all_node_info(timeout=10).values()
    if {node.node_manager_address for node in nodes if node.state == 0} & {*own_addresses(), "127.0.0.1"}:
        os.execvp(command[0], command)
    options = (address(head.rpartition(":")[0]), f"--address={head}", "--num-cpus=0", "--num-gpus=0")
    with TemporaryDirectory() as folder, ray_started(Path(folder), *options):
        return run_child(command)


def say(text: str) -> None:
    print(f"cluster.sh: {text}", file=sys.stderr, flush=True)


def address(host: str) -> str:
    """Return this machine's address on the route to ``host``, or raise ``ConfigError`` if it cannot be found."""
    try:
        return address_towards(host)
    except OSError as error:
        raise ConfigError(f"{host}: {error.strerror or error}; name machine 0 by its address") from None


def claim(start: Start) -> str:
    """Return the address of machine 0. Raise ``ConfigError`` if another cluster uses the folder or port."""
    require_private(start.folder)
    own, deadline = address(start.host), time.monotonic() + GOODBYE_S
    head = f"{own}:{start.port}"
    with suppress(OSError):
        other = (start.folder / "address").read_text()
        if other != head and reachable(other):
            fix = f"number the machines from 0, or name another VERL_CLUSTER_DIR than {start.folder}"
            raise ConfigError(f"NODE_RANK=0: machine 0 is at {other} already; {fix}")
    # The cluster of a stopped run may still be shutting down.
    while reachable(head):
        if time.monotonic() > deadline:
            line = f"MASTER_PORT={start.port}: {head} is in use, by another run's cluster?; set another port"
            raise ConfigError(line)
        time.sleep(0.5)
    return own


def wait(start: Start, limit_s: float) -> str:
    """Wait until the head accepts the token, and return its address. Raise ``ConfigError`` on failure or timeout."""
    name, mark = f"machine 0 at {start.host}:{start.port}", start.folder / "failed"
    deadline, announced = time.monotonic() + limit_s, False
    while True:
        require_private(start.folder)
        with suppress(OSError):
            if time.time() - mark.stat().st_mtime < 1.5 * FAILED_S:
                raise ConfigError(f"{name} gave up: {mark.read_text()}")
        head, problem = _find_head(start)
        if not problem:
            os.environ["RAY_ADDRESS"] = head
            check_head(head, PATIENCE_S)
            return head
        if time.monotonic() > deadline:
            raise ConfigError(f"{name} was not there within {limit_s:g} s: {problem}")
        if not announced:
            say(f"waiting for {name}")
            announced = True
        time.sleep(0.5)


def _find_head(start: Start) -> tuple[str, str]:
    """Return the head's address, resolved by name or read from the folder, and an error message (empty on success)."""
    head, path = "", os.environ.get("RAY_AUTH_TOKEN_PATH")
    with suppress(OSError):
        found = socket.gethostbyname(start.host)
        head = "" if found.startswith("127.") else f"{found}:{start.port}"
    try:
        head = head or (start.folder / "address").read_text()
    except OSError:
        return "", f"MASTER_ADDR={start.host} has no address here, and {start.folder}/address does not exist"
    if not reachable(head):
        return head, "nothing answers there"
    if path and not os.path.exists(path):
        fix = "is the folder shared? Otherwise set RAY_AUTH_TOKEN to the same value everywhere"
        return head, f"{path} does not exist; {fix}"
    return head, ""


def require_private(folder: Path) -> None:
    """Raise ``ConfigError`` if other accounts can write to the folder.

    Other accounts could replace the token and the address, and thus run code on the cluster's machines.
    """
    with suppress(FileNotFoundError):
        status = folder.stat()
        if status.st_uid not in (os.getuid(), 0) or status.st_mode & 0o022:
            facts = f"{stat.filemode(status.st_mode)}, owner {status.st_uid}"
            fix = "chmod go-w it, or name a folder of your own"
            raise ConfigError(f"VERL_CLUSTER_DIR={folder}: other accounts can write there ({facts}); {fix}")


def make_token(folder: Path) -> None:
    """Create a token for this cluster that only this user can read. Keep the user's token if one is set."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if not os.environ.get("RAY_AUTH_TOKEN") and not os.environ.get("RAY_AUTH_TOKEN_PATH"):
        file = folder / "token"
        # Another user may have placed a link to their own file there.
        file.unlink(missing_ok=True)
        with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as output:
            output.write(secrets.token_hex(32))
        os.environ["RAY_AUTH_TOKEN_PATH"] = str(file)
    use_token()


def remove(folder: Path, patterns: Sequence[str]) -> None:
    """Remove this module's files, and the folder if it is empty afterwards. The user may keep other files there."""
    for path in [path for pattern in patterns for path in folder.glob(pattern)]:
        path.unlink(missing_ok=True)
    with suppress(OSError):
        folder.rmdir()


@contextmanager
def ray_started(folder: Path, own: str, *options: str) -> Iterator[RayProcess]:
    """Run ``ray start`` during the block, with its output logged to the folder. Raise ``ConfigError`` if it fails."""
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / f"ray-{socket.gethostname()}.log"
    # Only metrics and tokens go through the object store.
    options = (f"--node-ip-address={own}", *options, "--object-store-memory=268435456", "--block")
    # Slurm sends SIGUSR1 and SIGTERM to every process of a step. They are meant for the driver, which then saves and
    # needs Ray and the workers to survive. Ray installs a SIGTERM handler, so ignoring the signal is not enough.
    with log.open("wb") as output, private_files(), signals_blocked(*SIGNALS):
        ray = subprocess.Popen(
            [sys.executable, "-m", "ray.scripts.scripts", "start", *options],
            env=os.environ | _ray_settings(),
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            process_group=0,
        )
    try:
        while "Ray runtime started" not in (text := log.read_text(errors="replace")):
            if ray.poll() is not None:
                say("\n".join([f"{socket.gethostname()}: ray start failed:", *text.splitlines()[-5:]]))
                raise ConfigError("Ray did not start on this machine")
            time.sleep(0.1)
        # Otherwise, the next run on this machine would mistake this cluster for one started by its user.
        Path(os.environ.get("RAY_TMPDIR") or "/tmp", "ray/ray_current_cluster").unlink(missing_ok=True)  # noqa: S108
        yield ray
    finally:
        family = psutil.Process(ray.pid).children(recursive=True) if ray.poll() is None else []
        # Kill these processes, because they do not receive SIGTERM.
        for process in (ray, *family):
            with suppress(psutil.NoSuchProcess):
                process.kill()
        ray.wait()
        psutil.wait_procs(family, timeout=5)


def _ray_settings() -> dict[str, str]:
    """Return settings for Ray with the run's timeout for unresponsive machines and heads."""
    silent_s = int(os.environ.get("VERL_DETECTION_S", 60))
    settings = {"health_check_initial_delay_ms": 1000, "health_check_period_ms": 1000}
    settings |= {"health_check_failure_threshold": 3, "gcs_rpc_server_reconnect_timeout_s": silent_s}
    for name in ("health_check_timeout", "grpc_client_keepalive_time", "grpc_client_keepalive_timeout"):
        settings[f"{name}_ms"] = silent_s * 250
    # Prestarted processes would never be used.
    settings |= {"USAGE_STATS_ENABLED": 0, "enable_worker_prestart": 0, "prestart_worker_first_driver": 0}
    return {f"RAY_{name}": str(value) for name, value in settings.items()}


def run_child(command: Sequence[str]) -> int:
    """Run a command to completion, forwarding signals to it, and return its exit code."""
    # Use a separate process group so that Ctrl-C reaches the command only once.
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, process_group=0)
    forwarded = (signal.SIGINT, signal.SIGHUP, *SIGNALS)
    for number in forwarded:
        signal.signal(number, lambda number, _: child.send_signal(number))
    code = child.wait()
    for number in forwarded:
        signal.signal(number, signal.SIG_IGN)  # later signals must not replace the exit code
    return 128 - code if code < 0 else code


def with_nnodes(command: Sequence[str], nnodes: int) -> list[str]:
    """Insert ``trainer.nnodes`` before the command's first override, so that the user's value takes precedence."""
    overrides = (i for i, word in enumerate(command) if i >= 3 and "=" in word and not word.startswith("-"))
    place = next(overrides, len(command))
    return [*command[:place], f"trainer.nnodes={nnodes}", *command[place:]]


def publish(head: str, code: int, others: int) -> None:
    """Publish the exit code and wait until all other machines have read it. Return immediately if the head is lost."""
    deadline = time.monotonic() + GOODBYE_S
    if reachable(head):
        with suppress(RpcError):
            client = GcsClient(address=head)
            client.internal_kv_put(EXIT_CODE, b"%d" % code, True, NAMESPACE, timeout=10)
            while len(client.internal_kv_keys(b"left ", NAMESPACE, timeout=10)) < others:
                if time.monotonic() > deadline:
                    break
                time.sleep(0.2)


def follow(head: str, rank: int, ray: RayProcess) -> int:
    """Wait for the run's exit code and return it, or :data:`REQUEUE` if the head is lost."""
    client, heard = None, time.monotonic()
    # Slurm signals every machine before the job ends; the driver then saves a checkpoint and still needs this machine.
    line = f"machine {rank}: %s: waiting for the end of the run; SIGINT ends this machine at once"
    for number in SIGNALS:
        signal.signal(number, lambda number, _: say(line % signal.Signals(number).name))
    # Ray on this machine shuts down if the head considers the machine lost.
    while ray.poll() is None and time.monotonic() - heard < LOST_S:
        # Creating a client for an unreachable head would take a minute.
        if reachable(head):
            with suppress(RpcError):
                client = client or GcsClient(address=head)
                code = client.internal_kv_get(EXIT_CODE, NAMESPACE, timeout=5)
                heard = time.monotonic()
                if code is not None:
                    client.internal_kv_put(b"left %d" % rank, b"", True, NAMESPACE, timeout=5)
                    return int(code)
        time.sleep(0.5)
    say(f"machine {rank} has lost the head at {head}; exit code {REQUEUE}: start the same command again")
    return REQUEUE


def main() -> None:
    command, env = sys.argv[1:], os.environ
    try:
        if head := env.get("RAY_ADDRESS"):
            sys.exit(use(head, command))
        env["RAY_AUTH_MODE"] = "token"
        folder = Path(env["VERL_CLUSTER_DIR"]).absolute()
        start = Start(env["MASTER_ADDR"], int(env["MASTER_PORT"]), folder, int(env["NNODES"]), int(env["NODE_RANK"]))
        sys.exit(join(start) if start.rank else lead(start, command))
    except ConfigError as error:
        raise SystemExit(f"error: {socket.gethostname()}: {error}") from None
    except KeyboardInterrupt:
        sys.exit(128 + signal.SIGINT)


if __name__ == "__main__":
    main()
