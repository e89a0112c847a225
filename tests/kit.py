"""What tests of several rooms build: configs, models, records, damaged files; and how they read refusals."""

import json
import os
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import is_dataclass, replace
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
from transformers import AutoModelForCausalLM, PreTrainedConfig

from verl.batch import RANK
from verl.checkpoint import folders
from verl.checkpoint.attempts import Attempt
from verl.config import DataConfig, PPOConfig, load_config
from verl.config.errors import ConfigError
from verl.config.rewards import RewardScoreConfig
from verl.utils.json_state import from_json, to_json

ROOT = Path(__file__).resolve().parents[1]

# Refusals. The rows are in a room's refusals.txt, which tests/tables.py reads.


@contextmanager
def refused(
    line: str, error: type[Exception] | tuple[type[Exception], ...] = ConfigError, **places: object
) -> Iterator[None]:
    """Check that ``error`` is raised with this one line, in which ``...`` stands for any text without an end of line.

    Args:
        line: the whole message; the names of ``places`` stand for their text.
        places: paths of this test, such as ``TMP=tmp_path``.
    """
    with pytest.raises(error) as caught:
        yield
    found = str(caught.value)
    for name, place in places.items():
        found = found.replace(str(place), name)
    assert matches(line, found), f"\nexpected: {line}\nraised:   {found}"


def matches(line: str, text: str) -> bool:
    """Return whether the text is this line, in which ``...`` stands for any text."""
    return re.fullmatch(".*".join(re.escape(part) for part in line.split("...")), text) is not None


def harm(folder: Path, call: str) -> None:
    """Change a file of a folder by a call such as ``cut("model.safetensors", -10)``.

    Other calls are ``remove``, ``write``, ``flip`` (a bit), ``edit`` (of JSON), ``rename``, ``pipe`` and ``grow``.
    """

    def write(name: str, content: bytes | str) -> None:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content.encode() if isinstance(content, str) else content)

    def flip(name: str, place: int = 3) -> None:
        content = bytearray((folder / name).read_bytes())
        content[place] ^= 1
        write(name, bytes(content))

    def pipe(name: str) -> None:
        (folder / name).unlink()
        os.mkfifo(folder / name)

    calls = {
        "remove": lambda name: (folder / name).unlink(),
        "write": write,
        "cut": lambda name, size: write(name, (folder / name).read_bytes()[:size]),
        "flip": flip,
        "edit": lambda name, **values: edit_json(folder / name, **values),
        "rename": lambda name, other: (folder / name).rename(folder / other),
        "pipe": pipe,
        "grow": lambda name, size: os.truncate(folder / name, size),
    }
    eval(call, calls)


# Files.


def edit_json(path: Path, **values: Any) -> None:
    """Change entries of a file with a JSON object."""
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


def edit_vocabulary(folder: Path, swap: tuple[str, str]) -> None:
    """Swap the numbers of two tokens of a tokenizer."""
    state = json.loads((folder / "tokenizer.json").read_text())
    vocabulary, (a, b) = state["model"]["vocab"], swap
    vocabulary[a], vocabulary[b] = vocabulary[b], vocabulary[a]
    (folder / "tokenizer.json").write_text(json.dumps(state))


def jsonl(path: Path, *rows: Any) -> str:
    """Write rows as lines of JSON; returns the path as text."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def parquet(path: Path, *rows: dict[str, Any]) -> str:
    """Write rows as parquet; returns the path as text."""
    pq.write_table(pa.Table.from_pylist(list(rows)), path)
    return str(path)


# Services.


@contextmanager
def served(answer: Callable[[BaseHTTPRequestHandler, bytes], tuple[Any, ...]]) -> Iterator[str]:
    """Serve HTTP in a thread, and yield the address.

    Args:
        answer: called with a request and its body; returns a status, the reply as bytes or JSON, and further headers.
    """

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, reply, *further = answer(self, self.rfile.read(int(self.headers.get("Content-Length", 0))))
            data = reply if isinstance(reply, bytes) else json.dumps(reply).encode()
            self.send_response(status)
            for name, value in {"Content-Length": str(len(data)), **dict(*further)}.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(data)

        do_POST = do_HEAD = do_GET

        def log_message(self, *_: object) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


# Configs.


def changed(config: Any, **changes: Any) -> Any:
    """Return the config with other values, those of a section in a dict."""
    values = {
        name: changed(getattr(config, name), **v) if is_dataclass(getattr(config, name)) and isinstance(v, dict) else v
        for name, v in changes.items()
    }
    return replace(config, **values)


@cache
def ppo_config(*overrides: str) -> PPOConfig:
    """Return the main job's config with these overrides, separated by arguments or spaces; composed once."""
    return load_config(PPOConfig, "ppo_trainer", " ".join(overrides).split())


