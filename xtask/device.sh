#!/usr/bin/env bash
# Runs on a machine with a GPU, in a folder that `cargo xtask device` gathered:
#   bash run.sh RESULTS_FOLDER [doctor] [sanitizer] [curves] [bench] [peer] [train]
# All parts without names. Prints a short account; logs and raw results go into the folder. A part that fails does not stop
# the others. Settings of the card are left as they are.
set -uo pipefail
here=$(cd "$(dirname "$0")" && pwd)
out=$(mkdir -p "$1" && cd "$1" && pwd)
shift
parts=${*:-doctor sanitizer curves bench peer train}
cd "$here"
export HYMO_KERNEL_CACHE="$here/kernels" PYTHONUNBUFFERED=1
torch=$(python3 -c 'import nvidia, os; print(":".join(os.path.join(p, d, "lib") for p in nvidia.__path__ for d in os.listdir(p)))' 2>/dev/null)
export HYMO_CUDA_LIB="/usr/local/cuda/lib64:/usr/local/cuda/targets/x86_64-linux/lib:${torch:-}"
hymo=$here/hymo
chmod +x "$hymo"
note() { echo "== $* ($(date +%T))"; }

for part in $parts; do
    note "$part"
    case $part in
    doctor)
        # One process an operation: what one leaves behind on the GPU is not the next one's.
        for op in embedding rms_norm linear short_conv decay_gate delta_rule gated_norm rotary attention residual router experts \
            swiglu concat cross_entropy model optim; do
            timeout 200 "$hymo" doctor --device cuda --op $op >"$out/doctor-$op.txt" 2>&1
            code=$?
            grep -E "^$op " "$out/doctor-$op.txt" || echo "$op: no table"
            if [ $code != 0 ]; then grep -E "FAIL|rror" "$out/doctor-$op.txt" | head -${LINES_OF_FAILURE:-12}; fi
        done
        cat "$out"/doctor-*.txt >"$out/doctor.txt" && rm "$out"/doctor-*.txt
        ;;
    sanitizer)
        # Small cases only: the tools slow kernels down a hundred times.
        for tool in memcheck racecheck initcheck; do
            timeout 150 compute-sanitizer --tool $tool --report-api-errors no --error-exitcode 9 "$hymo" doctor --device cuda --small \
                >"$out/sanitizer-$tool.txt" 2>&1
            echo "$tool: exit $?; $(grep -c 'ERROR SUMMARY: 0' "$out/sanitizer-$tool.txt") clean; $(tail -1 "$out/sanitizer-$tool.txt")"
        done
        ;;
    curves)
        nano="configs/hymo-nano.toml --set data.shards=data/nano --set schedule.num_steps=40 --set eval.every=0"
        "$hymo" train $nano --device cpu --resume never --json --out "$out/run/cpu" >"$out/cpu.jsonl" 2>"$out/cpu.err" &
        "$hymo" train $nano --device cuda --dtype f32 --resume never --json --out "$out/run/f32" >"$out/f32.jsonl" 2>"$out/f32.err"
        "$hymo" train $nano --device cuda --dtype bf16 --resume never --json --out "$out/run/bf16" >"$out/bf16.jsonl" 2>"$out/bf16.err"
        "$hymo" train $nano --device cuda --dtype bf16 --resume never --json --out "$out/run/bf16b" >"$out/again.jsonl" 2>&1
        wait
        for f in "$out"/*.err; do tail -n 3 "$f"; done
        python3 - "$out" <<'PY'
import json, sys
def losses(name):
    rows = []
    for line in open(f"{sys.argv[1]}/{name}.jsonl"):
        try: r = json.loads(line)
        except ValueError: continue
        r = r.get("step", r) if isinstance(r.get("step"), dict) else r
        if "losses" in r: rows.append(r["losses"][0])
    return rows
cpu, f32, bf16, again = map(losses, ("cpu", "f32", "bf16", "again"))
for i in range(0, min(map(len, (cpu, f32, bf16))), 5): print(f"step {i+1:3}: cpu {cpu[i]:.6f} f32 {f32[i]:.6f} bf16 {bf16[i]:.6f}")
far = lambda a, b: max((abs(x - y) / y for x, y in zip(a, b)), default=float("nan"))
print(f"farthest from cpu: f32 {far(f32, cpu):.2e}, bf16 {far(bf16, cpu):.2e}; bf16 twice equal: {bf16 == again and len(bf16) > 0}")
PY
        # Across devices: a checkpoint of one goes on on the other.
        more="configs/hymo-nano.toml --set data.shards=data/nano --set schedule.num_steps=44 --set eval.every=0"
        "$hymo" train $more --device cpu --resume "$out/run/f32" --json --out "$out/run/gpu-cpu" >"$out/gpu-cpu.jsonl" 2>&1 || tail -3 "$out/gpu-cpu.jsonl"
        "$hymo" train $more --device cuda --dtype f32 --resume "$out/run/cpu" --json --out "$out/run/cpu-gpu" >"$out/cpu-gpu.jsonl" 2>&1 || tail -3 "$out/cpu-gpu.jsonl"
        grep -h -o '"losses":\[[0-9.]*' "$out/gpu-cpu.jsonl" "$out/cpu-gpu.jsonl" | paste -sd' '
        rm -rf "$out/run"
        ;;
    bench)
        timeout 240 "$hymo" bench train configs/hymo-434m.toml --device cuda --batch 8 --len 4096 --reps 6 --warmup 2 --accumulate 16 --profile \
            --json >"$out/train-h200.json" 2>"$out/train-h200.err" || tail -5 "$out/train-h200.err"
        python3 - "$out/train-h200.json" <<'PY'
import json, sys
r = json.load(open(sys.argv[1]))
print({k: round(r[k], 2) for k in r if isinstance(r[k], float)}, r["device_memory_mib"])
for part, kernels in r["kernels"].items():
    print(part, round(sum(k["ms"] for k in kernels), 2), "ms")
    for k in kernels[:22]:
        print(f'  {k["ms"]:9.3f} ms {k["count"]:5} x {k["name"]}' + (f'  {k["flops"]/k["ms"]*1e-9:.0f} TFLOP/s' if k["flops"] else ""))
PY
        ;;
    peer)
        site=$(mktemp -d)
        python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --target "$site" wheels/*.whl
        PYTHONPATH=$site timeout 280 python3 bench/peer/hymo_torch.py --steps 6 2>&1 | tee "$out/peer.txt" | tail -3
        timeout 60 python3 bench/peer/ceil.py >"$out/ceilings.txt" 2>&1
        head -12 "$out/ceilings.txt"
        ;;
    train)
        timeout 120 "$hymo" train configs/hymo-434m.toml --device cuda --set data.shards=data/full --set schedule.num_steps=20 \
            --set train.rows=16 --set train.micro_rows=8 --set eval.every=0 --set checkpoint.every=0 --resume never \
            --out /tmp/run434 >"$out/train434.txt" 2>&1
        grep -v '^$' "$out/train434.txt" | tail -30
        ;;
    esac
done
note "done"
