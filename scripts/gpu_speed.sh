#!/usr/bin/env bash
# The race on one GPU: Headway's presets, TRL (packing, Liger) and the plain Trainer on the same real documents.
#   scripts/gpu_speed.sh SHARDS TOKENIZER [OUT]     SHARDS: real chats, from `headway data prepare`; TOKENIZER: its folder
# LAYERS=36 (Qwen3-4B's shape, random weights), DTYPE=bfloat16, DOCUMENTS=64, ROUNDS=2, PEER_PYTHON (default: PYTHON).
# One contestant after the other. On a CPU it runs a tiny shape: is the script itself right?
set -euo pipefail
shards=${1:?give a folder of prepared shards} tokenizer=${2:?give the folder of their tokenizer}
here=$(dirname "$0")/..
out=${3:-$here/gpu_speed_out}
mkdir -p "$out"
# All are the caller's, not this folder's.
shards=$(realpath "$shards") tokenizer=$(realpath "$tokenizer") out=$(realpath "$out")
cd "$here"
python=${PYTHON:-python3}
export PYTHONPATH="$PWD/src${PYTHONPATH:+:$PYTHONPATH}" HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false
export PYTORCH_ALLOC_CONF=expandable_segments:True
work=$(mktemp -d "$([ -w /dev/shm ] && echo /dev/shm || echo /tmp)/gpu_speed.XXXXXX")
trap 'rm -rf "$work"' EXIT

"$python" - "$work" "$shards" "$tokenizer" <<'PY'
import os
import sys

import torch
import yaml
from transformers import Qwen3Config, Qwen3ForCausalLM

work, shards, tokenizer = sys.argv[1:]
device = "cuda" if torch.cuda.is_available() else "cpu"
shape = {"hidden_size": 2560, "intermediate_size": 9728, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
vocabulary, dtype = 151936, os.environ.get("DTYPE", "bfloat16")
if device == "cpu":
    shape = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
    vocabulary, dtype = 65536, "float32"
layers = int(os.environ.get("LAYERS", "36"))
config = Qwen3Config(
    **shape, num_hidden_layers=layers, vocab_size=vocabulary, tie_word_embeddings=True, max_position_embeddings=40960
)
torch.manual_seed(0)
with torch.device(device):
    torch.set_default_dtype(getattr(torch, dtype))
    Qwen3ForCausalLM(config).save_pretrained(f"{work}/model")
run = {
    "name": "speed",
    "out": f"{work}/runs",
    "device": device,
    "model": {"path": f"{work}/model", "tokenizer": tokenizer, "dtype": dtype},
    "data": {"sources": [shards], "seq_len": int(os.environ.get("SEQ_LEN", "8192")), "overlong": "truncate"},
    "train": {"epochs": 1, "precision": "auto"},
    "optim": {"lr": 1.0e-5},
}
with open(f"{work}/run.yaml", "w") as file:
    yaml.safe_dump(run, file)
PY
"$python" -m headway bench speed "$work/run.yaml" --presets naive,fast --peers trl,hf --one-by-one \
  --peer-python "${PEER_PYTHON:-$(command -v "$python")}" --documents "${DOCUMENTS:-64}" --rounds "${ROUNDS:-2}" --scratch "$work/scratch" 2>&1 | tee "$out/speed.txt"
cp "$work"/scratch/*.log "$out/" 2> /dev/null || true
