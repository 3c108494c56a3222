"""The update rules again, with plain Python numbers or float64 tensors, sharing no code with the package.

They follow the formulas of the specification line by line, and are themselves tested against torch.optim, the adamp
package and each other.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor


class WithMoments:
    """One tensor with two moments, and the numbers that most formulas have."""

    def __init__(self, param: Tensor, lr=1e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, maximize=False):
        self.p, self.t = param.clone(), 0
        self.m, self.v = torch.zeros_like(param), torch.zeros_like(param)
        self.lr, (self.b1, self.b2), self.eps, self.wd, self.maximize = lr, betas, eps, weight_decay, maximize


class AdamByHand(WithMoments):
    """Adam and AdamW for one tensor, in the dtype of what it is given."""

    def __init__(self, param: Tensor, amsgrad=False, decoupled=True, **common):
        super().__init__(param, **common)
        self.x, self.amsgrad, self.decoupled = torch.zeros_like(param), amsgrad, decoupled

    def step(self, g: Tensor) -> None:
        self.t += 1
        g = -g if self.maximize else g
        if self.decoupled:
            self.p = self.p * (1 - self.lr * self.wd)
        else:
            g = g + self.wd * self.p
        self.m = self.b1 * self.m + (1 - self.b1) * g
        self.v = self.b2 * self.v + (1 - self.b2) * g**2
        self.x = torch.maximum(self.x, self.v) if self.amsgrad else self.v
        m_hat, root = self.m / (1 - self.b1**self.t), self.x.sqrt() / math.sqrt(1 - self.b2**self.t)
        self.p = self.p - self.lr * m_hat / (root + self.eps)


class EmaAdamByHand(WithMoments):
    def __init__(self, param: Tensor, ema_decay=0.9999, mode=1, bias_correction=True, warmup=False, **common):
        super().__init__(param, **common)
        self.s, self.decay, self.mode = param.clone(), ema_decay, mode
        self.bias_correction, self.warmup = bias_correction, warmup

    def step(self, g: Tensor) -> None:
        self.t += 1
        if self.mode == 0:
            g = g + self.wd * self.p
        self.m = self.b1 * self.m + (1 - self.b1) * g
        self.v = self.b2 * self.v + (1 - self.b2) * g * g
        c1, c2 = (1 - self.b1**self.t, 1 - self.b2**self.t) if self.bias_correction else (1, 1)
        u = (self.m / c1) / ((self.v / c2).sqrt() + self.eps)
        if self.mode == 1:
            u = u + self.wd * self.p
        self.p = self.p - self.lr * u
        d = min(self.decay, (1 + self.t) / (10 + self.t)) if self.warmup else self.decay
        self.s = d * self.s + (1 - d) * self.p


def adamw_v2(var, grad, m, v, largest, step, lr, beta1, beta2, weight_decay, eps, amsgrad, maximize):
    """One call of the operator as it is documented: everything in float32, each tensor rounded once on the way out."""
    p, g, first, second, top = (t.float() for t in (var, grad, m, v, largest))
    g = -g if maximize else g
    p = p * (1 - lr * weight_decay)
    first = torch.lerp(first, g, 1 - beta1)
    second = second * beta2 + g * g * (1 - beta2)
    used = torch.maximum(top, second) if amsgrad else second
    denominator = used.sqrt() / math.sqrt(1 - beta2**step) + eps
    p = p - lr / (1 - beta1**step) * first / denominator
    return p.to(var.dtype), first.to(m.dtype), second.to(v.dtype), (used if amsgrad else top).to(largest.dtype)


def adamw_v2_listing(var, grad, m, v, max_grad_norm, *, step, amsgrad, maximize, **attributes):
    """The operator as its page lists it: the attributes are float32 numbers, and then all is as in ``adamw_v2``.

    Scalars made of them are Python's, as in the listing under numpy 1; numpy 2 would make 1 - beta**t in float32. The
    root of a low-precision maximum is taken in float32, not as listed in its own dtype: the specification settles that.
    """
    rounded = {name: float(np.float32(value)) for name, value in attributes.items()}
    return adamw_v2(var, grad, m, v, max_grad_norm, step=step, amsgrad=amsgrad, maximize=maximize, **rounded)


class AdamPByHand(WithMoments):
    """AdamP for one tensor; ``projection`` says what the last step did.

    Of a matrix, the update is made of the moments as they are stored: ``as_stored``, if they are kept in low precision.
    """

    as_stored: tuple[Tensor, Tensor] | None = None

    def __init__(self, param: Tensor, delta=0.1, wd_ratio=0.1, nesterov=False, **common):
        super().__init__(param, **common)
        self.delta, self.wd_ratio, self.nesterov, self.projection = delta, wd_ratio, nesterov, "none"

    def step(self, g: Tensor) -> None:
        self.t += 1
        g = -g if self.maximize else g
        self.m = self.b1 * self.m + (1 - self.b1) * g
        self.v = self.b2 * self.v + (1 - self.b2) * g * g
        m, v = self.as_stored if self.as_stored is not None and self.p.dim() > 1 else (self.m, self.v)
        first = self.b1 * m + (1 - self.b1) * g if self.nesterov else m
        u = first / (v.sqrt() / math.sqrt(1 - self.b2**self.t) + self.eps)
        u, ratio = self.project(g, u)
        self.p = self.p * (1 - self.lr * self.wd * ratio) - self.lr / (1 - self.b1**self.t) * u

    def project(self, g: Tensor, u: Tensor) -> tuple[Tensor, float]:
        self.projection = "none"
        if self.p.dim() < 2 or self.p.numel() == 0:
            return u, 1
        for view, rows in (("channel", self.p.shape[0]), ("layer", 1)):
            if largest_cosine(g, self.p, rows, self.eps) < self.delta / math.sqrt(self.p.numel() // rows):
                p = self.p.reshape(rows, -1)
                n = p / (p.square().sum(1, keepdim=True).sqrt() + self.eps)
                u = u.reshape(rows, -1)
                u = u - n * (n * u).sum(1, keepdim=True)
                self.projection = view
                return u.reshape(self.p.shape), self.wd_ratio
        return u, 1


def largest_cosine(g: Tensor, p: Tensor, rows: int, eps: float) -> float:
    """NaN as soon as one row's is: then no comparison holds."""
    g, p = g.reshape(rows, -1), p.reshape(rows, -1)
    lengths = [x.square().sum(1).sqrt().clamp_min(eps) for x in (g, p)]
    return ((g * p).sum(1).abs() / (lengths[0] * lengths[1])).max().item()


