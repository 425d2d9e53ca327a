#!/usr/bin/env bash
# What a machine with a GPU should check before a release, from the source tree, nothing installed:
# the kernels' tests, a memory check, host cost, and optimize on the example models. Result files go to OUT.
#
#   benchmarks/run_gpu.sh OUT [part …]     parts: tests rows tune guide host aa minilm prefill decode
#   (default: all but tune and guide)
#   rows = sanitize bench. Peers of bench that are not installed can be on PYTHONPATH; WORKERS: processes of tests, with
#   pytest-xdist; TUNE_BUDGET, BENCH_BUDGET, SANITIZE_BUDGET, GUIDE_BUDGET: seconds.
set -uo pipefail
cd "$(dirname "$0")/.."
out=${1:?usage: benchmarks/run_gpu.sh OUT [part …]}
shift
parts=("$@")
[ ${#parts[@]} -gt 0 ] || parts=(tests rows host aa minilm prefill decode)
# rows stands for two parts
read -ra parts <<<"$(sed 's/\brows\b/sanitize bench/g' <<<"${parts[*]}")"
export PYTHONPATH=src:.${PYTHONPATH:+:$PYTHONPATH}
python=${PYTHON:-python3}
mkdir -p "$out"

optimize() { # name, workload, budget
    local run=runs/$1
    rm -rf "$run"
    "$python" -m wavecrest optimize "$2" --device cuda --budget "$3" ${FLAGS:-} --out "$run" 2>&1 | tee "$out/$1.log"
    cp "$run/run.json" "$out/$1.run.json"
    cp "$run/plan.json" "$out/$1.plan.json"
}

verify() { # name, workload
    "$python" -m wavecrest verify "$2" --plan "runs/$1/plan.json" --device cuda --processes "${PROCESSES:-2}" \
        --out "$out/$1.verify.json" 2>&1 | tee -a "$out/$1.log"
}

for part in "${parts[@]}"; do
    begin=$SECONDS
    echo "== $part"
    case $part in
    tests)
        "$python" -m pytest -q -p no:cacheprovider ${WORKERS:+-n $WORKERS} ${TESTS:-tests/ops tests/optimizer tests/unit} 2>&1 |
            tail -60 | tee "$out/tests.log"
        ;;
    tune)
        "$python" -m wavecrest tune "${TUNE:-gemm}" --suite shared --device cuda --budget "${TUNE_BUDGET:-480}" \
            --out "$out/tune.json" --table "$out/table.csv" 2>&1 | tee "$out/tune.log"
        ;;
    sanitize) PYTHON=$python scripts/sanitize --budget "${SANITIZE_BUDGET:-480}" --out "$out/sanitize.json" 2>&1 | tee "$out/sanitize.log" ;;
    bench)
        # one file for all ops (or those in BENCH); `wavecrest bench --from FILE --split DIR` makes one an op, with a plot
        "$python" -m wavecrest bench ${BENCH:---all-ops} --suite shared --device cuda --budget "${BENCH_BUDGET:-480}" \
            --out "$out/ops.json" 2>&1 | tee "$out/bench.log"
        ;;
    guide)
        # goes on with what is not done, so a second call on the same OUT finishes it
        "$python" -m benchmarks.guide --out "$out/guide.jsonl.gz" --device cuda --budget "${GUIDE_BUDGET:-540s}" \
            2>&1 | tee "$out/guide.log"
        ;;
    host) "$python" benchmarks/host_cost.py --out "$out/host_cost.json" 2>&1 | tee "$out/host.log" ;;
    aa) "$python" benchmarks/aa.py --out "$out/aa.json" 2>&1 | tee "$out/aa.log" ;;
    minilm) optimize minilm examples/minilm.py:make 150s && verify minilm examples/minilm.py:make ;;
    prefill) optimize llama_prefill examples/llama.py:prefill ${PREFILL_BUDGET:-240s} ;;
    decode)
        optimize llama_decode examples/llama.py:decode ${DECODE_BUDGET:-480s}
        "$python" benchmarks/decode_peers.py examples/llama.py:decode runs/llama_decode/plan.json --device cuda \
            --out "$out/llama_decode.peers.json" 2>&1 | tee -a "$out/llama_decode.log"
        verify llama_decode examples/llama.py:decode
        ;;
    *) echo "no part $part" ;;
    esac
    echo "== $part took $((SECONDS - begin)) s"
done
