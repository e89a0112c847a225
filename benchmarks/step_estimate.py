"""Estimate the seconds of a training step on H100s, ours and tuned veRL's. Nothing is timed.

python benchmarks/step_estimate.py --out benchmarks/step_estimate

Operations and bytes follow from the sizes of the models and the lengths of the responses; both become seconds by the
rates below, which are assumptions, but for Python's share of a weight sync. Writes OUT.jsonl and OUT.md.
"""

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from bench_report import parser, provenance, table, write_report
from torch import Tensor

from verl.spectral import SUM_S, SUM_S_LOG_S, SpectralOptions
from verl.spectral.bounds import block_rows, factor_operations
from verl.spectral.cost import RATES
from verl.spectral.nodes import node_set

PRODUCTS = 0.4 * 989e12
"""bfloat16 operations a second of forward and backward passes: 40% of an H100's."""
MEMORY = 0.6 * 3.35e12
"""Bytes a second, read or written: 60% of an H100's."""
LINK = 0.7 * 450e9
"""Bytes a second that a GPU receives over NVLink."""
SPECTRA = RATES["cuda"].products
"""float64 operations a second of spectra: the only rate measured, by a prototype on an H200."""
DECODE_STEP_S = 0.003
"""Of a decode step besides reading: scheduling, launching, sampling."""
COLLECTIVE_S, ALL_REDUCE_S = 2e-4, 1e-5
"""Of a collective of training, and of a small all-reduce inside an engine, besides their bytes."""
TENSOR_S = 1.4e-4
"""Of Python for a tensor that vLLM loads; measured: 1524 tensors of experts took 0.21 s of one core."""
BUCKET = 1 << 30
"""Bytes of weights in a collective."""

SOFTMAX_BYTES = {"ours": 52, "veRL": 8}
"""Bytes read and written for each token and word of the vocabulary, when scored. Ours: logits in float32, over the
temperature, their log-softmax, its exponential, product and sum. veRL's fused kernel: little besides the product."""
SOFTMAX_BACKWARD = {"ours": 30, "veRL": 12}

PROMPTS, SAMPLES, PROMPT, RESPONSE = 128, 8, 1024, 8192
MINI_BATCHES = 4
"""Optimizer steps of a step; ours takes the first one's old log-probabilities from its own forward pass."""


@dataclass(frozen=True)
class World:
    """A model on GPUs."""

    name: str
    gpus: int
    engine: int
    """GPUs of an engine."""
    width: int
    layers: int
    keys: int
    """Width of keys, and of values."""
    inner: int
    """Width of the MLP; of a mixture, that of an expert."""
    queries: int
    vocabulary: int
    experts: int = 0
    chosen: int = 1

    def parameters(self, active: bool) -> float:
        """Of layers and head: those that a token is multiplied by, or all."""
        mlp = 3 * self.width * self.inner * (self.chosen if active else max(self.experts, 1))
        attention = 2 * self.width * (self.queries + self.keys)
        return self.layers * (attention + mlp) + self.width * self.vocabulary

    def forward_s(self, lengths: Tensor) -> float:
        """A forward pass of all GPUs over rows of these lengths [B]; attention is causal."""
        rows = lengths.double()
        attention = 2 * self.layers * self.queries * rows.square().sum().item()
        return float((2 * self.parameters(True) * rows.sum().item() + attention) / self.gpus / PRODUCTS)


WORLDS = [
    World("Qwen2.5-7B", 8, 1, 3584, 28, 512, 18944, 3584, 152064),
    World("Qwen2.5-32B", 64, 4, 5120, 64, 1024, 27648, 5120, 152064),
    World("Qwen3-30B-A3B", 32, 4, 2048, 48, 512, 768, 4096, 151936, experts=128, chosen=8),
]


