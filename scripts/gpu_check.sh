#!/usr/bin/env bash
# What a machine with a GPU can show and a CPU cannot, in 8 minutes, without a network: the tests that
# need CUDA, the benchmark on the default target in both precisions, milliseconds per phase of a
# round. Writes a short report.
#
#   scripts/gpu_check.sh --target-file FILE... [--out FOLDER]
#
#   --target-file  the wheel of the default target; several files are joined in their order. Not
#                  needed where the target lies in $CONFU_HOME already.
#   --out          results (default: gpu-out): report.md, bench-*.json, *.log
#   --cpu-smoke    the same path in small, on a CPU, for tests: --target, --eagle3 and --confu name
#                  tiny folders
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-python3}
OUT=gpu-out SMOKE=no
FILES=() MODEL=()
while (($#)); do
  case $1 in
    --target-file) shift; while (($#)) && [[ $1 != --* ]]; do FILES+=("$1"); shift; done; continue ;;
    --out) OUT=$2 ;;
    --target | --eagle3 | --confu) MODEL+=("$1" "$2") ;;
    --cpu-smoke) SMOKE=yes; shift; continue ;;
    *) echo "Unknown option $1; see the head of $0." >&2; exit 2 ;;
  esac
  shift 2
done

mkdir -p "$OUT"
export CONFU_HOME=${CONFU_HOME:-$PWD/runs/gpu/home} PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
if ((${#FILES[@]})); then
  mkdir -p "$CONFU_HOME/downloads"
  WHEEL=$("$PYTHON" -c 'from confu_core.assets import WHEEL_NAME; print(WHEEL_NAME)')
  cat "${FILES[@]}" > "$CONFU_HOME/downloads/$WHEEL" # checked by its sha256
fi

if [[ $SMOKE == yes ]]; then
  DEVICE=cpu PATIENCE=10 LIMIT=2 TOKENS=6 REPEATS=1 SIZES=(--nodes 6 --depth 2 --top-k 3)
else
  DEVICE=cuda PATIENCE=1 LIMIT=24 TOKENS=96 REPEATS=3 SIZES=(--nodes 30)
fi
REPORT=$OUT/report.md
FAILED=0

step() { # SECONDS TITLE NAME COMMAND...: run, keep the output, put its end into the report
  local most=$1 title=$2 log=$OUT/$3.log began=$SECONDS code=0
  shift 3
  timeout --kill-after=10 $((most * PATIENCE)) "$@" > "$log" 2>&1 || code=$?
  {
    printf '\n## %s\n\n' "$title"
    printf '    %s\n\n' "$*"
    printf 'exit code %d, %d s\n\n' "$code" $((SECONDS - began))
    tail -40 "$log" | sed 's/^/    /'
  } >> "$REPORT"
  printf '%s: exit code %d, %d s\n' "$title" "$code" $((SECONDS - began))
  if ((code)); then FAILED=1; fi
}

{
  printf '# GPU check\n\n'
  date -u '+%Y-%m-%d %H:%M UTC'
  "$PYTHON" - <<'PY'
import platform

import torch
import transformers

print(f"Python {platform.python_version()}, torch {torch.__version__}, "
      f"transformers {transformers.__version__}")
if torch.cuda.is_available():
    for number in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(number)
        print(f"{found.name}, {found.total_memory / 1e9:.0f} GB")
else:
    print("no CUDA device")
PY
} > "$REPORT"

step 150 "Tests that need a GPU" tests \
  "$PYTHON" -m pytest -q -m gpu -p no:cacheprovider tests/gpu
step 150 "Benchmark, float32" bench-float32 \
  "$PYTHON" -m confu_core bench --limit "$LIMIT" --max-new-tokens "$TOKENS" "${SIZES[@]}" \
  --device "$DEVICE" --dtype float32 --json "$OUT/bench-float32.json" ${MODEL[@]+"${MODEL[@]}"}
step 100 "Benchmark, bfloat16: texts may differ at near ties, each with its margin" bench-bfloat16 \
  "$PYTHON" -m confu_core bench --limit "$LIMIT" --max-new-tokens "$TOKENS" "${SIZES[@]}" \
  --device "$DEVICE" --dtype bfloat16 --json "$OUT/bench-bfloat16.json" ${MODEL[@]+"${MODEL[@]}"}
step 60 "Milliseconds per phase of a round" profile \
  "$PYTHON" -m confu_core profile --max-new-tokens "$TOKENS" --repeats "$REPEATS" "${SIZES[@]}" \
  --device "$DEVICE" ${MODEL[@]+"${MODEL[@]}"}

printf '\nReport: %s\n' "$REPORT"
exit "$FAILED"
