#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
set -euo pipefail

usage() {
    cat <<'END'
Throughput of the paper's models at its budgets, on a GPU: `anchorprune bench serve` for each, then
the columns of the paper's efficiency table (FLOPs, prefill, decode, memory) for all of them.

  examples/benchmark_throughput.sh [--dry-run] [-- FURTHER ARGUMENTS OF anchorprune bench serve ...]
  RUNS=llava-next examples/benchmark_throughput.sh -- --methods divprune

Variables (defaults in brackets):

  RUNS        which of them [llava-1.5 llava-next qwen2.5-vl llava-video qwen2.5-vl-video]. The last
              is not in the paper: clips, beside vLLM's own --video-pruning-rate
  CONCURRENT  requests at once [1,8,32]
  REQUESTS    of a measurement, and at least twice as many as are at once [50]
  OUTPUT      tokens of an answer [32]
  REPEAT      rounds over all servers [1]
  OUT         where results go [bench-throughput]
  ANCHORPRUNE the command [anchorprune]

  --dry-run   print the commands, run nothing
  --help      this text

A result is OUT/RUN/results.json, table.md and two plots, and OUT/table.md has the efficiency tables
of all. What is there is not measured again: the same command goes on where an earlier one stopped.
END
}

source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
read_arguments "those of anchorprune bench serve" "$@"

RUNS=${RUNS:-llava-1.5 llava-next qwen2.5-vl llava-video qwen2.5-vl-video}
CONCURRENT=${CONCURRENT:-1,8,32}
REQUESTS=${REQUESTS:-50}
OUTPUT=${OUTPUT:-32}
REPEAT=${REPEAT:-1}
OUT=${OUT:-bench-throughput}
ANCHORPRUNE=${ANCHORPRUNE:-anchorprune}

need_whole_numbers REQUESTS OUTPUT REPEAT
[[ $CONCURRENT =~ ^[1-9][0-9]*(,[1-9][0-9]*)*$ ]] ||
    fail "CONCURRENT is '$CONCURRENT': give positive whole numbers, as 1,8,32"

# --- what the paper has for each model -----------------------------------------------------------

arguments_of() { # run; sets `arguments`
    case $1 in
        llava-1.5) # 576 tokens
            arguments=(--model llava-hf/llava-1.5-7b-hf --budgets 128,64,32 --media 336x336)
            ;;
        llava-next) # 2,880 tokens of a base view and four crops
            arguments=(--model llava-hf/llava-v1.6-vicuna-7b-hf --budgets 640,320,160
                --media 672x672)
            ;;
        qwen2.5-vl) # 1,296 tokens
            arguments=(--model Qwen/Qwen2.5-VL-7B-Instruct --budgets 256,128,64 --media 1008x1008)
            ;;
        llava-video) # 2,704 tokens: 16 frames of 13 x 13
            arguments=(--model lmms-lab/LLaVA-Video-7B-Qwen2 --budgets 1024,512
                --media 640x360x16
                --server-args="--hf-overrides '{\"mm_spatial_pool_mode\": \"average\"}'")
            ;;
        qwen2.5-vl-video) # vLLM's own pruning knows shares alone
            arguments=(--model Qwen/Qwen2.5-VL-7B-Instruct --budgets 20%,10% --media 448x448x32
                --vllm-video-pruning)
            ;;
        *) fail "RUNS has '$1': the runs are llava-1.5, llava-next, qwen2.5-vl, llava-video," \
            "qwen2.5-vl-video" ;;
    esac
}

read -r -a runs <<<"$RUNS"
for run in "${runs[@]}"; do arguments_of "$run"; done
$dry_run || need_command ANCHORPRUNE anchorprune

# --- one after the other: they share the GPU -----------------------------------------------------

$dry_run || mkdir -p "$OUT" # runs that fail early make none
failed=()
for run in "${runs[@]}"; do
    arguments_of "$run"
    command=("$ANCHORPRUNE" bench serve "${arguments[@]}" --concurrency "$CONCURRENT"
        --requests "$REQUESTS" --output-tokens "$OUTPUT" --repeat "$REPEAT" --out "$OUT/$run"
        ${further[@]+"${further[@]}"})
    show "${command[@]}"
    $dry_run || "${command[@]}" || {
        code=$?
        [ $code -ne 130 ] || exit 130
        failed+=("$run")
    }
done
$dry_run && exit 0

for run in "${runs[@]}"; do
    [ -f "$OUT/$run/table.md" ] || continue
    sed -n 1p "$OUT/$run/table.md"
    sed -n '/^## As in the paper/,$p' "$OUT/$run/table.md"
done | tee "$OUT/table.md"
if [ ${#failed[@]} -gt 0 ]; then
    echo "benchmark_throughput.sh: failed: ${failed[*]}; the same command tries again" >&2
    exit 1
fi
