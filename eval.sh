#!/usr/bin/env bash
# Evaluates checkpoints of training runs, or any model: pass@k over benchmarks (docs/evaluation.md). Set what to compare
# below or on the command line. Arguments are Hydra overrides or Hydra's own flags, for example:
#   bash eval.sh                           the default: the newest run of train.sh, before and after training
#   bash eval.sh model.path=outputs/verl/grpo/A               a run, on its own validation files
#   bash eval.sh benchmarks=math500                           the newest run
#   bash eval.sh model.path=Qwen/Qwen2.5-1.5B benchmarks=aime24,math500 n_sampling=16
#   bash eval.sh evaluation=SMALL_SAMPLES_PASS16 runs.grpo=outputs/verl/grpo/A runs.verl=outputs/verl/verl_grpo/B
#   bash eval.sh --cfg job                 print the configuration and run nothing
# The same command again resumes an interrupted evaluation and generates nothing twice.
set -euo pipefail

# === What to evaluate ================================================================================================
# Benchmarks, samples per problem, temperatures: FULL_PASS1, SMALL_SAMPLES_PASS16, LITTLE_SAMPLES_PASS32,
# TINY_SAMPLES_PASS256 or embedded, files of configs/evaluation/. Empty: what the command line says;
# embedded if nothing is named here or there.
ACTIVE_CONFIG_SET=${ACTIVE_CONFIG_SET:-}

# Several of these, one after another, unless one is named above or on the command line: (FULL_PASS1 SMALL_SAMPLES_PASS16).
ACTIVE_CONFIG_SETS=()

# The runs to compare, in this order. Empty: all runs of RUN_NAME_MAP, sorted.
RUN_ALIASES=()

# Alias -> a training run's folder (trainer.default_local_dir), or a model's folder or hub id.
declare -A RUN_NAME_MAP=(
  # [GRPO_VERL]=outputs/verl/verl_grpo/2026-11-21_08-38-33
  # [GRPO_ORIGIN]=outputs/verl/grpo/2026-11-21_09-12-08
)

# Alias -> the model of step 0. Default: the model that the run started from.
declare -A BASE_MODEL_MAP=(
)

# Alias -> checkpoints, separated by commas: 0 is the base model, -1 the newest checkpoint.
DEFAULT_SPECIFIC_STEPS="0,-1"
declare -A STEP_MAP=(
  # [GRPO_VERL]=0,120,160
)

# Alias -> prompt template (verl/data/templates.yaml). Empty: as the run was trained.
DEFAULT_TEMPLATE=""
declare -A TEMPLATE_MAP=(
  # [GRPO_VERL]=abel
)

# Alias -> longest response in tokens. Empty: as the run was trained.
DEFAULT_MAX_RESPONSE_LENGTH=""
declare -A MAX_RESPONSE_LENGTH_MAP=(
  # [GRPO_VERL]=1536
)

# Empty: as in the set.
TEMPERATURES="" # separated by commas
TOP_P=""
N_SAMPLING=""
EVAL_SEED=""

CALCULATE_METRICS=false # effective rank, velocity and acceleration of every response
METRIC_STRIDE=20        # tokens from one prefix to the next in these metrics
USE_WANDB=false
# =====================================================================================================================

checkout=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd) # the working directory stays: relative paths begin there

if [[ -z $ACTIVE_CONFIG_SET && " $*" != *" evaluation="* ]]; then
  for set in "${ACTIVE_CONFIG_SETS[@]}"; do
    ACTIVE_CONFIG_SET=$set bash "$checkout/eval.sh" "$@"
  done
  ((${#ACTIVE_CONFIG_SETS[@]} == 0)) || exit 0
fi

die() {
  printf 'eval.sh: %s\n' "$*" >&2
  exit 1
}

quoted() { # a string that Hydra takes literally
  printf "'%s'" "${1//\'/\\\'}"
}

overrides=()
set_from_map() { # ALIAS OPTION VALUE
  [[ -z $3 ]] || overrides+=("++runs.$1.$2=$3")
}

aliases=("${RUN_ALIASES[@]}")
if ((${#aliases[@]} == 0 && ${#RUN_NAME_MAP[@]} > 0)); then
  mapfile -t aliases < <(printf '%s\n' "${!RUN_NAME_MAP[@]}" | LC_ALL=C sort)
fi
for alias in "${aliases[@]}"; do
  [[ -n ${RUN_NAME_MAP[$alias]:-} ]] || die "RUN_ALIASES: $alias is not in RUN_NAME_MAP; add it there"
  [[ $alias =~ ^[A-Za-z][A-Za-z0-9_-]*$ ]] || die "RUN_NAME_MAP: $alias is not a valid alias; use a letter, then letters, digits, _ and -"
  set_from_map "$alias" path "$(quoted "${RUN_NAME_MAP[$alias]}")"
  base=${BASE_MODEL_MAP[$alias]:-}
  set_from_map "$alias" base "${base:+$(quoted "$base")}"
  set_from_map "$alias" steps "[${STEP_MAP[$alias]:-$DEFAULT_SPECIFIC_STEPS}]"
  set_from_map "$alias" template "${TEMPLATE_MAP[$alias]:-$DEFAULT_TEMPLATE}"
  set_from_map "$alias" max_response_length "${MAX_RESPONSE_LENGTH_MAP[$alias]:-$DEFAULT_MAX_RESPONSE_LENGTH}"
done
for map in BASE_MODEL_MAP STEP_MAP TEMPLATE_MAP MAX_RESPONSE_LENGTH_MAP; do
  declare -n entries=$map
  for alias in "${!entries[@]}"; do
    [[ -n ${RUN_NAME_MAP[$alias]:-} ]] || die "$map: $alias is not in RUN_NAME_MAP; add it there"
  done
  unset -n entries
done
for switch in CALCULATE_METRICS USE_WANDB; do
  [[ ${!switch} == true || ${!switch} == false ]] || die "$switch=${!switch}: must be true or false"
done
[[ -z $TEMPERATURES ]] || overrides+=("temperatures=[$TEMPERATURES]")
[[ -z $TOP_P ]] || overrides+=("top_p=$TOP_P")
[[ -z $N_SAMPLING ]] || overrides+=("n_sampling=$N_SAMPLING")
[[ -z $EVAL_SEED ]] || overrides+=("seed=$EVAL_SEED")
[[ $CALCULATE_METRICS == false ]] || overrides+=(calculator.enable=true "calculator.diff_stride=$METRIC_STRIDE")
[[ $USE_WANDB == false ]] || overrides+=('trainer.logger=[console,wandb]')

# The embedded set, unless something says what to evaluate.
asked=no
((${#aliases[@]} == 0)) || asked=yes
for argument in "$@"; do
  option=${argument#+}
  case ${option#+} in
    evaluation=*) ACTIVE_CONFIG_SET= asked=yes ;;
    benchmarks=* | model=* | model.path=* | model.base=* | runs=* | runs.*) asked=yes ;;
  esac
done
[[ $asked == yes ]] || ACTIVE_CONFIG_SET=${ACTIVE_CONFIG_SET:-embedded}
[[ -z $ACTIVE_CONFIG_SET ]] || overrides=("evaluation=$ACTIVE_CONFIG_SET" "${overrides[@]}")

source "$checkout/scripts/environment.sh"
source "$checkout/scripts/cluster.sh"
find_python
submit_elsewhere eval.sh "$@"
run_on_cluster verl.trainer.main_eval "${overrides[@]}" "$@"
