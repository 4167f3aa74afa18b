#!/usr/bin/env bash
# Correctness, then timing, of every GPU path, in under 4 minutes; a short table last.
#   scripts/gpu_check.sh SHARDS_FOLDER [OUT]      SHARDS_FOLDER: real chats, from `headway data prepare`
#   scripts/gpu_check.sh --cpu SHARDS_FOLDER [OUT]   every line on a CPU with a tiny model: is the script itself right?
set -uo pipefail
device=cuda
if [ "${1:-}" = --cpu ]; then
  device=cpu
  shift
  export HEADWAY_CHECK_ON_CPU=1 OMP_NUM_THREADS=1
fi
shards=${1:?give a folder of prepared shards}
shards=$(realpath "$shards")
here=$(dirname "$0")/..
out=${2:-$here/gpu_check_out}
mkdir -p "$out"
out=$(realpath "$out")  # both are the caller's, not this folder's
cd "$here" || exit 2
python=${PYTHON:-python3}
export PYTHONPATH="$PWD/src:$PWD/tests${PYTHONPATH:+:$PYTHONPATH}" HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
export PYTORCH_ALLOC_CONF=expandable_segments:True HEADWAY_HOME=$out/home
failed=0
# On a slow CPU the script is tried whole, however long it takes.
ends=$((SECONDS + ($([ $device = cuda ] && echo 235 || echo 3600))))

within() { # seconds of its own, command: never past the end of the whole
  local own=$1 left=$((ends - SECONDS)); shift
  [ $device = cuda ] || own=$left
  [ "$left" -gt 2 ] || { echo "no time is left for: $*"; return 124; }
  timeout -k 5 $((own < left ? own : left)) "$@"
}
check() { [ "${PIPESTATUS[0]}" = 0 ] || { failed=1; echo "FAILED $1"; }; }

run_file=scripts/gpu_check.yaml
if [ $device = cpu ]; then
  run_file=$out/cpu.yaml
  "$python" - "$run_file" <<'PY'
import sys
import yaml
run = yaml.safe_load(open("scripts/gpu_check.yaml"))
run["device"], run["train"]["precision"], run["train"]["steps"] = "cpu", "float32", 4
run["data"]["seq_len"] = 128
run["model"]["config"].update(
    hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
    vocab_size=65536,  # shards of a larger vocabulary are refused by name
)
yaml.safe_dump(run, open(sys.argv[1], "w"))
PY
fi

# Runs export their model: into memory, and only what the table reads comes back.
runs=$(mktemp -d "$([ -w /dev/shm ] && echo /dev/shm || echo /tmp)/gpu_check.XXXXXX")
trap 'rm -rf "$runs"' EXIT

echo "== correctness of what no card has seen"
# Most of it is compiling, which processes beside each other share.
beside=$([ $device = cuda ] && "$python" -c "import xdist" 2> /dev/null && echo "-n 4" || echo "")
within 75 "$python" -m pytest tests/gpu/test_triton_attention_gpu.py tests/gpu/test_newer_paths.py tests/gpu/test_kernels_gpu.py \
  tests/model/test_triton_kernels.py -q -p no:cacheprovider $beside 2>&1 | tee "$out/tests_newer.txt" | tail -15
check "newer paths"

slots=$([ $device = cuda ] && echo 16384 || echo 256)
rows=$([ $device = cuda ] && echo 16 || echo 8)
train() { # name, overrides
  local name=$1; shift
  within 40 "$python" -m headway train "$run_file" "name=$name" "out=$runs" "data.sources=[$shards]" "$@" \
    > "$out/$name.txt" 2>&1 || { failed=1; echo "FAILED $name"; tail -15 "$out/$name.txt"; }
  mkdir -p "$out/runs/$name"
  cp "$runs/$name"/*.json* "$out/runs/$name/" 2> /dev/null
  rm -rf "${runs:?}/$name"
  grep -h "^kernels:\|^compile:\|^precision:\|^memory:\|^checkpoints:" "$out/$name.txt" | sed "s/^/$name  /" | cut -c1-240
}
packed="data.slots=$slots train.global_batch_sequences=2"
echo "== attention: TF/s of every path at $slots slots, documents of real lengths"
within 30 "$python" scripts/gpu_attention.py "$run_file" "data.sources=[$shards]" "data.slots=$slots" \
  $([ $device = cpu ] && echo --model) 2>&1 | tee "$out/attention.txt" | tail -12
check attention

echo "== kernels: every candidate checked and timed on the card"
within 45 "$python" -m headway bench kernels "$run_file" "data.sources=[$shards]" "data.slots=$slots" --seconds 25 \
  2>&1 | tee "$out/kernels.txt" | tail -60
check kernels

echo "== training"
train packed preset=fast $packed
train packed-float8 preset=fast train.precision=float8_auto $packed
train naive preset=naive train.steps=6 train.global_batch_sequences=$rows

echo "== training, the other paths"
train packed-compiled preset=fast train.compile=true $packed
train packed-memory preset=fast checkpoint.memory_every=4 data.loader=process $packed
train packed-recompute preset=fast model.recompute=full $packed

echo "== peak"
dtype=$([ $device = cuda ] && echo bf16 || echo fp32)
within 15 "$python" -m headway bench peak --device $device --dtype "$dtype" --seconds 2 | tee "$out/peak.txt"
check peak

echo "== correctness of what has been seen before, in the time that is left"
within 75 "$python" -m pytest tests/gpu/test_model_gpu.py tests/gpu/test_train_gpu.py -q -p no:cacheprovider 2>&1 \
  | tee "$out/tests.txt" | tail -15
check "model and training"

echo "== table"
"$python" scripts/gpu_table.py "$out/runs"
tail -12 "$out/attention.txt"
exit $failed