def schedule_by_hand(name: str, x: float, warmup: float) -> float:
    warmup = 0.0 if warmup == -1 else warmup
    if x < warmup:
        return x / warmup
    if name == "warmup_constant":
        return 1.0
    if x >= 1:
        return 0.0
    return {
        "warmup_cosine": 0.5 * (1 + math.cos(math.pi * x)),
        "warmup_linear": (x - 1) / (warmup - 1),
        "warmup_poly": math.sqrt(1 - x),
    }[name]


class BertAdamByHand(WithMoments):
    """BertAdam for one tensor, clipped by the norm that is given or else by its own."""

    def __init__(
        self, param: Tensor, lr=1e-3, warmup=-1, t_total=-1, schedule="warmup_linear", b1=0.9, b2=0.999, e=1e-6,
        weight_decay=0.01, max_grad_norm=1.0, maximize=False,
    ):  # fmt: skip
        super().__init__(param, lr, (b1, b2), e, weight_decay, maximize)
        self.warmup, self.t_total, self.schedule, self.max_grad_norm = warmup, t_total, schedule, max_grad_norm

    def next_lr(self) -> float:
        if self.t_total == -1:
            return self.lr
        return self.lr * schedule_by_hand(self.schedule, self.t / self.t_total, self.warmup)

    def step(self, g: Tensor, norm: float | None = None) -> None:
        if self.max_grad_norm is not None and self.max_grad_norm > 0:
            g = clipped([g], self.max_grad_norm, norm)[0]
        g = -g if self.maximize else g
        self.m = self.b1 * self.m + (1 - self.b1) * g
        self.v = self.b2 * self.v + (1 - self.b2) * g * g
        u = self.m / (self.v.sqrt() + self.eps) + self.wd * self.p
        self.p = self.p - self.next_lr() * u
        self.t += 1


