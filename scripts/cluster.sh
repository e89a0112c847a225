# Sourced by train.sh and eval.sh, which have found $python: runs a command here, or on the cluster that the environment
# describes (docs/multinode.md).
#
#   RAY_ADDRESS=http://head:8265          as a job of that cluster; its output is followed, Ctrl-C stops it
#   RAY_ADDRESS=head:6379                 on that cluster, which this machine joins for the time if it is no part of it
#   NNODES=4 NODE_RANK=1 MASTER_ADDR=host0    machine 0 starts a cluster and runs the command; the others join, wait and
#                                         leave with its exit code. MASTER_PORT: the cluster's port, 6379
#   srun (Slurm)                          the same, with what Slurm says about the step
#   none of these                         here; Python finds a cluster that `ray start` started on this machine
#
# The cluster's token is $RAY_AUTH_TOKEN or the file $RAY_AUTH_TOKEN_PATH if one is set. Otherwise machine 0 makes one, and
# the others read it from $VERL_CLUSTER_DIR, which all of them must see (default: a folder below outputs/).

# Slurm sends SIGUSR1 and SIGTERM to every process of a step. They are meant for the driver, which then saves; Ray and the
# workers must live on for that. Ray handles SIGTERM, so ignoring it is not enough: it is blocked, in all that Ray starts.
DEAF='import os, signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGUSR1})
os.execv(sys.executable, [sys.executable, *sys.argv[1:]])'
MACHINE_LIMIT=${VERL_JOIN_TIMEOUT:-1800} # seconds that a machine waits for machine 0
ray_process=
cluster_folder=

say_cluster() {
  printf 'cluster.sh: %s\n' "$*"
}

cluster_tool() { # the rest of this script, where it talks to Ray
  "$python" -m verl.single_controller.cluster_script "$@"
}

prints_only() { # whether the arguments of Hydra ask for text instead of a run
  local word
  for word; do
    case $word in --cfg | --cfg=* | -c | --help | -h | --info | --info=* | -i | --hydra-help | --version) return 0 ;; esac
  done
  return 1
}

run_on_cluster() { # PYTHON -m MODULE ARGUMENT...: does not return
  prints_only "${@:4}" && exec "$@"
  token_mode
  read_slurm
  if [[ -n ${RAY_ADDRESS:-} ]]; then
    use_cluster "$@"
  elif ((${NNODES:-1} > 1)); then
    : "${NODE_RANK:?NNODES=$NNODES needs NODE_RANK, the number of this machine from 0}"
    : "${MASTER_ADDR:?NNODES=$NNODES needs MASTER_ADDR, the name or address of machine 0}"
    export MASTER_PORT=${MASTER_PORT:-6379}
    cluster_folder=${VERL_CLUSTER_DIR:-outputs/.cluster/${SLURM_JOB_ID:-${MASTER_ADDR}_$MASTER_PORT}}
    if ((NODE_RANK == 0)); then lead "$@"; else follow; fi
  else
    exec "$@"
  fi
}

token_mode() { # Ray looks for a token only if it is told that there is one
  if [[ -n ${RAY_AUTH_TOKEN:-}${RAY_AUTH_TOKEN_PATH:-} ]]; then
    export RAY_AUTH_MODE=${RAY_AUTH_MODE:-token}
  fi
}

read_slurm() { # the machines of a step that srun started on several
  ((${SLURM_STEP_NUM_NODES:-1} > 1)) && [[ -z ${NNODES:-}${RAY_ADDRESS:-} ]] || return 0
  if ((${SLURM_STEP_NUM_TASKS:-0} > SLURM_STEP_NUM_NODES)); then
    printf 'cluster.sh: SLURM_STEP_NUM_TASKS=%s on %s machines; start one task on each: srun --ntasks-per-node=1\n' \
      "$SLURM_STEP_NUM_TASKS" "$SLURM_STEP_NUM_NODES" >&2
    exit 1
  fi
  local hosts
  mapfile -t hosts < <(scontrol show hostnames "$SLURM_STEP_NODELIST")
  NNODES=$SLURM_STEP_NUM_NODES NODE_RANK=$SLURM_NODEID MASTER_ADDR=${hosts[0]}
  # Jobs that share a machine need two ports each; workers take those from 10002 on.
  MASTER_PORT=${MASTER_PORT:-$((7000 + SLURM_JOB_ID % 600 * 2))}
  export VERL_HOSTS="${hosts[*]}"
}

