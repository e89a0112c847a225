"""Measure what capturing hidden states costs in decoding speed.

python benchmarks/bench_hidden_states.py --out benchmarks/hidden_states

Every variant is an engine in its own process. They take turns, one generation each per round. A variant's cost is the
median over rounds of its speed divided by the speed of the engine without capture in the same round. Weights are
random, as speed does not depend on them.

Writes OUT.jsonl (how it was made, then the measurements of each variant) and OUT.md (the table).
"""

import argparse
import functools
import os
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
from bench_report import head, parser, provenance, table, take_turns, timed, write_report
from shapes import SHAPES
from transformers import Qwen2Config

from vllm_patches.buffer import SEGMENT_BYTES

PROMPT_LENGTH = 32


class Variant(NamedTuple):
    """One way to run the engine."""

    description: str
    capture: dict[str, Any] | None = None
    eager: bool = False
    speculator: bool = False


def variants(num_layers: int) -> dict[str, Variant]:
    """What is compared. The others are divided by the first."""
    four = [0, num_layers // 3, 2 * num_layers // 3, -1]
    reducer = {"layers": [-1], "reducer": f"{Path(__file__).stem}:sums"}
    return {
        "off": Variant("no capture"),
        "last": Variant("last layer of every response token", {"layers": [-1]}),
        "four": Variant(f"layers {four} of every response token", {"layers": four}),
        "both": Variant("last layer of every prompt and response token", {"layers": [-1], "phase": "both"}),
        "reduced": Variant("last layer, each response summed by a reducer", reducer),
        "speculator": Variant("vLLM's extract_hidden_states with its example connector", speculator=True),
        "eager": Variant("no capture, enforce_eager=True", eager=True),
    }


def sums(states: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    """A reducer that costs nothing."""
    return {"sum": torch.stack([response.sum(dim=0) for response in states])}


def time_plugin() -> dict[str, float]:
    """Seconds on the host that the plugin spends from now on; the dictionary is updated after each call.

    ``capture`` keeps the hidden states of a step, ``reduce`` hands out those of a finished response.
    """
    from vllm_patches import capture, frontend, worker

    seconds = {"capture": 0.0, "reduce": 0.0}

    def measure(owner: Any, name: str, key: str) -> None:
        original = getattr(owner, name)

        @functools.wraps(original)
        def measured(*args: Any, **kwargs: Any) -> Any:
            start = time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                seconds[key] += time.perf_counter() - start

        setattr(owner, name, measured)

    measure(worker, "read_step", "capture")
    measure(capture.HiddenStateCapture, "record", "capture")
    measure(frontend.StateCollector, "_collect", "reduce")
    return seconds


def serve(pipe: Connection, variant: Variant, model: str, options: argparse.Namespace) -> None:
    """Run one engine: a message in, one generation, its measurements out."""
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_NO_USAGE_STATS": "1"}
    # Newer versions of vLLM choose by the model; training uses the first.
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1" if options.second_runner else "0"
    sys.path.insert(0, str(Path(__file__).parent))  # where the reducer is
    try:
        # vLLM reads the environment when it is imported.
        from vllm import LLM, SamplingParams

        eager = variant.eager or options.eager
        with tempfile.TemporaryDirectory() as storage:
            llm = LLM(model, enforce_eager=eager, **engine_options(variant, options, storage))
            generator = torch.Generator().manual_seed(0)
            tokens = torch.randint(256, (options.sequences, PROMPT_LENGTH), generator=generator).tolist()
            prompts = [{"prompt_token_ids": ids} for ids in tokens]
            sampling = SamplingParams(max_tokens=options.tokens, ignore_eos=True, detokenize=False, temperature=1.0)
            plugin = time_plugin() if variant.capture else {}
            pipe.send({})
            while pipe.recv():
                plugin.update(dict.fromkeys(plugin, 0.0))
                seconds, outputs = timed(lambda: llm.generate(prompts, sampling, use_tqdm=False))
                count = sum(len(completion.token_ids) for output in outputs for completion in output.outputs)
                del outputs
                memory = llm.collective_rpc("hidden_states_memory")[0] if variant.capture else None
                allocated = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None
                measured = {"tokens_per_s": count / seconds, "own_share": sum(plugin.values()) / seconds}
                pipe.send(measured | {"memory": memory, "max_memory_allocated": allocated})
    except Exception as error:
        pipe.send(f"{type(error).__name__}: {error}")


def engine_options(variant: Variant, options: argparse.Namespace, storage: str) -> dict[str, Any]:
    """Options of ``LLM``."""
    chosen: dict[str, Any] = {
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": options.dtype,
        "seed": 0,
        "max_model_len": PROMPT_LENGTH + options.tokens + 8,  # the speculator needs some room
        "max_num_seqs": options.sequences,
        "max_num_batched_tokens": 8192,
        "enable_prefix_caching": False,
        "kv_cache_memory_bytes": options.kv_cache_mib << 20,
        # vLLM's default asks for nearly all of a GPU at start, even though the cache has its size above.
        "gpu_memory_utilization": 0.1,
    }
    if variant.capture:
        chosen["additional_config"] = {"hidden_states": {"device": "device", **variant.capture}}
    if variant.speculator:
        layers = SHAPES[options.shape]["num_hidden_layers"]
        chosen["speculative_config"] = {
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": {"hf_config": {"eagle_aux_hidden_state_layer_ids": [layers]}},
        }
        chosen["kv_transfer_config"] = {
            "kv_connector": "ExampleHiddenStatesConnector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {"shared_storage_path": storage},
        }
    return chosen


class Engine:
    """A variant's process."""

    def __init__(self, variant: Variant, options: argparse.Namespace) -> None:
        context = get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, variant, options.model, options))
        self._process.start()
        theirs.close()
        self.error: str | None = None
        self._receive()

    def generate(self) -> dict[str, Any] | None:
        """One measurement; None if the engine failed."""
        if self.error is None:
            self._pipe.send(True)
            return self._receive()
        return None

    def close(self) -> None:
        """End the process."""
        if self.error is None:
            self._pipe.send(False)
        self._process.join(timeout=60)
        self._process.kill()

    def _receive(self) -> Any:
        try:
            reply = self._pipe.recv()
        except EOFError:
            reply = f"its process ended with exit code {self._process.exitcode}"
        if isinstance(reply, str):
            self.error = reply.splitlines()[0]
            return None
        return reply


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Start all variants, let them take turns, and summarise each."""
    chosen = variants(SHAPES[options.shape]["num_hidden_layers"])
    chosen = {name: variant for name, variant in chosen.items() if name in ("off", *options.variants)}
    with ExitStack() as stack:
        engines = {}
        for name, variant in chosen.items():
            print(f"starting {name}: {variant.description}", file=sys.stderr, flush=True)
            engines[name] = Engine(variant, options)
            stack.callback(engines[name].close)
        # The first round warms up.
        turns = {name: engine.generate for name, engine in engines.items()}
        rounds = list(take_turns(turns, options.rounds + 1))[1:]
        errors = {name: engine.error for name, engine in engines.items() if engine.error is not None}
    return [
        {"variant": name, "description": variant.description, "error": errors[name]}
        if name in errors
        else {"variant": name} | summary(variant, [r[name] for r in rounds], [r["off"] for r in rounds], options)
        for name, variant in chosen.items()
    ]


def summary(variant: Variant, rounds: list[Any], baseline: list[Any], options: argparse.Namespace) -> dict[str, Any]:
    """The figures of one variant."""
    ratios = [a["tokens_per_s"] / b["tokens_per_s"] for a, b in zip(rounds, baseline, strict=True)]
    figures = {
        "description": variant.description,
        "tokens_per_s": statistics.median(result["tokens_per_s"] for result in rounds),
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "own_share": statistics.median(result["own_share"] for result in rounds),
        "max_memory_allocated": rounds[-1]["max_memory_allocated"],
    }
    if variant.capture:
        rows = options.tokens + (PROMPT_LENGTH - 1 if variant.capture.get("phase") == "both" else 0)
        itemsize = {"float32": 4, "bfloat16": 2}[options.dtype]
        row_bytes = SHAPES[options.shape]["hidden_size"] * len(variant.capture["layers"]) * itemsize
        segment = SEGMENT_BYTES // row_bytes
        needed = -(-rows * options.sequences // segment) * segment * row_bytes
        figures |= {"peak_bytes": rounds[-1]["memory"]["peak_device_bytes"], "bytes_by_formula": needed}
    return figures


def page(facts: dict[str, Any], results: list[dict[str, Any]]) -> str:
    """The results as Markdown."""
    rows = []
    for figures in results:
        if "error" in figures:
            rows.append([figures["description"], f"failed: {figures['error'][:150]}", "", "", "", ""])
            continue
        low, _, high = statistics.quantiles(figures["ratios"], n=4)
        cells = [figures["description"], f"{figures['tokens_per_s']:,.0f}"]
        cells += [f"{figures['ratio']:.3f} ({low:.3f} to {high:.3f})"]
        cells += [f"{figures['own_share']:.1%}" if "peak_bytes" in figures else ""]
        sizes = [figures.get(name) for name in ("peak_bytes", "bytes_by_formula")]
        rows.append(cells + ["" if size is None else f"{size / 2**20:.1f} MiB" for size in sizes])
    columns = ["variant", "tokens/s:", "relative speed:", "time in the plugin:", "peak buffer:", "by the formula:"]
    return f"""{head("Cost of capturing hidden states", facts)}\
