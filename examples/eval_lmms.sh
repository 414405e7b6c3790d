#!/usr/bin/env bash
# SPDX-License-Identifier: Apache-2.0
set -euo pipefail

usage() {
    cat <<'END'
The paper's protocol: lmms-eval against `vllm serve`, unpruned and at each budget, then a table
with Rel. beside the paper's own figures.

  examples/eval_lmms.sh [--dry-run] [-- FLAGS OF vllm serve ...]
  MODEL=Qwen/Qwen2.5-VL-7B-Instruct LIMIT=100 examples/eval_lmms.sh

Variables (defaults in brackets; those of BUDGETS and TASKS are the paper's for the model):

  MODEL       what to serve [llava-hf/llava-1.5-7b-hf]. The paper's others:
              llava-hf/llava-v1.6-vicuna-7b-hf, Qwen/Qwen2.5-VL-7B-Instruct,
              lmms-lab/LLaVA-Video-7B-Qwen2. Any other: give BUDGETS and TASKS.
  BUDGETS     visual tokens to keep: numbers or shares, e.g. "128 64 10%"
  METHODS     values of --anchorprune-method [anchorprune]
  TASKS       tasks of lmms-eval, e.g. "gqa pope"; those in examples/lmms_tasks are known too
  OUT         where results go [eval-lmms/NAME OF THE MODEL]
  LIMIT       only the first so many questions of each task [all]
  CONCURRENT  questions at once [32]
  PORT        of the server, on 127.0.0.1 [8000]
  START       seconds within which the server must be ready [1800]
  VLLM, LMMS_EVAL, PYTHON   the commands [vllm, lmms-eval, python3]. lmms-eval may live in another
              virtual environment: LMMS_EVAL=/path/to/bin/lmms-eval

  --dry-run   print the commands, run nothing
  --help      this text

A result is OUT/METHOD-BUDGET/TASK (unpruned: OUT/full/TASK), the table OUT/table.md. What is there
is not run again: the same command goes on where an earlier one stopped. MODEL, LIMIT and the flags of
vllm serve must be the same for all of an OUT.

OPENAI_API_KEY is the judge's. Without it MM-Vet and TempCompass' captioning, which a judge scores,
are left out of the defaults, and MMBench guesses where it cannot read an answer.
END
}

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$here/common.sh"
read_arguments "flags of vllm serve" "$@"

MODEL=${MODEL:-llava-hf/llava-1.5-7b-hf}
METHODS=${METHODS:-anchorprune}
CONCURRENT=${CONCURRENT:-32}
PORT=${PORT:-8000}
START=${START:-1800}
LIMIT=${LIMIT:-}
VLLM=${VLLM:-vllm}
LMMS_EVAL=${LMMS_EVAL:-lmms-eval}
PYTHON=${PYTHON:-python3}

need_whole_numbers CONCURRENT PORT START ${LIMIT:+LIMIT}

# --- what the paper has for this model -----------------------------------------------------------

# Names of lmms-eval 0.7: it has all of the paper's tasks. Which metric of each counts is in
# lmms_table.py. textvqa_val_ocr is lmms-eval's textvqa_val with OCR tokens in the prompt, as LLaVA's
# own evaluation has them. mmvet and tempcompass_captioning are scored by a judge.
family='' budgets='' tasks='' judged=''
serve_flags=() client_args=''
case ${MODEL,,} in
    *llava-1.5* | *llava-v1.5*) # 576 tokens
        family=llava-1.5 budgets='128 64 32'
        tasks='vqav2_val textvqa_val_ocr gqa scienceqa_img mme pope mmbench_en_dev mmbench_cn_dev'
        judged=mmvet
        ;;
    *llava-v1.6* | *llava-next*) # 2,880 tokens of a base view and four crops
        family=llava-next budgets='640 320 160'
        tasks='vqav2_val textvqa_val_ocr gqa scienceqa_img mme pope mmbench_en_dev mmbench_cn_dev'
        judged=mmvet
        ;;
    *qwen2.5-vl*) # 1,296 tokens: every picture has as many pixels as 1008 x 1008, in its own shape
        family=qwen2.5-vl budgets='256 128 64'
        tasks='mme textvqa_val docvqa_val ai2d mmmu_val mmbench_en_dev mmbench_cn_dev'
        serve_flags=(--mm-processor-kwargs '{"min_pixels": 1016064, "max_pixels": 1016064}')
        ;;
    *llava-video*) # 2,704 tokens: 16 frames of 13 x 13
        family=llava-video budgets='1024 512'
        tasks='videomme videomme_w_subtitle egoschema_subset'
        tasks+=' tempcompass_multi_choice tempcompass_yes_no tempcompass_caption_matching'
        judged=tempcompass_captioning
        # The server reads the videos itself, from where lmms-eval has put them, and takes the number
        # of frames from the request. (lmms-eval would send frames as so many pictures otherwise.)
        serve_flags=(
            --hf-overrides '{"mm_spatial_pool_mode": "average"}'
            --allowed-local-media-path "${HF_HOME:-$HOME/.cache/huggingface}"
            --trust-request-mm-kwargs
        )
        client_args=,pass_video_url=True,max_frames_num=16
        ;;