lead() { # machine 0: start the cluster, run the command on it, end it, and tell the others the exit code
  local address code=0 command
  trap 'exit 75' TERM USR1
  address=$(cluster_tool lead "$MASTER_ADDR" "$MASTER_PORT" "$cluster_folder") || exit 1
  make_token "$address"
  start_ray --head "--node-ip-address=$address" "--port=$MASTER_PORT" --include-dashboard=false \
    "--ray-client-server-port=$((MASTER_PORT + 1))"
  export RAY_ADDRESS=$address:$MASTER_PORT
  add_nnodes "$@"
  run_child "${command[@]}" || code=$?
  cluster_tool finish "$RAY_ADDRESS" "$code" "$((NNODES - 1))" || true
  stop_ray
  clear_folder
  exit "$code"
}

follow() { # the others: join, wait for the end, and end alike
  local address own code=0
  [[ -n ${RAY_AUTH_TOKEN:-}${RAY_AUTH_TOKEN_PATH:-} ]] || export RAY_AUTH_TOKEN_PATH=$cluster_folder/token
  export RAY_AUTH_MODE=token
  # A child of this shell itself: it ends when this shell does.
  address=$(exec "$python" -m verl.single_controller.cluster_script wait "$MASTER_ADDR" "$MASTER_PORT" "$cluster_folder" "$MACHINE_LIMIT") || exit 1
  own=$(cluster_tool address "${address%:*}") || exit 1
  start_ray "--address=$address" "--node-ip-address=$own"
  say_cluster "machine $NODE_RANK of $NNODES ($(hostname), $own) has joined $address and waits for the end of the run"
  run_child "$python" -m verl.single_controller.cluster_script follow "$address" "$NODE_RANK" "$ray_process" || code=$?
  stop_ray
  exit "$code"
}

use_cluster() { # RAY_ADDRESS=head:6379: be a part of that cluster
  local own code=0
  case $RAY_ADDRESS in auto | local | *://*) exec "$@" ;; esac
  [[ -n ${RAY_AUTH_MODE:-} || ! -s $HOME/.ray/auth_token ]] || export RAY_AUTH_MODE=token
  own=$(cluster_tool missing "$RAY_ADDRESS") || exit 1
  [[ -n $own ]] || exec "$@" # this machine is one of the cluster's
  start_ray "--address=$RAY_ADDRESS" "--node-ip-address=$own" --num-cpus=0 --num-gpus=0
  run_child "$@" || code=$?
  stop_ray
  clear_folder
  exit "$code"
}

make_token() { # a token of this cluster alone, which only this user may read; ADDRESS goes beside it
  [[ -d $cluster_folder ]] || mkdir -p -m 700 "$cluster_folder"
  if [[ -z ${RAY_AUTH_TOKEN:-}${RAY_AUTH_TOKEN_PATH:-} ]]; then
    (
      umask 077
      # Whoever may write there may have put a link to a file of theirs under this name.
      rm -f "$cluster_folder/token.new"
      set -C
      "$python" -c 'import secrets; print(secrets.token_hex(32), end="")' >"$cluster_folder/token.new"
    )
    mv "$cluster_folder/token.new" "$cluster_folder/token"
    RAY_AUTH_TOKEN_PATH=$(cd "$cluster_folder" && pwd)/token
    export RAY_AUTH_TOKEN_PATH
  fi
  export RAY_AUTH_MODE=token
  rm -f "$cluster_folder/failed"
  printf '%s:%s' "$1" "$MASTER_PORT" >"$cluster_folder/address"
}

clear_folder() { # removes what this script has written there; the folder may be the user's own
  rm -f "$cluster_folder"/{token,token.new,address,failed} "$cluster_folder"/ray-*.log
  rmdir "$cluster_folder" 2>/dev/null || true
}

