"""Estimate the seconds of a step on many GPUs, ours before and now, and veRL's: 7B on 8 H100s, 32B on 64.

python benchmarks/estimate_step.py --out benchmarks/step_estimate

Nothing is timed. Operations follow from the sizes of the models and the lengths of the responses, bytes from what
benchmarks/bench_traffic.py counted, and both become seconds by the rates below, which are assumptions.
Writes OUT.jsonl and OUT.md.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from bench_report import provenance, read_report, write_report
from bench_traffic import GIB, MIB, MODELS, PROMPT, PROMPTS, RESPONSE, SAMPLES, response_lengths, step_mib
from spectral_cost import SPECTRAL_RATE, spectral_operations
from torch import Tensor

ROOT = Path(__file__).resolve().parents[1]

PRODUCT_RATE = 0.4 * 989e12
"""bfloat16 operations a second in forward and backward passes: 40% of a H100's."""
MEMORY_RATE = 0.6 * 3.35e12
"""Bytes a second that decoding reads: 60% of a H100's memory."""
DECODE_STEP_S = 0.003
"""Of a decode step besides reading: scheduling, launching, sampling."""
LINK_RATE = 0.7 * 450e9
"""Bytes a second that a GPU receives of gathered weights: 70% of NVLink. Between machines each of the 8 network cards
carries an eighth of them, which takes no longer."""
COLLECTIVE_S = 2e-4
"""Of a collective besides its bytes."""
DRIVER_RATE = 1e9
"""Bytes a second that the driver packs, copies and sends."""

MINI_BATCHES = 4
"""Optimizer steps of a step; the first needs no pass for old log-probabilities now."""

MICRO_BATCH = 4
"""Rows of a micro-batch before; they were padded to the longest of them."""

BACKWARD, RECOMPUTED = 2.0, 1.0
"""Operations of a backward pass, and of the forward pass that gradient checkpointing repeats, in forward passes."""


class World(NamedTuple):
    """A model on GPUs."""

    model: str
    gpus: int
    engine: int
    """GPUs of an engine."""

    @property
    def sizes(self) -> Mapping[str, int]:
        """Of the model."""
        return MODELS[self.model]

    @property
    def matrices(self) -> float:
        """Parameters that each token is multiplied by: of layers and head."""
        s = self.sizes
        width, inner, layers = s["hidden_size"], s["intermediate_size"], s["num_hidden_layers"]
        keys = width // s["num_attention_heads"] * s["num_key_value_heads"]
        return layers * (2 * width * width + 2 * width * keys + 3 * width * inner) + width * s["vocab_size"]

    @property
    def cache_bytes(self) -> float:
        """Of a token's keys and values, in bfloat16."""
        s = self.sizes
        head = s["hidden_size"] // s["num_attention_heads"]
        return 2 * 2 * s["num_hidden_layers"] * s["num_key_value_heads"] * head

    def forward(self, lengths: Tensor) -> float:
        """Operations of a forward pass over rows of these lengths [B]; attention is causal."""
        s = self.sizes
        rows = lengths.double()
        attention = 2 * s["num_hidden_layers"] * s["hidden_size"] * rows.square().sum().item()
        return 2 * self.matrices * rows.sum().item() + attention


WORLDS = [World("7b", 8, 1), World("32b", 64, 4)]


def generation_s(world: World, lengths: Tensor) -> float:
    """Seconds until the slowest engine has sampled its share of responses of these lengths [B].

    All responses of an engine are decoded at once: each decode step reads the weights, and the keys and values of what
    still goes on.
    """
    engines = world.gpus // world.engine
    slowest = 0.0
    for share in lengths.reshape(engines, -1):
        steps = torch.arange(int(share.max()))
        going = share[None, :] > steps[:, None]
        tokens = going.sum(dim=1) * (PROMPT + steps)
        read = (2 * world.matrices + tokens * world.cache_bytes) / world.engine
        slowest = max(slowest, (read / MEMORY_RATE + DECODE_STEP_S).sum().item())
    prefill = world.forward(torch.full((PROMPTS,), PROMPT)) / world.gpus / PRODUCT_RATE
    return slowest + prefill


def spectra_s(world: World, lengths: Tensor) -> float:
    """Seconds of the rank metrics of all responses, one layer, on all GPUs at once."""
    width = world.sizes["hidden_size"]
    rounded = (lengths / 64).ceil().mul(64).long()
    counts = zip(*rounded.unique(return_counts=True), strict=True)
    total = sum(spectral_operations(int(rows), width) * int(count) for rows, count in counts)
    return float(total / world.gpus / SPECTRAL_RATE)


