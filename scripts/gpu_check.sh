#!/usr/bin/env bash
# Correctness, then timing, of every GPU path, in under 4 minutes; a short table last.
#   scripts/gpu_check.sh SHARDS_FOLDER [OUT]      SHARDS_FOLDER: real chats, from `headway data prepare`
set -uo pipefail
cd "$(dirname "$0")/.."
shards=${1:?give a folder of prepared shards}
out=${2:-gpu_check_out}
python=${PYTHON:-python3}
export PYTHONPATH="$PWD/src:$PWD/tests${PYTHONPATH:+:$PYTHONPATH}" HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
export PYTORCH_ALLOC_CONF=expandable_segments:True HEADWAY_HOME=$out/home
mkdir -p "$out"
failed=0

echo "== correctness"
timeout 150 "$python" -m pytest tests/gpu -q -p no:cacheprovider 2>&1 | tee "$out/tests.txt" | tail -25
[ "${PIPESTATUS[0]}" = 0 ] || failed=1

echo "== peak"
timeout 40 "$python" -m headway bench peak --device cuda --dtype bf16 --seconds 3 | tee "$out/peak.txt"

echo "== kernels: every candidate checked and timed on the card"
timeout 60 "$python" -m headway bench kernels scripts/gpu_check.yaml "data.sources=[$shards]" --seconds 40 \
  2>&1 | tee "$out/kernels.txt" | tail -40
[ "${PIPESTATUS[0]}" = 0 ] || failed=1

train() { # name, overrides
  local name=$1; shift
  timeout 100 "$python" -m headway train scripts/gpu_check.yaml "name=$name" "out=$out/runs" "data.sources=[$shards]" "$@" \
    > "$out/$name.txt" 2>&1 || { failed=1; echo "FAILED $name"; tail -15 "$out/$name.txt"; }
}
echo "== training"
train naive preset=naive train.global_batch_sequences=32
train packed preset=fast data.slots=16384 train.global_batch_sequences=2
train packed-recompute preset=fast data.slots=16384 train.global_batch_sequences=2 model.recompute=full

echo "== table"
"$python" scripts/gpu_table.py "$out/runs"
exit $failed
