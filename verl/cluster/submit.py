"""Runs a script from the repository checkout as a job on a Ray cluster.

python -m verl.cluster.submit ADDRESS FOLDER SCRIPT ARGUMENT ...

Prints the job's output and exits with the script's exit code. Ctrl-C and SIGTERM stop the job.
"""

import asyncio
import shlex
import signal
import sys
import time
from collections.abc import Sequence
from types import FrameType

from aiohttp import ClientError
from ray.exceptions import RayError
from ray.job_submission import JobStatus, JobSubmissionClient

from verl.cluster.environment import is_secret, passed_variables
from verl.cluster.ray_head import use_token

ALSO = ("VERL_ENV", "VERL_PYTHON", "VERL_FILE_LOGGER_PATH", "WANDB_MODE", "WANDB_PROJECT", "WANDB_ENTITY")
"""Variables that the script itself reads. Secrets belong in the cluster's environment, as Ray shows job variables."""

ENDED = {JobStatus.SUCCEEDED: 0, JobStatus.FAILED: 1, JobStatus.STOPPED: 1}


def main() -> None:
    address, folder, script, *arguments = sys.argv[1:]
    job = ""
    try:
        use_token()
        client = JobSubmissionClient(address)
        variables = {name: value for name, value in passed_variables(ALSO).items() if not is_secret(name)}
        job = client.submit_job(entrypoint=_entrypoint(folder, script, arguments), runtime_env={"env_vars": variables})
        print(f"submitted as {job} to {address}", flush=True)
        sys.exit(_follow(client, job))
    # Raised by HTTP requests, aiohttp, Ray, or while parsing a reply that does not come from Ray.
    except (OSError, ClientError, RuntimeError, RayError, ValueError, TypeError, KeyError) as error:
        reason = (str(error) or type(error).__name__).splitlines()[0]
        what = f"lost sight of {job}, which may still run" if job else "no job can be submitted there"
        raise SystemExit(f"error: RAY_ADDRESS={address}: {what}: {reason:.300}") from None


def _entrypoint(folder: str, script: str, arguments: Sequence[str]) -> str:
    missing = f"error: the head of the cluster has no checkout at {folder}; name its folder there with VERL_REMOTE_DIR"
    enter = f"cd {shlex.quote(folder)} || {{ echo {shlex.quote(missing)} >&2; exit 1; }}"
    return f"{enter}; exec {shlex.join(['bash', script, *arguments])}"


def _follow(client: JobSubmissionClient, job: str) -> int:
    """Print the job's output until it finishes and return its exit code."""
    stopped = 0

    def stop(signum: int, frame: FrameType | None) -> None:
        nonlocal stopped
        if not stopped:
            stopped = 128 + signum
            print(f"stopping {job}", file=sys.stderr, flush=True)
            client.stop_job(job)

    async def output() -> None:
        async for text in client.tail_job_logs(job):
            print(text, end="", flush=True)

    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, stop)
    asyncio.run(output())
    while (status := client.get_job_status(job)) not in ENDED:
        time.sleep(0.2)
    code = client.get_job_info(job).driver_exit_code
    return stopped or (ENDED[status] if code is None or code < 0 else int(code))


if __name__ == "__main__":
    main()
