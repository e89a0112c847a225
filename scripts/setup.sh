#!/usr/bin/env bash
# Makes the virtual environment for train.sh, eval.sh and scripts/test.sh.
#
# An environment is complete if and only if it holds the file .verl-setup, which is written last and names what the
# environment was made from. Until then .verl-setup.unfinished takes its place, and the next run starts again; with
# an update of a complete one it goes on.
set -euo pipefail

usage() {
  cat <<'EOF'
Usage: scripts/setup.sh [--cpu | --gpu] [--dev] [--venv DIR]

  --cpu, --gpu  which builds of torch and vLLM to install; default: those of the existing environment, otherwise
                --gpu if nvidia-smi lists a GPU, --cpu if not; README.md says which versions of them are tested
  --dev         also install what tests and checks need
  --venv DIR    where to put the environment; default: .venv in the repository root

VERL_PYTHON=python3.12 chooses the interpreter; default: the first of python3.11, python3.12 and python3 that is
Python 3.11 or 3.12 and runs. pip's own settings (PIP_INDEX_URL, PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS, ...) are kept.
EOF
}

die() {
  printf 'setup.sh: %s\n' "$*" >&2
  exit 1
}

say() {
  printf 'setup.sh: [%3d s] %s\n' "$SECONDS" "$*"
}

# --- arguments -------------------------------------------------------------------------------------------------------

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd -P)
venv=$root/.venv
asked_mode=
dev=no
while (($#)); do
  case $1 in
    --cpu | --gpu)
      [[ -z $asked_mode || $asked_mode == "${1#--}" ]] || die "--cpu and --gpu exclude each other; give one of them"
      asked_mode=${1#--}
      ;;
    --dev) dev=yes ;;
    --venv)
      [[ -n ${2:-} && $2 != --* ]] || die "--venv needs a directory"
      venv=$2
      shift
      ;;
    --help | -h)
      usage
      exit 0
      ;;
    *) die "unknown argument '$1'; see scripts/setup.sh --help" ;;
  esac
  shift
