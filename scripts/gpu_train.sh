#!/usr/bin/env bash
# Write training text with the default target and train a draft head on it, on one GPU, in a few
# minutes, without a network. Run it again to go on: an unfinished training resumes where it was, a
# finished one is followed by more text and a further training from its head.
#
#   scripts/gpu_train.sh [eagle3|confu] --target-file FILE... [--out FOLDER] [--start FOLDER]
#
#   --target-file  the wheel of the default target; several files are joined in their order, so it
#                  may come in pieces. Not needed where the target lies in $CONFU_HOME already.
#   --target       a target folder instead
#   --start        head to continue from (ConFu needs an EAGLE-3 head)
#   --data FILE    more text to train on, besides what is written here; may be repeated
#   --out          results (default: gpu-out): checkpoint/, text.jsonl.gz.NN, log.jsonl, report.txt;
#                  no file is larger than 16 MB
#   --work         what a later run goes on with (default: runs/gpu)
#   --seconds      for everything (default: 440)
#   --cpu-smoke    the same path in small, on a CPU, for tests
#
# Text and checkpoints come back by: cat text.jsonl.gz.* | gunzip > text.jsonl
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-python3}
STAGE=eagle3 OUT=gpu-out WORK=runs/gpu SECONDS_IN_ALL=440 SMOKE=no TARGET="" START=""
FILES=() DATA=()
if [[ ${1:-} == eagle3 || ${1:-} == confu ]]; then STAGE=$1; shift; fi
while (($#)); do
  case $1 in
    --target-file) shift; while (($#)) && [[ $1 != --* ]]; do FILES+=("$1"); shift; done; continue ;;
    --target) TARGET=$2 ;;
    --start) START=$2 ;;
    --data) DATA+=("$2") ;;
    --out) OUT=$2 ;;
    --work) WORK=$2 ;;
    --seconds) SECONDS_IN_ALL=$2 ;;
    --cpu-smoke) SMOKE=yes; shift; continue ;;
    *) echo "Unknown option $1; see the head of $0." >&2; exit 2 ;;
  esac
  shift 2
done
if [[ $STAGE == confu && -z $START ]]; then
  echo "ConFu starts from an EAGLE-3 head: name one with --start." >&2
  exit 2
fi

BEGAN=$SECONDS
left() { echo $((SECONDS_IN_ALL - (SECONDS - BEGAN))); }
say() { printf '%4ds  %s\n' $((SECONDS - BEGAN)) "$*" | tee -a "$OUT/report.txt"; }

