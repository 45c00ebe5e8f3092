"""Every kernel of a training step from `hymo bench train --profile --json`: time, TFLOP/s, GB/s, percent of this GPU's ceilings.

python3 kernel_table.py RESULT.json PRODUCT_TFLOPS COPY_GBS. Work and bytes of the kernels that are no cuBLASLt products are the
least possible at HyMo-434M's shapes, bf16: every input read once, every output written once.
"""
import json
import sys

result, product, copy = json.load(open(sys.argv[1])), float(sys.argv[2]), float(sys.argv[3])
N, T, D, V = result["batch"] * result["length"], result["length"], 896, 64256
QKV, HV, HK, E, F = 4096, 2048, 1024, 16, 2304
chunks, pairs, rows = N / 64 * 16, N * T / 2 * 16, 2 * N
B, mb = 2, 1e-9  # bytes of an element; bytes to GB
inter = N / 64 * 16 * (3 * 64 * 64 + 64 * 128 + 64 * 64) * B  # W, K~, Q^, U, P
state = chunks * 64 * 128 * B
kernels = {  # flops, bytes of one run
    "attention_fwd": (4 * pairs * 128, N * (2 * HV + 1024) * B),
    "attention_bwd_q": (6 * pairs * 128, N * (3 * HV + 1024) * B),
    "attention_bwd_kv": (8 * pairs * 128, N * (2 * HV + 2048) * B),
    "delta_rule_prepare": (chunks * 2 * 64 * 64 * (3 * 64 + 128), N * QKV * B + inter),
    "delta_rule_states": (chunks * 4 * 64 * 64 * 128, N * (2 * HK + HV) * B + state + N * HV * B),
    "delta_rule_output": (chunks * 2 * 64 * 128 * 128, N * (2 * HK + 2 * HV) * B + state),
    "delta_rule_bwd_states": (chunks * 8 * 64 * 64 * 128, N * (4 * HK + 2 * HV) * B + state),
    "delta_rule_bwd_grads": (chunks * 2 * 64 * 64 * (7 * 128 + 6 * 64), N * (2 * QKV + 3 * HV + 2 * HK) * B + 2 * state),
    "short_conv_fwd_runs": (0, 2 * N * QKV * B),
    "short_conv_bwd_runs": (0, 3 * N * QKV * B),
    "gated_norm_fwd": (0, 3 * N * HV * B),
    "gated_norm_bwd": (0, 5 * N * HV * B),
    "gated_norm_bwd_w": (0, 3 * N * HV * B),
    "rms_norm_fwd": (0, 2 * N * D * B),
    "rms_norm_bwd_x": (0, 4 * N * D * B),
    "rms_norm_bwd_w": (0, 2 * N * D * B),
    "residual_fwd": (0, 3 * N * D * B),
    "experts_gated": (0, rows * 3 * F * B),
    "experts_bwd": (0, rows * 6 * F * B),
    "experts_gather": (0, 2 * rows * D * B),
    "swiglu_fwd": (0, 3 * N * F * B),
    "swiglu_bwd": (0, 5 * N * F * B),
    "rotary": (0, 2 * N * HV * B),
    "adamw_moments": (0, 5 * 4 * 901e6),
    "adamw_apply": (0, 5 * 4 * 901e6),
}
print(f'{"":10} {"ms":>9} {"runs":>5}  {"kernel":<52} {"TFLOP/s":>8} {"GB/s":>7} {"of ceiling":>10}')
for part, all_kernels in result["kernels"].items():
    for k in all_kernels:
        name, ms, runs = k["name"], k["ms"], k["count"]
        flops, size = kernels.get(name, (0, 0))
        flops, size = k["flops"] or flops * runs, size * runs
        if name == "panels":  # the experts' products: two forward, four backward a layer
            flops = runs / 2 * 2 * rows * D * 3 * F / (1 if part == "forward" else 1)
        if name == "cross_entropy":
            size = 3 * N * V * (4 + 4 + B)
        if ms < 0.2:
            continue
        rates = [flops / ms * 1e-9, size / ms * 1e-6]
        share = max(rates[0] / product, rates[1] / copy)
        show = lambda x, digits: f"{x:.{digits}f}" if x else ""
        print(f'{part:10} {ms:9.3f} {runs:5}  {name:<52} {show(rates[0], 0):>8} {show(rates[1], 0):>7} {f"{share:.0%}" if share else "":>10}')
