"""The top eigenvalue of the loss's Hessian on fixed data, by Lanczos or power iteration with Hessian-vector products.

    H v = ∇_θ ⟨∇_θ ℓ, v⟩,   ℓ the mean loss over all samples

Reference: wninit, section 5.3 and Table 2 (the spectral norm of the Hessian at initialization).
Differs: a Rayleigh quotient on fixed data, as the paper's text describes it; see `top_eigenvalue`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import reduce
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from normfree.diagnostics.measurement.inputs_and_outputs import cross_entropy
from normfree.diagnostics.propagation import Loss
from normfree.nn.model_state import call_arguments, preserve_model_state

Which = Literal["magnitude", "largest"]
Product = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Curvature:
    """The top eigenvalue λ of a Hessian, and the course of the iteration.

    All numbers are NaN if a product was not finite; the paper's table has N/A there.

    Attributes:
        eigenvalue: The estimate of λ.
        log10: The logarithm of |λ|.
        history: The estimate after each Hessian-vector product.
        residual: ‖Hv - λv‖ for the unit vector v that was found. The Hessian has an eigenvalue within this distance
            of λ.
        converged: Whether the residual fell below the tolerance.
        products: The number of Hessian-vector products.
    """

    eigenvalue: float
    log10: float
    history: tuple[float, ...]
    residual: float
    converged: bool
    products: int

    @property
    def stable_learning_rate(self) -> float:
        """2/|λ|, the rate above which gradient descent diverges along v; ∞ for λ = 0.

        If the eigenvalue of largest magnitude is negative, all positive ones are smaller, so that 2/|λ| is a safe
        rate.
        """
        return math.inf if self.eigenvalue == 0 else 2 / abs(self.eigenvalue)

    def to_json(self) -> dict[str, Any]:
        """Return the result as plain data; numbers may be NaN or infinite."""
        return {**asdict(self), "history": list(self.history), "stable_learning_rate": self.stable_learning_rate}


def top_eigenvalue(
    model: nn.Module,
    inputs: Any,
    targets: Any,
    *,
    loss: Loss | None = None,
    algorithm: Literal["lanczos", "power"] = "lanczos",
    which: Which = "magnitude",
    max_products: int = 100,
    tolerance: float = 1e-4,
    micro_batch: int | None = None,
    vectors: int = 30,
    parameters: Iterable[nn.Parameter] | None = None,
    generator: torch.Generator | None = None,
    on_product: Callable[[int, float], None] | None = None,
) -> Curvature:
    """Compute the top eigenvalue of the Hessian of the mean loss.

    The iteration ends if the residual ‖Hv - λv‖ falls below `tolerance` · |λ|, or after `max_products`. Lanczos needs
    fewer products than power iteration. The model runs in its current mode and is unchanged; every product sees
    the same random numbers, such as those of dropout. On GPUs, `torch.backends.cudnn.allow_tf32` limits the precision
    of convolutions.

    Args:
        model: Any model.
        inputs: A tensor, a tuple of positional arguments or a mapping of keyword arguments.
        targets: The second argument of the loss.
        loss: A function of the output and the targets that is a mean over samples (default: cross-entropy).
        algorithm: 'lanczos' or 'power'.
        which: 'magnitude' for the eigenvalue of largest magnitude, which is the spectral norm in `wninit`, or
            'largest' for the largest one, which bounds the learning rate. They differ if the Hessian is indefinite;
            only Lanczos finds the largest one.
        max_products: The largest number of Hessian-vector products.
        tolerance: The residual, relative to |λ|, at which the iteration ends.
        micro_batch: The number of samples at a time, which bounds memory (default: all). Batch norm in training mode
            couples the samples of a batch, so that micro-batches change its function: use evaluation mode, or one
            batch.
        vectors: The largest number of vectors of the model's size that Lanczos keeps; it restarts from the best.
        parameters: The parameters of the Hessian (default: all that require a gradient).
        generator: The source of the start vector (default: seed 0).
        on_product: A function that is called after each product with their number and the estimate.

    Returns:
        The eigenvalue with its residual, and the learning rate that it allows.

    Raises:
        ValueError: for settings that cannot work, for a model without a parameter that requires a gradient, and for
            one with a function that torch cannot differentiate twice (hard sigmoid).

    Reference: wninit, section 5.3 and Table 2; Pearlmutter 1994 (the product); Wu & Simon 2000 (thick restart).
    Differs: the code behind the table took the largest entry of a power iteration over changing batches.

    >>> model = nn.Linear(1, 1, bias=False)
    >>> square = lambda output, target: ((output - target) ** 2).mean()  # H = 2 · mean(x²)
    >>> top_eigenvalue(model, torch.tensor([[1.0], [3.0]]), torch.zeros(2, 1), loss=square).eigenvalue
    10.0
    """
    if algorithm not in ("lanczos", "power") or which not in ("magnitude", "largest"):
        raise ValueError(
            f"expected algorithm 'lanczos' or 'power' and which 'magnitude' or 'largest', got '{algorithm}', '{which}'"
        )
    if algorithm == "power" and which == "largest":
        raise ValueError(
            "power iteration finds the eigenvalue of largest magnitude, got which='largest'; use algorithm='lanczos'"
        )
    if max_products < 1 or vectors < 3 or not tolerance > 0:
        raise ValueError(
            "expected max_products ≥ 1, vectors ≥ 3 and tolerance > 0, "
            f"got max_products={max_products}, vectors={vectors}, tolerance={tolerance}"
        )
    hessian = Hessian(model, inputs, targets, loss=loss, micro_batch=micro_batch, parameters=parameters)
    source = generator or torch.Generator().manual_seed(0)
    start = torch.randn(hessian.size, generator=source, device=source.device).to(hessian.device, hessian.dtype)
    steps = (
        _power(hessian, start)
        if algorithm == "power"
        else _lanczos(hessian, start, min(vectors, hessian.size), magnitude=which == "magnitude")
    )
    history: list[float] = []
    value, residual, converged = math.nan, math.nan, False
    for value, residual in steps:
        if not math.isfinite(value):
            value = residual = math.nan
        history.append(value)
        if on_product is not None:
            on_product(len(history), value)
        converged = residual <= tolerance * abs(value)
        if converged or math.isnan(value) or len(history) == max_products:
            break
    log10 = math.log10(abs(value)) if value else -math.inf
    return Curvature(value, log10, tuple(history), residual, converged, len(history))


class Hessian:
    """The linear map v ↦ H v for a flat vector v over the parameters of a model, on fixed data.

    With one micro-batch and no buffers, the graph of the gradient is kept between products. Otherwise the graphs are
    built for each product.
    """

    def __init__(
        self,
        model: nn.Module,
        inputs: Any,
        targets: Any,
        *,
        loss: Loss | None = None,
        micro_batch: int | None = None,
        parameters: Iterable[nn.Parameter] | None = None,
    ) -> None:
        self.model = model
        self.parameters = [p for p in (model.parameters() if parameters is None else parameters) if p.requires_grad]
        if not self.parameters:
            raise ValueError("expected parameters that require gradients, got none; pass parameters=, or unfreeze some")
        if any(p.is_meta for p in self.parameters):
            raise ValueError("expected a model with values, got parameters on the meta device; initialize it first")
        self.device = self.parameters[0].device
        self.dtype = reduce(torch.promote_types, (p.dtype for p in self.parameters), torch.float32)
        self.size = sum(p.numel() for p in self.parameters)
        self._loss = loss or cross_entropy
        self._pieces = list(_pieces(inputs, targets, micro_batch))
        self._kept_gradient: tuple[Tensor, ...] | None = None

    def __call__(self, vector: Tensor) -> Tensor:
        """Compute the product, averaged over the micro-batches by their sizes."""
        sizes = [p.numel() for p in self.parameters]
        parts = [v.view_as(p).to(p.dtype) for v, p in zip(vector.split(sizes), self.parameters, strict=True)]
        total = torch.zeros_like(vector)
        # Fused attention has no second derivative.
        with preserve_model_state(self.model), torch.enable_grad(), sdpa_kernel(SDPBackend.MATH):
            for inputs, targets, share in self._pieces:
                gradient = self._gradient(inputs, targets)
                dot = torch.stack([(g * v).sum().to(self.dtype) for g, v in zip(gradient, parts, strict=True)]).sum()
                if not dot.requires_grad:  # a loss that is linear in the parameters
                    continue
                product = self._derivative(dot)
                del gradient, dot
                total += share * torch.cat([part.flatten().to(self.dtype) for part in product])
        return total

    def _derivative(self, dot: Tensor) -> tuple[Tensor, ...]:
        keep = self._kept_gradient is not None
        try:
            return torch.autograd.grad(dot, self.parameters, retain_graph=keep, materialize_grads=True)
        except RuntimeError as error:
            if "derivative for" not in str(error):
                raise
            function = str(error).partition("derivative for ")[2].split()[0]
            raise ValueError(
                f"expected a model that can be differentiated twice, got one with {function}, which torch cannot; use "
                "another function instead, such as a sigmoid for a hard one"
            ) from error

    def _gradient(self, inputs: Any, targets: Any) -> tuple[Tensor, ...]:
        if self._kept_gradient is not None:
            return self._kept_gradient
        args, kwargs = call_arguments(inputs)
        value = self._loss(self.model(*args, **kwargs), targets)
        gradient = torch.autograd.grad(value, self.parameters, create_graph=True, materialize_grads=True)
        if len(self._pieces) == 1 and not any(True for _ in self.model.buffers()):
            self._kept_gradient = gradient
        return gradient


def _power(hessian: Product, start: Tensor) -> Iterator[tuple[float, float]]:
    """Yield the Rayleigh quotient and the residual of v ← Hv/‖Hv‖, one pair per product."""
    v = start / start.norm()
    while True:
        w = hessian(v)
        value = torch.dot(v, w)
        residual = torch.linalg.vector_norm(w - value * v)
        yield float(value), float(residual)
        v = w / torch.linalg.vector_norm(w)


def _lanczos(hessian: Product, start: Tensor, limit: int, *, magnitude: bool) -> Iterator[tuple[float, float]]:
    """Yield the top Ritz value and its residual β·|s_k|, one pair per product; the basis V has at most `limit` rows.

    V H Vᵀ = S and H Vᵀ = Vᵀ S + β v eᵀ_k hold with v the next row, also across a restart, because every row of S is
    computed as V H v and not assumed to have two entries.
    """
    basis = start.new_empty((limit, start.numel()))
    projected = torch.zeros(limit, limit, dtype=torch.float64)
    v, k = start / torch.linalg.vector_norm(start), 0
    while True:
        basis[k] = v
        k += 1
        w = hessian(v)
        row = basis[:k] @ w
        w = w - basis[:k].mT @ row
        w -= basis[:k].mT @ (basis[:k] @ w)  # a second time: rounding leaves a part of V in w, which would grow
        beta = float(torch.linalg.vector_norm(w))
        projected[:k, k - 1] = projected[k - 1, :k] = row.double().cpu()
        if not math.isfinite(beta) or not projected.isfinite().all():
            yield math.nan, math.nan
            return
        values, mixtures = torch.linalg.eigh(projected[:k, :k])
        order = (values.abs() if magnitude else values).argsort(descending=True)
        top = order[0]
        # A remainder at the level of rounding counts as zero: the Krylov space is exhausted.
        complete = beta <= 16 * torch.finfo(start.dtype).eps * float(values.abs().max()) or k == start.numel()
        yield float(values[top]), 0.0 if complete else beta * abs(float(mixtures[-1, top]))
        if complete:
            return
        v = w / beta
        if k == limit:
            kept = order[: max(1, limit // 2)]
            _mix_(basis, mixtures[:, kept].to(basis))
            projected.zero_()
            k = len(kept)
            projected[:k, :k] = torch.diag(values[kept])


def _mix_(basis: Tensor, mixtures: Tensor, columns: int = 1 << 20) -> None:
    """Replace the first rows of the basis by linear combinations of all rows, a piece of the columns at a time."""
    for piece in basis.split(columns, dim=1):
        piece[: mixtures.shape[1]] = mixtures.mT @ piece


def _pieces(inputs: Any, targets: Any, size: int | None) -> Iterator[tuple[Any, Any, float]]:
    """Yield the inputs and targets of each micro-batch, and its fraction of all samples."""
    args, kwargs = call_arguments(inputs)
    batched = next((a for a in (*args, *kwargs.values()) if isinstance(a, Tensor) and a.dim() > 0), None)
    if size is None or batched is None:
        yield inputs, targets, 1.0
        return
    if size < 1:
        raise ValueError(f"expected a micro_batch of at least 1 sample, got {size}; None takes all samples at once")
    count = len(batched)

    def cut(value: Any, start: int) -> Any:
        if isinstance(value, Tensor):
            return value[start : start + size] if value.dim() > 0 and len(value) == count else value
        if isinstance(value, Mapping):
            return {key: cut(item, start) for key, item in value.items()}
        return type(value)(cut(item, start) for item in value) if isinstance(value, tuple | list) else value

    for start in range(0, count, size):
        yield cut(inputs, start), cut(targets, start), min(size, count - start) / count