mkdir -p "$OUT" "$WORK"
export CONFU_HOME=${CONFU_HOME:-$PWD/$WORK/home} PYTHONUNBUFFERED=1 HF_HUB_OFFLINE=1
if ((${#FILES[@]})); then
  mkdir -p "$CONFU_HOME/downloads"
  WHEEL=$("$PYTHON" -c 'from confu_core.assets import WHEEL_NAME; print(WHEEL_NAME)')
  cat "${FILES[@]}" > "$CONFU_HOME/downloads/$WHEEL" # checked by its sha256 when it is unpacked
fi
if [[ -z $TARGET ]]; then
  TARGET=$("$PYTHON" -m confu_core fetch)
fi
say "target $TARGET, stage $STAGE"

if [[ $SMOKE == yes ]]; then
  DEVICE=cpu DTYPE=float32 BATCH=48 TOKENS=256 UNROLL=2 EVERY=2 VOCAB=64 PROBE=2 PRECISION=no
  MOST_STEPS=4 MOST_TEXT=48 TEXT_SECONDS=$((SECONDS_IN_ALL / 2))
else
  DEVICE=cuda DTYPE=bfloat16 BATCH=1024 TOKENS=16384 UNROLL=5 EVERY=100 VOCAB=8192 PROBE=40
  PRECISION=bf16 MOST_STEPS=100000 MOST_TEXT=10000000 TEXT_SECONDS=$(($(left) * 45 / 100))
fi

# Runs of a stage follow one another: each starts from the head of the one before. An unfinished run
# goes on with the text, the steps and the state that it has.
NUMBER=1
while [[ -f $WORK/$STAGE-$NUMBER/done ]]; do
  START=$WORK/$STAGE-$NUMBER/head
  NUMBER=$((NUMBER + 1))
done
RUN=$WORK/$STAGE-$NUMBER
TEXT=$WORK/text.jsonl

train() { # SECONDS RUN_FOLDER STEPS SAVE_FOLDER
  local start=() shape=()
  if [[ -n $START ]]; then start=(--start "$START"); fi
  if [[ $STAGE == confu ]]; then shape=(--adapter-rank 16 --read-outs 3); fi
  timeout --signal=INT --kill-after=20 "$1" "$PYTHON" -m confu_core train "$STAGE" \
    --data "$TEXT" ${DATA[@]+"${DATA[@]}"} --run-folder "$2" --steps "$3" --save "$4" \
    ${start[@]+"${start[@]}"} ${shape[@]+"${shape[@]}"} --batch-tokens "$TOKENS" \
    --unroll "$UNROLL" --draft-vocab "$VOCAB" --precision "$PRECISION" --evaluate-every "$EVERY" \
    --target "$TARGET" --device "$DEVICE" --dtype "$DTYPE" >> "$WORK/train.log" 2>&1
}

if [[ ! -f $RUN/steps ]]; then
  # Whole batches are appended, so an interrupted call leaves a file that a later one continues.
  HAVE=0
  if [[ -f $TEXT ]]; then HAVE=$(wc -l < "$TEXT"); fi
  if ((HAVE < MOST_TEXT)); then
    timeout --signal=INT --kill-after=20 "$TEXT_SECONDS" "$PYTHON" -m confu_core synth \
      --out "$TEXT" --conversations "$MOST_TEXT" --batch "$BATCH" --target "$TARGET" \
      --device "$DEVICE" --dtype "$DTYPE" >> "$WORK/synth.log" 2>&1 \
      || [[ -s $TEXT ]] || { tail -5 "$WORK/synth.log" >&2; exit 1; }
  fi
  say "$(wc -l < "$TEXT") conversations, $(($(wc -l < "$TEXT") - HAVE)) of them new"
  # The schedule needs the number of steps, and the time left decides it: a probe measures a step.
  # Its time holds loading and one evaluation too, so a step is really cheaper; a margin is kept.
  rm -rf "$WORK/probe"
  PROBE_BEGAN=$SECONDS
  train "$(left)" "$WORK/probe" "$PROBE" "$WORK/probe/head" \
    || { tail -5 "$WORK/train.log" >&2; exit 1; }
  TOOK=$((SECONDS - PROBE_BEGAN + 1))
  STEPS=$(($(left) * 8 * PROBE / (10 * TOOK)))
  mkdir -p "$RUN"
  echo $((STEPS < 2 ? 2 : STEPS > MOST_STEPS ? MOST_STEPS : STEPS)) > "$RUN/steps"
fi
STEPS=$(< "$RUN/steps")
say "run $NUMBER: $STEPS steps in all, $(left) seconds left"
if ! train "$(left)" "$RUN" "$STEPS" "$RUN/head"; then
  tail -5 "$WORK/train.log" >&2
  say "not finished; call again to go on"
  exit 3
fi
touch "$RUN/done"

rm -rf "$OUT/checkpoint" "$OUT"/text.jsonl.gz.*
cp -r "$RUN/head" "$OUT/checkpoint"
cp "$RUN/log.jsonl" "$OUT/log.jsonl"
gzip -c "$TEXT" | split -b 15000000 -d - "$OUT/text.jsonl.gz."
tail -1 "$RUN/log.jsonl" | tee -a "$OUT/report.txt"
say "done: $OUT"
LARGE=$(find "$OUT" -type f -size +16000000c)
if [[ -n $LARGE ]]; then
  echo "Larger than 16 MB: $LARGE" >&2
  exit 1
fi