done
[[ $venv == /* ]] || venv=$PWD/$venv
stamp=$venv/.verl-setup
unfinished=$venv/.verl-setup.unfinished
log=$venv/setup.log
cd "$root"

# Settings of another environment, or settings that install packages elsewhere, must not leak in.
unset VIRTUAL_ENV PYTHONPATH PYTHONHOME PIP_TARGET PIP_PREFIX PIP_ROOT PIP_USER PIP_REQUIRE_VIRTUALENV
export PYTHONNOUSERSITE=1 PIP_NO_INPUT=1 PIP_DISABLE_PIP_VERSION_CHECK=1
# pip would compile one file after another, which is half of its time; compile_packages takes all cores.
export PIP_COMPILE=0

# --- what exists, and what is wanted ---------------------------------------------------------------------------------

stamped() { # the value of one key of the stamp, or of the stamp before an unfinished update
  { cat "$stamp" "$unfinished" 2>/dev/null || true; } | sed -n "s/^$1=//p"
}

choose_mode() { # sets $mode
  mode=${asked_mode:-$(stamped mode)}
  [[ -z $mode ]] || return 0
  mode=cpu
  [[ $(nvidia-smi -L 2>/dev/null || true) != GPU* ]] || mode=gpu
}

python_version() { # "3.11" if the interpreter $1 runs and can make environments; otherwise fails
  "$1" -c 'import sys, ensurepip, venv; print("%d.%d" % sys.version_info[:2])' 2>/dev/null </dev/null
}

choose_python() { # sets $python
  local version candidates=(python3.11 python3.12 python3)
  [[ -z ${VERL_PYTHON:-} ]] || candidates=("$VERL_PYTHON")
  for python in "${candidates[@]}"; do
    # Being on PATH is not enough: a pyenv shim exists for interpreters that are not selected.
    version=$(python_version "$python") || continue
    if [[ $version == 3.11 || $version == 3.12 ]]; then
      # In an activated environment, the interpreter behind it: the environment itself may be removed below.
      python=$("$python" -c 'import sys; print(sys._base_executable)')
      return
    fi
  done
  [[ -z ${VERL_PYTHON:-} ]] || die "VERL_PYTHON=$VERL_PYTHON: not a working Python 3.11 or 3.12 with venv"
  die "no working Python 3.11 or 3.12 with venv found (Debian, Ubuntu: python3-venv); set VERL_PYTHON to one"
}

fits() { # the environment is complete and of the wanted kind, whatever the versions in it
  [[ -f $stamp && ! -f $unfinished ]] && of_this_kind
}

was_updated() { # it was complete before an update that was interrupted: pip goes on from whatever is there
  [[ ! -f $stamp && -s $unfinished ]] && of_this_kind
}

of_this_kind() {
  [[ $(stamped mode) == "$mode" && $(stamped root) == "$root" ]] || return 1
  local version
  version=$(python_version "$venv/bin/python") && [[ $version == "$(stamped python)" ]] || return 1
  [[ -z ${VERL_PYTHON:-} || $(python_version "$VERL_PYTHON") == "$version" ]]
}

up_to_date() {
  fits && [[ $(stamped requirements) == "$requirements" && ($dev == no || $(stamped dev) == yes) ]]
}

finish_if_up_to_date() {
  if up_to_date; then
    say "$venv is up to date ($mode)"
    exit 0
  fi
}

refuse_foreign() { # before anything is written: it would end up in what another checkout uses
  local target owner
  owner=$(stamped root)
  [[ $owner != "$root" ]] || return 0
  target=$(readlink -f "$venv" || true)
  if [[ -L $venv ]]; then
    die "$venv is a link to $target, which is not this checkout's; to use it as it is, set VERL_ENV=$target, or remove" \
      "the link to have an environment made"
  fi
  # A checkout that was moved brings its environment along.
  if [[ -n $owner && -e $owner/scripts/setup.sh ]]; then
    die "$venv belongs to the checkout $owner; to use it as it is, set VERL_ENV=$target, or choose another --venv"
  fi
}

refuse_foreign
choose_mode
requirements=$(cat requirements.txt requirements/*.txt setup.py | cksum)
finish_if_up_to_date

# Of runs at once, on this machine or on others that share the folder, all but the first wait and then find the work done.
# The script itself is the lock file. NFS locks only a descriptor that may write; nothing is ever written to it.
if command -v flock >/dev/null; then
  if [[ -w scripts/setup.sh ]]; then
    exec 9>>scripts/setup.sh
  else
    exec 9<scripts/setup.sh
  fi
  if ! flock --nonblock 9; then
    say "waiting for another setup.sh to finish"
    flock 9
    choose_mode
  fi
  finish_if_up_to_date
fi

# --- the steps -------------------------------------------------------------------------------------------------------

quietly() { # runs a command with its output in the log
  printf '\n$ %s\n' "$*" >>"$log"
  "$@" >>"$log" 2>&1 </dev/null
}

step() { # step TEXT COMMAND...
  say "$1"
  quietly "${@:2}" || fail "$1: failed"
}

fail() { # print the end of the log, then one line that says what failed
  tail -n 15 "$log" >&2
  die "$*; the whole log is in $log"
}

make_environment() {
  if fits || was_updated; then
    [[ $(stamped dev) == no ]] || dev=yes
    [[ ! -f $stamp ]] || mv "$stamp" "$unfinished"
    : >"$log"
    say "bringing $venv up to date ($mode)"
    return
  fi
  choose_python
  if [[ -n $(ls -A "$venv" 2>/dev/null) ]]; then
    # Remove only what this script made.
    [[ -f $stamp || -f $unfinished ]] ||
      die "$venv was not made by setup.sh; move it away, or choose another folder with --venv"
    say "removing $venv, which is unfinished or for another mode or Python"
  fi
  say "making $venv with $("$python" -V) ($mode)"
  # The marker survives the removal: it exists from before the first package until after the last.
  mkdir -p "$venv"
  : >"$unfinished"
  find "$venv" -mindepth 1 -maxdepth 1 ! -name "${unfinished##*/}" -exec rm -rf {} +
  quietly "$python" -m venv "$venv" || fail "python -m venv: failed"
}