class RMSpropTFByHand:
    """TensorFlow's RMSprop for one tensor."""

    def __init__(
        self, param: Tensor, lr=1e-2, alpha=0.9, eps=1e-10, weight_decay=0.0, momentum=0.0, centered=False,
        decoupled_decay=False, lr_in_momentum=True, maximize=False,
    ):  # fmt: skip
        self.p, self.v, self.t = param.clone(), torch.ones_like(param), 0
        self.a, self.b = torch.zeros_like(param), torch.zeros_like(param)
        self.lr, self.alpha, self.eps, self.wd, self.momentum = lr, alpha, eps, weight_decay, momentum
        self.centered, self.decoupled_decay = centered, decoupled_decay
        self.lr_in_momentum, self.maximize = lr_in_momentum, maximize

    def step(self, g: Tensor) -> None:
        self.t += 1
        g = -g if self.maximize else g
        if self.decoupled_decay:
            self.p = self.p - self.wd * self.p
        else:
            g = g + self.wd * self.p
        self.v = self.v + (1 - self.alpha) * (g * g - self.v)
        self.a = self.a + (1 - self.alpha) * (g - self.a)
        d = (self.v - self.a * self.a + self.eps if self.centered else self.v + self.eps).sqrt()
        if self.momentum == 0:
            self.p = self.p - self.lr * g / d
        elif self.lr_in_momentum:
            self.b = self.momentum * self.b + self.lr * g / d
            self.p = self.p - self.b
        else:
            self.b = self.momentum * self.b + g / d
            self.p = self.p - self.lr * self.b


class LambByHand(WithMoments):
    """Lamb for one tensor; ``ratio`` is the last step's. It is given the norm of all gradients.

    Where a ratio is taken, the update is made of the moments as they are stored: ``as_stored``, if they are kept in low
    precision.
    """

    as_stored: tuple[Tensor, Tensor] | None = None

    def __init__(
        self, param: Tensor, eps=1e-6, weight_decay=0.01, bias_correction=True, max_weight_norm=None, adam=False,
        use_global_grad_norm=False, **common,
    ):  # fmt: skip
        super().__init__(param, eps=eps, weight_decay=weight_decay, **common)
        self.bias_correction, self.max_weight_norm, self.adam = bias_correction, max_weight_norm, adam
        self.use_global_grad_norm, self.ratio = use_global_grad_norm, 1.0

    def step(self, g: Tensor, norm: float = 0.0) -> None:
        self.t += 1
        g = -g if self.maximize else g
        if self.use_global_grad_norm and norm > 1:
            g = g / norm
        self.m = self.b1 * self.m + (1 - self.b1) * g
        self.v = self.b2 * self.v + (1 - self.b2) * g * g
        m, v = self.as_stored if self.as_stored is not None and not self.adam else (self.m, self.v)
        c1, c2 = (1 - self.b1**self.t, 1 - self.b2**self.t) if self.bias_correction else (1, 1)
        u = (m / c1) / ((v / c2).sqrt() + self.eps) + self.wd * self.p
        length, of_update = norm_by_hand([self.p]), norm_by_hand([u])
        if self.max_weight_norm is not None:
            length = min(length, self.max_weight_norm)
        self.ratio = 1.0 if self.adam or length == 0 or of_update == 0 else length / of_update
        self.p = self.p - self.lr * self.ratio * u


