# Sourced by train.sh and eval.sh, which have set $checkout: `find_python` sets $python to the interpreter that runs VERL.
#
# An environment that exists is used as it is, without pip: the one of VERL_ENV=/path; otherwise the active one (virtual
# environment, conda, module, container) if it has the packages. Only where there is none, setup.sh makes .venv.

find_python() {
  local folder candidate found
  export PYTHONPATH=$checkout${PYTHONPATH:+:$PYTHONPATH}
  if [[ -n ${VERL_ENV:-} ]]; then
    python=$VERL_ENV/bin/python
    found=$(check_environment "$python") || {
      printf 'VERL_ENV=%s: %s\n' "$VERL_ENV" "$found" >&2
      exit 1
    }
    return
  fi
  for folder in "${VIRTUAL_ENV:-}" "${CONDA_PREFIX:-}"; do
    if [[ -n $folder ]]; then
      use_if_it_fits "$folder/bin/python" && return
    fi
  done
  # A container or a module has its packages on PATH. A .venv that was made here comes first.
  if [[ ! -e $checkout/.venv ]]; then
    candidate=$(command -v python3 || command -v python || true)
    if [[ -n $candidate ]] && check_environment "$candidate" >/dev/null; then
      python=$candidate
      return
    fi
  fi
  bash "$checkout/scripts/setup.sh"
  python=$checkout/.venv/bin/python
}

use_if_it_fits() { # the active environment, or a line that says why not
  local found
  if found=$(check_environment "$1"); then
    python=$1
    return
  fi
  printf 'the active environment is not used (%s)\n' "$found"
  return 1
}

check_environment() { # prints what is wrong with the interpreter $1, and fails if anything is
  if [[ ! -x $1 ]]; then
    echo "has no bin/python"
    return 1
  fi
  "$1" "$checkout/scripts/check_environment.py" 2>&1
}
