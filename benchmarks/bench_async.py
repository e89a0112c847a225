"""Estimate what responses that outlive a step are worth: the real scheduler over engines that only count seconds.

python benchmarks/bench_async.py --out benchmarks/async

``PartialRolloutScheduler``, ``Generation`` and ``RequestQueue`` run as in training. In place of engines stand lengths,
drawn from lognormal distributions, and a clock: a decoding step of an engine takes BASE + PER_RESPONSE x the responses
that it decodes, a token that it reads again READ, a token that a device learns from LEARN. The page names these figures
and what they leave out. Every run checks that no token is older than the bound, that nothing is lost, and that it ends.

Writes OUT.jsonl (how it was made, then each mode of each case) and OUT.md.
"""

import itertools
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from bench_report import head, parser, provenance, table, write_report

from verl.batch import Batch
from verl.config import PPOConfig, load_config
from verl.data.prompt_record import PromptRecord
from verl.method.calls import MethodCalls
from verl.rollout.queue import EngineCapacity
from verl.rollout.requests import ResponseRequests
from verl.single_controller.generation import Generation
from verl.trainer.logging.speed import PhaseTimer
from verl.trainer.ppo.advantages import ResponseRewards
from verl.trainer.ppo.partial_rollouts import PartialRolloutScheduler
from verl.verifiers.verdict import Verdict

UNIT = 32
"""Tokens that stand as one token in the batches of this estimate; engines reply after each."""

BASE, PER_RESPONSE = 8e-3, 6e-5
"""Seconds of a decoding step of 7B in bfloat16 on an H100: reading 15 GB of weights at 3.35 TB/s and launching, and
reading 0.1 to 0.2 GB of keys and values for each response."""
READ = 1 / 25_000
"""Seconds of a device to read a token again: 2 x 7e9 operations at 350e12 a second."""
LEARN = 8 * 7e9 / 400e12
"""Seconds of a device for a token that is learned from: a forward pass before the update, and the update."""
SYNC = 5.0
"""Seconds from the update to the next decoding step: weights, and waking the engines."""

GROUPS, N, MEDIAN, SLOTS, STEPS = 64, 8, 1600, 256, 9
"""Groups of a step, responses to a prompt, tokens of the median response, responses that an engine decodes at once,
and steps of a run, of which the middle ones count."""

CASES = [(devices, ratio) for devices in (8, 16) for ratio in (5, 20)]
"""Devices, and how much longer than the median the longest of the responses of a step is."""

PUBLISHED = [
    ("veRL, one step off", "32 H20, 7B: FSDP2, 20k tokens / Megatron, 8k", "1.23 / 1.40", "docs/advance/one_step_off"),
    ("veRL, fully asynchronous", "128 GPUs, 7B, partial responses", "2.35 to 2.67", "docs/advance/fully_async"),
    ("ROLL Flash", "RLVR, the same number of GPUs", "up to 2.24", "arXiv 2510.11345"),
    ("AReaL", "1.5B to 32B, math and code", "up to 2.77", "arXiv 2505.24298"),
]
"""What others measured: system, setting, speed-up over their synchronous step, source."""


def lengths(ratio: float, median: float = MEDIAN, unit: int = UNIT) -> list[int]:
    """Lengths in units of tokens, at even quantiles of a lognormal distribution, in a fixed random order.

    The longest of 512 responses is ``ratio`` times the median: their expected largest normal deviate is 3.04.
    """
    quantiles = (torch.arange(4096) + 0.5) / 4096
    normal = torch.special.ndtri(quantiles).clamp(max=3.04)
    tokens = median * (normal * math.log(ratio) / 3.04).exp()
    order = torch.randperm(len(tokens), generator=torch.Generator().manual_seed(0))
    return (tokens[order] / unit).round().clamp(min=1).long().tolist()


Reply = tuple[Batch | None, int]