class LionByHand:
    """Lion for one tensor."""

    def __init__(self, param: Tensor, lr=1e-4, betas=(0.9, 0.99), weight_decay=0.0, maximize=False):
        self.p, self.m = param.clone(), torch.zeros_like(param)
        self.lr, (self.b1, self.b2), self.wd, self.maximize = lr, betas, weight_decay, maximize

    def step(self, g: Tensor) -> None:
        g = -g if self.maximize else g
        u = torch.sign(self.b1 * self.m + (1 - self.b1) * g)
        self.p = self.p - self.lr * (u + self.wd * self.p)
        self.m = self.b2 * self.m + (1 - self.b2) * g


class AdanByHand:
    """Adan for one tensor."""

    previous: Tensor | None = None

    def __init__(
        self, param: Tensor, lr=1e-3, betas=(0.98, 0.92, 0.99), eps=1e-8, weight_decay=0.0, no_prox=False,
        maximize=False,
    ):  # fmt: skip
        self.p, self.t = param.clone(), 0
        self.m, self.d, self.n = torch.zeros_like(param), torch.zeros_like(param), torch.zeros_like(param)
        self.lr, (self.b1, self.b2, self.b3), self.eps, self.wd = lr, betas, eps, weight_decay
        self.no_prox, self.maximize = no_prox, maximize

    def step(self, g: Tensor) -> None:
        self.t += 1
        g = -g if self.maximize else g.clone()
        change = g - (g if self.previous is None else self.previous)
        self.m = self.b1 * self.m + (1 - self.b1) * g
        self.d = self.b2 * self.d + (1 - self.b2) * change
        self.n = self.b3 * self.n + (1 - self.b3) * (g + self.b2 * change) ** 2
        m, d, n = (x / (1 - b**self.t) for x, b in ((self.m, self.b1), (self.d, self.b2), (self.n, self.b3)))
        u = (m + self.b2 * d) / (n.sqrt() + self.eps)
        if self.no_prox:
            self.p = self.p - self.lr * self.wd * self.p - self.lr * u
        else:
            self.p = (self.p - self.lr * u) / (1 + self.lr * self.wd)
        self.previous = g


class AdEMAMixByHand:
    """AdEMAMix for one tensor."""

    def __init__(
        self, param: Tensor, lr=1e-3, betas=(0.9, 0.999, 0.9999), alpha=2.0, alpha_warmup=None, beta3_warmup=None,
        eps=1e-8, weight_decay=0.0, maximize=False,
    ):  # fmt: skip
        self.p, self.t = param.clone(), 0
        self.m, self.s, self.v = torch.zeros_like(param), torch.zeros_like(param), torch.zeros_like(param)
        self.lr, (self.b1, self.b2, self.b3), self.eps, self.wd = lr, betas, eps, weight_decay
        self.alpha, self.alpha_warmup, self.beta3_warmup, self.maximize = alpha, alpha_warmup, beta3_warmup, maximize

    def beta3(self) -> float:
        """The paper's schedule, its equation with logarithms of beta1 and beta3."""
        if self.beta3_warmup is None or self.t >= self.beta3_warmup:
            return self.b3
        a = self.t / self.beta3_warmup
        start, end = math.log(self.b1) if self.b1 else -math.inf, math.log(self.b3)
        return math.exp(end / a if self.b1 == 0 else start * end / ((1 - a) * end + a * start))

    def step(self, g: Tensor) -> None:
        self.t += 1
        g = -g if self.maximize else g
        alpha = self.alpha
        if self.alpha_warmup is not None and self.t < self.alpha_warmup:
            alpha = alpha * self.t / self.alpha_warmup
        self.m = self.b1 * self.m + (1 - self.b1) * g
        b3 = self.beta3()
        self.s = b3 * self.s + (1 - b3) * g
        self.v = self.b2 * self.v + (1 - self.b2) * g * g
        fast, square = self.m / (1 - self.b1**self.t), self.v / (1 - self.b2**self.t)
        self.p = self.p - self.lr * ((fast + alpha * self.s) / (square.sqrt() + self.eps) + self.wd * self.p)


