# What the batch scripts share. Read by them (source slurm/job.sh) in the folder they were submitted from, the project's.

python=${PYTHON:-$PWD/.venv/bin/python}
if ! [ -x "$python" ]; then
  echo "no Python at $python: run 'make env' in $PWD on a login node, or submit with PYTHON=/path/to/python" >&2
  exit 2
fi
export PYTHONUNBUFFERED=1 OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}

# Where the ranks meet: the first node, and a port that jobs sharing a node do not share.
export MASTER_ADDR=${MASTER_ADDR:-$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)}
export MASTER_PORT=${MASTER_PORT:-$((20000 + SLURM_JOB_ID % 12000))}

# Compiled kernels on each node's own disk: hundreds of processes that write one shared folder slow each other down.
export VLA_LM_CACHE=${SLURM_TMPDIR:-${TMPDIR:-/tmp}}/vla-lm-$SLURM_JOB_ID

MAX_VAIN_STARTS=3  # requeues in a row without a new checkpoint after which the job gives up

# Ends the job when it was requeued MAX_VAIN_STARTS times without a new checkpoint in between.
# The count is kept in RUN_DIR/requeues: "<newest complete checkpoint> <starts since it>".
refuse_vain_start() {
  local newest last=none vain=0
  newest=$(ls "$1/checkpoints" 2>/dev/null | grep '^step=.*\.complete$' | sort -V | tail -n 1)
  newest=${newest:-none}
  if [ "${SLURM_RESTART_COUNT:-0}" -gt 0 ] && [ -f "$1/requeues" ]; then
    read -r last vain < "$1/requeues"
    if [ "$newest" = "$last" ]; then vain=$((vain + 1)); else vain=0; fi
  fi
  echo "$newest $vain" > "$1/requeues"
  if [ "$vain" -ge "$MAX_VAIN_STARTS" ]; then
    echo "requeued $vain times without a new checkpoint (newest: $newest), so this job gives up. Raise --time, warn" \
         "earlier (--signal=USR1@SECONDS), or save oftener (--checkpoint.every_n_train_steps); the starts' logs: $1/logs" >&2
    exit 1
  fi
}

# train RUN_DIR AGAIN ARGUMENTS...: one task per GPU on all nodes of the job; goes on where an earlier start of the job ended.
# AGAIN: how the line begins that goes on with the run as another job.
train() {
  local run_dir=$1 again=$2 logs code cause ended=
  shift 2
  set -- --trainer.devices "$SLURM_NTASKS_PER_NODE" --trainer.num_nodes "$SLURM_JOB_NUM_NODES" "$@"
  "$python" -m recipes.preflight "$@" || exit 2
  case " $* " in
    *" --resume"*) ls "$run_dir"/checkpoints/step=*.complete >/dev/null 2>&1 && set -- "$@" --resume auto ;;  # its own first
    *) set -- "$@" --resume auto ;;
  esac
  logs=$run_dir/logs/$SLURM_JOB_ID-start-${SLURM_RESTART_COUNT:-0}
  mkdir -p "$logs"
  refuse_vain_start "$run_dir"
  echo "start ${SLURM_RESTART_COUNT:-0} of job $SLURM_JOB_ID on $SLURM_JOB_NODELIST; watch: tail -f $logs/rank-0.log"
  trap 'ended=yes' TERM  # scancel, preemption or the time limit: SLURM has decided, so there is nothing to requeue
  # A rank that fails ends the others at once. srun takes --cpus-per-task only from its own command line.
  srun --kill-on-bad-exit=1 --cpus-per-task="${SLURM_CPUS_PER_TASK:-1}" --output="$logs/rank-%t.log" bash -c '
    export TORCHELASTIC_ERROR_FILE=$0/rank-$SLURM_PROCID.error.json  # where a rank leaves its traceback, with the time
    export TRITON_CACHE_DIR=$VLA_LM_CACHE/triton TORCHINDUCTOR_CACHE_DIR=$VLA_LM_CACHE/inductor
    exec "$@"' "$logs" "$python" -m recipes.pretrain "$@" --run_dir "$run_dir"
  code=$?
  tail -n 4 "$logs/rank-0.log"
  if [ -n "$ended" ]; then
    echo "job $SLURM_JOB_ID was ended from outside; go on with: $again (the same line)"
  elif [ "$code" = 85 ] || [ "$code" = 138 ]; then  # saved and asks for another start; or warned before it had begun
    echo "job $SLURM_JOB_ID goes back into the queue; it goes on in $run_dir"
    scontrol requeue "$SLURM_JOB_ID"
  elif [ "$code" != 0 ]; then
    "$python" slurm/first_failure.py "$logs"
    cause=$?  # srun's code may be that of a rank that srun ended
    [ "$cause" = 0 ] || code=$cause
    echo "ended with exit code $code; when mended go on with: $again (the same line)"
  fi
  exit "$code"
}
