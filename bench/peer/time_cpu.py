"""Times the PyTorch peer on the CPU: a training step's forward and backward (and optimizers), or one operator.

    python time_cpu.py --config configs/hymo-nano.toml --batch 4 --len 512 --threads 2 --mode eager --json out.json
    python time_cpu.py --op delta_rule --size B=4,T=512,H=4,dk=32,dv=64
    python time_cpu.py --list

Every repetition's wall time is kept, and the processor time that it took over all threads: on a busy machine the second is
the steadier one.
"""

import argparse
import ctypes
import inspect
import json
import math
import os
import platform
import resource
import statistics
import time
import warnings

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
warnings.filterwarnings("ignore")

import torch
import torch.nn.functional as F

MIB = 1 << 20


def keep_freed_memory():
    """Lets glibc reuse what it freed: by default every large tensor is new pages from the system, zeroed one by one."""
    m_trim_threshold, m_mmap_threshold = -1, -3
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt"):
        return False
    return bool(libc.mallopt(m_mmap_threshold, 1 << 30) and libc.mallopt(m_trim_threshold, (1 << 31) - 1))


# --- memory ----------------------------------------------------------------------------------


def resident(field):
    """VmRSS (now) or VmHWM (peak since the last reset) in MiB."""
    with open("/proc/self/status") as file:
        for line in file:
            if line.startswith(field + ":"):
                return int(line.split()[1]) / 1024
    return math.nan


def reset_peak():
    try:
        with open("/proc/self/clear_refs", "w") as file:
            file.write("5")
        return True
    except OSError:
        return False


# --- operators -------------------------------------------------------------------------------


def tensor(*shape, scale=1.0):
    return (torch.randn(*shape) * scale).requires_grad_()


def delta_inputs(B, T, H, dk, dv):
    g = -F.softplus(torch.randn(B, T, H) - 3)
    return tensor(B, T, H, dk), tensor(B, T, H, dk), tensor(B, T, H, dv), g.requires_grad_(), torch.rand(B, T, H).requires_grad_()


def op_delta_rule(B=4, T=512, H=4, dk=32, dv=64):
    """transformers' chunk form as published, with its norm of q and k."""
    from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

    # The public name may dispatch to a GPU kernel; the PyTorch form is inside.
    function = inspect.unwrap(torch_chunk_gated_delta_rule)

    def run(q, k, v, g, beta):
        return function(q, k, v, g=g, beta=beta, use_qk_l2norm_in_kernel=True)[0]

    return run, delta_inputs(B, T, H, dk, dv)


def op_delta_rule_peer(B=4, T=512, H=4, dk=32, dv=64):
    """The form inside hymo_cpu.py."""
    from hymo_cpu import delta_rule, l2_norm

    return lambda q, k, v, g, beta: delta_rule(l2_norm(q), l2_norm(k), v, g, beta), delta_inputs(B, T, H, dk, dv)


def op_gemm(m=2048, n=768, k=192):
    """[m, k] times [k, n]; forward only."""
    return lambda a, b: a @ b, (torch.randn(m, k), torch.randn(k, n))


def op_linear(rows=2048, n_in=192, n_out=768):
    return F.linear, (tensor(rows, n_in), tensor(n_out, n_in))


def op_rms_norm(rows=2048, width=192):
    return lambda x, w: F.rms_norm(x, (width,), 1 + w, 1e-6), (tensor(rows, width), tensor(width))


def op_attention(B=4, T=512, H=6, G=2, dqk=32, dv=32):
    def run(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=H != G)

    return run, (tensor(B, H, T, dqk), tensor(B, G, T, dqk), tensor(B, G, T, dv))


def op_cross_entropy(rows=2048, width=192, vocab=4096, z_loss=1e-4, block=1024):
    """Head and loss, as hymo_cpu.py has them."""
    from hymo_cpu import FusedHead

    target, weight = torch.randint(0, vocab, (rows,)), torch.full((rows,), 1 / rows)
    return lambda h, e: FusedHead.apply(h, e, target, weight, z_loss, None, block)[0], (
        tensor(rows, width),
        tensor(vocab, width, scale=0.02),
    )