install_cpu_torch() {
  local torch name report=$venv/torch-report.json
  torch=$(sed -n 's/^torch==//p' requirements/cpu.txt)
  say "torch $torch, CPU build"
  if quietly "$pip" install "torch==$torch+cpu"; then
    return
  fi
  # Elsewhere the CPU build has no name of its own (macOS), or the index offers only the CUDA build. Ask pip which one
  # it would install before downloading gigabytes.
  quietly "$pip" install --dry-run --quiet --ignore-installed --report "$report" "torch==$torch" ||
    fail "pip finds no torch $torch for $("$venv/bin/python" -V); choose another Python with VERL_PYTHON, or set" \
      "PIP_EXTRA_INDEX_URL to PyTorch's CPU wheel index"
  for name in nvidia cuda; do
    if grep -q "\"name\": \"$name-" "$report"; then
      die "pip finds only the CUDA build of torch $torch; set PIP_EXTRA_INDEX_URL to PyTorch's CPU wheel index"
    fi
  done
  quietly "$pip" install "torch==$torch" || fail "torch $torch: failed"
}

driver_version() { # of NVIDIA, if nvidia-smi lists a GPU; otherwise nothing
  [[ $(nvidia-smi -L 2>/dev/null || true) != GPU* ]] || nvidia-smi --query-gpu=driver_version --format=csv,noheader | head -n 1
}

refuse_verl() { # ByteDance's package of the same import name, left by a pip install into this environment
  ! quietly "$pip" show verl || die "veRL (the package verl) is installed in $venv, and imports as verl too; run" \
    "$pip uninstall verl, then setup.sh again"
}

compile_packages() { # what has no bytecode yet, but for their own tests
  say "compiling"
  # Packages hold files that are no Python of this version, such as templates; nothing imports them, and the log names them.
  quietly "$venv/bin/python" -I -m compileall -q -j 0 -x 'site-packages/.*/tests/' "$venv/lib" || true
}

check_environment() {
  # Otherwise a wrong build of torch, or a plugin that vLLM does not see, would show only later, in a run.
  local check='
import sys
from importlib.metadata import entry_points
from importlib.util import find_spec

import hydra, ray, torch, vllm

if sys.argv[1] == "cpu":
    assert torch.version.cuda is None, f"torch {torch.__version__} is a CUDA build"
    unwanted = [name for name in ("torchvision", "torchaudio", "torchcodec", "triton") if find_spec(name)]
    assert not unwanted, f"not for CPU machines: {unwanted}"
else:
    # If pip sees both builds it may prefer +cpu, as a local version label sorts higher.
    assert torch.version.cuda or torch.version.hip, f"torch {torch.__version__} is a CPU build"
    # The machine that makes an image for GPUs may have none.
    if sys.argv[3] and not torch.cuda.is_available():
        sys.path.append(sys.argv[2])
        import check_environment

        sys.exit(check_environment.gpu_problem(torch.__version__, torch.version.cuda, sys.argv[3]))
plugins = entry_points(group="vllm.general_plugins").names
assert "verl_hidden_states" in plugins, f"vLLM plugins: {plugins}"
print(f"torch {torch.__version__}, vllm {vllm.__version__}, ray {ray.__version__}, hydra {hydra.__version__}")
'
  say "checking that it imports"
  # Isolated (-I), so that only installed packages are found.
  quietly "$venv/bin/python" -I -c "$check" "$mode" "$root/scripts" "$(driver_version)" || fail "import check: failed"
  say "$(tail -n 1 "$log")"
}

trap 'die "interrupted; run it again"' INT TERM
make_environment
pip=$venv/bin/pip
if [[ $mode == cpu ]]; then
  install_cpu_torch
  step "requirements/cpu.txt" "$pip" install -r requirements/cpu.txt
  step "requirements/cpu-no-deps.txt" "$pip" install --no-deps -r requirements/cpu-no-deps.txt
else
  step "requirements/gpu.txt" "$pip" install -r requirements/gpu.txt
fi
refuse_verl
[[ $dev == no ]] || step "requirements/dev.txt" "$pip" install -r requirements/dev.txt
step "verl, editable" "$pip" install --no-deps --no-build-isolation -e .
compile_packages
check_environment

cat >"$unfinished" <<EOF
mode=$mode
dev=$dev
root=$root
python=$(python_version "$venv/bin/python")
requirements=$requirements
EOF
mv "$unfinished" "$stamp"
say "$venv is ready ($mode)"
