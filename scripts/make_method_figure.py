"""Draws docs/method.svg: one response of the embedded model, from its hidden states to its advantage.

python scripts/make_method_figure.py [--out docs/method.svg]
"""

import argparse
from pathlib import Path

import matplotlib
import matplotlib.pyplot as plt
import torch
from matplotlib.axes import Axes
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from verl import RepresentationMetricsCalculator
from verl.config.paths import SHIPPED
from verl.rank.dynamics import prefix_counts, prefix_rows, velocity
from verl.rank.shaping import shaped_advantages
from verl.spectral import prefix_functionals

QUESTION = "What is 7453 - 450?"
STRIDE = 8
BLUE, ORANGE, GREY = "#3b6fb6", "#d9822b", "#8a8f98"


def sample_states() -> Tensor:
    """Hidden states ``[T, D]`` of the model's greedy response."""
    folder = SHIPPED / "data" / "tiny_model"
    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModelForCausalLM.from_pretrained(folder)
    chat = [{"role": "user", "content": QUESTION}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    tokens = model.generate(**prompt, max_new_tokens=128, do_sample=False)
    with torch.no_grad():
        states = model(tokens, output_hidden_states=True).hidden_states[-1][0]
    return states[prompt["input_ids"].shape[1] - 1 : -1].double()


def draw_states(axes: Axes, states: Tensor) -> None:
    axes.set_title("1. Hidden states")
    centred = states - states.mean(0)
    plane = centred @ torch.linalg.svd(centred, full_matrices=False)[2][:2].T
    axes.plot(*plane.T, color=GREY, linewidth=0.6, zorder=1)
    axes.scatter(*plane.T, c=range(len(plane)), cmap="viridis", s=12, zorder=2)
    axes.set(xlabel=f"first two of {states.shape[1]} directions", xticks=[], yticks=[])


def draw_spectra(axes: Axes, states: Tensor, rows: list[int]) -> None:
    axes.set_title("Singular values of prefixes")
    for shade, k in zip((0.35, 0.65, 1.0), rows, strict=True):
        values = torch.linalg.svdvals(states[:k] - states[:k].mean(0))
        axes.plot(range(1, len(values) + 1), values / values.sum(), color=BLUE, alpha=shade, label=f"{k} tokens")
    axes.set(xlabel="i", ylabel="$p_i$", yscale="log", ylim=(1e-4, 1))
    axes.legend(frameon=False)


def draw_ranks(axes: Axes, states: Tensor) -> None:
    axes.set_title("2. Effective rank along the response")
    length = torch.tensor([len(states)])
    every = torch.arange(1, len(states) + 1)[None]
    along = prefix_functionals(states[None], length, every, ["effective_rank"])["effective_rank"]
    rows = prefix_rows(length, STRIDE)
    marks = along.gather(1, rows - 1)
    axes.plot(every[0], along[0], color=BLUE, linewidth=1)
    axes.plot(rows[0], marks[0], "o", color=BLUE, markersize=4, label="$m_j$")
    means = marks.cumsum(1) / torch.arange(1, marks.shape[1] + 1)
    for k, value, mean in zip(rows[0, 1:], marks[0, 1:], means[0, :-1], strict=True):
        axes.plot([k, k], [mean, value], color=ORANGE, linewidth=1.5)
    axes.plot([], [], color=ORANGE, label=rf"$\delta_j$, mean {velocity(marks, prefix_counts(length, STRIDE))[0]:.2f}")
    axes.set(xlabel="tokens")
    axes.legend(frameon=False)


def draw_advantage(axes: Axes) -> None:
    axes.set_title(r"3, 4. The advantage, $\kappa = 2$")
    phi = torch.linspace(-0.6, 0.9, 301)
    for before, colour in ((0.7, BLUE), (-0.7, ORANGE)):
        column = torch.full((len(phi), 1), before)
        after = shaped_advantages(column, torch.ones_like(column), phi, 2.0, "all_tokens")
        axes.plot(phi, after[:, 0], color=colour, label=f"$A_0 = {before}$")
        axes.axhline(before, color=colour, linewidth=0.6, linestyle=":")
    axes.set(xlabel=r"$\Phi$", ylabel="$A$")
    axes.legend(frameon=False)


def main() -> None:
    """Write the figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=SHIPPED / "docs" / "method.svg")
    out = parser.parse_args().out
    matplotlib.rcParams.update({"svg.hashsalt": "verl", "font.size": 9, "axes.titlesize": 9, "svg.fonttype": "none"})
    states = sample_states()
    measured = RepresentationMetricsCalculator(diff_stride=STRIDE)(states[None, :, None], torch.ones(1, len(states)))
    print({name: round(float(value), 3) for name, value in measured["1"].items()}, f"{len(states)} tokens")
    figure, axes = plt.subplots(1, 4, figsize=(12, 3), layout="constrained")
    draw_states(axes[0], states)
    draw_spectra(axes[1], states, [len(states) // 4, len(states) // 2, len(states)])
    draw_ranks(axes[2], states)
    draw_advantage(axes[3])
    for one in axes:
        one.spines[["top", "right"]].set_visible(False)
    figure.savefig(out, metadata={"Date": None})


if __name__ == "__main__":
    main()
