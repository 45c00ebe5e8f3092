"""HyMo in PyTorch for the CPU, written to be fast: the peer that the Rust model is timed against.

The same function as the Rust model: same parameters, mixers, mixture of experts, prediction modules and losses, float32
throughout (float64 for checks). `fixtures/hymo_reference.py` is the slow form; check.py holds this one to its files.

    config = Config.from_toml("configs/hymo-nano.toml")
    model = HyMo(config)
    total, losses = model(tokens)          # each row one document; tokens [B, T + modules + 1]
    total, losses = model(tokens, seg)     # packed documents

What is done for speed, beyond plain modules: projections that read the same input are one matrix; the delta rule runs all
rows, heads and chunks as one batch, and only the state goes from chunk to chunk; tokens are sorted by expert, and each
expert is one matrix product in both directions; the three heads are one call that turns logits into their own gradient block
by block, so that no [tokens, vocabulary] matrix exists.
"""

import math
import tomllib
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

# --- configuration ---------------------------------------------------------------------------

DEFAULTS = {
    "norm": {"eps": 1e-6, "zero_centred": True},
    "gdn": {"conv_kernel": 4, "gate_act": "sigmoid", "allow_neg_eigval": False, "chunk_size": 64, "ffn": "none"},
    "mla": {"rope": "interleaved", "rope_theta": 1e4},
    "moe": {"balance_loss": 1e-4, "n_shared": 1},
    "mtp": {"n_modules": 0, "loss_weights": []},
    "loss": {"z_loss": 1e-4, "soft_cap": None},
}


class Config(SimpleNamespace):
    """The `[model]` table of a run file, its sections as attributes; an absent section is None."""

    @classmethod
    def from_table(cls, table):
        values = {k: v for k, v in table.items() if not isinstance(v, dict)}
        for name, defaults in DEFAULTS.items():
            required = name in ("norm", "mtp", "loss")
            given = table.get(name, {} if required else None)
            values[name] = None if given is None else SimpleNamespace(**(defaults | given))
        config = cls(**values)
        if config.mla and (getattr(config.mla, "yarn", None) or config.mla.rope not in ("interleaved", "none")):
            raise NotImplementedError("stretched rotary angles are not part of the peer")
        return config

    @classmethod
    def from_toml(cls, path):
        return cls.from_table(tomllib.loads(Path(path).read_text())["model"])

    def layers(self):
        return [self.pattern[i % len(self.pattern)] for i in range(self.n_layers)]


# --- building blocks -------------------------------------------------------------------------


class Documents:
    """What the layers need to know of packed documents, computed once a batch. seg [B, T]."""

    def __init__(self, seg):
        batch, length = seg.shape
        self.seg = seg
        index = torch.arange(length)
        starts = torch.ones_like(seg, dtype=torch.bool)
        starts[:, 1:] = seg[:, 1:] != seg[:, :-1]
        self.pos = index - torch.where(starts, index, 0).cummax(1).values
        # Numbered over the whole batch: rows never share a document.
        self.number = starts.flatten().cumsum(0) - 1
        self.visible = ((seg[:, :, None] == seg[:, None, :]) & torch.ones(length, length, dtype=torch.bool).tril())[:, None]

    def inside(self, shift):
        """Whether the token `shift` places back is in the same document, [B, T, 1]."""
        return F.pad(self.seg[:, shift:] == self.seg[:, : self.seg.shape[1] - shift], (shift, 0))[..., None]


class RmsNorm(nn.Module):
    def __init__(self, width, eps, zero_centred):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width) if zero_centred else torch.ones(width))
        self.eps, self.zero_centred = eps, zero_centred

    def forward(self, x):
        gain = 1 + self.weight if self.zero_centred else self.weight
        return F.rms_norm(x, self.weight.shape, gain, self.eps)

    def pieces(self):
        return [("weight", self.weight, ...)]


def matrix(*shape):
    return nn.Parameter(torch.empty(shape))


def rows(parameter, *names_and_sizes):
    """The parts of a matrix that several of HyMo's matrices were joined into, along the last axis but one."""
    start = 0
    for name, size in names_and_sizes:
        if size:
            yield f"{name}.weight", parameter, (..., slice(start, start + size), slice(None))
        start += size
    assert start == parameter.shape[-2]


def l2_norm(x, eps=1e-6):
    return x * (x.square().sum(-1, keepdim=True) + eps).rsqrt()