Relative speed: speed divided by that without capture in the same round; the median and, in brackets, the
middle half of the rounds. Time in the plugin: share of a generation's wall time that its code takes on the
host.

{table(columns, rows)}"""


def main(argv: list[str]) -> None:
    """Measure the variants."""
    on_gpu = torch.cuda.is_available()
    command = parser(__doc__)
    command.add_argument("--shape", choices=SHAPES, default="1.5b" if on_gpu else "20m")
    command.add_argument("--sequences", type=int, default=256 if on_gpu else 64)
    command.add_argument("--tokens", type=int, default=512 if on_gpu else 128)
    command.add_argument("--rounds", type=int, default=7)
    command.add_argument("--dtype", choices=["float32", "bfloat16"], default="bfloat16" if on_gpu else "float32")
    command.add_argument("--kv-cache-mib", type=int, default=8192 if on_gpu else 512)
    command.add_argument("--eager", action="store_true", help="all variants without compilation and CUDA graphs")
    command.add_argument("--second-runner", action="store_true", help="VLLM_USE_V2_MODEL_RUNNER=1")
    command.add_argument("--variants", nargs="+", choices=variants(8), default=list(variants(8)))
    options = command.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        config = Qwen2Config(**SHAPES[options.shape], max_position_embeddings=4096, architectures=["Qwen2ForCausalLM"])
        config.save_pretrained(folder)
        options.model = folder
        results = measure(options)
    mode = ("eager" if options.eager else "compiled") + (", second model runner" if options.second_runner else "")
    what = (
        f"Qwen2 of shape {options.shape}, {options.dtype}, {options.sequences} sequences of {options.tokens} new tokens"
    )
    facts = provenance("bench_hidden_states.py", argv, "cuda" if on_gpu else "cpu")
    write_report(options.out, facts | {"what": f"{what}, {mode}, {options.rounds} rounds."}, results, page)


if __name__ == "__main__":
    main(sys.argv[1:])
