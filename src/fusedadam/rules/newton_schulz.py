"""Orthogonalization: the nearest matrix whose singular values are all 1, by a few Newton-Schulz iterations.

An iteration is an odd polynomial of a matrix, X <- a X + b (X X^T) X + c (X X^T)^2 X. It keeps the singular vectors and
changes every singular value s to a s + b s^3 + c s^5. After some of them, singular values between 0 and 1 are near 1.

Here is which iterations there are, and what a class may choose. Who runs them: ``orthogonal.py`` by torch's products,
``backends/triton/orthogonal.py`` by kernels. What they cost is known to ``operations`` in ``engine/exchange.py`` and,
in bytes, to ``engine/products.py``; how large their rounding errors may be, to ``cli/verify/bounded.py``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

Triple: TypeAlias = tuple[float, float, float]

# https://kellerjordan.github.io/posts/muon: the steepest at 0; singular values end between 0.68 and 1.15
KELLER: Triple = (3.4445, -4.7750, 2.0315)
# https://github.com/KellerJordan/modded-nanogpt, by You Jiacheng: one polynomial for each of five iterations
YOU: tuple[Triple, ...] = (
    (4.0848, -6.8946, 2.9270), (3.9505, -6.3029, 2.6377), (3.7418, -5.5913, 2.3037), (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)  # fmt: skip
# https://arxiv.org/abs/2505.16932, Algorithm 1; all but the last for singular values up to 1.01 instead of 1
SAFETY = 1.01
POLAR_EXPRESS: tuple[Triple, ...] = (
    *((a / SAFETY, b / SAFETY**3, c / SAFETY**5) for a, b, c in (
        (8.28721201814563, -23.595886519098837, 17.300387312530933),
        (4.107059111542203, -2.9478499167379106, 0.5448431082926601),
        (3.9486908534822946, -2.908902115962949, 0.5518191394370137),
        (3.3184196573706015, -2.488488024314874, 0.51004894012372),
        (2.300652019954817, -1.6689039845747493, 0.4188073119525673),
        (1.891301407787398, -1.2679958271945868, 0.37680408948524835),
        (1.8750014808534479, -1.2500016453999487, 0.3750001645474248),
    )),
    (1.875, -1.25, 0.375),
)  # fmt: skip
NAMED: dict[str, tuple[Triple, ...]] = {"keller": (KELLER,), "you": YOU, "polar-express": POLAR_EXPRESS}


class NewtonSchulz(NamedTuple):
    """How ``orthogonalized`` iterates: what ``newton_schulz(group)`` of an optimizer's class returns.

    Args:
        coefficients: one triple (a, b, c) for each iteration
        eps: lower limit of the norm that a matrix is divided by first; at least 0
    """

    coefficients: tuple[Triple, ...] = (KELLER,) * 5
    eps: float = 1e-7


DEFAULT = NewtonSchulz()
SMALLEST_EPS = 1e-30  # not 0 in float32: a matrix of zeros divided by it is one of zeros, whatever eps


def checked(method: Any, owner: str) -> NewtonSchulz:
    """What a class says about its iterations, as hashable numbers; refused if it is something else."""
    if not isinstance(method, NewtonSchulz):
        raise TypeError(f"{owner} returned a {type(method).__name__}; it must return a fusedadam.NewtonSchulz")
    if method is DEFAULT:
        return method
    try:
        coefficients = tuple(_triple(*triple) for triple in method.coefficients)
    except (TypeError, ValueError):
        raise ValueError(
            f"{owner} returned coefficients={method.coefficients!r}; it must have a triple (a, b, c) of numbers for "
            "each iteration, such as ((3.4445, -4.775, 2.0315),) * 5"
        ) from None
    eps = method.eps
    if not (isinstance(eps, (int, float)) and 0 <= eps < math.inf and all(map(math.isfinite, sum(coefficients, ())))):
        raise ValueError(f"{owner} returned {method!r}; coefficients must be finite, and eps at least 0")
    return NewtonSchulz(coefficients, max(float(eps), SMALLEST_EPS))


def coefficients_of(given: str | Sequence[float], steps: int) -> tuple[Triple, ...]:
    """Of each iteration: a triple serves all of them, a named set one after the other, its last one as often as
    needed."""
    known = NAMED[given] if isinstance(given, str) else (_triple(*given),)
    return (*known[:steps], *known[-1:] * (steps - len(known)))


def _triple(a: float, b: float, c: float) -> Triple:
    return float(a), float(b), float(c)
