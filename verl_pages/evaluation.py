"""Builds the HTML page of an evaluation with results, curves, verdicts, and the responses to every problem."""

from collections.abc import Mapping, Sequence
from typing import Any

from verl_pages.html import BROWSER_SCRIPTS, has_formulas, render
from verl_pages.names import metric_name
from verl_pages.samples import Limits, PackedSamples, PromptSamples, pack_all

MAX_PAGE_BYTES = 64 << 20
"""Maximum page size in bytes. Responses are shortened or omitted to keep a page below this size, while metrics,
verdicts and questions are always kept."""

LIMITS = (
    *(Limits(characters, None) for characters in (20_000, 8_000, 3_000)),
    *(Limits(3_000, responses) for responses in (128, 64, 32, 16)),
    Limits(1_500, 4),
    Limits(800, 1),
    Limits(0, 0),
)
"""Limits on responses, from loosest to tightest. The page uses the loosest limits that make it small enough."""


def build_page(
    title: str,
    index: Mapping[str, Any],
    prompts: Sequence[PromptSamples],
    metrics: Sequence[str],
    verdicts: Mapping[str, str],
    max_bytes: int = MAX_PAGE_BYTES,
) -> str:
    """Return the page's HTML. All text from the evaluation is encoded as ASCII.

    Args:
        index: Data for ``evaluation.js``, without the responses.
        metrics: Names of the response metrics, without the length.
        verdicts: One-character code -> name of the verdict.
    """
    figures = ["num_tokens", *metrics]
    samples = {
        "list": 0,
        "noun": "problem",
        "truth": "Reference answer",
        "order": "place",
        "figures": [metric_name(name) for name in figures],
        "prefixes": [],
        "verdicts": verdicts,
        "files": "samples.parquet",
        "none": "There are no problems.",
        "hint": "",
        "limits": "",
    }

    formulas = has_formulas(text for prompt in prompts for text in prompt.texts())

    def text(chunks: Sequence[str]) -> str:
        links = [("results", "Results"), ("curves", "Curves"), ("responses", "Responses"), ("samples", "Problems")]
        scripts = (*BROWSER_SCRIPTS, "evaluation")
        whole = {**index, "samples": samples}
        return render(
            "evaluation.html", title, ("base", "pages"), scripts, whole, chunks, formulas=formulas, links=links
        )

    packed = pack_all(prompts, figures, LIMITS, 0, max_bytes - len(text(())) - 4096)
    samples["limits"] = _sentence(packed) if prompts else ""
    return text(packed.chunks)


def _sentence(packed: PackedSamples) -> str:
    """Return a note to the reader about content that the page omits."""
    characters, responses = packed.limits.characters, packed.limits.responses
    parts = [f"Of responses longer than {characters:,} characters, this page shows the beginning and the end."]
    if responses == 0:
        parts = ["To keep the page small, responses are left out."]
    elif responses is not None:
        parts.append(f"To keep the page small, it has at most {responses} responses per problem and run.")
    return " ".join([*parts, "samples.parquet has all of them in full; all verdicts are here."])
