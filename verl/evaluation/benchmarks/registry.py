"""The published benchmarks: source, licence and verifier of each.

Hub ids and licences are as stated on their pages and public copies; ``unknown`` if none was found. Sizes on the hub may
differ from those of other copies: ``asdiv`` has 2305 problems there, and 2215 where answers of several parts were left
out.
"""

from collections.abc import Mapping
from dataclasses import dataclass

OPEN = "open_answer"
CHOICE = "multiple_choice"

RELEASE = "https://github.com/hf618/VERL/tree/main/examples/simplelr_math_eval/data"
"""The data folder of the paper's release: every benchmark of ``FULL_PASS1`` as ``<name>/test.jsonl``."""


@dataclass(frozen=True)
class Benchmark:
    """One benchmark."""

    name: str
    hub_id: str | None
    """Data set on the Hugging Face hub; None if no copy there is known, see ``home``."""
    hub_split: str = "test"
    hub_config: str | None = None
    """Configuration on the hub; None for the default."""
    hub_revision: str | None = None
    """Branch on the hub; None for ``main``."""
    home: str = ""
    """Where to get ``<name>/test.jsonl`` if not from the hub."""
    fields: Mapping[str, str] | None = None
    """Our field (``rows.FIELD_NAMES``) -> theirs, if recognition would choose the wrong one."""
    verifier: str = OPEN
    """Data source, a key of ``verl.rewards.registry.VERIFIERS``. In any benchmark, a problem with options whose answer
    is letters is scored by ``multiple_choice``."""
    relative_tolerance: float = 0.0
    """Relative error up to which a decimal number is correct; 0 leaves it to the verifier."""
    licence: str = "unknown"
    """As published: an SPDX identifier if there is one."""
    language: str = "en"
    """``en`` or ``zh``."""
    demonstrations: str | None = None
    """Few-shot examples for base models, a key of ``verl.data.demonstrations.DEMONSTRATIONS``; None if this benchmark
    is usually evaluated without."""


_RECORDS = [
    Benchmark("arithmetic", hub_id=None, home="bash train.sh", verifier="arithmetic", licence="same as VERL"),
    # Competitions
    Benchmark("math24o", None, home=RELEASE, language="zh"),
    Benchmark("OlymMATH-EN-EASY", "RUC-AIBOX/OlymMATH", hub_config="en-easy", licence="mit"),
    Benchmark("OlymMATH-EN-HARD", "RUC-AIBOX/OlymMATH", hub_config="en-hard", licence="mit"),
    Benchmark("OlymMATH-ZH-EASY", "RUC-AIBOX/OlymMATH", hub_config="zh-easy", licence="mit", language="zh"),
    Benchmark("OlymMATH-ZH-HARD", "RUC-AIBOX/OlymMATH", hub_config="zh-hard", licence="mit", language="zh"),
    Benchmark("BeyondAIME", "ByteDance-Seed/BeyondAIME", licence="cc0-1.0"),
    Benchmark("aime24", "HuggingFaceH4/aime_2024", hub_split="train", licence="none stated"),
    Benchmark("aime25", "math-ai/aime25", licence="apache-2.0"),
    Benchmark("amc23", "math-ai/amc23"),
    Benchmark("amc24", "rawsh/2024_AMC12", hub_split="train", licence="none stated; problems copyright MAA"),
    Benchmark("olympiadbench", "Hothan/OlympiadBench", "train", "OE_TO_maths_en_COMP", licence="apache-2.0"),
    # Word problems
    Benchmark("gsm8k", "openai/gsm8k", hub_config="main", verifier="gsm8k", licence="mit", demonstrations="words"),
    # Published with a loading script, which `datasets` no longer runs; the hub's own conversion is used instead.
    Benchmark(
        "asdiv",
        "EleutherAI/asdiv",
        hub_split="validation",
        hub_revision="refs/convert/parquet",
        licence="cc-by-nc-4.0",
        demonstrations="words",
    ),
    Benchmark("mawps", "MU-NLPC/Calc-mawps", licence="mit", demonstrations="words"),
    Benchmark("svamp", "ChilleD/SVAMP", licence="mit", demonstrations="words"),
    Benchmark(
        "tabmwp",
        hub_id=None,
        home=RELEASE,
        licence="cc-by-nc-sa-4.0",
        demonstrations="words",
    ),
    Benchmark("cmath", "weitianwen/cmath", licence="cc-by-4.0", language="zh", demonstrations="chinese"),
    # School and university
    Benchmark("math", "DigitalLearningGmbH/MATH-lighteval", licence="mit", demonstrations="formulas"),
    Benchmark("math500", "HuggingFaceH4/MATH-500", licence="mit (MATH)", demonstrations="formulas"),
    # Answers are measured quantities with two or three digits.
    Benchmark("minerva_math", "math-ai/minervamath", relative_tolerance=0.01, demonstrations="formulas"),
    Benchmark(
        "college_math",
        "di-zhang-fdu/College_Math_Test",
        licence="per problem, in its field license",
        demonstrations="formulas",
    ),
    Benchmark("carp_en", None, home=RELEASE, demonstrations="formulas"),
    Benchmark("gaokao2023en", "MARIO-Math-Reasoning/Gaokao2023-Math-En", hub_split="train", licence="mit"),
    Benchmark("gaokao2024_I", None, home=RELEASE, language="zh"),
    Benchmark("gaokao2024_II", None, home=RELEASE, language="zh"),
    Benchmark("gaokao2024_mix", None, home=RELEASE, language="zh"),
    Benchmark("gaokao_math_cloze", "hails/agieval-gaokao-mathcloze", licence="mit", language="zh"),
    Benchmark("cn_middle_school", None, home=RELEASE, language="zh", demonstrations="chinese"),
    # Multiple choice
    Benchmark("gaokao_math_qa", "hails/agieval-gaokao-mathqa", verifier=CHOICE, licence="mit", language="zh"),
    Benchmark(
        "aqua", "deepmind/aqua_rat", hub_config="raw", verifier=CHOICE, licence="apache-2.0", demonstrations="choices"
    ),
    Benchmark("mmlu_stem", "TIGER-Lab/MMLU-STEM", verifier=CHOICE, licence="mit", demonstrations="choices"),
    Benchmark(
        "sat_math", "mcaleste/sat_multiple_choice_math_may_23", "train", verifier=CHOICE, demonstrations="choices"
    ),
]

BENCHMARKS: dict[str, Benchmark] = {benchmark.name: benchmark for benchmark in _RECORDS}
"""Name, as in ``benchmarks=...`` -> benchmark."""