class ShortConv(torch.autograd.Function):
    """Faster than F.conv1d both ways: rows stay [B, T, C], and each tap is one multiply-add over them."""

    @staticmethod
    def forward(ctx, x, weight, inside):
        length, taps = x.shape[1], weight.shape[1]
        padded = F.pad(x, (0, 0, taps - 1, 0))
        columns = weight.T.contiguous()
        y = x * columns[-1]
        for j in range(taps - 1):
            shifted = padded[:, j : j + length]
            y.addcmul_(shifted if inside is None else shifted * inside[j], columns[j])
        ctx.save_for_backward(padded, columns, y, inside)
        return F.silu(y)

    @staticmethod
    def backward(ctx, dz):
        padded, columns, y, inside = ctx.saved_tensors
        length, taps = y.shape[1], columns.shape[0]
        dy = torch.ops.aten.silu_backward(dz, y)
        dx = dy * columns[-1]
        dw = [None] * (taps - 1) + [(dy * padded[:, taps - 1 :]).sum((0, 1))]
        for j in range(taps - 1):
            own = dy if inside is None else dy * inside[j]
            dw[j] = (own * padded[:, j : j + length]).sum((0, 1))
            back = taps - 1 - j
            dx[:, : length - back].addcmul_(own[:, back:], columns[j])
        return dx, torch.stack(dw, 1), None


def short_conv(x, weight, docs):
    """Depthwise causal convolution and SiLU. x [B, T, C], weight [C, K]; tap j multiplies x[t - (K - 1) + j]."""
    taps = weight.shape[1]
    inside = None if docs is None else torch.stack([docs.inside(taps - 1 - j) for j in range(taps - 1)]).to(x.dtype)
    return ShortConv.apply(x, weight, inside)


def delta_rule(q, k, v, g, beta, docs=None, chunk=64):
    """Gated delta rule in chunks. q, k [B, T, H, dk] of unit length, v [B, T, H, dv], log decay g and strength beta
    [B, T, H] -> [B, T, H, dv].

    Inside a chunk the corrections of all its tokens are the solution of one unit triangular system; with the state H that
    enters the chunk they are U - W H. Documents: the grid of chunks stays, and decays between different ones are zero."""
    batch, length, heads, d_k = q.shape
    pad = -length % chunk
    count = (length + pad) // chunk

    def fold(x, scale=None):
        """[B, T, H, d] -> [chunks, B H, C, d]"""
        x = F.pad(x, (0, 0, 0, 0, 0, pad)) if pad else x
        return x.view(batch, count, chunk, heads, -1).permute(1, 0, 3, 2, 4).reshape(count, batch * heads, chunk, -1)

    q, k, v = fold(q * d_k**-0.5), fold(k), fold(v)
    g, beta = fold(g[..., None]), fold(beta[..., None])
    # With documents in float64: a short one late in a chunk would lose its digits in the long sum, forwards and backwards.
    b = (g if docs is None else g.double()).cumsum(2)
    last = b[:, :, -1:]
    decay_in, decay_out, decay_all = b.exp().to(g.dtype), (last - b).exp().to(g.dtype), last.exp().to(g.dtype)
    hidden = torch.ones(chunk, chunk, dtype=torch.bool).triu(1)
    if docs is not None:
        # Padding continues the last document; nothing reads it.
        seg = F.pad(docs.seg, (0, pad), mode="replicate") if pad else docs.seg
        seg = seg.view(batch, count, chunk).transpose(0, 1).repeat_interleave(heads, 1)[..., None]  # [chunks, B H, C, 1]
        before = F.pad(seg[:-1, :, -1:], (0, 0, 0, 0, 0, 0, 1, 0), value=-1)
        hidden = hidden | (seg != seg.mT)
        decay_in = decay_in * (seg == before)
        decay_out = decay_out * (seg == seg[:, :, -1:])
        decay_all = decay_all * (seg[:, :, -1:] == before)
    decay = (b - b.mT).to(g.dtype).masked_fill(hidden, -math.inf).exp()  # masked before exp: the other half would overflow

    k_t = k.mT
    system = (k @ k_t) * decay * beta  # the solver reads what is below the diagonal
    solved = torch.linalg.solve_triangular(
        system, torch.cat([v, k * decay_in], -1) * beta, upper=False, unitriangular=True
    )
    u, w = solved.split([v.shape[-1], d_k], -1)

    # From chunk to chunk: the state before each, and the corrections in it.
    write = (k * decay_out).mT
    state = v.new_zeros(batch * heads, d_k, v.shape[-1])
    states, corrections = [], []
    for u_i, w_i, write_i, decay_i in zip(u.unbind(0), w.unbind(0), write.unbind(0), decay_all.unbind(0), strict=True):
        new = torch.baddbmm(u_i, w_i, state, alpha=-1)
        states.append(state)
        corrections.append(new)
        state = torch.baddbmm(state * decay_i, write_i, new)

    o = ((q @ k_t) * decay) @ torch.stack(corrections) + (q * decay_in) @ torch.stack(states)
    return o.view(count, batch, heads, chunk, -1).permute(1, 0, 3, 2, 4).reshape(batch, length + pad, heads, -1)[:, :length]