class Engines:
    """In place of a worker group: engines that count, with one clock, since they wait for each other after a unit."""

    def __init__(self, num_engines: int, lengths: Sequence[int]) -> None:
        self.world_size, self.lengths, self.clock = num_engines, lengths, 0.0
        self.held: list[dict[int, Response]] = [{} for _ in range(num_engines)]
        self._seconds = [0.0] * num_engines
        self._replies: dict[int, Reply] = {}
        self.living = list(range(num_engines))

    def run(self, method: str) -> list[Any]:
        if method == "rollout.cut":
            return [joined(self._emptied(held)) for held in self.held]
        return [EngineCapacity(SLOTS, SLOTS)] * self.world_size

    run_living = run

    def call(self, rank: int, method: str, arguments: tuple[ResponseRequests, int]) -> int:
        self._replies[rank] = self._advance(rank, arguments[0])
        return rank

    def completed(self, calls: Mapping[int, int], *_: Any) -> Iterator[tuple[int, int]]:
        # All wait for the slowest.
        self.clock += max(self._seconds)
        self._seconds = [0.0] * self.world_size
        yield from ((call, call) for call in calls)

    def received(self, call: int) -> Reply:
        return self._replies.pop(call)

    def _advance(self, rank: int, requests: ResponseRequests) -> Reply:
        held, begun = self.held[rank], requests.partial
        assert begun is not None
        for i, versions in enumerate(begun.version.split(begun.response_lengths.tolist())):
            length = self.lengths[requests.streams[i] % len(self.lengths)]
            row, prompt_ids = requests.rows[i], requests.prompt_ids[i]
            held[row] = Response(row, prompt_ids, length, requests.version, versions.tolist())
        running = list(held.values())[:SLOTS]
        if running:
            self._seconds[rank] = UNIT * (BASE + PER_RESPONSE * len(running) + READ * len(begun.version))
        for response in running:
            response.versions.append(response.version)
        ended = [held.pop(response.row) for response in running if len(response.versions) == response.length]
        finished = joined(ended)
        if finished is not None:
            finished.fill(truncated=torch.zeros(len(ended), dtype=torch.bool))
        return finished, max(0, len(held) - SLOTS)

    @staticmethod
    def _emptied(held: dict[int, "Response"]) -> list["Response"]:
        responses = list(held.values())
        held.clear()
        return responses


class Response:
    """A response in an engine."""

    def __init__(self, row: int, prompt_ids: list[int], length: int, version: int, begun: list[int]) -> None:
        self.row, self.prompt_ids, self.length, self.version, self.versions = row, prompt_ids, length, version, begun


def joined(responses: Sequence[Response]) -> Batch | None:
    """Responses as engines return them."""
    if not responses:
        return None
    versions = [version for response in responses for version in response.versions]
    return Batch.of(
        [response.prompt_ids for response in responses],
        [[0] * len(response.versions) for response in responses],
        request=torch.tensor([response.row for response in responses]),
        rollout_logprobs=torch.zeros(len(versions)),
        version=torch.tensor(versions, dtype=torch.int32),
    )


def scheduler(overrides: Sequence[str], engines: Any, steps: int) -> PartialRolloutScheduler:
    """Return the scheduler of a run of ``steps`` over ``engines`` instead of a worker group."""
    carried = [
        "async_training.partial_rollout=true",
        "algorithm.rollout_correction.rollout_is=token",
        "actor.ppo_mini_batch_size=1",
    ]
    config = load_config(PPOConfig, "ppo_trainer", [*carried, *overrides])
    tokenizer: Any = SimpleNamespace(batch_decode=lambda ids, **_: [""] * len(ids), added_tokens_decoder={})
    policy: Any = SimpleNamespace(
        workers=engines,
        finish_generation=lambda: None,
        conversations=None,
        generation=lambda requests, take, enough, _: Generation(engines, 1, requests, True, take, enough),
    )
    verifiers: Any = Verifiers()
    method = MethodCalls(config, tokenizer)
    rewards = ResponseRewards(config, None, engines)
    return PartialRolloutScheduler(config, tokenizer, policy, verifiers, [], method, rewards, total_steps=steps)


class Verifiers:
    """Every response is right."""

    def submit_batch(self, sources: list[str], *_: Any) -> Any:
        verdicts = [Verdict(True, True, "exact", score=1.0) for _ in sources]
        return SimpleNamespace(done=lambda: True, result=lambda: verdicts)


def prompts(groups: int, tokens: Sequence[int]) -> Iterator[list[PromptRecord]]:
    """Prompts of these tokens without end, so many at once."""
    for first in itertools.count(step=groups):
        yield [PromptRecord(first + i, list(tokens), "simulated", "", {}, [], False) for i in range(groups)]


def run(ratio: float, carried: int, engines: int, trainers: int) -> dict[str, float]:
    """Seconds of a step, the mean lag, and tokens that are read again for each that is learned from.

    Args:
        carried: versions over which responses are carried; 0: each step's are sampled to their end.
        trainers: devices of their own that learn, from the batch before the one that is sampled; 0: all take turns.
    """
    pool = Engines(engines, lengths(ratio))
    stream, timer = prompts(GROUPS, [0]), PhaseTimer(lambda name: None)
    ahead = int(trainers > 0)
    overrides = [f"data.train_batch_size={GROUPS}", f"rollout.n={N}", f"rollout.nnodes={ahead}"]
    overrides += [f"rollout.n_gpus_per_node={ahead}", f"async_training.max_staleness={max(carried, 1) + ahead}"]
    sampler = scheduler(overrides, pool, STEPS)
    seconds, lag, reread, tokens, seen = list[float](), 0.0, 0.0, 0.0, set[int]()
    learning = 0.0
    for step in range(1, STEPS + 1):
        if not carried:
            # As in the last step, nothing is admitted that the step does not learn from.
            sampler.total_steps = step
        started = pool.clock
        batch, metrics, *_ = sampler.sample(stream, step, timer)
        sampling = pool.clock - started
        behind = step - 1 - batch.version
        assert 0 <= int(behind.min()) <= int(behind.max()) <= carried + ahead, "the bound holds"
        groups = set(batch.group.tolist())
        assert len(groups) == GROUPS and not groups & seen, "each group is learned from once"
        seen |= groups
        lag += behind.double().mean().item()
        reread, tokens = reread + metrics["async/reread_tokens"], tokens + int(batch.response_lengths.sum())
        before, learning = learning, int(batch.response_lengths.sum()) * UNIT * LEARN / (trainers or engines)
        seconds.append((max(sampling, before) if trainers else sampling + learning) + SYNC)
    groups = sampler.groups
    assert groups is not None and groups.open is None and groups.ready is None, "nothing is left"
    assert seen == set(range(GROUPS * STEPS))
    # The first steps fill the engines, and the last empty them.
    middle = seconds[carried + 1 : STEPS - carried]
    return {"seconds": sum(middle) / len(middle), "lag": lag / STEPS, "reread": reread / tokens}


