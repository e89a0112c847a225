"""The peak of a command's memory on this machine, summed over all its processes, and who held it.

    python benchmarks/measure_memory.py bash train.sh preset=small model.path=data/models/smollm2-135m ...

Proportional set sizes (PSS) are summed, so that pages that processes share count once. Processes are recognised by a
variable in their environment, so Ray's count too, wherever they hang in the tree. Linux only.
"""

import argparse
import os
import re
import subprocess
import time
from collections import Counter
from pathlib import Path

MARK = "VERL_MEASURED"
GB = 1e9


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--interval", type=float, default=0.5, help="seconds between samples")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    args = parser.parse_args()
    mark = f"{os.getpid()}-{time.time_ns()}"
    process = subprocess.Popen(args.command, env=os.environ | {MARK: mark})
    peak: Counter[str] = Counter()
    at, begin, known = 0.0, time.monotonic(), dict[int, bool]()
    while process.poll() is None:
        now = sample(mark, known)
        if now.total() > peak.total():
            peak, at = now, time.monotonic() - begin
        time.sleep(args.interval)
    print(f"peak {peak.total() / GB:.2f} GB after {at:.0f} s of {time.monotonic() - begin:.0f} s")
    for name, size in peak.most_common():
        print(f"  {size / GB:6.2f} GB  {name}")
    raise SystemExit(process.returncode)


def sample(mark: str, known: dict[int, bool]) -> Counter[str]:
    """Bytes by name of process, of all processes that carry ``mark``; ``known`` remembers which do."""
    sizes: Counter[str] = Counter()
    for folder in Path("/proc").glob("[0-9]*"):
        pid = int(folder.name)
        try:
            if pid not in known:
                known[pid] = f"{MARK}={mark}".encode() in (folder / "environ").read_bytes()
            if known[pid]:
                sizes[name_of(folder)] += pss(folder)
        except OSError:
            # It ended in the meantime, or belongs to another user.
            continue
    return sizes


def pss(folder: Path) -> int:
    """Proportional set size in bytes."""
    line = next(line for line in (folder / "smaps_rollup").read_text().splitlines() if line.startswith("Pss:"))
    return int(line.split()[1]) * 1024


def name_of(folder: Path) -> str:
    """What the process calls itself, without numbers; ``ray::ActorRolloutWorker.generate`` without its method."""
    title = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    if title.startswith("ray::"):
        return re.split(r"[. (]", title)[0]
    words = title.split()
    modules = [words[i + 1] for i, word in enumerate(words[:-1]) if word == "-m"]
    scripts = [Path(word).name for word in words if word.endswith(".py")]
    return (modules + scripts + [Path(words[0]).name if words else "?"])[0]


if __name__ == "__main__":
    main()