class Gdn(nn.Module):
    """Gated DeltaNet mixer on normed input."""

    def __init__(self, c: Config):
        super().__init__()
        g = c.gdn
        self.g, self.eps = g, c.norm.eps
        self.qk, self.vs = g.n_heads * g.d_k, g.n_heads * g.d_v
        self.sizes = [2 * self.qk + self.vs, self.vs, g.n_heads, g.n_heads]
        self.inputs = matrix(sum(self.sizes), c.d_model)
        self.conv = matrix(self.sizes[0], g.conv_kernel)
        self.A_log, self.dt_bias = matrix(g.n_heads), matrix(g.n_heads)
        self.norm = nn.Parameter(torch.ones(g.d_v))
        self.o = matrix(c.d_model, self.vs)

    def pieces(self):
        h = self.g.n_heads
        yield from rows(self.inputs, ("q", self.qk), ("k", self.qk), ("v", self.vs), ("z", self.vs), ("a", h), ("b", h))
        yield from [("conv.weight", self.conv, ...), ("A_log", self.A_log, ...), ("dt_bias", self.dt_bias, ...)]
        yield from [("norm.weight", self.norm, ...), ("o.weight", self.o, ...)]

    def forward(self, x, docs):
        c = self.g
        heads = (*x.shape[:2], c.n_heads, -1)
        qkv, z, a, b = F.linear(x, self.inputs).split(self.sizes, -1)
        q, k, v = short_conv(qkv, self.conv, docs).split([self.qk, self.qk, self.vs], -1)
        g = -self.A_log.exp() * F.softplus(a + self.dt_bias)
        beta = torch.sigmoid(b) * (2 if c.allow_neg_eigval else 1)
        o = delta_rule(l2_norm(q.view(heads)), l2_norm(k.view(heads)), v.view(heads), g, beta, docs, c.chunk_size)
        gate = F.silu(z) if c.gate_act == "silu" else torch.sigmoid(z)
        y = F.rms_norm(o, self.norm.shape, self.norm, self.eps) * gate.view(heads)
        return F.linear(y.flatten(2), self.o)


def rotary(x, cos, sin):
    """Turns interleaved pairs. x [B, T, H, d], cos and sin [.., T, 1, d / 2]."""
    u, w = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([u * cos - w * sin, w * cos + u * sin], -1).flatten(-2)