def case(devices: int, ratio: float) -> Iterator[dict[str, Any]]:
    """The modes of one case; of a pool's splits the faster."""
    about = {"devices": devices, "ratio": ratio}
    yield about | {"mode": "synchronous", "engines": devices} | run(ratio, 0, devices, 0)
    for carried in (1, 2):
        mode = f"carry-over, `max_staleness={carried}`"
        yield about | {"mode": mode, "engines": devices} | run(ratio, carried, devices, 0)
    for carried in (0, 1, 2):
        mode = f"pool with carry-over, `max_staleness={carried + 1}`" if carried else "pool, one batch ahead"
        splits = {n: run(ratio, carried, n, devices - n) for n in (devices // 2, devices * 5 // 8)}
        engines = min(splits, key=lambda n: splits[n]["seconds"])
        yield about | {"mode": mode, "engines": engines} | splits[engines]


def shown(row: dict[str, Any], sync: float) -> list[str]:
    """A line of the page's table; ``sync``: seconds of the synchronous step."""
    figures = [f"{row['seconds']:.0f}", f"**{sync / row['seconds']:.2f}**", f"{row['lag']:.2f}", f"{row['reread']:.2f}"]
    return [str(row["devices"]), f"{row['ratio']:g}", row["mode"], str(row["engines"]), *figures]


PAGE = """\
{head}An estimate, not a measurement: the project's scheduler decides which response is sampled when, and a clock counts
what a 7B model in bfloat16 would take on H100s. {groups} prompts a step with {n} responses each, lengths lognormal
with a median of {median} tokens, the longest of a step 5 or 20 times that; ROLL Flash speaks of more than 20 times
(arXiv 2510.11345, section 1). Every run checks that no token is older than `max_staleness`, that no group is lost or
learned from twice, and that nothing is left at its end.

{measured}
"Mean lag" is `async/lag/mean`; "read again" are the tokens that engines read again for each that is learned from. Of
two splits of a pool's devices the faster is shown.

Assumed:

- A decoding step takes {base:g} ms, and {per_response:g} ms more for each response; an engine is one device with
  {slots} slots.
- To read a token again takes a device {read:g} µs, to learn from one {learn:g} µs. A new version takes {sync:g} s to
  reach the engines, in every mode.
- Engines wait for each other every {unit} tokens, as with `trainer.deterministic`, and a pool's for the trainer at the
  end of a step.
- Prompts, verifiers, validation and checkpoints take no time; keys and values always fit; lengths do not change with
  training.

What others measured, each against its own synchronous step:

{published}"""


def page(facts: dict[str, Any], rows: list[dict[str, Any]]) -> str:
    sync = {(row["devices"], row["ratio"]): row["seconds"] for row in rows if row["mode"] == "synchronous"}
    names = ["Devices:", "Longest / median:", "Mode", "Engines:", "Step, s:", "Speed-up:", "Mean lag:", "Read again:"]
    return PAGE.format(
        head=head("What responses that outlive a step are worth: an estimate", facts),
        measured=table(names, (shown(row, sync[row["devices"], row["ratio"]]) for row in rows)),
        published=table(["System", "Setting", "Speed-up:", "Source"], map(list, PUBLISHED)),
        groups=GROUPS,
        n=N,
        median=MEDIAN,
        slots=SLOTS,
        base=1e3 * BASE,
        per_response=1e3 * PER_RESPONSE,
        read=1e6 * READ,
        learn=1e6 * LEARN,
        sync=SYNC,
        unit=UNIT,
    )


def main(argv: Sequence[str]) -> None:
    arguments = parser(__doc__).parse_args(argv)
    rows = [row for devices, ratio in CASES for row in case(devices, ratio)]
    write_report(arguments.out, provenance("bench_async.py", argv), rows, page)


if __name__ == "__main__":
    main(sys.argv[1:])
