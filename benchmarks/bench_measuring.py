"""Measure how decoding goes on while the hidden states of a long response are measured.

python benchmarks/bench_measuring.py --out benchmarks/measuring

A vLLM engine decodes ``--sequences`` responses without end. In each round it decodes ``--steps`` steps three times:
alone; while a response is measured in the background; and with a response that is measured at once, between two steps.
The measured response is synthetic: one that ends after a few tokens has its states replaced by random ones
``[--rows, 1, --width]``, so that a small model can stand for decoding. Writes OUT.jsonl and OUT.md. On CPU.
"""

import argparse
import itertools
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"

import torch
from bench_report import provenance, write_report
from torch import Tensor
from transformers import Qwen2Config, Qwen2ForCausalLM
from vllm import LLM, SamplingParams
from vllm.sampling_params import RequestOutputKind

from verl.config import PPOConfig, load_config
from verl.rank.calculator import RepresentationMetricsCalculator

MARK = 3
KINDS = ("alone", "background", "at once")
"""Tokens of the response whose states are replaced."""


def measure(states: list[Tensor], rows: int, width: int) -> Any:
    """The reducer: metrics of synthetic states, in slices."""
    generator = torch.Generator().manual_seed(0)
    long = [torch.randn(rows, 1, width, generator=generator) if len(s) == MARK else s for s in states]
    calculator = RepresentationMetricsCalculator(load_config(PPOConfig, "ppo_trainer", []).calculator)
    metrics = yield from calculator.measure_in_slices(long)
    return metrics.to_rows()


class Bench:
    """One engine, and requests that keep it busy."""

    def __init__(self, args: argparse.Namespace, folder: str) -> None:
        self.args, self.names = args, itertools.count()
        shape = {"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "num_attention_heads": 8}
        config = Qwen2Config(vocab_size=2048, num_key_value_heads=8, max_position_embeddings=8192, **shape)
        torch.manual_seed(0)
        Qwen2ForCausalLM(config).save_pretrained(folder)
        options = {"rows": args.rows, "width": args.width}
        capture = {"reducer": "bench_measuring:measure", "reducer_options": options}
        llm = LLM(
            folder,
            dtype="float32",
            enforce_eager=True,
            skip_tokenizer_init=True,
            max_model_len=8192,
            kv_cache_memory_bytes=4 << 30,
            max_num_seqs=args.sequences + 1,
            additional_config={"hidden_states": capture},
        )
        self.engine: Any = llm.llm_engine
        for _ in range(args.sequences):
            self.add(8000)

    def add(self, tokens: int) -> None:
        """A request for a response of so many tokens."""
        params = SamplingParams(
            max_tokens=tokens, ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY
        )
        self.engine.add_request(str(next(self.names)), {"prompt_token_ids": [1, 2, 3]}, params)

    def run(self, kind: str) -> dict[str, float]:
        """Decode ``--steps`` steps, ``alone``, with a measurement in the ``background`` or ``at once``."""
        collector = self.engine.state_collector
        if kind != "alone":
            self.add(MARK)
        ends = []

        def steps() -> None:
            for _ in range(self.args.steps):
                self.engine.step()
                ends.append(time.perf_counter())

        if kind == "background":
            with collector.in_background():
                for _ in range(MARK + 1):
                    self.engine.step()
                collector.collected(wait=False)
                begun = collector._job is not None
                start = time.perf_counter()
                steps()
                measuring = begun and collector._job is not None
                drained = time.perf_counter()
                collector.collected(wait=True)
                left = time.perf_counter() - drained
        else:
            start, measuring, left = time.perf_counter(), False, 0.0
            steps()
        gaps = [b - a for a, b in itertools.pairwise([start, *ends])]
        rate = self.args.sequences * len(ends) / (ends[-1] - start)
        typical = self.args.sequences / statistics.median(gaps)
        return {
            "tokens_per_s": rate,
            "median_tokens_per_s": typical,
            "longest_gap_s": max(gaps),
            "measuring_throughout": float(measuring),
            "rest_s": left,
        }


PAGE = """\
# Decoding while a long response is measured

{hardware}, {threads} threads, torch {torch}, {date}

    {command}

A vLLM engine on a CPU decodes {sequences} responses with a model of 512 columns and 8 layers, while the rank metrics
of one response of {rows} x {width} (synthetic states) are computed. Medians of {rounds} rounds; each round runs all
three, {steps} steps each, so that ratios are of one run.

- alone: nothing is measured.
- background: what the engine does. After each step, slices of the measurement for at most a quarter of the step's time.
  What is left when the {steps} steps are over is finished without decoding ("rest").
- at once: the whole measurement between two steps, as before.

| | tokens/s | of alone | longest gap between two steps, s | of alone's median step | rest, s |
|---|---|---|---|---|---|
"""


def page(metadata: dict[str, Any], rounds: list[dict[str, Any]]) -> str:
    """The results as Markdown."""
    lines = []
    for kind in KINDS:
        found = [one[kind] for one in rounds]
        rate, gap, rest = (
            statistics.median(f[name] for f in found) for name in ("tokens_per_s", "longest_gap_s", "rest_s")
        )
        share = statistics.median(one[kind]["tokens_per_s"] / one["alone"]["tokens_per_s"] for one in rounds)
        step = metadata["sequences"] / statistics.median(one["alone"]["median_tokens_per_s"] for one in rounds)
        lines.append(f"| {kind} | {rate:.0f} | {share:.2f} | {gap:.3f} | {gap / step:.1f} | {rest:.1f} |")
    return PAGE.format(**metadata) + "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> None:
    """Run the benchmark; ``argv`` without the program's name, default ``sys.argv``."""
    argv = sys.argv[1:] if argv is None else argv
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/measuring"), help="OUT.jsonl and OUT.md")
    parser.add_argument("--sequences", type=int, default=16, help="responses that are decoded")
    parser.add_argument("--rows", type=int, default=8192, help="tokens of the measured response")
    parser.add_argument("--width", type=int, default=1024, help="its hidden size")
    parser.add_argument("--steps", type=int, default=200, help="steps of each kind and round")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args(argv)
    rounds = []
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(args, folder)
        bench.run("alone")  # libraries and caches
        for _ in range(args.rounds):
            rounds.append({kind: bench.run(kind) for kind in KINDS})
            print(rounds[-1], file=sys.stderr, flush=True)
    metadata = provenance("bench_measuring.py", argv, "cpu") | {"threads": torch.get_num_threads()} | vars(args)
    metadata["out"] = str(args.out)
    write_report(args.out, metadata, [{"round": i, **one} for i, one in enumerate(rounds)], page)


if __name__ == "__main__":
    main()