def shipped_config() -> PPOConfig:
    """Return the main job's config as it is shipped."""
    return ppo_config()


def data_options(**changes: Any) -> DataConfig:
    """Return the shipped options of prompts with changes, those of a section as its dataclass."""
    return replace(shipped_config().data, **changes)


def scoring(**changes: object) -> RewardScoreConfig:
    """Return the shipped options of verifiers with changes."""
    return replace(shipped_config().reward_score, **changes)


def small_overrides(model: Path, prompts: Path, folder: Path) -> list[str]:
    """Return overrides that cut the main job down to seconds: 4 prompts a step, 4 responses of at most 12 tokens."""
    return [
        "preset=embedded",
        f"model.path={model}",
        f"data.train_files={prompts}",
        f"data.val_files={prompts}",
        "data.train_batch_size=4",
        "data.max_response_length=12",
        "actor.ppo_mini_batch_size=2",
        "actor.micro_batch_size_per_gpu=3",
        "rollout.n=4",
        "rollout.kv_cache_memory_mb=32",
        # Not enough for all prompts at once: they wait for each other.
        "rollout.max_num_seqs=16",
        "rollout.max_num_batched_tokens=16",
        "calculator.layers=[0,-1]",
        "calculator.diff_stride=2",
        "trainer.n_gpus_per_node=1",
        "model.fsdp.fsdp_size=-1",
        "trainer.total_training_steps=2",
        "trainer.report_freq=-1",
        f"trainer.default_local_dir={folder}",
        "device=cpu",
    ]


def stored(state: Any) -> Any:
    """Return the state that a checkpoint gives back, after its way through JSON."""
    return from_json(json.loads(json.dumps(to_json(state))))


def documented(page: str, name: str) -> str:
    """Return an example of a page of docs/: the block of code whose first line is ``# name``."""
    text = (ROOT / "docs" / f"{page}.md").read_text()
    (code,) = re.findall(rf"^```python\n(# {re.escape(name)}\n.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return code


def user_code(folder: Path, source: str, name: str = "mine.py") -> str:
    """Write a module as users do; returns its path."""
    (folder / name).write_text(source)
    return str(folder / name)


# Models.

TINY = {"vocab_size": 101, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3, "pad_token_id": 0}
TINY |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "initializer_range": 0.2}
"""Sizes of random models: heads in groups, weights large enough for attention to be sharp."""


def save_random_model(
    config: PreTrainedConfig, folder: Path, kind: Any = AutoModelForCausalLM, dtype: Any = None, **options: Any
) -> str:
    """Save a random model of an architecture, with the options of ``save_pretrained``; returns the folder as text."""
    torch.manual_seed(0)
    kind.from_config(config).to(dtype).save_pretrained(folder, **options)
    return str(folder)


# Checkpoints.

MODEL, POINTER = "actor/huggingface/model.safetensors", "latest_checkpointed_iteration.txt"
"""Files of a checkpoint, and of a run with checkpoints."""


def begin_checkpoint(root: Path, step: int, text: str = "weights", attempt: Attempt | None = None) -> Path:
    """Return the unfinished folder of a checkpoint, with a file of weights."""
    folder = folders.begin_checkpoint(attempt or Attempt(root, 0), step)
    harm(folder, f"write({MODEL!r}, {text!r})")
    return folder


def save_checkpoint(
    root: Path, step: int, text: str = "weights", attempt: Attempt | None = None, **state: object
) -> Path:
    """Return the folder of a complete checkpoint, with a file of weights."""
    state = {"job": "ppo", "step": step} | state
    return folders.complete_checkpoint(begin_checkpoint(root, step, text, attempt), step, json.dumps(state))


def save_shards(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Save tensors as the shards of a checkpoint's model, ``actor/shards``."""
    writer = HuggingFaceStorageWriter(str(folder / "actor" / "shards"), save_distributed=True)
    dcp.save({f"model.{name}": value.detach() for name, value in tensors.items()}, storage_writer=writer, no_dist=True)


# Tensors, and columns of a batch.


def f64(*values: Any) -> Tensor:
    """Return numbers, or rows of them, in float64."""
    return torch.tensor(values, dtype=torch.float64)


def rank_metrics(*layers: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return rank metrics of the same responses in several layers, each name -> [B]; as of ``Batch.rank_metrics``."""
    return {name: torch.stack([layer[name] for layer in layers], dim=1) for name in layers[0]}


def rank_columns(*layers: dict[str, Tensor], mean_states: Tensor | None = None) -> dict[str, Tensor]:
    """Return the columns of a batch with these rank metrics."""
    columns = {RANK + name: values for name, values in rank_metrics(*layers).items()}
    num, num_layers = next(iter(columns.values())).shape
    return columns | {"mean_states": torch.zeros(num, num_layers, 3) if mean_states is None else mean_states}