def norm_by_hand(tensors: list[Tensor]) -> float:
    return math.sqrt(sum(t.double().square().sum().item() for t in tensors))


def clipped(grads: list[Tensor], max_norm: float, norm: float | None = None) -> list[Tensor]:
    """By the norm that is given, or else by the 2-norm of them all."""
    norm = norm_by_hand(grads) if norm is None else norm
    return [g.double() * min(1.0, max_norm / (norm + 1e-6)) for g in grads]


class ScheduleFreeByHand:
    """Schedule-Free AdamW for one tensor, with x, y and z of the paper, and its sum of weights as a running one."""

    def __init__(
        self, param: Tensor, lr=2.5e-3, betas=(0.9, 0.999), eps=1e-8, weight_decay=0.0, warmup_steps=0, maximize=False
    ):
        self.p, self.x, self.z, self.v = param.clone(), param.clone(), param.clone(), torch.zeros_like(param)
        self.lr, (self.b1, self.b2), self.eps, self.wd = lr, betas, eps, weight_decay
        self.warmup, self.maximize, self.t, self.weights = warmup_steps, maximize, 0, 0.0

    def step(self, g: Tensor) -> None:
        self.t += 1
        g = -g if self.maximize else g
        warm = min(1.0, self.t / self.warmup) if self.warmup else 1.0
        self.v = self.b2 * self.v + (1 - self.b2) * g * g
        u = g / ((self.v / (1 - self.b2**self.t)).sqrt() + self.eps) + self.wd * self.p
        self.z = self.z - self.lr * warm * u
        self.weights += warm**2
        c = warm**2 / self.weights
        self.x = (1 - c) * self.x + c * self.z
        self.p = (1 - self.b1) * self.z + self.b1 * self.x


class AdafactorByHand:
    """Adafactor for one tensor, one matrix at a time."""

    as_stored: Tensor | None = None  # a vector's second moment as it is kept, in fewer bits

    def __init__(self, param: Tensor, lr=1e-2, beta2_decay=-0.8, eps=(None, 1e-3), d=1.0, weight_decay=0.0):
        self.p, self.t, self.v = param.clone(), 0, torch.zeros_like(param)
        self.lr, self.tau, self.d, self.wd = lr, beta2_decay, d, weight_decay
        self.eps1 = torch.finfo(param.dtype).eps if eps[0] is None else eps[0]
        self.eps2 = eps[1]
        matrices = param.reshape(-1, *param.shape[-2:]) if param.dim() > 1 else ()
        self.rows = [torch.zeros(len(m), dtype=param.dtype) for m in matrices]
        self.columns = [torch.zeros(m.shape[1], dtype=param.dtype) for m in matrices]

    def estimate(self, g: Tensor, kept: float) -> Tensor:
        if g.dim() < 2:
            self.v = kept * self.v + (1 - kept) * g**2
            return self.v if self.as_stored is None else self.as_stored
        estimates = []
        for k, m in enumerate(g.reshape(-1, *g.shape[-2:])):
            self.rows[k] = kept * self.rows[k] + (1 - kept) * (m**2).mean(1)
            self.columns[k] = kept * self.columns[k] + (1 - kept) * (m**2).mean(0)
            estimates.append(torch.outer(self.rows[k], self.columns[k]) / max(float(self.rows[k].mean()), self.eps1))
        return torch.stack(estimates).reshape(g.shape)

    def step(self, g: Tensor) -> None:
        self.t += 1
        estimate = self.estimate(g, 1 - self.t**self.tau)
        u = g / estimate.clamp_min(self.eps1**2).sqrt()
        size = max(self.eps2, float((self.p**2).mean().sqrt())) * min(self.lr, self.t**-0.5)
        u = u / max(1.0, float((u**2).mean().sqrt()) / self.d)
        self.p = self.p - self.lr * self.wd * self.p - size * u
