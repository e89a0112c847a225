"""Models of a hub that is played by a small server: what is downloaded, how often, and what is said where it cannot."""

import hashlib
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest
from huggingface_hub import constants

from tests.kit import served
from tests.tables import refusals
from verl.models import hub
from verl.models.hub import fetch_model, local_folder

COMMIT = "c" * 40


@dataclass
class Hub:
    """A hub with one model, ``org/model``."""

    files: dict[str, bytes]
    gated: bool = False
    requests: Counter[str] = field(default_factory=Counter)

    def answer(self, request: BaseHTTPRequestHandler, _: bytes) -> tuple[int, object, dict[str, str]]:
        """Status, body and headers of a reply."""
        path = unquote(urlsplit(request.path).path)
        if request.command == "GET":
            self.requests[path.rpartition("/")[2] if "/resolve/" in path else "api"] += 1
        if not path.startswith(("/api/models/org/model", "/org/model/resolve/")):
            return 401, b"", {"X-Error-Code": "RepoNotFound"}
        if path.startswith("/api/"):
            entries = [
                {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}
                for name, data in self.files.items()
            ]
            siblings = [{"rfilename": name} for name in self.files]
            body = entries if "/tree/" in path else {"id": "org/model", "sha": COMMIT, "siblings": siblings}
            return 200, body, {"Content-Type": "application/json"}
        if self.gated:
            return 403, b"", {"X-Error-Code": "GatedRepo"}
        data = self.files[path.removeprefix(f"/org/model/resolve/{COMMIT}/")]
        return 200, data, {"ETag": f'"{hashlib.sha1(data).hexdigest()}"', "X-Repo-Commit": COMMIT}


@pytest.fixture
def fake_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub at this machine, and an empty cache."""
    weights = ["model.safetensors", "consolidated.safetensors", "model.gguf"]
    names = ["config.json", "tokenizer.json", *weights, "README.md"]
    played = Hub({name: name.encode() for name in names})

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    monkeypatch.setattr(hub.huggingface_hub, "get_token", lambda: None)
    with served(played.answer) as address:
        monkeypatch.setattr(constants, "ENDPOINT", address)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", address + "/{repo_id}/resolve/{revision}/{filename}"
        )
        yield played


@pytest.mark.parametrize("fetched", [True, False], ids=["by the driver", "by the first of the workers"])
def test_missing_files_are_downloaded_once(fake_hub, fetched: bool):
    if fetched:
        fetch_model("org/model", "model.path")
    with ThreadPoolExecutor(4) as workers:
        folders = set(workers.map(local_folder, ["org/model"] * 4))
    (folder,) = folders
    needed = {"config.json", "tokenizer.json", "model.safetensors"}
    assert {path.name for path in Path(folder).iterdir()} == needed
    asked = dict(fake_hub.requests)
    assert {name: asked[name] for name in needed} == dict.fromkeys(needed, 1) and set(asked) == needed | {"api"}
    # Nobody who comes later asks the hub, not even whether there is something newer.
    local_folder("org/model")
    assert dict(fake_hub.requests) == asked


def test_pickled_weights_are_fetched_only_without_safetensors(fake_hub, monkeypatch):
    fake_hub.files |= {"pytorch_model.bin.index.json": b'{"weight_map": {"a": "pytorch_model-1.bin"}}'}
    fake_hub.files |= {"pytorch_model-1.bin": b""}
    assert {path.suffix for path in Path(local_folder("org/model")).iterdir()} == {".json", ".safetensors"}
    monkeypatch.setattr(constants, "HF_HUB_CACHE", f"{constants.HF_HUB_CACHE}_2")
    del fake_hub.files["model.safetensors"]
    assert (Path(local_folder("org/model")) / "pytorch_model-1.bin").is_file()


@pytest.mark.parametrize(("path", "situation", "line"), refusals("models/refusals.txt", "hub"))
def test_model_that_the_hub_cannot_give_is_one_line(fake_hub, refused, monkeypatch, path, situation, line):
    fake_hub.gated = "gated" in situation
    if situation == "incomplete":
        del fake_hub.files["model.safetensors"]
    if situation == "unreachable":
        monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(hub.huggingface_hub, "get_token", lambda: "t" if "token" in situation else None)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", situation == "offline")
    with refused(line):
        fetch_model(path, "critic.model.path")
    assert path.startswith("org/") or not fake_hub.requests


def test_cached_model_needs_no_network(fake_hub, refused, monkeypatch):
    folder = local_folder("org/model")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    fetch_model("org/model", "model.path")
    assert local_folder("org/model") == folder
    (Path(folder) / "model.safetensors").unlink()
    with refused("model.path='org/model': HF_HUB_OFFLINE is set, and the cache has no complete copy..."):
        local_folder("org/model")
