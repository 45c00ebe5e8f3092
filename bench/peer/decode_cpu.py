"""Times decoding in PyTorch on the CPU, one token after the other, batch 1: the peer of `hymo bench decode`.

    python decode_cpu.py --config configs/hymo-434m.toml --threads 2 --dtypes bfloat16,float32,int8 --json out.json

The same layers and sizes with random weights, written to be fast: projections that read one input are one matrix, the
attention is absorbed into the latent, only the chosen experts are read, states are float32. int8 is weight-only, by the
kernel that PyTorch has for it (`_weight_int8pack_mm`), activations in bfloat16. Greedy, so that the head is read whole.
"""

import argparse
import json
import statistics
import time

import torch
import torch.nn.functional as F
from hymo_cpu import Config


class Linear:
    """y = x Wᵀ with W as it is kept."""

    def __init__(self, rows, cols, kind):
        w = torch.randn(rows, cols) * 0.02
        self.int8 = kind == "int8"
        self.dtype = torch.bfloat16 if self.int8 else kind
        if self.int8:
            scale = w.abs().amax(1) / 127
            self.w, self.scale = (w / scale[:, None]).round().to(torch.int8), scale.to(torch.bfloat16)
        else:
            self.w = w.to(kind)
        self.bytes = self.w.numel() * self.w.element_size()

    def __call__(self, x):
        x = x.to(self.dtype)
        return torch._weight_int8pack_mm(x, self.w, self.scale) if self.int8 else F.linear(x, self.w)


def norm(x, w):
    return F.rms_norm(x.float(), w.shape, w, 1e-6)


class Gdn:
    def __init__(self, c, kind):
        g = c.gdn
        self.h, self.k, self.v, self.taps = g.n_heads, g.d_k, g.d_v, g.conv_kernel
        self.channels = self.h * (2 * self.k + self.v)
        self.proj = Linear(self.channels + self.h * self.v, c.d_model, kind)
        self.gates = Linear(2 * self.h, c.d_model, torch.float32)
        self.out = Linear(c.d_model, self.h * self.v, kind)
        self.conv = torch.randn(self.channels, self.taps) * 0.3
        self.a, self.dt = torch.rand(self.h) + 0.1, torch.zeros(self.h)
        self.w, self.n = torch.ones(self.v), torch.ones(c.d_model)
        self.tail = torch.zeros(self.taps - 1, self.channels)
        self.state = torch.zeros(self.h, self.k, self.v)
        self.bytes = self.proj.bytes + self.gates.bytes + self.out.bytes

    def __call__(self, x):
        n = norm(x, self.n)
        both = self.proj(n).float()
        qkv, z = both[:, : self.channels], both[0, self.channels :].view(self.h, self.v)
        rows = torch.cat([self.tail, qkv])
        self.tail = rows[1:]
        y = F.silu((rows.t() * self.conv).sum(1))
        q, k, v = y.split([self.h * self.k, self.h * self.k, self.h * self.v])
        q, k = F.normalize(q.view(self.h, self.k), dim=-1), F.normalize(k.view(self.h, self.k), dim=-1)
        a, b = self.gates(n)[0].split(self.h)
        decay, beta = torch.exp(-self.a * F.softplus(a + self.dt)), torch.sigmoid(b)
        self.state *= decay[:, None, None]
        u = beta[:, None] * (v.view(self.h, self.v) - torch.bmm(k[:, None], self.state)[:, 0])
        self.state.baddbmm_(k[:, :, None], u[:, None])
        o = torch.bmm(q[:, None], self.state)[:, 0] * self.k**-0.5
        return x + self.out((norm(o, self.w) * torch.sigmoid(z)).view(1, -1)).float()


