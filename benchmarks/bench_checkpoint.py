"""Count what the workers of a checkpoint write and read, and time its verification.

python benchmarks/bench_checkpoint.py --out benchmarks/checkpoint

A random model in bfloat16 with AdamW's moments, sharded over gloo workers, is saved with its export. What a worker
reads and writes comes from the kernel's counters (/proc/self/io), from the start of a save to its end. Then the
checkpoint is verified, from the page cache, with one thread and with several.

Writes OUT.jsonl (how it was made, then each row) and OUT.md.
"""

import socket
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.multiprocessing as mp
from bench_report import head, parser, provenance, table, timed, write_report
from shapes import EMBEDDED
from transformers import Qwen2Config, Qwen2ForCausalLM

from verl.checkpoint.attempts import Attempt
from verl.checkpoint.folders import begin_checkpoint, complete_checkpoint, verify_checkpoint
from verl.checkpoint.shards import CheckpointWorker, TrainedPart
from verl.config import PPOConfig, load_config
from verl.models.fsdp import offloaded_parameters
from verl.models.learner import Learner
from verl.models.loading import load_sharded_model
from verl.models.tokenizer import load_tokenizer
from verl.models.weight_files import WeightFiles
from verl.utils.distributed import WorkerPlace, join_world
from verl.utils.files import FileRecord

MIB = 1 << 20
SIZES = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "vocab_size": 16384}
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 2}
FILE_BYTES = 16 * MIB
"""Files of the export, small enough that every worker has some."""
ROUNDS = 5


def counters() -> tuple[int, int]:
    """Bytes that this process has asked the kernel to read and to write."""
    lines = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(lines["rchar"]), int(lines["wchar"])


def save(rank: int, world_size: int, port: int, model: Path, folder: Path, answers: Any) -> None:
    """One worker: load, step once, save; puts what it read, wrote and recorded."""
    mesh = join_world(WorkerPlace(rank, world_size, "127.0.0.1", port, "cpu", 1, world_size))
    config = load_config(PPOConfig, "ppo_trainer", [f"model.path={model}", "device=cpu"])
    learner = Learner(load_sharded_model(config.model, mesh, trainable=True), config.actor.optim, 10)
    total = sum(p.sum() for p in learner.model.parameters())
    learner.step([total], lambda loss: (loss, {"none": torch.zeros(())}))
    tokenizer = load_tokenizer(str(model), False)
    part = TrainedPart("actor", learner, offloaded_parameters(learner.model, False), config.model, tokenizer)
    worker = CheckpointWorker([part], 0)
    worker._exports["actor"] = WeightFiles(worker._exports["actor"].model, FILE_BYTES)
    before = counters()
    worker.start(folder, False, True)
    records = worker.finish(True)
    after = counters()
    answers.put((rank, after[0] - before[0], after[1] - before[1], records))


def measure(scratch: Path) -> Iterator[dict[str, Any]]:
    """A row for each worker of each world, and one for each number of threads."""
    source = scratch / "model"
    torch.manual_seed(0)
    Qwen2ForCausalLM(Qwen2Config(**SIZES, **HEADS, dtype="bfloat16")).bfloat16().save_pretrained(source)
    load_tokenizer(str(EMBEDDED), False).save_pretrained(source)
    for world_size in (1, 2, 4):
        folder = begin_checkpoint(Attempt(scratch, 0), world_size)
        with socket.socket() as listener:
            listener.bind(("127.0.0.1", 0))
            port = listener.getsockname()[1]
        answers = mp.get_context("spawn").SimpleQueue()
        processes = mp.spawn(save, (world_size, port, source, folder, answers), world_size, join=False)
        replies = sorted((answers.get() for _ in range(world_size)), key=lambda answer: answer[0])
        processes.join()
        records: dict[str, FileRecord] = {}
        for rank, read, written, files in replies:
            exported = sum(record.size for name, record in files.items() if "/huggingface/model-" in name)
            total = sum(record.size for record in files.values())
            row = {"workers": world_size, "rank": rank, "files": total, "exported": exported}
            yield row | {"read": read, "written": written}
            records |= files
        final = complete_checkpoint(folder, world_size, "{}", records)
    size = sum(path.stat().st_size for path in final.rglob("*") if path.is_file())
    for threads in (1, 2, 4):
        seconds = [timed(lambda threads=threads: verify_checkpoint(final, threads))[0] for _ in range(ROUNDS)]
        yield {"threads": threads, "bytes": size, "seconds": median(seconds), "best": min(seconds)}


def page(facts: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    """The results as Markdown."""
    checks = [row for row in rows if "threads" in row]
    sizes = ("files", "exported", "written")
    saves = [
        [str(row["workers"]), str(row["rank"]), *(f"{row[n] / MIB:.1f}" for n in sizes), f"{row['read'] / MIB:.2f}"]
        for row in rows
        if "rank" in row
    ]
    verified = [[str(row["threads"]), f"{row['seconds']:.2f}", f"{row['best']:.2f}"] for row in checks]
    return f"""{head("What a checkpoint writes and reads", facts)}\
A model in bfloat16 with AdamW's moments: its shards in float32, and its export in bfloat16 in files of at most
{FILE_BYTES // MIB} MiB. In MiB, by worker; *written* and *read* are the kernel's counts, with messages to other workers
among what is written.

{table(["workers:", "rank:", "its files:", "of these exported weights:", "written:", "read:"], saves)}
Checksums are taken while files are written. What is read again are configurations and the tokenizer, which libraries
write.

Verifying the last of them, {checks[0]["bytes"] / MIB:.0f} MiB in the page cache, seconds of {ROUNDS} rounds:

{table(["threads:", "median:", "best:"], verified)}"""


if __name__ == "__main__":
    options = parser(__doc__).parse_args()
    with tempfile.TemporaryDirectory() as folder:
        write_report(options.out, provenance("bench_checkpoint.py", sys.argv[1:]), measure(Path(folder)), page)
