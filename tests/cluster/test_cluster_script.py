"""What the machines of scripts/cluster.sh tell each other."""

import os
import socket
import time
from pathlib import Path

import pytest

from verl.config.errors import ConfigError
from verl.single_controller.cluster_script import finish, wait


@pytest.mark.parametrize(
    ("age_s", "said"),
    [(1, "^machine 0 at 127.0.0.1:6379 gave up: no room$"), (60, "was not there within 0.1 s: MASTER_ADDR=127.0.0.1")],
)
def test_a_machine_0_that_gave_up_is_believed_for_a_while(tmp_path: Path, age_s: float, said: str):
    mark = tmp_path / "failed"
    mark.write_text("no room")
    os.utime(mark, (time.time() - age_s,) * 2)
    with pytest.raises(ConfigError, match=said):
        wait("127.0.0.1", "6379", str(tmp_path), "0.1")


def test_a_head_that_is_gone_is_not_waited_for():
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    started = time.monotonic()
    finish(f"127.0.0.1:{port}", "0", "1")
    assert time.monotonic() - started < 5