def op_cross_entropy_plain(rows=2048, width=192, vocab=4096, z_loss=1e-4):
    """Head and loss with whole logits and autograd."""
    from hymo_cpu import plain_head

    target, weight = torch.randint(0, vocab, (rows,)), torch.full((rows,), 1 / rows)
    return lambda h, e: plain_head(h, e, target, weight, z_loss, None)[0], (
        tensor(rows, width),
        tensor(vocab, width, scale=0.02),
    )


def op_swiglu(rows=2048, width=192, d_ff=432):
    def run(x, w13, w2):
        a, b = F.linear(x, w13).chunk(2, -1)
        return F.linear(F.silu(a) * b, w2)

    return run, (tensor(rows, width), tensor(2 * d_ff, width), tensor(width, d_ff))


def op_conv(B=4, T=512, C=512, K=4):
    """Depthwise causal convolution and SiLU on [B, T, C], as hymo_cpu.py has it."""
    from hymo_cpu import short_conv

    return lambda x, w: short_conv(x, w, None), (tensor(B, T, C), tensor(C, K))


def op_conv_conv1d(B=4, T=512, C=512, K=4):
    """The same through F.conv1d."""

    def run(x, w):
        y = F.conv1d(x.transpose(1, 2), w[:, None], padding=K - 1, groups=C)[..., : x.shape[1]]
        return F.silu(y.transpose(1, 2))

    return run, (tensor(B, T, C), tensor(C, K))


OPS = {name.removeprefix("op_"): f for name, f in list(globals().items()) if name.startswith("op_")}


def op_step(args):
    sizes = dict(pair.split("=") for pair in args.size.split(",") if pair)
    make = OPS[args.op]
    defaults = {n: p.default for n, p in inspect.signature(make).parameters.items()}
    unknown = sizes.keys() - defaults.keys()
    if unknown:
        raise SystemExit(f"{args.op} has no size {', '.join(sorted(unknown))}; it has {', '.join(defaults)}")
    sizes = {n: type(d)(sizes.get(n, d)) for n, d in defaults.items()}
    function, inputs = make(**sizes)
    if args.mode == "compile":
        function = torch.compile(function, dynamic=False)
    upstream = torch.randn_like(function(*inputs))
    needs = [x for x in inputs if x.requires_grad]

    def step():
        start = time.perf_counter()
        out = function(*inputs)
        middle = time.perf_counter()
        if needs:
            torch.autograd.grad(out, needs, upstream)
        return start, middle, time.perf_counter(), None

    return step, {"op": args.op, "sizes": sizes}


# --- the model -------------------------------------------------------------------------------


def model_step(args):
    from hymo_cpu import Config, HyMo

    config = Config.from_toml(args.config)
    model = HyMo(config, head=args.head, head_block=args.head_block)
    ahead = config.mtp.n_modules + 1
    tokens = torch.randint(0, config.vocab_size, (args.batch, args.len + ahead))
    seg = None
    if args.documents:
        # About this many documents a row, cut at random places.
        cuts = torch.rand(tokens.shape) < args.documents / tokens.shape[1]
        seg = cuts.long().cumsum(1)
    if args.mode == "compile":
        model.compile_layers()

    def step():
        model.zero_grad(set_to_none=True)
        start = time.perf_counter()
        total, _ = model(tokens, seg)
        middle = time.perf_counter()
        total.backward()
        return start, middle, time.perf_counter(), total

    facts = {
        "config": os.path.basename(args.config),
        "batch": args.batch,
        "length": args.len,
        "documents_a_row": args.documents or "one, without masks",
        "parameters": sum(p.numel() for p in model.parameters()),
        "head": args.head,
        "head_block": args.head_block,
    }
    return step, facts, model


# --- timing ----------------------------------------------------------------------------------


def optimizer_times(model, step, args):
    """Milliseconds of the optimizers' steps, gradients of a whole step before each."""
    from optim_cpu import Optimizers

    optimizers = Optimizers(model, compiled=args.mode == "compile")
    times = []
    for _ in range(args.warmup + args.reps):
        step()
        start = time.perf_counter()
        optimizers.step(1e-6)
        times.append((time.perf_counter() - start) * 1e3)
    return times[args.warmup :]


