"""What two prediction modules gain in decoding a trained model: speed with drafts beside speed without, turn by turn.

    hymo demo --text books/ --out runs/demo
    python3 bench/experiments/mtp.py target/release/hymo runs/demo bench/results/mtp-cpu-DATE.json

Greedy text of every prompt, for every dtype of weights and all gates; each run's text must be the plain run's. Prints a table:
tokens a second, the gain end to end, tokens a pass, and the share of each depth's drafts that came true.
"""

import json
import statistics
import subprocess
import sys

PROMPTS = [
    "It is a truth universally acknowledged, that",
    "The price of corn is, in the long run,",
    "He went down to the river, and",
    '"My dear," said the lady, "',
]
TOKENS, ROUNDS = 480, 5
MODES = [("off", None), ("on", "0.8,0.75"), ("on", "0.5,0.5"), ("on", "0.2,0.2"), ("on", "0"), ("auto", "0.8,0.75"), ("auto", "0")]


def generate(hymo, model, prompt, dtype, mode, gates):
    args = [hymo, "generate", model, "--prompt", prompt, "-t", "0", "-n", str(TOKENS), "--ignore-end", "--json"]
    args += ["--dtype", dtype, "--mtp", mode] + (["--gates", gates] if gates else [])
    return json.loads(subprocess.run(args, check=True, capture_output=True, text=True).stdout)


def main():
    hymo, model, out = sys.argv[1:]
    version = subprocess.run([hymo, "--version"], check=True, capture_output=True, text=True).stdout.strip()
    rows = []
    for dtype in ["f32", "bf16", "int8"]:
        runs = {mode: [] for mode in MODES}
        for prompt in PROMPTS:
            plain = None
            for _ in range(ROUNDS):
                for mode in MODES:
                    got = generate(hymo, model, prompt, dtype, *mode)
                    plain = plain or got["tokens"]
                    assert got["tokens"] == plain, (dtype, mode, prompt)
                    runs[mode].append({"seconds": got["seconds"], "passes": got["passes"], "mtp": got["mtp"]})
        for mode, found in runs.items():
            # Each prompt's best of all rounds: what else the machine does only ever adds time.
            best = lambda runs: [min(r["seconds"] for r in runs[i : i + ROUNDS]) for i in range(0, len(runs), ROUNDS)]
            gain = statistics.median(a / b for a, b in zip(best(runs[MODES[0]]), best(found)))
            drafted = [sum(column) for column in zip(*(r["mtp"]["drafted"] for r in found if r["mtp"]["drafted"]))]
            accepted = [sum(column) for column in zip(*(r["mtp"]["accepted"] for r in found if r["mtp"]["accepted"]))]
            rows.append({
                "dtype": dtype, "mtp": mode[0], "gates": mode[1], "gain": gain,
                "tokens_per_second": TOKENS / statistics.median(best(found)),
                "drafted": drafted, "accepted": accepted,
                "tokens_per_pass": TOKENS * len(found) / sum(r["passes"] for r in found),
                "runs": found,
            })
            share = " ".join(f"{a / d:.0%} of {d}" if d else "-" for a, d in zip(accepted, drafted)) or "no drafts"
            row = rows[-1]
            print(f"{dtype:5} {mode[0]:5} {mode[1] or '':9} {row['tokens_per_second']:7.0f} tok/s  gain {gain:.2f}  "
                  f"{row['tokens_per_pass']:.2f} tokens a pass  accepted {share}", flush=True)
    command = f"python3 bench/experiments/mtp.py target/release/hymo runs/demo {out}"
    about = {"command": command, "version": version, "prompts": PROMPTS, "tokens": TOKENS, "rounds": ROUNDS}
    lines = ",\n".join("  " + json.dumps(row) for row in rows)
    with open(out, "w") as file:
        file.write(json.dumps(about, indent=1)[:-2] + ',\n "rows": [\n' + lines + "\n ]\n}\n")


main()