start_ray() { # ray start with these options, in the background; waits until it runs
  local log ready cores
  mkdir -p "${cluster_folder:=$(mktemp -d)}"
  log=$cluster_folder/ray-$(hostname).log
  ready="Ray runtime started"
  # Workers on a CPU share its cores: what counts is trainer.n_gpus_per_node, not the cores.
  cores=$(($(nproc) > 64 ? $(nproc) : 64))
  [[ " $* " == *" --num-cpus="* ]] || set -- "$@" "--num-cpus=$cores"
  [[ -z ${NODE_RANK:-} ]] || set -- "$@" "--labels=verl-rank=$NODE_RANK"
  local silent=${VERL_DETECTION_S:-60}
  # Nothing but metrics and tokens goes through the object store.
  set -m
  (
    # What Ray writes is this user's alone; workers create files by the user's own mask again (verl/utils/process.py).
    VERL_UMASK=$(umask) && export VERL_UMASK && umask 077
    # Ray gives a silent machine up as soon as the run does, and a machine its head.
    export RAY_health_check_initial_delay_ms=1000 RAY_health_check_period_ms=1000 RAY_health_check_failure_threshold=3
    export RAY_health_check_timeout_ms=$((silent * 250)) RAY_gcs_rpc_server_reconnect_timeout_s=$silent
    export RAY_grpc_client_keepalive_time_ms=$((silent * 250)) RAY_grpc_client_keepalive_timeout_ms=$((silent * 250))
    RAY_USAGE_STATS_ENABLED=0 RAY_enable_worker_prestart=0 RAY_prestart_worker_first_driver=0 \
      exec "$python" -c "$DEAF" -m ray.scripts.scripts start "$@" --object-store-memory=268435456 --block
  ) >"$log" 2>&1 </dev/null &
  ray_process=$!
  # Otherwise bash reports how stop_ray ends it.
  disown "$ray_process"
  set +m
  trap stop_ray EXIT
  until grep -q "$ready" "$log"; do
    if ! kill -0 "$ray_process" 2>/dev/null; then
      printf 'cluster.sh: %s: ray start failed:\n' "$(hostname)" >&2
      tail -n 5 "$log" >&2
      [[ ${NODE_RANK:-} != 0 ]] || tell_others "ray start failed on $(hostname)"
      exit 1
    fi
    sleep 0.1
  done
  # Else the next run on this machine would take this cluster for one that its user has started.
  rm -f "${RAY_TMPDIR:-/tmp}/ray/ray_current_cluster"
}

tell_others() { # that machine 0 gives up: they would wait for VERL_JOIN_TIMEOUT
  printf '%s' "$1" >"$cluster_folder/failed"
  sleep 10
  rm -f "$cluster_folder"/{failed,token,address}
}

stop_ray() {
  trap - EXIT
  [[ -n $ray_process ]] || return 0
  cluster_tool stop "$ray_process" || true
  ray_process=
}

run_child() { # runs a command to its end, with the signals that this shell gets; its exit code
  local code=0 child
  # In a process group of its own, else it would ignore Ctrl-C as a background process does.
  set -m
  "$@" </dev/null &
  child=$!
  set +m
  trap 'kill -INT "$child" 2>/dev/null' INT
  trap 'kill -TERM "$child" 2>/dev/null' TERM
  trap 'kill -USR1 "$child" 2>/dev/null' USR1
  trap 'kill -HUP "$child" 2>/dev/null' HUP
  while :; do
    code=0
    wait "$child" || code=$?
    # A signal ends wait, not the child.
    kill -0 "$child" 2>/dev/null || break
  done
  # What comes now must not replace the exit code.
  trap - INT
  trap '' TERM USR1 HUP
  return "$code"
}

add_nnodes() { # sets $command: the arguments with trainer.nnodes=$NNODES before the first override, so that others win
  local index
  command=("$@")
  for ((index = 3; index < $#; index++)); do
    [[ ${command[index]} != *=* || ${command[index]} == -* ]] || break
  done
  command=("${command[@]:0:index}" "trainer.nnodes=$NNODES" "${command[@]:index}")
}

submit_elsewhere() { # SCRIPT ARGUMENT...: returns unless RAY_ADDRESS is the dashboard of a cluster
  [[ ${RAY_ADDRESS:-} == http://* || ${RAY_ADDRESS:-} == https://* ]] || return 0
  prints_only "${@:2}" && return
  token_mode
  [[ -n ${RAY_AUTH_MODE:-} || ! -s $HOME/.ray/auth_token ]] || export RAY_AUTH_MODE=token
  exec "$python" -m verl.single_controller.submit "$RAY_ADDRESS" "${VERL_REMOTE_DIR:-$PWD}" "$@"
}