def generation_s(world: World, lengths: Tensor) -> tuple[float, float]:
    """Until the slowest engine has sampled its share of responses of these lengths [B]; of it, the all-reduces.

    All responses of an engine are decoded at once. A step reads the weights (of a mixture all: some token chooses each
    expert) and what it keeps of the tokens before; each layer adds up the engine's parts twice.
    """
    found = []
    for share in lengths.reshape(world.gpus // world.engine, -1):
        steps = torch.arange(int(share.max()))
        going = (share[None, :] > steps[:, None]).sum(dim=1)
        cache = 4 * world.layers * world.keys * going * (PROMPT + steps)
        read = ((2 * world.parameters(False) + cache) / world.engine / MEMORY + DECODE_STEP_S).sum().item()
        sent = 2 * 2 * going * world.width * (world.engine - 1) / world.engine
        reduced = (2 * world.layers * (ALL_REDUCE_S + sent / LINK)).sum().item() if world.engine > 1 else 0.0
        found.append((read + reduced, reduced))
    total, reduced = max(found)
    return total + world.forward_s(torch.full((PROMPTS,), PROMPT)), reduced


def spectra_s(world: World, lengths: Tensor) -> float:
    """Rank metrics of all responses, one layer, on all GPUs, hidden behind nothing."""
    nodes = len(node_set((SUM_S, SUM_S_LOG_S), SpectralOptions.tolerance, SpectralOptions.condition).shifts)
    total = 0.0
    for rows in lengths.tolist():
        size = block_rows(rows, world.width)
        gram = rows * rows if size == rows else 6 * rows * world.width + rows * size
        total += nodes * factor_operations(rows, world.width, size) + gram * world.width
    return total / world.gpus / SPECTRA


def phases(world: World, lengths: Tensor) -> dict[str, dict[str, float]]:
    """Column -> phase -> seconds."""
    generation, reduced = generation_s(world, lengths)
    forward = world.forward_s(PROMPT + lengths)
    tokens = lengths.sum().item() / world.gpus * world.vocabulary
    weights = 2 * world.parameters(False)
    gather = weights / LINK + math.ceil(weights / BUCKET) * COLLECTIVE_S
    names = world.layers * 8 + (3 * world.layers if world.experts else 0)

    def column(who: str, spectra: float, scored: float) -> dict[str, float]:
        softmax = tokens * SOFTMAX_BYTES[who] / MEMORY
        learned = 2 * softmax + tokens * SOFTMAX_BACKWARD[who] / MEMORY
        found = {"generation": generation, "of it all-reduces": reduced, "rank metrics": spectra}
        found |= {"old log-probabilities": scored * (forward + softmax), "reference": forward + softmax}
        # Forward, backward, and the forward pass that gradient checkpointing repeats.
        found |= {"update": 4 * forward + learned, "of it softmax": learned}
        found["weights to engines"] = gather + names * TENSOR_S
        return found | {"a step": sum(s for phase, s in found.items() if not phase.startswith("of it"))}

    return {
        "ours": column("ours", spectra_s(world, lengths), 1 - 1 / MINI_BATCHES),
        "veRL": column("veRL", 0.0, 1.0),
        "ours, bypass": column("ours", spectra_s(world, lengths), 0.0),
        "veRL, bypass": column("veRL", 0.0, 0.0),
    }


HEAD = f"""\
# Seconds of a step on GPUs, estimated

{{date}}. **Nothing here was timed, ours and veRL's alike.** `{{command}}` computes it.

{PROMPTS} prompts of {PROMPT} tokens with {SAMPLES} responses, log-normal with a median of {RESPONSE // 8} and at most
{RESPONSE} tokens; {MINI_BATCHES} mini-batches; KL loss with a reference; packed rows; gradient checkpointing. H100s.

veRL is taken as its users tune it, without rank metrics: packed, dynamic micro-batches, fused kernels for the output
head, weights in buckets, and experts loaded as fast as ours (it is not known to do so). "Bypass": with `bypass_mode`,
which both have, the engine's log-probabilities are the old ones.

Assumed: passes reach 40% of 989e12 operations a second, memory 60% of 3.35 TB/s, links 70% of 450 GB/s, spectra
{SPECTRA:.0e} float64 operations a second with nothing to hide behind; a decode step takes 3 ms besides reading, a
collective 0.2 ms, an all-reduce in an engine 10 us besides its bytes. Measured, on a CPU: {1e3 * TENSOR_S:.2f} ms of
Python a tensor that vLLM loads. Left out, for both: verification, the optimizer, waking the engine, FSDP's own
communication, batches, capture.

"""


def page(facts: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> str:
    """The results as Markdown."""
    text = HEAD.format(**facts)
    for entry in rows:
        columns = entry["seconds"]
        cells = [[phase, *(f"{column[phase]:.2f}" for column in columns.values())] for phase in columns["ours"]]
        text += f"## {entry['model']} on {entry['gpus']} GPUs\n\n{table(['phase', *columns], cells)}\n"
        says = []
        for ours, theirs in (("ours", "veRL"), ("ours, bypass", "veRL, bypass")):
            ratio = columns[ours]["a step"] / columns[theirs]["a step"] - 1
            says.append(f"{theirs}: {abs(ratio):.1%} {'faster' if ratio > 0 else 'slower'} than ours")
        saved = 3 * entry["experts"] * entry["layers"] * TENSOR_S
        text += f"{'; '.join(says)}.{f' Experts one by one would add {saved:.1f} s.' if saved else ''}\n\n"
    return text.rstrip() + "\n"


def main(argv: Sequence[str]) -> None:
    """The command line."""
    out = parser(__doc__).parse_args(argv).out
    torch.manual_seed(0)
    lengths = (RESPONSE / 8 * torch.randn(PROMPTS * SAMPLES).mul(0.9).exp()).long().clamp(1, RESPONSE)
    rows = [
        {"model": w.name, "gpus": w.gpus, "experts": w.experts, "layers": w.layers, "seconds": phases(w, lengths)}
        for w in WORLDS
    ]
    write_report(out, provenance("step_estimate.py", argv), rows, page)


if __name__ == "__main__":
    main(sys.argv[1:])
