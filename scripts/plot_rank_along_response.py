"""Draw effective rank, velocity and acceleration along one response of a model.

python scripts/plot_rank_along_response.py --model data/tiny_model --prompt "Compute 47 * 38 - 19." --out docs/rank.svg

`transformers` samples the response. The states are those after the final norm, one per sampled token. Velocity and
acceleration at k tokens are those of the response's first k tokens, at stride 1.
"""

import argparse
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402  (the backend must be chosen first)
import torch  # noqa: E402
from torch import Tensor  # noqa: E402
from transformers import AutoModelForCausalLM, AutoTokenizer  # noqa: E402

from verl.rank.dynamics import acceleration, velocity  # noqa: E402
from verl.spectral import prefix_functionals  # noqa: E402


def sample_states(model_path: str, prompt: str, max_tokens: int, seed: int) -> Tensor:
    """States ``[T, D]`` from which the tokens of one sampled response were drawn."""
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    model = AutoModelForCausalLM.from_pretrained(model_path)
    chat = [{"role": "user", "content": prompt}]
    tokens = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_tensors="pt", return_dict=False)
    torch.manual_seed(seed)
    with torch.no_grad():
        sequence = model.generate(tokens, do_sample=True, temperature=1.0, top_k=0, max_new_tokens=max_tokens)
        states = model.base_model(sequence).last_hidden_state[0]
    # Row j is the state before token j: the last of the prompt samples the first of the response.
    return states[tokens.shape[1] - 1 : -1]


def curves(states: Tensor) -> dict[str, Tensor]:
    """Effective rank, velocity and acceleration of the first k tokens, k = 2..T, at stride 1."""
    length = len(states)
    prefixes = torch.arange(2, length + 1)[None]
    ranks = prefix_functionals(states[None], torch.tensor([length]), prefixes, ["effective_rank"])["effective_rank"]
    counts = torch.arange(1, length)
    along = ranks.expand(length - 1, -1)
    return {
        "effective rank": ranks[0],
        "velocity (ERV)": velocity(along, counts),
        "acceleration (ERA)": acceleration(along, counts),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="folder or hub id")
    parser.add_argument("--prompt", required=True)
    parser.add_argument("--max-tokens", type=int, default=256)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True, help="figure to write: .svg or .png")
    args = parser.parse_args()
    states = sample_states(args.model, args.prompt, args.max_tokens, args.seed)
    if len(states) < 4:
        raise SystemExit(f"the response has {len(states)} tokens, too few to draw; try another --seed or --prompt")
    # Reproducible files, with text stored as text.
    plt.rcParams |= {"svg.hashsalt": "verl", "svg.fonttype": "none"}
    figure, axes = plt.subplots(3, 1, sharex=True, figsize=(6, 4.5), layout="constrained")
    for axis, (name, values) in zip(axes, curves(states).items(), strict=True):
        axis.plot(range(2, len(states) + 1), values, color="#20639b", linewidth=1.5)
        axis.set_ylabel(name, fontsize=8)
        axis.tick_params(labelsize=8)
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    axes[-1].set_xlabel("tokens of the response", fontsize=8)
    figure.savefig(args.out, metadata={"Date": None} if args.out.suffix == ".svg" else None)
    print(f"{args.out}: a response of {len(states)} tokens")


if __name__ == "__main__":
    main()
