#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
set -euo pipefail

usage() {
    cat <<'END'
An OpenAI-compatible server with pruning. examples/openai_client.py asks it.

  examples/serve.sh [--dry-run] [-- FURTHER FLAGS OF vllm serve ...]
  MODEL=llava-hf/llava-1.5-7b-hf BUDGET=64 examples/serve.sh
  MODEL=lmms-lab/LLaVA-Video-7B-Qwen2 BUDGET=256 VIDEO_BUDGET=512 examples/serve.sh

Variables (defaults in brackets):

  MODEL        hub id or path [a small trained LLaVA: made in .demo/trained-llava-1.5, served
               as `demo`, fit for a CPU, and each request may choose its own budget]
  BUDGET       visual tokens kept per image: a number, or a share such as 10% [64; of the small
               model 16]
  VIDEO_BUDGET the same per video [as BUDGET]
  METHOD       how they are chosen: a value of --anchorprune-method [anchorprune]
  LISTEN, PORT where to listen [127.0.0.1, 8000]; LISTEN=0.0.0.0 lets other machines ask: give
               -- --api-key KEY then
  VLLM, ANCHORPRUNE   the commands [vllm, anchorprune]

  --dry-run    print the commands, run nothing
  --help       this text

To let requests to another model choose budgets too: -- --trust-request-mm-kwargs. That is vLLM's own
flag; it trusts all clients with all settings of the image processor.
END
}

source "$(dirname "${BASH_SOURCE[0]}")/common.sh"
read_arguments "flags of vllm serve" "$@"

small=.demo/trained-llava-1.5
MODEL=${MODEL:-$small}
VIDEO_BUDGET=${VIDEO_BUDGET:-}
METHOD=${METHOD:-anchorprune}
LISTEN=${LISTEN:-127.0.0.1} # not HOST, which some shells and conda set to something else
PORT=${PORT:-8000}
VLLM=${VLLM:-vllm}
ANCHORPRUNE=${ANCHORPRUNE:-anchorprune}

need_whole_numbers PORT
$dry_run || need_command VLLM vllm

model_flags=()
if [ "$MODEL" = "$small" ]; then
    BUDGET=${BUDGET:-16}
    # Its text encoder is beside it; for the published models the plugin knows the pair. vLLM's own
    # defaults would compile for minutes and take gigabytes for the KV cache.
    model_flags=(--anchorprune-text-encoder "$small/clip" --served-model-name demo --dtype float32
        --enforce-eager --max-model-len 1024 --kv-cache-memory-bytes 128M --trust-request-mm-kwargs)
    case $METHOD in # the patches of its CLIP are most similar to the words that are true of them
        anchorprune | cdpruner) model_flags+=(--anchorprune-config '{"similarity": "raw"}') ;;
    esac
    export HF_HUB_OFFLINE=${HF_HUB_OFFLINE:-1} # waiting for a hub would only cost time
    echo "The small demo model. A real one:" \
        "MODEL=llava-hf/llava-1.5-7b-hf BUDGET=64 examples/serve.sh" >&2
    make_model=("$ANCHORPRUNE" demo-model "$small")
    if $dry_run; then
        show "${make_model[@]}"
    else
        need_command ANCHORPRUNE anchorprune
        "${make_model[@]}"
    fi
fi

# The last one: each answer's `usage` tells how many visual tokens were kept.
serve=("$VLLM" serve "$MODEL" --host "$LISTEN" --port "$PORT"
    --anchorprune-budget "${BUDGET:-64}" ${VIDEO_BUDGET:+--anchorprune-video-budget "$VIDEO_BUDGET"}
    --anchorprune-method "$METHOD" ${model_flags[@]+"${model_flags[@]}"}
    --enable-prompt-tokens-details ${further[@]+"${further[@]}"})
show "${serve[@]}"
$dry_run || exec "${serve[@]}"
