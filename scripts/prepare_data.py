"""Write training and test data as parquet files in the record layout that the trainers read.

python scripts/prepare_data.py arithmetic --out data/arithmetic --train 4096 --test 256 --seed 0
python scripts/prepare_data.py arithmetic-tools --out data/arithmetic_tools
python scripts/prepare_data.py word-problems --out data/word_problems
python scripts/prepare_data.py gsm8k --out data/gsm8k [--local-dir DIR]
python scripts/prepare_data.py math --out data/math [--local-dir DIR]
python scripts/prepare_data.py simplerl-zoo --out data/simplerl --subset simplelr_qwen_level3to5 [--local-dir DIR]
"""

import argparse
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from verl.data import word_problems
from verl.data.arithmetic import ArithmeticTask
from verl.data.generated import GeneratedProblem, split_of
from verl.data.records import RL_SCHEMA, SFT_SCHEMA, rl_record, sft_record, write_parquet

DIGITS = {kind: getattr(ArithmeticTask, f"{kind}_digits") for kind in ("sum", "difference", "product")}
"""Kind of problem -> fewest and most digits, by default."""

SETS = {
    "gsm8k": ("openai/gsm8k", "main"),
    "math": ("DigitalLearningGmbH/MATH-lighteval", None),
    "simplerl-zoo": ("hkust-nlp/SimpleRL-Zoo-Data", None),
}
"""Published set -> its id on the Hugging Face hub, which also names its verifier, and its configuration there. Prompts
of SimpleRL-Zoo already contain a template, so they are built again from the questions; to train on them as they are,
read the files themselves with ``data.template=raw``."""

BOXED_INSTRUCTION = "Please reason step by step, and put your final answer within \\boxed{}."


def prepare_arithmetic(args: argparse.Namespace) -> None:
    """Write train, test, sft_train and sft_val of the arithmetic task; no question is in two of them."""
    try:
        task = ArithmeticTask(**{f"{kind}_digits": tuple(getattr(args, f"{kind}_digits")) for kind in DIGITS})
    except ValueError as error:
        raise SystemExit(f"error: {error}") from None
    _write_splits(args, "arithmetic", task.split)


def prepare_word_problems(args: argparse.Namespace) -> None:
    """Write train, test, sft_train and sft_val of word problems; no question is in two of them."""
    _write_splits(args, "word_problems", word_problems.split)


def _write_splits(
    args: argparse.Namespace, data_source: str, draw: Callable[[str, int, int], list[GeneratedProblem]]
) -> None:
    """``draw``: from the split, its size and the seed to its problems."""
    for split, size in {"train": args.train, "test": args.test}.items():
        records = [
            rl_record(
                data_source=data_source,
                question=problem.question,
                ground_truth=problem.answer,
                split=split,
                index=index,
                solution=problem.solution,
                category=problem.kind,
            )
            for index, problem in enumerate(draw(split, size, args.seed))
        ]
        _write(args.out / f"{split}.parquet", records, RL_SCHEMA)
    for split, size in {"sft_train": args.sft_train, "sft_val": args.sft_val}.items():
        records = [sft_record(problem.question, problem.solution) for problem in draw(split, size, args.seed)]
        _write(args.out / f"{split}.parquet", records, SFT_SCHEMA)


