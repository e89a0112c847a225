# Sourced by train.sh and eval.sh, which have found $python: runs a module here, or on the cluster that the environment
# describes (docs/multinode.md).
#
#   RAY_ADDRESS=http://head:8265          as a job of that cluster; its output is followed, Ctrl-C stops it
#   RAY_ADDRESS=head:6379                 on that cluster, which this machine joins for the time if it is no part of it
#   NNODES=4 NODE_RANK=1 MASTER_ADDR=host0    machine 0 starts a cluster and runs the command; the others join, wait and
#                                         leave with its exit code
#   srun (Slurm)                          the same, with what Slurm says about the step
#   none of these                         here; Python finds a cluster that `ray start` started on this machine

prints_only() { # whether the arguments of Hydra ask for text instead of a run
  local word
  for word; do
    case $word in --cfg | --cfg=* | -c | --help | -h | --info | --info=* | -i | --hydra-help | --version) return 0 ;; esac
  done
  return 1
}

run_on_cluster() { # MODULE ARGUMENT...: does not return
  # -P: a folder named verl in the working directory is not the package.
  local run=("$python" -P -m)
  prints_only "${@:2}" && exec "${run[@]}" "$@"
  case ${RAY_ADDRESS:-} in auto | local | *://*) exec "${run[@]}" "$@" ;; esac
  [[ -n ${NNODES:-}${RAY_ADDRESS:-} ]] || ((${SLURM_STEP_NUM_NODES:-1} == 1)) || read_slurm
  if [[ -z ${RAY_ADDRESS:-} ]]; then
    ((${NNODES:-1} > 1)) || exec "${run[@]}" "$@"
    : "${NODE_RANK:?NNODES=$NNODES needs NODE_RANK, the number of this machine from 0}"
    : "${MASTER_ADDR:?NNODES=$NNODES needs MASTER_ADDR, the name or address of machine 0}"
    export NNODES NODE_RANK MASTER_ADDR MASTER_PORT=${MASTER_PORT:-6379}
    export VERL_CLUSTER_DIR=${VERL_CLUSTER_DIR:-$checkout/outputs/.cluster/${SLURM_JOB_ID:-${MASTER_ADDR}_$MASTER_PORT}}
  fi
  exec "${run[@]}" verl.cluster.launch "${run[@]}" "$@"
}

read_slurm() { # the machines of a step that srun started on several
  if ((${SLURM_STEP_NUM_TASKS:-0} > SLURM_STEP_NUM_NODES)); then
    printf 'cluster.sh: SLURM_STEP_NUM_TASKS=%s on %s machines; start one task on each: srun --ntasks-per-node=1\n' \
      "$SLURM_STEP_NUM_TASKS" "$SLURM_STEP_NUM_NODES" >&2
    exit 1
  fi
  VERL_HOSTS=$(scontrol show hostnames "$SLURM_STEP_NODELIST" | xargs) && export VERL_HOSTS
  NNODES=$SLURM_STEP_NUM_NODES NODE_RANK=$SLURM_NODEID MASTER_ADDR=${VERL_HOSTS%% *}
  # Jobs that share a machine need two ports each; workers take those from 10002 on.
  MASTER_PORT=${MASTER_PORT:-$((7000 + SLURM_JOB_ID % 600 * 2))}
}

submit_elsewhere() { # SCRIPT ARGUMENT...: returns unless RAY_ADDRESS is the dashboard of a cluster
  [[ ${RAY_ADDRESS:-} == http://* || ${RAY_ADDRESS:-} == https://* ]] || return 0
  prints_only "${@:2}" && return
  exec "$python" -P -m verl.cluster.submit "$RAY_ADDRESS" "${VERL_REMOTE_DIR:-$checkout}" "$@"
}
