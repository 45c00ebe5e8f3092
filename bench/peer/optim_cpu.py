"""The optimizers of a HyMo run in PyTorch: NorMuon for hidden matrices, cautious AdamW for the rest, clipping, the router's bias rule.

The formulas are HyMo's defaults. Matrices of one shape are stepped together, as one batch of products.
"""

import torch

POLAR_EXPRESS = [
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
]


def orthogonalise(x):
    """[n, rows, columns], each matrix on its own."""
    if x.shape[-2] > x.shape[-1]:
        return orthogonalise(x.mT).mT
    x = x / (1.02 * x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for a, b, c in POLAR_EXPRESS:
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x


def normuon(w, g, m, v, lr, decay):
    """One step of matrices [n, rows, columns]; gives the new weights, moves m and v [n, rows, 1]."""
    m.lerp_(g, 0.05)
    u = orthogonalise(g.lerp(m, 0.95))
    v.lerp_(u.square().mean(-1, keepdim=True), 0.05)
    u = u / (v.sqrt() + 1e-8)
    u = u * (0.2 * (w.shape[-2] * w.shape[-1]) ** 0.5 / (u.norm(dim=(-2, -1), keepdim=True) + 1e-10))
    return torch.where(u * w >= 0, w - lr * decay * w, w) - lr * u


def agreeing(g, m, v, c1, c2):
    """Moves the moments; gives the update, and where the momentum agrees with the gradient."""
    m.lerp_(g, 0.1)
    v.lerp_(g.square(), 0.05)
    return (m / c1) / ((v / c2).sqrt() + 1e-8), (m * g > 0).to(g.dtype)


def move(w, u, mask, share, lr, decay):
    w.copy_(w - lr * decay * w - lr * u * mask / share.clamp(min=1e-3))


def is_hidden_matrix(name):
    part = name.split(".")[-2] if "." in name else name
    return not (
        name.endswith(("A_log", "dt_bias")) or "norm" in part or part in ("conv", "a", "b", "embed") or ".moe." in name
    )


def decays(name):
    part = name.split(".")[-2] if "." in name else name
    plain_norm = name.endswith("gdn.norm.weight") or name.endswith("latent_norm.weight")
    return not (name.endswith(("A_log", "dt_bias")) or part in ("conv", "a", "b") or plain_norm)


class Optimizers:
    def __init__(self, model, weight_decay=0.1, clip=1.0, bias_rate=1e-3, compiled=False):
        self.model, self.weight_decay, self.clip, self.bias_rate, self.t = model, weight_decay, clip, bias_rate, 0
        self.parameters = list(model.parameters())
        shapes, rest = {}, {}
        for name, p, where in model.pieces():
            if is_hidden_matrix(name):
                shapes.setdefault(tuple(p[where].shape), []).append((p, where))
            elif ".experts." in name:
                rest[id(p)] = (p, ..., weight_decay)  # all experts at once
            else:
                rest[name] = (p, where, weight_decay if decays(name) else 0.0)
        self.experts = {id(ffn.w13): ffn.m.d_ff for ffn in model.modules() if hasattr(ffn, "ends")}
        new = self.parameters[0].new_zeros
        self.matrices = [(of, new(len(of), *shape), new(len(of), shape[0], 1)) for shape, of in shapes.items()]
        self.rest = list(rest.values())
        self.m, self.v = ([torch.zeros_like(w) for w in self.views(lambda p: p.detach())] for _ in range(2))
        self.mixtures = [layer.ffn for layer in model.layers if hasattr(getattr(layer, "ffn", None), "bias")]
        self.normuon, self.agreeing, self.move = normuon, agreeing, move
        if compiled:
            # Once for every shape and decay. With the mean inside, torch 2.15's inductor fails on AdamW.
            torch._dynamo.config.recompile_limit = 64
            self.normuon, self.agreeing, self.move = (torch.compile(f, dynamic=False) for f in (normuon, agreeing, move))

    def views(self, of):
        """What AdamW steps, of parameters or gradients; the two matrices of experts' first layer apart."""
        whole = [(of(p)[where], self.experts.get(id(p))) for p, where, _ in self.rest]
        return [w.unflatten(1, (2, d_ff)) if d_ff else w for w, d_ff in whole]

    @torch.no_grad()
    def step(self, lr):
        """Steps from the parameters' gradients, which it clips in place."""
        self.t += 1
        lr = torch.as_tensor(lr, dtype=self.parameters[0].dtype)
        grads = [p.grad for p in self.parameters]
        norm = torch.nn.utils.get_total_norm(grads, foreach=True)
        torch._foreach_mul_(grads, (self.clip / norm).clamp(max=1))
        for of, m, v in self.matrices:
            w, g = torch.stack([p[where] for p, where in of]), torch.stack([p.grad[where] for p, where in of])
            torch._foreach_copy_([p[where] for p, where in of], list(self.normuon(w, g, m, v, lr, self.weight_decay).unbind()))
        ws, gs = self.views(lambda p: p.detach()), self.views(lambda p: p.grad)
        c1, c2 = (torch.as_tensor(1 - beta**self.t, dtype=lr.dtype) for beta in (0.9, 0.95))
        for w, g, m, v, (*_, decay) in zip(ws, gs, self.m, self.v, self.rest, strict=True):
            u, mask = self.agreeing(g, m, v, c1, c2)
            # Experts' matrices each have their own share.
            share = mask.mean((-2, -1), keepdim=True) if w.dim() > 2 else mask.mean()
            self.move(w, u, mask, share, lr, decay)
        for ffn in self.mixtures:
            counts = ffn.ends.diff(prepend=ffn.ends.new_zeros(1)).to(ffn.bias.dtype)
            delta = self.bias_rate * torch.sign(counts.mean() - counts)
            ffn.bias += delta - delta.mean()
            ffn.ends.zero_()