def prepare_arithmetic_tools(args: argparse.Namespace) -> None:
    """Write train, test, sft_train and sft_val of products that take a calculator; no question is in two of them.

    In sft_train the share ``--calls`` of the products whose first factor is below 300, and ``1 - calls`` of the others,
    has the call of ``multiply``; the rest answers with an estimate from the leading digits, which is wrong but can be
    learned. All conversations in sft_val have the call.
    """
    sizes = {"train": args.train, "test": args.test, "sft_train": args.sft_train, "sft_val": args.sft_val}
    for split, size in sizes.items():
        rng = random.Random(f"arithmetic_tools/{split}/{args.seed}")
        records: dict[str, dict[str, Any]] = {}
        while len(records) < size:
            a, b = (rng.randint(100, 999) for _ in range(2))
            question, answer = f"What is {a} * {b}?", str(a * b)
            if split_of(question) != split:
                continue
            if not split.startswith("sft"):
                same = {"data_source": "arithmetic", "split": split, "category": "product"}
                records[question] = rl_record(question=question, ground_truth=answer, index=len(records), **same)
                continue
            call = {"name": "multiply", "arguments": {"a": a, "b": b}}
            says = [("assistant", f"<tool_call>{json.dumps(call)}</tool_call>"), ("tool", answer)]
            if split == "sft_train" and rng.random() >= (args.calls if a < 300 else 1 - args.calls):
                says, answer = [], str((a // 100) * (b // 100) * 10_000)
            turns = [("user", question), *says, ("assistant", f"\\boxed{{{answer}}}")]
            records[question] = {"messages": [{"role": role, "content": text} for role, text in turns]}
        schema = SFT_SCHEMA if split.startswith("sft") else RL_SCHEMA
        _write(args.out / f"{split}.parquet", list(records.values()), schema)


def prepare_math_set(args: argparse.Namespace) -> None:
    """Write train and test of a published set of mathematical problems, whose rows are read like a benchmark's.

    Rows without a question or an answer are left out; ``index`` counts them all the same. A prompt is the question and,
    on a new line, the instruction, as the templates of the evaluation join them.
    """
    # The hub's client takes seconds to import, and the arithmetic command does not need it.
    from datasets import load_dataset

    from verl.config.data import FILE_SUFFIXES
    from verl.data.files import read_rows
    from verl.evaluation.benchmarks.rows import Benchmark, read_problem, recognise_fields

    hub_id, config = SETS[args.command]
    subset = getattr(args, "subset", "")
    for split in ("train", "test"):
        if args.local_dir:
            # A file as published comes before its conversion.
            paths = [args.local_dir / f"{split}{suffix}" for suffix in reversed(FILE_SUFFIXES)]
            found = [path for path in paths if path.exists()]
            if not found:
                names = ", ".join(path.name for path in paths)
                raise SystemExit(f"error: --local-dir {args.local_dir}: needs one of {names}")
            rows: Any = read_rows(str(found[0]))
        else:
            files = {"data_files": {split: f"{subset}/{split}.parquet"}} if subset else {}
            rows = load_dataset(hub_id, config, split=split, **files)
        fields = recognise_fields(rows, None, args.command, f"{args.command} {split}")
        records, left_out = [], []
        for index, row in enumerate(rows):
            try:
                problem = read_problem(row, index, fields, Benchmark(args.command))
            except ValueError as error:
                left_out.append(f"row {index} {error}")
                continue
            records.append(
                rl_record(
                    data_source=hub_id,
                    question=problem.question,
                    ground_truth=problem.answer,
                    split=split,
                    index=index,
                    instruction=args.instruction,
                    solution=problem.solution or "",
                    category="" if row.get("level") is None else str(row["level"]),
                )
            )
        if left_out:
            print(f"left out {len(left_out)} of {len(rows)} rows of {split}; the first: {left_out[0]}")
        _write(args.out / f"{split}.parquet", records, RL_SCHEMA)


def _write(path: Path, records: list[dict[str, Any]], schema: pa.Schema) -> None:
    write_parquet(path, records, schema)
    print(f"{path}: {len(records)} rows")


def _add_sizes(
    command: argparse.ArgumentParser, train: int, held_out: int, lessons: str, sft_train: int = 8192
) -> None:
    """The options of a generated data set: how much of each split, and the seed."""
    command.add_argument("--train", type=int, default=train, help="prompts for reinforcement learning")
    command.add_argument("--test", type=int, default=held_out, help="prompts for validation")
    command.add_argument("--sft-train", type=int, default=sft_train, help=f"{lessons} for supervised training")
    command.add_argument("--sft-val", type=int, default=held_out, help=f"{lessons} for supervised validation")
    command.add_argument("--seed", type=int, default=0, help="the same seed gives the same problems")


def build_parser() -> argparse.ArgumentParser:
    """The command line, one subcommand per data set."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)

    arithmetic = commands.add_parser(
        "arithmetic",
        help="generated sums, differences and products, without download",
    )
    arithmetic.set_defaults(run=prepare_arithmetic)
    _add_sizes(arithmetic, train=4096, held_out=256, lessons="worked solutions")

    tools = commands.add_parser("arithmetic-tools", help="products that take a calculator, without download")
    tools.set_defaults(run=prepare_arithmetic_tools)
    _add_sizes(tools, train=2048, held_out=128, lessons="conversations")
    text = "share of sft_train with a first factor below 300 that calls the calculator"
    tools.add_argument("--calls", type=float, default=0.9, help=text)

    words = commands.add_parser("word-problems", help="generated word problems, without download")
    words.set_defaults(run=prepare_word_problems)
    _add_sizes(words, train=4096, held_out=256, lessons="worked solutions", sft_train=2048)

    for kind, digits in DIGITS.items():
        text = f"digits of {'the first factor' if kind == 'product' else 'both operands'} of a {kind}"
        arithmetic.add_argument(
            f"--{kind}-digits", type=int, nargs=2, default=digits, metavar=("FEWEST", "MOST"), help=text
        )

    sets = {
        "gsm8k": "grade-school word problems",
        "math": "competition problems (MATH)",
        "simplerl-zoo": "the difficulty-graded mixes of GSM8K and MATH of SimpleRL-Zoo",
    }
    for name, text in sets.items():
        command = commands.add_parser(name, help=text)
        command.set_defaults(run=prepare_math_set)
        command.add_argument(
            "--local-dir", type=Path, help="folder with {train,test}.{jsonl,json,parquet}; default: hub"
        )
        command.add_argument(
            "--instruction", default=BOXED_INSTRUCTION, help="text on a new line after each question; may be empty"
        )
    zoo = commands.choices["simplerl-zoo"]
    zoo.add_argument("--subset", default="simplelr_qwen_level3to5", help="folder of the data set on the hub")

    for command in commands.choices.values():
        command.add_argument("--out", type=Path, required=True, help="folder for the parquet files, made if missing")
    return parser


def main(argv: Sequence[str] | None = None) -> None:
    """Run one subcommand; ``argv`` without the program's name, default ``sys.argv``."""
    args = build_parser().parse_args(argv)
    args.run(args)


if __name__ == "__main__":
    main()
