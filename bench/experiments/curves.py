"""Learning curves of hymo-nano: NorMuon against AdamW, and HyMo against a dense model of equal active size.

    python bench/experiments/curves.py HYMO TEXT WORK bench/results/curves-cpu-DATE.json

HYMO is the command, TEXT what `hymo data prep` takes, WORK a folder for tokenizer, shards and runs. Every run sees the same
tokens in the same order. Five learning rates at one seed choose each side's own; that one runs with three seeds. A run that
is done is not run again, and one that was stopped goes on. Only the standard library is used.
"""

import json
import pathlib
import subprocess
import sys

RATES = [0.001, 0.002, 0.004, 0.008, 0.016]
SEEDS = [0, 1, 2]
COMMON = {
    "model.context_length": 256,
    "train.rows": 4,
    "train.micro_rows": 4,
    "schedule.num_steps": 150,
    "eval.every": 50,
    "eval.tokens": 32768,
    "eval.samples": 0,
    "checkpoint.every": 50,
    "checkpoint.keep_last": 1,
    "checkpoint.keep_best": "false",
}
SIDES = {
    "hymo-nano, NorMuon": ("hymo-nano", {}),
    "hymo-nano, AdamW": ("hymo-nano", {"optim.matrices": '"adamw"'}),
    "gpt-nano, NorMuon": ("gpt-nano", {}),
}


def data(hymo, text, work):
    """The folder of shards."""
    tokenizer, shards = work / "tokenizer.json", work / "data"
    if not tokenizer.exists():
        subprocess.run([hymo, "tokenizer", "train", text, "--vocab", "4096", "-o", tokenizer], check=True)
    prep = [hymo, "data", "prep", text, "-t", tokenizer, "-o", shards, "--val-fraction", "0.05"]
    subprocess.run(prep, check=True)
    return shards


def run(hymo, work, shards, side, rate, seed):
    """One run's curve: training loss at each step, held-out bits a byte at each evaluation."""
    preset, changes = SIDES[side]
    out = work / f"{side.replace(', ', '-')}-{rate}-{seed}"
    fields = COMMON | changes | {"optim.lr": rate, "train.seed": seed, "data.shards": shards}
    sets = [arg for field, value in fields.items() for arg in ("--set", f"{field}={value}")]
    subprocess.run([hymo, "train", preset, "--out", out, *sets], check=True, stdout=subprocess.DEVNULL)
    losses, bits = {}, {}
    for line in (out / "log.jsonl").read_text().splitlines():
        record = json.loads(line)
        if record["kind"] == "step":
            losses[record["step"]] = round(record["losses"][0], 5)
        elif record["kind"] == "eval":
            bits[record["step"]] = record["bits_per_byte"]
    return {"side": side, "lr": rate, "seed": seed, "losses": list(losses.values()), "bits_per_byte": bits}


def main():
    hymo, text, work, result = sys.argv[1:]
    work = pathlib.Path(work)
    work.mkdir(parents=True, exist_ok=True)
    shards = data(hymo, text, work)
    version = subprocess.run([hymo, "--version"], check=True, capture_output=True, text=True).stdout.strip()
    runs = []

    def go(side, rate, seed):
        runs.append(run(hymo, work, shards, side, rate, seed))
        final = runs[-1]["bits_per_byte"][COMMON["schedule.num_steps"]]
        print(f"{side}, lr {rate}, seed {seed}: {final:.4f} bits a byte", flush=True)
        table = {"command": " ".join(sys.argv), "version": version, "config": {k: str(v) for k, v in COMMON.items()}}
        pathlib.Path(result).write_text(json.dumps(table | {"runs": runs}, indent=1) + "\n")
        return final

    for side in SIDES:
        finals = {rate: go(side, rate, SEEDS[0]) for rate in RATES}
        # A run that fell over has no finite number.
        best = min(finals, key=lambda rate: finals[rate] if finals[rate] == finals[rate] else float("inf"))
        last = [finals[best]] + [go(side, best, seed) for seed in SEEDS[1:]]
        mean = sum(last) / len(last)
        print(f"{side}: best lr {best}, {mean:.4f} bits a byte ({min(last):.4f} to {max(last):.4f})", flush=True)


if __name__ == "__main__":
    main()
