"""Count how many tokens a forward pass would yield if earlier text drafted the next ones, from a run's stored tokens.

No engine runs. Stored responses are decoded once more on paper: every pass proposes up to k tokens for each response,
keeps those that agree with what was sampled, and draws one more token. As every position of a response has a random
number of its own, the sampled tokens are the same with and without drafts. The run must have visited its prompts twice.

    bash train.sh trainer.samples.freq=1 trainer.samples.tokens=true trainer.default_local_dir=RUN ...
    python benchmarks/draft_acceptance.py RUN [RUN ...] --model MODEL
"""

import argparse
import statistics
import time
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import pandas as pd
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from verl.data.responses import token_pieces

LONGEST = 8
"""Length in tokens of the longest text end that is looked up."""
PAST = 96
"""Number of cached tokens that a timed pass continues."""
SOURCES = ("ngram", "siblings", "history")
"""The response itself and its prompt; also the prompt's other responses; the prompt's responses of the visit before."""


class Response(NamedTuple):
    """A stored response: its tokens as text, and whether the policy sampled each of them."""

    tokens: list[str]
    sampled: list[bool]


class Visit(NamedTuple):
    """The responses to one prompt in one step, and those of the step that had it before."""

    prompt: list[str]
    responses: list[Response]
    before: list[Response]


class Corpus:
    """Texts in which the end of another text is looked up."""

    def __init__(self, num_texts: int) -> None:
        """Start with empty texts."""
        self.texts: list[list[str]] = [[] for _ in range(num_texts)]
        self._places: dict[tuple[str, ...], list[tuple[int, int]]] = defaultdict(list)

    def extend(self, number: int, tokens: Sequence[str]) -> None:
        """Append tokens to a text."""
        text = self.texts[number]
        for token in tokens:
            for length in range(1, min(LONGEST, len(text)) + 1):
                self._places[tuple(text[-length:])].append((number, len(text)))
            text.append(token)

    def propose(self, end: Sequence[str], k: int, among: Collection[int]) -> list[str]:
        """Return at most k tokens that followed the longest known part of ``end``, most recently in texts ``among``."""
        for length in range(min(LONGEST, len(end)), 0, -1):
            for number, place in reversed(self._places.get(tuple(end[-length:]), ())):
                if number in among:
                    return self.texts[number][place : place + k]
        return []


def num_passes(visit: Visit, source: str, k: int) -> int:
    """Return the number of passes in which each response to a prompt takes part, summed over the responses.

    All of them begin at once, so that a response drafts from as much of its siblings as exists by then.
    """
    before = visit.before if source == "history" else []
    num = len(visit.responses)
    corpus = Corpus(num + len(before))
    for number, response in enumerate([*visit.responses, *before]):
        corpus.extend(number, visit.prompt)
        if number >= num:
            corpus.extend(number, response.tokens)
    positions = [0] * num
    passes = 0
    while True:
        drafts = {}
        for number, (tokens, sampled) in enumerate(visit.responses):
            # An environment's tokens come without a pass.
            while positions[number] < len(tokens) and not sampled[positions[number]]:
                corpus.extend(number, [tokens[positions[number]]])
                positions[number] += 1
            if positions[number] < len(tokens):
                among = {"ngram": [number], "siblings": range(num), "history": range(num, num + len(before))}[source]
                drafts[number] = corpus.propose(corpus.texts[number][-LONGEST:], k, among)
        if not drafts:
            return passes
        passes += len(drafts)
        for number, draft in drafts.items():
            tokens, sampled = visit.responses[number]
            end = positions[number]
            for token in draft:
                if end + 1 >= len(tokens) or not sampled[end + 1] or token != tokens[end]:
                    break
                end += 1
            corpus.extend(number, tokens[positions[number] : end + 1])
            positions[number] = end + 1


def visits(run: Path, tokenizer: PreTrainedTokenizerBase) -> Iterator[Visit]:
    """Yield every visit of a prompt but the first."""
    samples = pd.concat([pd.read_parquet(path) for path in sorted((run / "samples").glob("train_*.parquet"))])
    for _, of_prompt in samples.groupby("uid"):
        prompt = token_pieces(tokenizer(of_prompt["prompt"].iloc[0], add_special_tokens=False)["input_ids"], tokenizer)
        before: list[Response] = []
        for _, rows in of_prompt.groupby("step"):
            responses = [
                Response(list(tokens), [logprob is not None and logprob == logprob for logprob in logprobs])
                for tokens, logprobs in zip(rows["tokens"], rows["token_logprobs"], strict=True)
            ]
            if before:
                yield Visit(prompt, responses, before)
            before = responses


def pass_seconds(model: PreTrainedModel, slots: int, positions: int, repeats: int = 15) -> float:
    """Return the median seconds of a pass over ``positions`` new tokens of each of ``slots`` texts."""
    tokens = torch.randint(10, 1000, (slots, PAST + positions))
    seconds = []
    with torch.inference_mode():
        cache = model(tokens[:, :PAST], use_cache=True).past_key_values
        for _ in range(repeats):
            started = time.perf_counter()
            model(tokens[:, PAST:], past_key_values=cache, use_cache=True)
            seconds.append(time.perf_counter() - started)
            cache.crop(PAST)
    return statistics.median(seconds)


def print_costs(folder: str, drafts: Sequence[int]) -> None:
    """Print what a pass over k + 1 positions costs against one over a single position."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    print(f"\nSeconds of a pass over k + 1 positions, against one position; {torch.get_num_threads()} threads\n")
    print("| Busy slots | " + " | ".join(f"k = {k}" for k in drafts) + " |")
    print("|---:|" + "---:|" * len(drafts))
    for slots in (1, 4, 16):
        single = pass_seconds(model, slots, 1)
        ratios = [pass_seconds(model, slots, k + 1) / single for k in drafts]
        print(f"| {slots} | " + " | ".join(f"{ratio:.2f}" for ratio in ratios) + " |")


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table for every run."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", type=Path)
    parser.add_argument("--model", required=True, help="folder of the model, for its tokenizer")
    parser.add_argument("--drafts", nargs="+", type=int, default=[1, 2, 4, 8], metavar="K")
    parser.add_argument("--cost", action="store_true", help="also time passes of the model")
    options = parser.parse_args(arguments)
    tokenizer = AutoTokenizer.from_pretrained(options.model)
    for run in options.runs:
        found = list(visits(run, tokenizer))
        lengths = [sum(response.sampled) for visit in found for response in visit.responses]
        if not lengths:
            parser.error(f"{run}: holds no prompt that was visited twice with trainer.samples.tokens=true")
        print(f"\n{run.name}: {len(lengths)} responses of {sum(lengths) / len(lengths):.1f} tokens; tokens a pass\n")
        print("| Draft from | " + " | ".join(f"k = {k}" for k in options.drafts) + " |")
        print("|---|" + "---:|" * len(options.drafts))
        for source in SOURCES:
            yields = [sum(lengths) / sum(num_passes(visit, source, k) for visit in found) for k in options.drafts]
            print(f"| {source} | " + " | ".join(f"{value:.2f}" for value in yields) + " |")
    if options.cost:
        print_costs(options.model, options.drafts)


if __name__ == "__main__":
    main()