def phases(world: World, lengths: Tensor, traffic: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Column -> phase -> seconds."""
    rows = PROMPT + lengths
    padded = rows.reshape(-1, MICRO_BATCH).amax(dim=1).repeat_interleave(MICRO_BATCH)
    packed_s, padded_s = (world.forward(given) / world.gpus / PRODUCT_RATE for given in (rows, padded))
    (sync,) = [row for row in traffic if (row.get("model"), row.get("shards")) == (world.model, world.gpus)]
    sent = {
        name: step_mib(traffic, "log-normal", name, world.engine) * MIB / DRIVER_RATE
        for name in ("before_mib", "after_mib")
    }
    generation, spectra = generation_s(world, lengths), spectra_s(world, lengths)
    update = 1 + BACKWARD + RECOMPUTED
    later = 1 - 1 / MINI_BATCHES

    def column(measured: float, old: float, scored: float, weights: float, moved: float) -> dict[str, float]:
        found = {"generation": generation, "rank metrics": measured, "old log-probabilities": old * scored}
        found |= {"reference": scored, "update": update * scored, "weights to engines": weights, "batches": moved}
        return found | {"a step": sum(found.values())}

    before, after = sync["before"], sync["after"]
    one_by_one = _sync_s(before["collectives"], after["gib"])
    return {
        "before": column(spectra, 1.0, padded_s, _sync_s(before["collectives"], before["gib"]), sent["before_mib"]),
        "now": column(spectra, later, packed_s, _sync_s(after["collectives"], after["gib"]), sent["after_mib"]),
        "veRL": column(0.0, 1.0, packed_s, one_by_one, sent["before_mib"]),
    }


def _sync_s(collectives: float, gib: float) -> float:
    return gib * GIB / LINK_RATE + collectives * COLLECTIVE_S


HEAD = f"""\
# Seconds of a step on GPUs, estimated

{{date}}. **Nothing here was timed, ours and veRL's alike.**

Regenerate with

    {{command}}

{PROMPTS} prompts of {PROMPT} tokens with {SAMPLES} responses, log-normal with a median of {RESPONSE // 8} and at most
{RESPONSE} tokens; {MINI_BATCHES} mini-batches; KL loss with a reference; gradient checkpointing. H100s; engines of 1
GPU for 7B, of 4 for 32B.

What a column does:

- before: rows padded to the longest of a micro-batch of {MICRO_BATCH}, all old log-probabilities in a pass of their
  own, weights gathered in float32 one by one, dense batches.
- now: packed rows, no such pass for the first mini-batch, weights in bfloat16 and in buckets, packed batches.
- veRL: with `use_remove_padding` and `use_dynamic_bsz`, as its users tune it, and without rank metrics. Taken to
  compute all old log-probabilities in a pass of their own, to gather weights in bfloat16 one by one, and to send dense
  batches, to each GPU of an engine.

Assumed: passes reach 40% of the bfloat16 rate of 989e12; decoding reads at 60% of 3.35 TB/s and takes 3 ms a step
besides, the same in all columns; gathered weights arrive at 70% of 450 GB/s, and each collective takes 0.2 ms besides;
the driver moves 1 GB/s; spectra reach 2e13 float64 operations a second, and nothing hides them. Left out:
verification, the optimizer, waking the engine, communication of FSDP and of engines of several GPUs, capture. Ours now
and veRL's differ by less than what is left out, so they are taken to be equal.
"""


def page(facts: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
    """The results as Markdown."""
    lines = [HEAD.format(**facts)]
    for entry in rows:
        columns = entry["seconds"]
        lines += [f"## {entry['model']} on {entry['gpus']} GPUs", "", f"| phase | {' | '.join(columns)} |"]
        lines.append(f"|---|{'---:|' * len(columns)}")
        for phase in columns["now"]:
            cells = [f"{found[phase]:.2f}" for found in columns.values()]
            bold = "**" if phase == "a step" else ""
            lines.append(f"| {bold}{phase}{bold} | {' | '.join(f'{bold}{cell}{bold}' for cell in cells)} |")
        lines.append("")
    return "\n".join(lines)


def main(argv: list[str]) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="path of OUT.jsonl and OUT.md without suffix")
    options = parser.parse_args(argv)
    _, traffic = read_report(ROOT / "benchmarks/traffic.jsonl")
    lengths = response_lengths("log-normal")
    rows = [{"model": world.model, "gpus": world.gpus, "seconds": phases(world, lengths, traffic)} for world in WORLDS]
    facts = provenance("estimate_step.py", argv)
    write_report(options.out, facts, rows, page)
    print(page(facts, rows))


if __name__ == "__main__":
    main(sys.argv[1:])