class Mla(nn.Module):
    """Latent attention on normed input; a latent of width 0 is ordinary grouped attention."""

    def __init__(self, c: Config):
        super().__init__()
        m = c.mla
        self.m = m
        self.q_width, self.kr_width = m.n_heads * (m.d_nope + m.d_rope), m.n_kv_groups * m.d_rope
        self.uk_width, self.uv_width = m.n_kv_groups * m.d_nope, m.n_kv_groups * m.d_v
        content = [m.kv_latent] if m.kv_latent else [self.uk_width, self.uv_width]
        self.sizes = [self.q_width, self.kr_width, *content]
        self.inputs = matrix(sum(self.sizes), c.d_model)
        if m.kv_latent:
            self.latent_norm = RmsNorm(m.kv_latent, c.norm.eps, zero_centred=False)
            self.up = matrix(self.uk_width + self.uv_width, m.kv_latent)
        self.o = matrix(c.d_model, m.n_heads * m.d_v)

    def pieces(self):
        up = [("uk", self.uk_width), ("uv", self.uv_width)]
        content = [("dkv", self.m.kv_latent)] if self.m.kv_latent else up
        yield from rows(self.inputs, ("q", self.q_width), ("kr", self.kr_width), *content)
        if self.m.kv_latent:
            yield from rows(self.up, *up)
            yield "latent_norm.weight", self.latent_norm.weight, ...
        yield "o.weight", self.o, ...

    def forward(self, x, docs, cos, sin):
        m = self.m
        batch, length, _ = x.shape
        q, k_r, *content = F.linear(x, self.inputs).split(self.sizes, -1)
        if m.kv_latent:
            content = F.linear(self.latent_norm(content[0]), self.up).split([self.uk_width, self.uv_width], -1)
        group = (batch, length, m.n_kv_groups, -1)
        q, k, v = q.view(batch, length, m.n_heads, -1), content[0].view(group), content[1].view(group)
        if m.d_rope:
            k_r = k_r.view(group)
            if m.rope == "interleaved":
                q_n, q_r = q.split([m.d_nope, m.d_rope], -1)
                q, k_r = torch.cat([q_n, rotary(q_r, cos, sin)], -1), rotary(k_r, cos, sin)
            k = torch.cat([k, k_r], -1)
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        mask = None if docs is None else docs.visible
        grouped = m.n_kv_groups != m.n_heads
        o = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=docs is None, enable_gqa=grouped)
        return F.linear(o.transpose(1, 2).flatten(2), self.o)


class SwiGlu(nn.Module):
    def __init__(self, width, d_ff):
        super().__init__()
        self.d_ff = d_ff
        self.w13, self.w2 = matrix(2 * d_ff, width), matrix(width, d_ff)

    def pieces(self):
        yield from rows(self.w13, ("w1", self.d_ff), ("w3", self.d_ff))
        yield "w2.weight", self.w2, ...

    def forward(self, x):
        a, b = F.linear(x, self.w13).chunk(2, -1)
        return F.linear(F.silu(a) * b, self.w2)


def parts(ends):
    ends = ends.tolist()
    return [(e, lo, hi) for e, (lo, hi) in enumerate(zip([0, *ends[:-1]], ends, strict=True)) if lo < hi]


