#!/usr/bin/env bash
# The whole comparison on one Hopper GPU, start-up included, in at most 12 minutes:
#
#     benchmark/h200_qwen3_32b.sh [--dry-run] [FOLDER]
#
# The shape of Qwen3-32B with random weights (about 65 GB in bfloat16): step times are
# those of the model, its answers are noise, and every result says so. One boot; a
# closed loop of 64 requests, then an open loop that runs out of rows. Results are
# appended to FOLDER/results.jsonl as they come, so that what has been measured is
# there whatever happens. --dry-run prints every command instead of running it.
set -euo pipefail

# Seconds after the start of this script by which no further run begins.
CLOSED_UNTIL_S=400
OPEN_UNTIL_S=610
READY_WITHIN_S=360
END_S=715

dry_run=false
if [[ ${1:-} == --dry-run ]]; then
  dry_run=true
  shift
fi
folder=${1:-h200_qwen3_32b}
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
python=${PYTHON:-python3}
port=${PORT:-31000}
model=$folder/model
url=http://127.0.0.1:$port

mkdir -p "$model"
cat > "$model/config.json" <<'JSON'
{
  "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3",
  "hidden_size": 5120, "num_hidden_layers": 64, "num_attention_heads": 64,
  "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 25600,
  "vocab_size": 151936, "max_position_embeddings": 40960, "rope_theta": 1000000,
  "rms_norm_eps": 1e-06, "hidden_act": "silu", "attention_bias": false,
  "tie_word_embeddings": false, "torch_dtype": "bfloat16",
  "bos_token_id": 151643, "eos_token_id": 151645
}
JSON

goodput() { # PRESET UNTIL_S
  local left=$(($2 - SECONDS))
  if ((left <= 0)); then
    echo "no time left for $1" >&2
    return
  fi
  run "$python" "$here/goodput.py" --preset "$1" --base-url "$url" \
    --model-path "$model" --output-file "$folder/results.jsonl" --output-details \
    --request-timeout-s 120 --time-budget-s "$left"
}

run() {
  if $dry_run; then
    echo "$@"
  else
    timeout $((END_S > SECONDS + 5 ? END_S - SECONDS : 5)) "$@" \
      || echo "ended with $?: $*" >&2
  fi
}

is_ready() {
  "$python" -c 'import sys, urllib.request as u; u.urlopen(sys.argv[1], timeout=2)' \
    "$url/health" 2> /dev/null
}

read -ra flags < <("$python" "$here/goodput.py" --preset h200-closed --print-server-flags)
server=("$python" -m sglang_taper.launch_server --model-path "$model" --port "$port"
  "${flags[@]}")

if $dry_run; then
  echo "${server[@]}"
else
  setsid "${server[@]}" > "$folder/server.log" 2>&1 &
  server_pid=$!
  trap 'kill -TERM -- -$server_pid 2> /dev/null || true; sleep 3
        kill -KILL -- -$server_pid 2> /dev/null || true' EXIT
  until is_ready; do
    if ! kill -0 "$server_pid" 2> /dev/null || ((SECONDS > READY_WITHIN_S)); then
      tail -n 40 "$folder/server.log" >&2
      echo "the server did not become ready" >&2
      exit 1
    fi
    sleep 1
  done
  echo "ready after $SECONDS s" >&2
fi

goodput h200-closed "$CLOSED_UNTIL_S"
goodput h200-slots "$OPEN_UNTIL_S"
run "$python" "$here/report.py" "$folder/results.jsonl"
