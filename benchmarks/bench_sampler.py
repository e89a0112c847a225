"""Measure what drawing a step's tokens costs: from streams, by vLLM without seeds, and by vLLM with a seed per request.

python benchmarks/bench_sampler.py --out benchmarks/sampler                       # on a CPU
python benchmarks/bench_sampler.py --out benchmarks/sampler_gpu --device cuda

Timed is the part of vLLM's sampler that truncates, draws and returns log-probabilities, with random logits of --vocab
tokens for --rows sequences. The three ways take turns; the cost is the median over turns of the ratio of times. With
one thread it is CPU time, on which other processes have little influence. The operations of torch that each way calls
are counted for a few numbers of rows.

Writes OUT.jsonl (how it was made, then each case) and OUT.md.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import vllm._custom_ops  # noqa: F401 - registers the operations of vLLM's sampler
from bench_report import head, parser, provenance, table, take_turns, timed, write_report
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from vllm import SamplingParams
from vllm.v1.sample.ops.topk_topp_sampler import TopKTopPSampler
from vllm.v1.sample.sampler import Sampler

from vllm_patches.sampler import StreamSampler

STREAMS, UNSEEDED, SEEDED = "streams", "unseeded", "seeded"

CASES: dict[str, dict[str, Any]] = {
    "training": {"mode": "processed_logprobs"},
    "evaluation": {"mode": "raw_logprobs"},
    "training, top-p 0.95": {"mode": "processed_logprobs", "top_p": 0.95, "share": 8},
}
"""What is sampled: the log-probabilities returned, the truncation, and the share of --rows that suffices where sorting
takes most of the time."""

COUNTED_ROWS = (8, 64, 256)

Draw = Callable[[], Any]


class Counting(TorchDispatchMode):
    """Counts operations."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return function(*args, **(kwargs or {}))


def ways(logits: Tensor, case: dict[str, Any]) -> dict[str, Draw]:
    """Draw a token for each row of ``logits`` [B, V], which are overwritten."""
    count, device, mode = len(logits), logits.device, case["mode"]
    p = torch.full((count,), case["top_p"], device=device) if "top_p" in case else None
    generators = {row: torch.Generator(device).manual_seed(row) for row in range(count)}
    natively = TopKTopPSampler(mode)
    runner = stand_in(count, device, TopKTopPSampler(mode))
    # What the runner's sampler does before is the same in all ways and left out.
    runner._sample = lambda: runner.sampler.topk_topp_sampler.forward(logits, {}, None, p)
    StreamSampler(runner)
    return {
        STREAMS: runner._sample,
        UNSEEDED: lambda: natively(logits, {}, None, p),
        SEEDED: lambda: natively(logits, generators, None, p),
    }


def stand_in(count: int, device: torch.device, sampler: TopKTopPSampler) -> Any:
    """What the stream sampler reads of a runner, in a step of one token for each of ``count`` requests."""
    names = [str(row) for row in range(count)]
    return SimpleNamespace(
        device=device,
        sampler=SimpleNamespace(topk_topp_sampler=sampler, apply_temperature=Sampler.apply_temperature),
        requests={
            name: SimpleNamespace(sampling_params=SamplingParams(extra_args={"stream": row}))
            for row, name in enumerate(names)
        },
        input_batch=SimpleNamespace(req_ids=names, num_reqs=count, num_computed_tokens_cpu=np.arange(count) + 100),
        query_start_loc=SimpleNamespace(np=np.arange(count + 1)),
        _sample=None,
    )


def measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """One case: median times, ratios to unseeded sampling, and operations by number of rows."""
    case = CASES[name]
    rows = max(1, options.rows // case.get("share", 1))
    original = torch.randn(rows, options.vocab, generator=torch.Generator().manual_seed(0)).mul_(3).to(options.device)
    logits = original.clone()
    alone = options.device == "cpu" and torch.get_num_threads() == 1
    clock = time.thread_time if alone else time.perf_counter

    def turn(draw: Draw) -> float:
        logits.copy_(original)
        return timed(draw, options.device, clock)[0]

    contestants = {way: lambda draw=draw: turn(draw) for way, draw in ways(logits, case).items()}
    turns = list(take_turns(contestants, options.turns + 1))[1:]  # the first warms up
    ratios = {way: sorted(times[way] / times[UNSEEDED] for times in turns) for way in (STREAMS, SEEDED)}
    return {
        "case": name,
        "rows": rows,
        "seconds": {way: statistics.median(times[way] for times in turns) for way in contestants},
        "ratio": {way: statistics.median(values) for way, values in ratios.items()},
        "middle_half": {way: [v[len(v) // 4], v[-1 - len(v) // 4]] for way, v in ratios.items()},
        "operations": {str(number): operations(original[:1, :1000].repeat(number, 1), case) for number in COUNTED_ROWS},
    }


def operations(logits: Tensor, case: dict[str, Any]) -> dict[str, int]:
    """Operations of each way to draw."""
    counts = {}
    for way, draw in ways(logits, case).items():
        draw()
        with Counting() as counting:
            draw()
        counts[way] = counting.count
    return counts


def page(facts: dict[str, Any], cases: Sequence[dict[str, Any]]) -> str:
    """The results as Markdown."""
    timings, counts = [], []
    for case in cases:
        ratios = [
            "{}{:.2f}{} ({:.2f} to {:.2f})".format(mark, case["ratio"][way], mark, *case["middle_half"][way])
            for way, mark in ((STREAMS, "**"), (SEEDED, ""))
        ]
        seconds = [f"{case['seconds'][way]:.3f}" for way in (UNSEEDED, STREAMS, SEEDED)]
        timings.append([case["case"], str(case["rows"]), *seconds, *ratios])
        for rows, by_way in case["operations"].items():
            counts.append([case["case"], rows, *(str(by_way[way]) for way in (UNSEEDED, STREAMS, SEEDED))])
    columns = ["", "Sequences:", "Unseeded, s:", "Streams, s:", "Seeded, s:"]
    return f"""{head("What drawing tokens costs", facts)}\
{facts["vocab"]} tokens in the vocabulary, threads: {facts["threads"]}. Streams are `rollout.seeded=true`; unseeded is
vLLM left alone, `rollout.seeded=false`; seeded is a vLLM seed per request. Medians of {facts["turns"]} turns; in
brackets, the middle half of the ratios.

{table([*columns, "Streams / unseeded:", "Seeded / unseeded:"], timings)}
Operations of torch in one step, by number of sequences:

{table(["", "Sequences:", "Unseeded:", "Streams:", "Seeded:"], counts)}"""


def main(argv: list[str]) -> None:
    """Measure all cases."""
    command = parser(__doc__)
    command.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    command.add_argument("--rows", type=int, default=256, help="sequences in a step")
    command.add_argument("--vocab", type=int, default=151_936, help="tokens in the vocabulary; Qwen2.5's")
    command.add_argument("--turns", type=int, default=15)
    command.add_argument("--threads", type=int, default=1, help="of the CPU")
    options = command.parse_args(argv)
    torch.set_num_threads(options.threads)
    with torch.inference_mode():
        cases = [measure(name, options) for name in CASES]
    facts = provenance("bench_sampler.py", argv, options.device)
    facts |= {name: getattr(options, name) for name in ("vocab", "turns", "threads")}
    write_report(options.out, facts, cases, page)


if __name__ == "__main__":
    main(sys.argv[1:])
