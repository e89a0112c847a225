"""What the other tests of this folder rely on: machines that are apart, and that can be lost."""

from pathlib import Path

import pytest

from tests.cluster.machines import HOME, cluster

pytestmark = pytest.mark.slow

PING = "import socket, sys; socket.create_connection((sys.argv[1], 7000), timeout=1); print('heard')"
LISTEN = "import socket; s = socket.create_server(('', 7000)); print('open', flush=True)\nwhile True: s.accept()"


def test_machines_are_apart(tmp_path: Path):
    with cluster(2, tmp_path / "machines", shared=[tmp_path]) as (one, two):
        assert one.run(["hostname"]) == (0, "machine1\n")
        script = f"echo $$ >/tmp/own; echo here >/dev/shm/own; echo all >{tmp_path}/shared; mkdir {HOME}/.ray; nproc"
        assert one.run(["bash", "-c", script]) == (0, "1\n")
        assert two.run(["ls", "/tmp/own", "/dev/shm/own", f"{HOME}/.ray"])[0] == 2
        assert two.run(["cat", f"{tmp_path}/shared"]) == (0, "all\n")
        listener = one.start(["python", "-c", LISTEN], tmp_path / "listener.log")
        listener.wait_for_line("open")
        ping = ["python", "-c", PING, "machine1"]
        assert two.run(ping) == (0, "heard\n")
        one.cut()
        assert two.run(ping)[0] == 1
        one.heal()
        assert two.run(ping) == (0, "heard\n")
        assert list(two.processes().values()) == []
        assert any("7000" in command for command in one.processes().values())
        one.kill()
        assert listener.wait() == -9 and one.processes() == {}
        one.boot()
        assert one.run(["ls", "/tmp/own"])[0] == 2
        assert one.run(["cat", f"{tmp_path}/shared"]) == (0, "all\n")


@pytest.mark.parametrize(("names", "expected"), [("loopback", "127.0.1.1"), ("unknown", "")])
def test_names_that_do_not_help(names, expected, tmp_path: Path):
    with cluster(2, tmp_path / "machines", names=names) as (one, _):
        code, found = one.run(["getent", "hosts", "machine1"])
        assert (code == 0, found.split()[:1]) == (bool(expected), [expected] if expected else [])
        assert one.run(["getent", "hosts", "machine2"])[0] != 0


def test_a_folder_that_is_not_mounted(tmp_path: Path):
    (tmp_path / "outputs").mkdir()
    (tmp_path / "outputs" / "file").touch()
    with cluster(1, tmp_path / "machines", shared=[tmp_path / "outputs"]) as (one,):
        assert one.run(["ls", str(tmp_path / "outputs")]) == (0, "file\n")
        one.kill()
        one.lacks = [tmp_path / "outputs"]
        one.boot()
        assert one.run(["ls", str(tmp_path / "outputs")]) == (0, "")
