"""Measure what carrying responses over is worth with a real engine of few slots and long-tailed lengths.

python benchmarks/bench_carry_over.py --out benchmarks/carry_over

One vLLM engine in this process, driven by the scheduler of training, samples the responses of step after step; nothing
is learned, and the prefix cache is emptied between steps, as new weights would. Each response is made to end at a
length drawn from a lognormal distribution whose longest is five times the median, and its hidden states are measured.
The two modes take turns. Seconds are those of the process's CPU time with one thread, on which other processes have
little influence.

Writes OUT.jsonl (how it was made, then each turn) and OUT.md.
"""

import os
import statistics
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any

from bench_async import lengths, prompts, scheduler
from bench_report import head, parser, provenance, table, take_turns, write_report

from verl.batch import Batch
from verl.rollout.engines import engine_environment
from verl.rollout.requests import ResponseRequests
from verl.trainer.logging.speed import PhaseTimer
from verl.utils.distributed import WorkerPlace

GROUPS, N, SLOTS, STEPS, MEDIAN, LONGEST = 16, 4, 32, 7, 80, 400
"""Prompts of a step, responses to each, responses that the engine decodes at once, steps of a turn, and the lengths."""

OPTIONS = [
    *(f"data.train_batch_size={GROUPS}", f"rollout.n={N}", f"rollout.max_num_seqs={SLOTS}"),
    *("async_training.max_staleness=1", f"data.max_response_length={LONGEST}", "data.max_prompt_length=32"),
]

SYNCHRONOUS, CARRIED = "synchronous", "carry-over, `max_staleness=1`"


class Engine:
    """In place of a worker group: one engine in this process."""

    world_size = 1
    living = [0]

    def __init__(self) -> None:
        # vLLM reads the environment when it is imported.
        from verl.workers.rollout import RolloutWorker

        config = scheduler(OPTIONS, self, 0).config
        self.worker = RolloutWorker(config, WorkerPlace(0, 1, "127.0.0.1", 29531, "cpu", 1), [])
        self.lengths = lengths(LONGEST / MEDIAN, MEDIAN, 1)
        rollout: Any = self.worker.rollout
        made = rollout._sampling_params

        def forced(requests: ResponseRequests, i: int) -> Any:
            params = made(requests, i)
            beginning = 0 if requests.partial is None else int(requests.partial.response_lengths[i])
            params.max_tokens = self.lengths[requests.streams[i] % len(self.lengths)] - beginning
            params.ignore_eos, params.stop_token_ids = True, []
            return params

        rollout._sampling_params = forced

    def run(self, method: str) -> list[Any]:
        return [attrgetter(method)(self.worker)()]

    run_living = run

    def call(self, rank: int, method: str, arguments: tuple[Any, ...]) -> int:
        self.reply = attrgetter(method)(self.worker)(*arguments)
        return 0

    def completed(self, calls: Mapping[int, int], *_: Any) -> Iterator[tuple[int, int]]:
        yield from ((call, call) for call in calls)

    def received(self, call: int) -> tuple[Batch | None, int]:
        return self.reply

    def turn(self, carried: bool) -> dict[str, float]:
        """Tokens a second of the middle steps, and what was read again for each token."""
        sampler, stream = scheduler(OPTIONS, self, STEPS), prompts(GROUPS, range(20, 40))
        tokens, reread, seconds = 0, 0.0, 0.0
        for step in range(1, STEPS + 1):
            if not carried:
                # As in the last step, nothing is admitted that the step does not learn from.
                sampler.total_steps = step
            began = time.process_time()
            batch, metrics, *_ = sampler.sample(stream, step, PhaseTimer(lambda name: None))
            rollout: Any = self.worker.rollout
            rollout.engine.reset_prefix_cache()
            # The first step fills the engine, and the last empties it.
            if 1 < step < STEPS:
                seconds += time.process_time() - began
                tokens += int(batch.response_lengths.sum())
                reread += metrics["async/reread_tokens"]
        return {"tokens_per_second": tokens / seconds, "reread": reread / tokens}


def page(facts: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    def median(mode: str, name: str) -> float:
        return statistics.median(row[mode][name] for row in rows)

    ratios = sorted(row[CARRIED]["tokens_per_second"] / row[SYNCHRONOUS]["tokens_per_second"] for row in rows)
    lines = [
        [mode, f"{median(mode, 'tokens_per_second'):.0f}", f"{median(mode, 'reread'):.2f}"]
        for mode in (SYNCHRONOUS, CARRIED)
    ]
    return f"""{head("What carrying responses over is worth to an engine", facts)}{facts["setting"]}

{table(["Mode", "Tokens per CPU second:", "Read again for each token:"], lines)}
Ratio, median of {len(ratios)} turns: **{statistics.median(ratios):.2f}** ({ratios[0]:.2f} to {ratios[-1]:.2f}).
"""


SETTING = f"""\
A vLLM engine with the shipped model and {SLOTS} slots; {GROUPS} prompts a step with {N} responses each, whose lengths
are lognormal: median {MEDIAN} tokens, the longest {LONGEST}. Sampling and rank metrics alone: no update, no verifier.
Tokens are those of the batches that would be learned from, seconds the process's CPU time with one thread, so that
other work on the machine counts little; the machine was shared, though. A GPU, on which a decoding step takes hardly
longer for more responses and reading a token again is cheap, was not measured."""


def main(argv: Sequence[str]) -> None:
    command = parser(__doc__)
    command.add_argument("--rounds", type=int, default=3)
    arguments = command.parse_args(argv)
    os.environ |= engine_environment("cpu") | {"OMP_NUM_THREADS": "1"}
    engine = Engine()
    turns = {SYNCHRONOUS: lambda: engine.turn(False), CARRIED: lambda: engine.turn(True)}
    facts = provenance("bench_carry_over.py", argv) | {"setting": SETTING}
    write_report(arguments.out, facts, take_turns(turns, arguments.rounds), page)


if __name__ == "__main__":
    main(sys.argv[1:])