def processor():
    try:
        with open("/proc/cpuinfo") as file:
            return next(line.split(":")[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor()


def measure(step, args):
    base = resident("VmRSS")
    begin = time.perf_counter()
    step()
    first = time.perf_counter() - begin
    for _ in range(args.warmup - 1):
        step()
    # From here the peak is the steps' own, without the compiler's.
    own_peak = reset_peak()
    rows = {"forward_ms": [], "backward_ms": [], "step_ms": [], "processor_ms": []}
    loss = None
    for _ in range(args.reps):
        busy = time.process_time()
        start, middle, end, loss = step()
        rows["processor_ms"].append((time.process_time() - busy) * 1e3)
        rows["forward_ms"].append((middle - start) * 1e3)
        rows["backward_ms"].append((end - middle) * 1e3)
        rows["step_ms"].append((end - start) * 1e3)
    summary = {}
    for name, values in rows.items():
        summary[f"{name}_median"] = statistics.median(values)
        summary[f"{name}_min"] = min(values)
    return {
        **summary,
        "first_step_s": first,
        "loss": None if loss is None else loss.item(),
        "resident_before_mib": base,
        "peak_resident_mib": resident("VmHWM") if own_peak else None,
        "peak_resident_whole_process_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / MIB,
        "raw": rows,
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", help="a run file, of which [model] is read")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--len", type=int, default=512)
    parser.add_argument("--documents", type=int, default=0, help="documents a row; 0: one, without masks")
    parser.add_argument("--head", choices=("fused", "plain"), default="fused")
    parser.add_argument("--head-block", type=int, default=1024, help="rows of logits at a time in the fused head")
    parser.add_argument("--op", choices=sorted(OPS), help="one operator in place of the model")
    parser.add_argument("--size", default="", help="its sizes: name=number,..")
    parser.add_argument("--list", action="store_true", help="print operators and their sizes")
    parser.add_argument("--accumulate", type=int, default=0, help="with the optimizers' step, spread over so many micro-batches")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--mode", choices=("eager", "compile"), default="eager")
    parser.add_argument("--malloc", choices=("keep", "system"), default="keep", help="keep: freed memory is reused")
    parser.add_argument("--warmup", type=int, default=3)
    parser.add_argument("--reps", type=int, default=10)
    parser.add_argument("--profile", action="store_true", help="print where the time of a step goes, too")
    parser.add_argument("--json", help="file to write")
    args = parser.parse_args()
    if args.list:
        for name, make in sorted(OPS.items()):
            print(f"{name:20} {inspect.signature(make)}  {(make.__doc__ or '').strip()}")
        return
    if bool(args.config) == bool(args.op):
        parser.error("give --config or --op")

    kept = args.malloc == "keep" and keep_freed_memory()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    load_before = os.getloadavg()[0]
    step, facts, model = (*op_step(args), None) if args.op else model_step(args)
    result = facts | {
        "mode": args.mode,
        "threads": args.threads,
        "malloc": "keep" if kept else "system",
        "dtype": "float32",
        "torch": torch.__version__,
        "processor": processor(),
        "cores": os.cpu_count(),
        "load_before": load_before,
    }
    result |= measure(step, args)
    if args.config:
        tokens = args.batch * args.len
        result["tokens_a_second"] = tokens / result["step_ms_median"] * 1e3
        if n := args.accumulate:
            times = optimizer_times(model, step, args)
            result["raw"]["optimizer_ms"], result["optimizer_ms_median"] = times, statistics.median(times)
            whole = result["whole_step_ms"] = n * result["step_ms_median"] + result["optimizer_ms_median"]
            result["peak_resident_mib"] = resident("VmHWM") if result["peak_resident_mib"] else None
            result["tokens_a_second_with_optimizer"] = n * tokens / whole * 1e3
    result["load_after"] = os.getloadavg()[0]
    print(json.dumps({k: round(v, 3) if isinstance(v, float) else v for k, v in result.items() if k != "raw"}, indent=1))
    if args.json:
        with open(args.json, "w") as file:
            json.dump(result, file, indent=1)
            file.write("\n")
    if args.profile:
        with torch.profiler.profile() as profile:
            step()
        print(profile.key_averages().table(sort_by="self_cpu_time_total", row_limit=30, max_name_column_width=60))


if __name__ == "__main__":
    main()
