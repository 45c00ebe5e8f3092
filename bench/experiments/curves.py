"""Learning curves of hymo-nano: NorMuon against AdamW, and HyMo against a dense model of equal active size.

    python bench/experiments/curves.py HYMO DATA WORK bench/results/curves-DATE.json [--device cuda] [--jobs 4] [--steps 600]

HYMO is the command, DATA a folder of shards (`hymo data prep`; the tokenizer of 4,096 entries), WORK a folder for the runs.
Every run sees the same tokens in the same order. Five learning rates at one seed choose each side's own; a best rate at the
edge is followed outwards; that one runs with three seeds. A run that is done is not run again, and one that was stopped goes
on. JOBS runs at a time. Only the standard library is used.
"""

import argparse
import concurrent.futures
import json
import pathlib
import subprocess
import sys

RATES = [0.001, 0.002, 0.004, 0.008, 0.016]
SEEDS = [0, 1, 2]
COMMON = {
    "model.context_length": 512,
    "eval.tokens": 65536,
    "eval.samples": 0,
    "checkpoint.every": 0,
    "checkpoint.keep_last": 1,
    "checkpoint.keep_best": "false",
}
SIDES = {
    "hymo-nano, NorMuon": ("hymo-nano", {}),
    "hymo-nano, AdamW": ("hymo-nano", {"optim.matrices": '"adamw"'}),
    "gpt-nano, NorMuon": ("gpt-nano", {}),
}


def run(args, side, rate, seed):
    """One run's curve: training loss at each step, held-out bits a byte at each evaluation."""
    preset, changes = SIDES[side]
    out = args.work / f"{side.replace(', ', '-')}-{rate}-{seed}"
    fields = COMMON | changes | {"optim.lr": rate, "train.seed": seed, "data.shards": args.data}
    fields |= {"train.rows": args.rows, "train.micro_rows": args.rows}
    fields |= {"schedule.num_steps": args.steps, "eval.every": args.steps // 2}
    sets = [arg for field, value in fields.items() for arg in ("--set", f"{field}={value}")]
    options = ["--device", args.device] + (["--dtype", args.dtype] if args.device != "cpu" else [])
    options += ["--threads", str(args.threads)]
    command = [args.hymo, "train", preset, "--out", out, *options, *sets]
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    losses, bits = {}, {}
    log = out / "log.jsonl"
    if not log.exists():
        raise SystemExit(f"{side} did not start: {done.stderr.strip()}")
    for line in log.read_text().splitlines():
        record = json.loads(line)
        if record["kind"] == "step":
            losses[record["step"]] = round(record["losses"][0], 5)
        elif record["kind"] == "eval":
            bits[record["step"]] = record["bits_per_byte"]
    # A run that fell over is a result: the rate is too high.
    error = done.stderr.strip().splitlines()[-1:] if done.returncode else []
    final = bits.get(args.steps, float("inf"))
    print(f"{side}, lr {rate}, seed {seed}: {final:.4f} bits a byte {' '.join(error)}", flush=True)
    curve = {"losses": list(losses.values()), "bits_per_byte": bits}
    return {"side": side, "lr": rate, "seed": seed, "final": final, "error": error} | curve


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("hymo")
    for name in ("data", "work", "result"):
        parser.add_argument(name, type=pathlib.Path)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="f32")
    parser.add_argument("--threads", type=int, default=2, help="of each run")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time")
    parser.add_argument("--rows", type=int, default=8, help="of 512 tokens, a step")
    parser.add_argument("--steps", type=int, default=150, help="of each run")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    version = subprocess.run([args.hymo, "--version"], check=True, capture_output=True, text=True).stdout.strip()
    done = {}
    with concurrent.futures.ThreadPoolExecutor(args.jobs) as pool:

        def go(wanted):
            """Runs what is wanted and not there yet."""
            new = [key for key in dict.fromkeys(wanted) if key not in done]
            for key, result in zip(new, pool.map(lambda key: run(args, *key), new)):
                done[key] = result
            table = {"command": " ".join(sys.argv), "version": version, "config": {k: str(v) for k, v in COMMON.items()}}
            args.result.write_text(json.dumps(table | {"runs": list(done.values())}) + "\n")

        def best(side):
            """The best rate of the first seed."""
            return min((result["final"], rate) for (of, rate, seed), result in done.items() if (of, seed) == (side, SEEDS[0]))[1]

        go([(side, rate, SEEDS[0]) for side in SIDES for rate in RATES])
        for _ in range(2):
            edges = {side: best(side) for side in SIDES}
            tried = {side: [rate for (of, rate, _) in done if of == side] for side in SIDES}
            out = {side: rate / 2 if rate == min(tried[side]) else 2 * rate for side, rate in edges.items()}
            go([(side, out[side], SEEDS[0]) for side, rate in edges.items() if rate in (min(tried[side]), max(tried[side]))])
        go([(side, best(side), seed) for side in SIDES for seed in SEEDS])
        for side in SIDES:
            last = [done[side, best(side), seed]["final"] for seed in SEEDS]
            mean = sum(last) / len(last)
            print(f"{side}: best lr {best(side)}, {mean:.4f} bits a byte ({min(last):.4f} to {max(last):.4f})", flush=True)


if __name__ == "__main__":
    main()
