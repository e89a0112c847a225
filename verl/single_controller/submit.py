"""Runs a script of the checkout as a job of a Ray cluster.

python -m verl.single_controller.submit ADDRESS FOLDER SCRIPT ARGUMENT ...

Its output is followed; Ctrl-C and SIGTERM stop it. The exit code is the script's.
"""

import asyncio
import shlex
import signal
import sys
import time
from types import FrameType

from ray.exceptions import RayError
from ray.job_submission import JobStatus, JobSubmissionClient

from verl.single_controller.environment import is_secret, passed_variables

ALSO = ("VERL_ENV", "VERL_PYTHON", "VERL_FILE_LOGGER_PATH", "WANDB_MODE", "WANDB_PROJECT", "WANDB_ENTITY")
"""Variables that the script itself reads. Secrets belong into the cluster's own environment: Ray shows a job's."""

ENDED = {JobStatus.SUCCEEDED: 0, JobStatus.FAILED: 1, JobStatus.STOPPED: 1}


def main() -> None:
    """The command line."""
    address, folder, script, *arguments = sys.argv[1:]
    try:
        client = JobSubmissionClient(address)
    except (ConnectionError, RuntimeError, RayError) as error:
        reason = str(error).splitlines()[0]
        raise SystemExit(f"error: RAY_ADDRESS={address}: no job can be submitted there: {reason}") from None
    variables = {name: value for name, value in passed_variables(ALSO).items() if not is_secret(name)}
    inside = shlex.join(["bash", script, *arguments])
    missing = f"error: the head of the cluster has no checkout at {folder}; name its folder there with VERL_REMOTE_DIR"
    entrypoint = f"cd {shlex.quote(folder)} || {{ echo {shlex.quote(missing)} >&2; exit 1; }}; exec {inside}"
    job = client.submit_job(entrypoint=entrypoint, runtime_env={"env_vars": variables})
    print(f"submitted as {job} to {address}", flush=True)
    stopped = 0

    def stop(signum: int, frame: FrameType | None) -> None:
        nonlocal stopped
        if not stopped:
            stopped = 128 + signum
            print(f"stopping {job}", file=sys.stderr, flush=True)
            client.stop_job(job)

    signal.signal(signal.SIGINT, stop)
    signal.signal(signal.SIGTERM, stop)
    asyncio.run(_follow(client, job))
    while (status := client.get_job_status(job)) not in ENDED:
        time.sleep(0.2)
    code = client.get_job_info(job).driver_exit_code
    sys.exit(stopped or (ENDED[status] if code is None or code < 0 else code))


async def _follow(client: JobSubmissionClient, job: str) -> None:
    async for text in client.tail_job_logs(job):
        print(text, end="", flush=True)


if __name__ == "__main__":
    main()