class Mla:
    def __init__(self, c, kind, context):
        m = c.mla
        self.h, self.g, self.nope, self.rope, self.v, self.c = (
            m.n_heads, m.n_kv_groups, m.d_nope, m.d_rope, m.d_v, m.kv_latent,
        )
        self.q = self.h * (self.nope + self.rope)
        self.proj = Linear(self.q + self.c + self.g * self.rope, c.d_model, kind)
        self.out = Linear(c.d_model, self.h * self.v, kind)
        self.uk = torch.randn(self.g, self.nope, self.c) * 0.1
        self.uv = torch.randn(self.g, self.c, self.v) * 0.1
        self.n, self.latent = torch.ones(c.d_model), torch.ones(self.c)
        self.cs, self.kr, self.len = torch.zeros(context, self.c), torch.zeros(self.g, context, self.rope), 0
        self.bytes = self.proj.bytes + self.out.bytes

    def __call__(self, x):
        both = self.proj(norm(x, self.n)).float()
        q, c, kr = both.split([self.q, self.c, self.g * self.rope], 1)
        self.cs[self.len], self.kr[:, self.len] = norm(c, self.latent)[0], kr.view(self.g, self.rope)
        self.len += 1
        q = q.view(self.g, self.h // self.g, -1)
        content = torch.bmm(q[..., : self.nope], self.uk)
        cs = self.cs[: self.len]
        scores = content @ cs.t() + torch.bmm(q[..., self.nope :], self.kr[:, : self.len].transpose(1, 2))
        p = torch.softmax(scores * (self.nope + self.rope) ** -0.5, -1)
        return x + self.out(torch.bmm(p @ cs, self.uv).view(1, -1)).float()


class Experts:
    def __init__(self, c, kind):
        self.c = c.moe
        self.n = torch.ones(c.d_model)
        self.router = Linear(self.c.n_routed, c.d_model, torch.float32)
        expert = lambda: (Linear(2 * self.c.d_ff, c.d_model, kind), Linear(c.d_model, self.c.d_ff, kind))
        self.experts, self.shared = [expert() for _ in range(self.c.n_routed)], expert()
        one = sum(w.bytes for w in self.shared)
        self.bytes = self.router.bytes + (self.c.top_k + 1) * one

    def one(self, n, expert):
        a, b = expert[0](n).chunk(2, 1)
        return expert[1](F.silu(a) * b).float()

    def __call__(self, x):
        n = norm(x, self.n)
        s = torch.sigmoid(self.router(n))[0]
        p, chosen = torch.topk(s, self.c.top_k)
        p = 1.412 * p / p.sum()
        y = self.one(n, self.shared)
        for weight, e in zip(p.tolist(), chosen.tolist()):
            y = y + weight * self.one(n, self.experts[e])
        return x + y


class Model:
    def __init__(self, c, kind, context):
        self.layers = []
        for layer in c.layers():
            if layer == "gdn":
                self.layers.append(Gdn(c, kind))
            else:
                self.layers += [Mla(c, kind, context), Experts(c, kind)]
        self.head = Linear(c.vocab_size, c.d_model, kind)
        self.norm = torch.ones(c.d_model)
        self.bytes = self.head.bytes + sum(layer.bytes for layer in self.layers)

    def step(self, token):
        x = self.head.w[token : token + 1].float()
        if self.head.int8:
            x = x * self.head.scale[token].float()
        for layer in self.layers:
            x = layer(x)
        return int(self.head(norm(x, self.norm)).argmax())


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", required=True)
    parser.add_argument("--dtypes", default="bfloat16,float32,int8")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--prompt", type=int, default=64, help="tokens stepped through before timing")
    parser.add_argument("--reps", type=int, default=20)
    parser.add_argument("--json")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    config, cases = Config.from_toml(args.config), []
    for name in args.dtypes.split(","):
        kind = name if name == "int8" else getattr(torch, name)
        with torch.inference_mode():
            model = Model(config, kind, args.prompt + args.reps)
            token, times = 1, []
            for i in range(args.prompt + args.reps):
                start = time.perf_counter()
                token = model.step(token)
                if i >= args.prompt:
                    times.append((time.perf_counter() - start) * 1e3)
        median = statistics.median(times)
        cases.append({"dtype": name, "weight_bytes_a_token": model.bytes, "step_ms_median": median,
                      "step_ms_min": min(times), "tokens_a_second": 1e3 / median, "raw": {"step_ms": times}})
        print(f"{name:<9} {median:8.2f} ms a step (best {min(times):.2f}), {1e3 / median:6.1f} tokens/s, "
              f"{model.bytes / median / 1e6:.1f} GB/s of weights")
        del model
    if args.json:
        with open(args.json, "w") as file:
            json.dump({"torch": torch.__version__, "threads": args.threads, "config": args.config, "cases": cases}, file, indent=1)


if __name__ == "__main__":
    main()