esac
serve_flags+=(${further[@]+"${further[@]}"})

if [ -z "${TASKS+given}" ] && [ -n "$judged" ]; then
    if [ -n "${OPENAI_API_KEY:-}${AZURE_API_KEY:-}" ]; then
        tasks+=" $judged"
    else
        echo "Left out: $judged, which needs a judge (OPENAI_API_KEY)." >&2
    fi
fi
read -r -a budgets <<<"${BUDGETS-$budgets}"
read -r -a tasks <<<"${TASKS-$tasks}"
read -r -a methods <<<"$METHODS"
[ -n "$family" ] || { [ -n "${BUDGETS+given}" ] && [ -n "${TASKS+given}" ]; } ||
    fail "the paper has no table for '$MODEL': give BUDGETS and TASKS"
[ ${#tasks[@]} -gt 0 ] || fail "TASKS is empty: name at least one task"
for budget in ${budgets[@]+"${budgets[@]}"}; do
    [[ $budget =~ ^[1-9][0-9]*$|^[0-9]+(\.[0-9]+)?%$ ]] ||
        fail "BUDGETS has '$budget': give numbers or shares, e.g. '128 64 10%'"
done

if ! $dry_run; then
    command -v "$LMMS_EVAL" >/dev/null ||
        fail "there is no '$LMMS_EVAL': pip install lmms-eval, best in a virtual environment of its" \
            "own, and name it: LMMS_EVAL=/path/to/bin/lmms-eval"
    need_command VLLM vllm
fi

name=${MODEL%/}
OUT=${OUT:-eval-lmms/${name##*/}}

# Results of other settings must not be taken for these.
settings="MODEL=$MODEL LIMIT=${LIMIT:-all} flags: ${serve_flags[*]-}"
if ! $dry_run; then
    mkdir -p "$OUT"
    [ -e "$OUT/settings.txt" ] || printf '%s\n' "$settings" >"$OUT/settings.txt"
    [ "$(cat "$OUT/settings.txt")" = "$settings" ] ||
        fail "$OUT has results of other settings ($(cat "$OUT/settings.txt")), not of these" \
            "($settings): choose another OUT, or remove it"
fi

# --- one server, all its tasks -------------------------------------------------------------------

server='' asking=''
stop_server() {
    [ -n "$server" ] || return 0
    # Its own process group: nothing else is ended, and nothing of it is left.
    kill -TERM "$server" 2>/dev/null || true
    for _ in $(seq 40); do kill -0 "$server" 2>/dev/null || break && sleep 0.5; done
    kill -KILL -- "-$server" 2>/dev/null || true
    wait "$server" 2>/dev/null || true
    server=''
}
stop_all() {
    [ -z "$asking" ] || kill -TERM "$asking" 2>/dev/null || true
    stop_server
}
trap stop_all EXIT
trap 'exit 130' INT TERM

is_healthy() {
    "$PYTHON" - "$PORT" <<'END' 2>/dev/null
import sys, urllib.request
no_proxy = urllib.request.build_opener(urllib.request.ProxyHandler({}))
no_proxy.open(f"http://127.0.0.1:{sys.argv[1]}/health", timeout=2)
END
}

start_server() { # log, command ...
    local log=$1 deadline=$((SECONDS + START))
    shift
    is_healthy && fail "something answers on port $PORT already: choose another PORT"
    setsid "$@" >"$log" 2>&1 &
    server=$!
    until is_healthy; do
        kill -0 "$server" 2>/dev/null || {
            tail -n 20 "$log" >&2
            fail "vllm serve ended; its last lines are above, all of them in $log"
        }
        [ $SECONDS -lt $deadline ] || fail "vllm serve is not ready after $START s; see $log"
        sleep 1
    done
}

failed=()
evaluate() { # directory, flags of the pruning ...
    local run=$OUT/$1 left=() task
    shift
    for task in "${tasks[@]}"; do [ -d "$run/$task" ] || left+=("$task"); done
    [ ${#left[@]} -gt 0 ] || { echo "$run: all there" && return; }

    # A name of its own: from some names (those with o1 in them) lmms-eval draws conclusions.
    local serve=("$VLLM" serve "$MODEL" --host 127.0.0.1 --port "$PORT" --served-model-name served)
    serve+=("$@" ${serve_flags[@]+"${serve_flags[@]}"})
    local client=model=served,base_url=http://127.0.0.1:$PORT/v1,api_key=none
    client+=,timeout=600,httpx_trust_env=False,num_concurrent=$CONCURRENT$client_args
    # temperature=0: without sampling, which is what the tasks say, but MM-Vet beside a temperature.
    local ask=("$LMMS_EVAL" --model openai --model_args "$client" --batch_size 1
        --gen_kwargs temperature=0 --include_path "$here/lmms_tasks" --log_samples
        ${LIMIT:+--limit "$LIMIT"})

    if $dry_run; then
        show "${serve[@]}"
        for task in "${left[@]}"; do show "${ask[@]}" --tasks "$task" --output_path "$run/$task"; done
        return
    fi
    mkdir -p "$run"
    show "${serve[@]}" | tee "$run/server.txt"
    start_server "$run/server.log" "${serve[@]}"
    for task in "${left[@]}"; do
        local partial=$run/.$task
        rm -rf "$partial" && mkdir "$partial"
        local asked=("${ask[@]}" --tasks "$task" --output_path "$partial")
        show "${asked[@]}" | tee "$partial/command.txt"
        # In the background: a signal that comes meanwhile is heard at once.
        "${asked[@]}" >"$partial/log" 2>&1 &
        asking=$!
        # lmms-eval may end well without a result, and scores a question that failed as wrong.
        if wait "$asking" && compgen -G "$partial/*/*_results.json" >/dev/null &&
            ! grep -rqs LMMS_EVAL_REQUEST_FAILED "$partial" --include='*_samples_*.jsonl'; then
            mv "$partial" "$run/$task"
        else
            tail -n 5 "$partial/log" >&2
            echo "eval_lmms.sh: $task failed; see $partial/log" >&2
            failed+=("$partial")
        fi
        asking=''
    done
    stop_server
}

evaluate full
for budget in ${budgets[@]+"${budgets[@]}"}; do
    for method in "${methods[@]}"; do
        evaluate "$method-$budget" --anchorprune-budget "$budget" --anchorprune-method "$method"
    done
done

table=("$PYTHON" "$here/lmms_table.py" "$OUT" ${family:+--paper "$family"})
if $dry_run; then
    show "${table[@]}"
else
    "${table[@]}" | tee "$OUT/table.md" || failed+=("$OUT/table.md")
fi
if [ ${#failed[@]} -gt 0 ]; then
    echo "eval_lmms.sh: failed: ${failed[*]}; the same command tries again" >&2
    exit 1
fi