# A product per expert of sorted rows. One opaque operator, so that the compiler does not stop at the counts.
@torch.library.custom_op("hymo::grouped_linear", mutates_args=())
def grouped_linear(x: torch.Tensor, w: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """x [N, in], w [E, out, in], ends [E] of each expert's rows -> [N, out]."""
    y = x.new_empty(x.shape[0], w.shape[1])
    for e, lo, hi in parts(ends):
        torch.mm(x[lo:hi], w[e].T, out=y[lo:hi])
    return y


@torch.library.custom_op("hymo::grouped_linear_backward", mutates_args=())
def grouped_linear_backward(
    dy: torch.Tensor, x: torch.Tensor, w: torch.Tensor, ends: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    dx, dw = torch.empty_like(x), torch.empty_like(w)
    seen = parts(ends)
    for e, lo, hi in seen:
        torch.mm(dy[lo:hi], w[e], out=dx[lo:hi])
        torch.mm(dy[lo:hi].T, x[lo:hi], out=dw[e])
    for e in set(range(w.shape[0])) - {e for e, _, _ in seen}:
        dw[e].zero_()
    return dx, dw


@grouped_linear.register_fake
def _(x, w, ends):
    return x.new_empty(x.shape[0], w.shape[1])


@grouped_linear_backward.register_fake
def _(dy, x, w, ends):
    return torch.empty_like(x), torch.empty_like(w)


def _grouped_setup(ctx, inputs, output):
    ctx.save_for_backward(*inputs)


def _grouped_backward(ctx, dy):
    return (*grouped_linear_backward(dy.contiguous(), *ctx.saved_tensors), None)


grouped_linear.register_autograd(_grouped_backward, setup_context=_grouped_setup)


class Dispatch(torch.autograd.Function):
    """Rows of each choice, in expert order. Both ways a gather; plain indexing would scatter-add backwards."""

    @staticmethod
    def forward(ctx, x, order, slot, top_k):
        ctx.save_for_backward(slot)
        ctx.top_k = top_k
        return x.index_select(0, order // top_k)

    @staticmethod
    def backward(ctx, dy):
        (slot,) = ctx.saved_tensors
        return dy.index_select(0, slot).unflatten(0, (-1, ctx.top_k)).sum(1), None, None, None


class Combine(torch.autograd.Function):
    """The sum over a token's choices, back in token order."""

    @staticmethod
    def forward(ctx, y, order, slot, top_k):
        ctx.save_for_backward(order)
        ctx.top_k = top_k
        return y.index_select(0, slot).unflatten(0, (-1, top_k)).sum(1)

    @staticmethod
    def backward(ctx, dx):
        (order,) = ctx.saved_tensors
        return dx.index_select(0, order // ctx.top_k), None, None, None


class Moe(nn.Module):
    """`top_k` of `n_routed` experts and the shared ones; returns the output and the balance loss."""

    def __init__(self, c: Config):
        super().__init__()
        self.m = c.moe
        e, d, f = c.moe.n_routed, c.d_model, c.moe.d_ff
        self.router = matrix(e, d)
        self.register_buffer("bias", torch.zeros(e))
        # Where each expert's rows end, summed over the micro-batches of a step.
        self.register_buffer("ends", torch.zeros(e, dtype=torch.long))
        self.w13, self.w2 = matrix(e, 2 * f, d), matrix(e, d, f)
        self.shared = SwiGlu(d, c.moe.n_shared * f) if c.moe.n_shared else None

    def pieces(self):
        f = self.m.d_ff
        yield "router.weight", self.router, ...
        for e in range(self.m.n_routed):
            yield f"experts.{e}.w1.weight", self.w13, (e, slice(0, f))
            yield f"experts.{e}.w3.weight", self.w13, (e, slice(f, 2 * f))
            yield f"experts.{e}.w2.weight", self.w2, (e,)
        if self.shared:
            yield from ((f"shared.{name}", p, where) for name, p, where in self.shared.pieces())

    def balance(self, s, chosen, n_rows, docs):
        """alpha / N times the sum over documents of n sum_e f_e P_e, f = E count / (K n), P the mean share."""
        share = s / s.sum(-1, keepdim=True)
        hits = torch.zeros_like(s).scatter_(1, chosen, 1.0)
        if docs is None:
            # Documents of equal length.
            share, hits = share.unflatten(0, (n_rows, -1)).sum(1), hits.unflatten(0, (n_rows, -1)).sum(1)
            total = (share * hits).sum() * n_rows / s.shape[0]
        else:
            zeros = torch.zeros_like(s)
            size = zeros.index_add(0, docs.number, torch.ones_like(s))
            share, hits = zeros.index_add(0, docs.number, share), zeros.index_add(0, docs.number, hits)
            total = (share * hits / size.clamp(min=1)).sum()
        return self.m.balance_loss * self.m.n_routed / (self.m.top_k * s.shape[0]) * total

    def forward(self, x, docs):
        m = self.m
        flat = x.flatten(0, 1)
        s = torch.sigmoid(F.linear(flat, self.router))
        chosen = (s.detach() + self.bias).topk(m.top_k, -1).indices
        picked = s.gather(-1, chosen)
        gates = m.routed_scale * picked / (picked.sum(-1, keepdim=True) + 1e-20)
        experts, order = chosen.flatten().sort(stable=True)
        slot = torch.empty_like(order).scatter_(0, order, torch.arange(order.shape[0]))
        ends = torch.searchsorted(experts, torch.arange(m.n_routed), right=True)
        self.ends += ends
        a, b = grouped_linear(Dispatch.apply(flat, order, slot, m.top_k), self.w13, ends).chunk(2, -1)
        h = F.silu(a) * b * gates.flatten()[order][:, None]
        y = Combine.apply(grouped_linear(h, self.w2, ends), order, slot, m.top_k)
        if self.shared:
            y = y + self.shared(flat)
        loss = self.balance(s, chosen, x.shape[0], docs) if m.balance_loss else None
        return y.view_as(x), loss


class Layer(nn.Module):
    def __init__(self, c: Config, kind):
        super().__init__()
        self.kind = kind
        self.norm = RmsNorm(c.d_model, c.norm.eps, c.norm.zero_centred)
        self.mixer = Gdn(c) if kind == "gdn" else Mla(c)
        part = getattr(c, kind)
        self.ffn = {"none": lambda: None, "moe": lambda: Moe(c), "swiglu": lambda: SwiGlu(c.d_model, part.d_ff)}[part.ffn]()
        if self.ffn:
            self.ffn_norm = RmsNorm(c.d_model, c.norm.eps, c.norm.zero_centred)

    def pieces(self):
        modules = [("norm", self.norm), (self.kind, self.mixer)]
        if self.ffn:
            modules += [("ffn_norm", self.ffn_norm), ("moe" if isinstance(self.ffn, Moe) else "ffn", self.ffn)]
        for prefix, module in modules:
            yield from ((f"{prefix}.{name}", p, where) for name, p, where in module.pieces())

    def forward(self, x, docs, *angles):
        x = x + self.mixer(self.norm(x), docs, *(() if self.kind == "gdn" else angles))
        balance = None
        if self.ffn:
            normed = self.ffn_norm(x)
            y, balance = self.ffn(normed, docs) if isinstance(self.ffn, Moe) else (self.ffn(normed), None)
            x = x + y
        return x, balance


class Mtp(nn.Module):
    """A prediction module: the hidden state, joined with the embedding of a later token, through one GDN layer."""

    def __init__(self, c: Config):
        super().__init__()
        self.enorm, self.hnorm, self.out_norm = (RmsNorm(c.d_model, c.norm.eps, c.norm.zero_centred) for _ in range(3))
        self.proj = matrix(c.d_model, 2 * c.d_model)
        self.layer = Layer(c, "gdn")

    def pieces(self):
        for name in ("enorm", "hnorm", "out_norm"):
            yield f"{name}.weight", getattr(self, name).weight, ...
        yield "proj.weight", self.proj, ...
        yield from self.layer.pieces()

    def forward(self, h, e, docs):
        return self.layer(F.linear(torch.cat([self.enorm(e), self.hnorm(h)], -1), self.proj), docs)[0]


class FusedHead(torch.autograd.Function):
    """Sum of weight * (nll + z lse^2) over rows, its gradients computed on the way: a block of logits becomes its own
    gradient in place and is used twice. Also returns the unweighted losses of the rows."""

    @staticmethod
    def forward(ctx, h, embed, target, weight, z_loss, soft_cap, block):
        dh, de = torch.empty_like(h), torch.zeros_like(embed)
        losses = torch.empty_like(weight)
        for lo in range(0, h.shape[0], block):
            part = slice(lo, lo + block)
            y, w = target[part, None], weight[part, None]
            logits = h[part] @ embed.T
            if soft_cap is not None:
                capped = torch.tanh(logits / soft_cap)
                logits = soft_cap * capped
            log_p = torch.log_softmax(logits, -1)
            nll = -log_p.gather(1, y)
            lse = logits.gather(1, y) + nll
            losses[part] = (nll + z_loss * lse.square())[:, 0]
            d = log_p.exp_().mul_(w * (1 + 2 * z_loss * lse))
            d.scatter_add_(1, y, -w)
            if soft_cap is not None:
                d.mul_(1 - capped.square())
            torch.mm(d, embed, out=dh[part])
            de.addmm_(d.T, h[part])
        ctx.save_for_backward(dh, de)
        ctx.mark_non_differentiable(losses)
        return (losses * weight).sum(), losses

    @staticmethod
    def backward(ctx, up, _):
        dh, de = ctx.saved_tensors
        return dh * up, de * up, None, None, None, None, None


def plain_head(h, embed, target, weight, z_loss, soft_cap):
    """The same through autograd, whole logits at once."""
    logits = F.linear(h, embed)
    if soft_cap is not None:
        logits = soft_cap * torch.tanh(logits / soft_cap)
    nll = F.cross_entropy(logits, target, reduction="none")
    losses = nll
    if z_loss:
        losses = nll + z_loss * (logits.gather(1, target[:, None])[:, 0] + nll).square()
    return (losses * weight).sum(), losses.detach()


class HyMo(nn.Module):
    def __init__(self, c: Config, head="fused", head_block=1024):
        super().__init__()
        self.c, self.head, self.head_block = c, head, head_block
        self.embed = matrix(c.vocab_size, c.d_model)
        self.layers = nn.ModuleList(Layer(c, kind) for kind in c.layers())
        self.norm = RmsNorm(c.d_model, c.norm.eps, c.norm.zero_centred)
        self.mtp = nn.ModuleList(Mtp(c) for _ in range(c.mtp.n_modules))
        if c.mla and c.mla.d_rope:
            self.register_buffer("freq", c.mla.rope_theta ** (-torch.arange(0, c.mla.d_rope, 2) / c.mla.d_rope))
        self.init()

    def pieces(self):
        """Every parameter by HyMo's name: (name, our tensor, the part of it)."""
        yield "embed.weight", self.embed, ...
        yield "norm.weight", self.norm.weight, ...
        for prefix, modules in (("layers", self.layers), ("mtp", self.mtp)):
            for i, module in enumerate(modules):
                yield from ((f"{prefix}.{i}.{name}", p, where) for name, p, where in module.pieces())

    def compile_layers(self):
        """Compiles layer by layer. Those of a kind are the same code with other weights, so that each kind is compiled once."""
        for module in [*self.layers, *self.mtp]:
            module.compile(dynamic=False, fullgraph=True)

    def hymo_state(self, of=lambda p: p.detach()):
        """Name -> tensor, of the parameters or of something like them (`of=lambda p: p.grad`)."""
        return {name: of(p)[where] for name, p, where in self.pieces()}

    @torch.no_grad()
    def load(self, state, buffers=()):
        mine = self.hymo_state()
        assert mine.keys() == state.keys(), mine.keys() ^ state.keys()
        for name, tensor in mine.items():
            tensor.copy_(state[name])
        for name, bias in dict(buffers).items():
            self.layers[int(name.split(".")[1])].ffn.bias.copy_(bias)

    @torch.no_grad()
    def init(self):
        """The distributions of the Rust model, not its numbers."""
        branches = sum(1 + (layer.ffn is not None) for layer in self.layers)
        for name, p in self.hymo_state().items():
            if name.endswith("A_log"):
                p.uniform_(0.01, 16).log_()
            elif name.endswith("dt_bias"):
                dt = torch.empty_like(p).uniform_(math.log(1e-3), math.log(0.1)).exp()
                p.copy_(dt + torch.log(-torch.expm1(-dt)))
            elif name.endswith("conv.weight"):
                bound = p.shape[1] ** -0.5
                p.uniform_(-bound, bound)
            elif p.dim() > 1:
                output = name.endswith((".o.weight", ".w2.weight"))
                std = 0.02 / math.sqrt(branches) if output else 0.02
                nn.init.trunc_normal_(p, std=std, a=-3 * std, b=3 * std)

    def forward(self, tokens, seg=None):
        """tokens (and seg) [B, T + modules + 1] -> the total, and a tensor of the losses: each depth, then balance."""
        c = self.c
        depths = c.mtp.n_modules + 1
        batch, length = tokens.shape[0], tokens.shape[1] - depths
        docs = None if seg is None else Documents(seg[:, :length])
        angles = ()
        if c.mla and c.mla.d_rope:
            pos = torch.arange(length) if docs is None else docs.pos
            angle = (pos.to(self.freq.dtype)[..., None] * self.freq)[..., None, :]
            angles = (angle.cos(), angle.sin())

        embedded = F.embedding(tokens[:, : length + depths - 1], self.embed)
        x = embedded[:, :length]
        balances = []
        for layer in self.layers:
            x, balance = layer(x, docs, *angles)
            if balance is not None:
                balances.append(balance)
        outputs = [self.norm(x)]
        for k, module in enumerate(self.mtp, 1):
            e = embedded[:, k : k + length]
            if docs is not None:
                e = e * (seg[:, k : k + length] == docs.seg)[..., None]
            x = module(x, e, docs)
            outputs.append(module.out_norm(x))

        target = torch.stack([tokens[:, k : k + length] for k in range(1, depths + 1)])
        if docs is None:
            valid = torch.full((depths, batch, length), 1 / (batch * length), dtype=x.dtype)
        else:
            valid = torch.stack([seg[:, k : k + length] == docs.seg for k in range(1, depths + 1)]).to(x.dtype)
            valid = valid / valid.sum((1, 2), keepdim=True)
        scale = torch.tensor([1.0, *c.mtp.loss_weights[: depths - 1]], dtype=x.dtype)
        weight = (valid * scale[:, None, None]).flatten()
        inputs = (torch.stack(outputs).flatten(0, 2), self.embed, target.flatten(), weight, c.loss.z_loss, c.loss.soft_cap)
        if self.head == "fused":
            total, losses = FusedHead.apply(*inputs, self.head_block)
        else:
            total, losses = plain_head(*inputs)
        balance = sum(balances) if balances else x.new_zeros(())
        parts = (losses.view(depths, -1) * valid.flatten(1)).sum(1)
        return total + balance, torch.cat([parts, balance.detach()[None]])
