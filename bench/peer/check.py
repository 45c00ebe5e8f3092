"""Holds hymo_cpu.py and optim_cpu.py to the whole-model fixtures: every loss, every gradient, 20 steps of training.

    python check.py [--compile]
"""

import argparse
import json
import math
import sys
from pathlib import Path

import torch
from hymo_cpu import Config, HyMo, delta_rule, l2_norm
from optim_cpu import Optimizers
from safetensors import safe_open

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"
LIMITS = {torch.float32: 1e-4, torch.float64: 1e-6}  # relative RMS; the files hold float64 results rounded to float32


def read(name):
    with safe_open(FIXTURES / f"{name}.safetensors", "pt") as file:
        return {key: file.get_tensor(key) for key in file.keys()}, json.loads(file.metadata()["fixture"])


def under(tensors, prefix):
    return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}


def model_table(c):
    """The fixture's configuration in the words of a run file."""
    gdn, mla, moe = c["gdn"], c["mla"], c["moe"]
    return {
        "vocab_size": c["vocab_size"],
        "d_model": c["d_model"],
        "n_layers": len(c["pattern"]),
        "pattern": c["pattern"],
        "norm": {"eps": c["norm_eps"]},
        "gdn": gdn | {"conv_kernel": gdn["conv_size"], "ffn": c["ffn"]["gdn"], "d_ff": c["d_ff"]},
        "mla": mla | {"kv_latent": mla["d_latent"], "ffn": c["ffn"]["mla"], "d_ff": c["d_ff"]},
        "moe": moe | {"n_routed": moe["n_experts"], "d_ff": c["d_ff"], "balance_loss": c["balance_loss"]},
        "mtp": {"n_modules": c["n_mtp"], "loss_weights": c["mtp_loss_weights"]},
        "loss": {"z_loss": c["z_loss"], "soft_cap": c["soft_cap"]},
    }


def error(got, want):
    got, want = got.double(), want.double()
    relative = float((got - want).norm() / want.norm())
    return relative if math.isfinite(relative) else math.inf


def build(table, dtype, head, state, buffers):
    model = HyMo(Config.from_table(table), head=head, head_block=48).to(dtype)
    if hasattr(model, "freq"):
        model.freq = model.c.mla.rope_theta ** (-torch.arange(0, model.c.mla.d_rope, 2, dtype=dtype) / model.c.mla.d_rope)
    model.load({n: p.to(dtype) for n, p in state.items()}, buffers)
    return model


def check_packed(name, dtype, head, compiled):
    """Against the file: packed documents."""
    tensors, about = read(name)
    model = build(model_table(about["config"]), dtype, head, under(tensors, "param."), under(tensors, "buffer."))
    if compiled:
        model.compile_layers()
    total, losses = model(tensors["tokens"].long(), tensors["seg"].long())
    total.backward()
    wanted = [tensors[f"loss.{k}"] for k in range(len(losses) - 1)] + [tensors["loss.balance"]]
    errors = {f"loss {k}": error(got, want) for k, (got, want) in enumerate(zip(losses, wanted, strict=True)) if want != 0}
    errors["loss total"] = error(total.detach(), tensors["loss.total"])
    grads = model.hymo_state(of=lambda p: p.grad)
    errors |= {n: error(grads[n], want) for n, want in under(tensors, "grad.").items()}
    return errors


def check_rows(name, dtype, head, compiled):
    """Rows that are one document each: without masks against with."""
    tensors, about = read(name)
    tokens = torch.cat([tensors["tokens"].long()] * 2, 1)  # over two chunks
    results = []
    for seg in (None, torch.zeros_like(tokens)):
        model = build(model_table(about["config"]), dtype, head, under(tensors, "param."), under(tensors, "buffer."))
        if compiled and seg is None:
            model.compile_layers()
        total, losses = model(tokens, seg)
        total.backward()
        results.append({"losses": losses} | model.hymo_state(of=lambda p: p.grad))
    return {n: error(got, results[1][n]) for n, got in results[0].items()}


def check_delta_rule(dtype):
    """The operator alone, against the files made by public code."""
    tensors, about = read("delta_rule")
    errors = {}
    for case, facts in about["cases"].items():
        if facts["initial_state"]:
            continue
        t = under(tensors, f"{case}.")
        inputs = {n: t[n].to(dtype).requires_grad_() for n in ("q", "k", "v", "g", "beta")}
        q, k = (l2_norm(inputs[n]) if facts["qk_l2norm"] else inputs[n] for n in "qk")
        o = delta_rule(q, k, inputs["v"], inputs["g"], inputs["beta"])
        errors[f"{case} o"] = error(o.detach(), t["f64.o"])
    return errors


def check_trace(dtype, compiled):
    """20 steps of training: every loss against the file's float64 run."""
    tensors, about = read("trace")
    model = build(model_table(about["config"]), dtype, "fused", under(tensors, "param."), under(tensors, "buffer."))
    if compiled:
        model.compile_layers()
    optimizers = Optimizers(model, about["weight_decay"], about["clip"], about["bias_rate"], compiled)
    stream = tensors["tokens"].long()
    seg = torch.repeat_interleave(torch.arange(len(tensors["lengths"])), tensors["lengths"].long())
    losses = []
    for step, want in enumerate(tensors["losses"]):
        starts = [(step * about["rows"] + row) * about["length"] for row in range(about["rows"])]
        tokens, docs = (torch.stack([x[s : s + about["length"] + len(want) - 1] for s in starts]) for x in (stream, seg))
        model.zero_grad(set_to_none=True)
        total, parts = model(tokens, docs)
        total.backward()
        losses.append(parts.detach())
        share, steps = step + 1, len(tensors["losses"])
        start, warmup = steps * (1 - about["decay"]), steps * about["warmup"]
        falling = max(share - start, 0) / (steps - start)
        optimizers.step(about["lr"] * min(share / warmup, 1) * (1 - math.sqrt(falling)))
    got, want = torch.stack(losses).double(), tensors["losses"]
    return {f"loss {k}": float(((got - want) / want)[:, k].abs().max()) for k in range(want.shape[1])}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--compile", action="store_true", help="check compiled layers: float32, one model; takes minutes")
    args = parser.parse_args()
    bad = False
    for dtype, limit in LIMITS.items():
        if args.compile:
            if dtype == torch.float64:
                continue
            cases = [
                ("hymo_sigmoid, one document a row, compiled", check_rows("hymo_sigmoid", dtype, "fused", True)),
                ("hymo_sigmoid, compiled", check_packed("hymo_sigmoid", dtype, "fused", True)),
                ("20 steps of training, compiled", check_trace(dtype, True)),
            ]
        else:
            cases = [("delta_rule", check_delta_rule(dtype))]
            for name in ("hymo_sigmoid", "hymo_silu", "hymo_dense"):
                for head in ("fused", "plain"):
                    cases.append((f"{name}, {head} head", check_packed(name, dtype, head, False)))
            cases.append(("20 steps of training", check_trace(dtype, False)))
            for name in ("hymo_sigmoid", "hymo_dense"):
                cases.append((f"{name}, one document a row", check_rows(name, dtype, "fused", False)))
        for title, errors in cases:
            worst = max(errors, key=errors.get)
            failed = not errors[worst] < limit
            bad |= failed
            verdict = "FAIL" if failed else "ok  "
            print(f"{verdict} {dtype} {title}: {len(errors)} quantities, worst {errors[worst]:.1e} ({worst})")
    sys.exit(bad)


if __name__ == "__main__":
    main()
