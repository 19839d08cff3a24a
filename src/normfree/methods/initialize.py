"""`initialize_`: set the weights of a model by a method; and `InitContext`, with which a method draws and sets them."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from normfree import theory
from normfree.arguments import check_arguments
from normfree.methods.method import Method
from normfree.methods.method_registry import get
from normfree.nn.attention import TokenEmbedding
from normfree.nn.model_state import eval_mode, restored_on_error
from normfree.nn.normalizers import NORM_TYPES, is_norm
from normfree.nn.residual import NEUTRAL, Residual
from normfree.nn.scalars import ScalarBias, ScalarMultiplier, scalars_of
from normfree.nn.weight_layers import WEIGHT_LAYERS, set_weight_, weight_kind
from normfree.plan import Layer, ResidualPlan, remembered_plan

Batch = Tensor | tuple[Tensor, ...]
"""A batch of inputs: one tensor, or a tuple of the model's arguments."""


@dataclass(frozen=True)
class InitContext:
    """The model, plan, generator and batch that an initializer works with.

    Every draw comes from `generator`, or from torch's global generator if that is None. Weights are handled with the
    outputs first, `(outputs, inputs, *kernel)`, whatever the layout in the module.
    """

    model: nn.Module
    plan: ResidualPlan
    generator: torch.Generator | None = None
    example: Batch | None = None
    modules: dict[str, nn.Module] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "modules", dict(self.model.named_modules()))

    def module(self, layer: Layer) -> nn.Conv2d | nn.Linear:
        """Return the module that holds a layer's weight; raise `ValueError` if the model has none."""
        module = self.modules.get(layer.name)
        weight = getattr(module, layer.parameter, None)
        if not isinstance(weight, Tensor) or weight.dim() < 2 or isinstance(module, NORM_TYPES):
            got = "nothing" if module is None else type(module).__name__
            raise ValueError(f"expected a weight layer at '{layer.name}', got {got}; the plan belongs to another model")
        return module  # type: ignore[return-value]  # Conv1d, Conv3d and other holders of weights have the same fields

    def each(self, layers: Iterable[Layer]) -> Iterator[tuple[Layer, nn.Conv2d | nn.Linear]]:
        """Iterate over pairs of layer and module."""
        return ((layer, self.module(layer)) for layer in layers)

    def shape(self, layer: Layer) -> tuple[int, ...]:
        """Return the shape of a layer's weight, outputs first."""
        first, *rest = getattr(self.module(layer), layer.parameter).shape
        if not layer.transposed:
            return (first, *rest)
        return (rest[0], first, *rest[1:]) if self._convolves(layer) else (math.prod(rest), first)

    def fans(self, layer: Layer) -> tuple[int, int]:
        """Return fan-in k²·c and fan-out k²·d of a layer, per group and, for a fused layer, per part."""
        out, inputs, *kernel = self.shape(layer)
        groups = getattr(self.module(layer), "groups", 1)
        if layer.transposed:
            out *= groups
        else:
            inputs *= groups
        return theory.fan_in(inputs, kernel, groups), theory.fan_out(out // layer.parts, kernel, groups)

    def normal(self, layer: Layer, variance: float = 1.0) -> Tensor:
        """Draw a weight with independent N(0, variance) entries, on the generator's device."""
        return self._empty(self.shape(layer)).normal_(generator=self.generator).mul_(variance**0.5)

    def uniform(self, layer: Layer, variance: float) -> Tensor:
        """Draw a weight with independent entries of a uniform distribution around 0, on the generator's device."""
        return self._empty(self.shape(layer)).uniform_(-1, 1, generator=self.generator).mul_((3 * variance) ** 0.5)

    def xavier(self, layer: Layer) -> Tensor:
        """Draw a weight with independent N(0, 2/(fan_in + fan_out)) entries."""
        return self.normal(layer, 2.0 / sum(self.fans(layer)))

    def orthogonal(self, layer: Layer) -> Tensor:
        """Draw a weight whose (outputs, rest) matrix is orthogonal, from the Haar measure (sign-corrected QR).

        Each part of a fused layer and each group of a grouped convolution is a matrix of its own. One matrix for all
        groups would give a depthwise layer of c channels rows of norm k/√c, so weight norm would update their
        directions c/k² times as fast.
        """
        out, *rest = self.shape(layer)
        groups = 1 if layer.transposed else getattr(self.module(layer), "groups", 1)
        pieces = math.lcm(layer.parts, groups)
        draws = [self._empty((out // pieces, *rest)) for _ in range(pieces)]
        return torch.cat([nn.init.orthogonal_(draw, generator=self.generator) for draw in draws])

    def set_(self, layer: Layer, weight: Tensor) -> None:
        """Set a layer's weight; a weight that is tied to an embedding stays unchanged.

        Parallel layers whose outputs are added share the variance.
        """
        if layer.tied:
            return
        module = self.module(layer)
        if layer.parallel_paths > 1:
            weight = weight * layer.parallel_paths**-0.5
        if layer.transposed:
            stored_shape = getattr(module, layer.parameter).shape
            weight = (weight.transpose(0, 1) if self._convolves(layer) else weight.mT).reshape(stored_shape)
        set_weight_(module, weight, layer.parameter, name=layer.path)

    def zero_(self, layer: Layer) -> None:
        """Set a layer's weight to 0."""
        self.set_(layer, torch.zeros(self.shape(layer), device=getattr(self.module(layer), layer.parameter).device))

    def default_(self, layer: Layer) -> None:
        """Set a layer's weight to torch's default, U(-1/√fan_in, 1/√fan_in), so that Var[W] = 1/(3·fan_in)."""
        draw = self._empty(self.shape(layer)).uniform_(-1, 1, generator=self.generator)
        self.set_(layer, draw.div_(self.fans(layer)[0] ** 0.5))

    def default_classifier_(self) -> None:
        """Set the classifier's weight to torch's default; its bias stays 0."""
        for layer in self.plan.classifier:
            self.default_(layer)

    def draw_embeddings_(self, factor: float = 1.0) -> None:
        """Draw each `TokenEmbedding` from N(0, 1/width), times a factor; other embeddings stay unchanged."""
        for module in self.modules.values():
            if isinstance(module, TokenEmbedding):
                draw = self._empty(tuple(module.weight.shape)).normal_(generator=self.generator)
                module.weight.copy_(draw.mul_(factor * module.embedding_dim**-0.5))

    def run_model(self) -> None:
        """Run the model on the batch, in evaluation mode, so that dropout draws nothing from the global generator."""
        if self.example is None:
            raise ValueError("expected a batch to calibrate on, got none; pass example=a batch of inputs")
        like = next(self.model.parameters())
        given = (self.example,) if isinstance(self.example, Tensor) else self.example
        # Copies, because a model may write into its input.
        args = [t.to(like.device, like.dtype if t.is_floating_point() else t.dtype, copy=True) for t in given]
        with eval_mode(self.model):
            self.model(*args)

    def zero_biases_(self) -> None:
        """Set the bias of every weight layer to 0."""
        for layer, module in self.each(self.plan.layers()):
            for name in {layer.parameter.replace("weight", "bias"), "in_proj_bias"}:
                bias = getattr(module, name, None)
                if isinstance(bias, nn.Parameter) and name != layer.parameter:
                    bias.zero_()

    def _empty(self, shape: tuple[int, ...]) -> Tensor:
        return torch.empty(shape, device=self.generator.device if self.generator else "cpu")

    def _convolves(self, layer: Layer) -> bool:
        return isinstance(self.module(layer), nn.modules.conv._ConvNd)


def fans(module: nn.Conv2d | nn.Linear) -> tuple[int, int]:
    """Return fan-in k²·c and fan-out k²·d of a plain weight layer, per group."""
    out, per_group, *kernel = module.weight.shape
    groups = getattr(module, "groups", 1)
    return theory.fan_in(per_group * groups, tuple(kernel), groups), theory.fan_out(out, tuple(kernel), groups)


def gain(layer: Layer) -> float:
    """Return γ, the gain of the variance in He's rule: 2 if the layer's input is a ReLU's output, else 1."""
    return theory.forward_gain("relu") if layer.reads_activation else 1.0


def standardized(weight: Tensor, variance: float, *, per_channel: bool = False) -> Tensor:
    """Shift and scale a sampled weight to mean 0 and exactly this variance, overall or per output channel.

    Reference: robust, section 4 ("we perform the empirical standardization"); per channel as equation 3.
    """
    rows = weight.flatten(1) if per_channel else weight.flatten().unsqueeze(0)
    centred = rows - rows.mean(1, keepdim=True)
    # A row of one weight has no variance of its own and keeps its drawn value.
    std = centred.square().mean(1, keepdim=True).sqrt()
    centred = torch.where(std > 0, centred / std.clamp_min(1e-12), rows)
    scaled: Tensor = centred * variance**0.5
    return scaled.view_as(weight)


def initialize_(
    model: nn.Module,
    method: str | Method,
    plan: ResidualPlan | None = None,
    *,
    example: Batch | None = None,
    generator: torch.Generator | None = None,
) -> nn.Module:
    """Initialize a model by a method, in place.

    Writes weights, biases (0), scalars (by the method's rule) and normalizers (neutral); adds and removes no module.
    Embeddings of normfree's Transformers are drawn; other embeddings, and layers tied to them, stay unchanged.

    Args:
        model: The model. It must have the modules that the method needs: build or convert it with the same method.
        method: A method, or its name with options, such as `"hanin:r=0.8"`.
        plan: The residual branches of the model. The default is the plan that the model remembers from its
            conversion or construction; for any other, pass the one from `discover`.
        example: A batch of inputs, for data-dependent methods such as `"lsuv"`.
        generator: The source of all draws, so that one seed gives the same weights on any device. The default is
            torch's global generator.

    Returns:
        The model.

    Raises:
        ValueError: If the method needs residual branches and the plan has none, if it needs a batch and gets none, if
            the model lacks the method's modules, or if a weight is computed from other parameters and cannot be set.
            The model is then unchanged.
    """
    method = get(method)
    check_arguments(model=model, plan=plan)
    if plan is None:
        plan = remembered_plan(model)
        if plan is None:
            raise ValueError(
                f"expected a model that provides a plan, got {type(model).__name__}; "
                "pass plan=normfree.discover(model, example)"
            )
    with restored_on_error(model):
        write_weights_(InitContext(model, plan, generator, example), method)
    return model


@torch.no_grad()
def write_weights_(ctx: InitContext, method: Method) -> None:
    """Reset normalizers, scalars and biases, set the scalars of the rule, then run the method's initializer.

    Raises:
        ValueError: As `initialize_`, but the model may be changed.
    """
    _check(ctx, method)
    for module in ctx.modules.values():
        if isinstance(module, NORM_TYPES):
            module.reset_parameters()
        elif isinstance(module, ScalarBias) and module.learnable:
            module.set_(0.0)
        elif isinstance(module, ScalarMultiplier) and module.learnable:
            module.set_(1.0)
    for branch in ctx.plan.branches:
        residual = ctx.modules.get(branch.name)
        if isinstance(residual, Residual):
            residual.set_scalars_(method.rule.at(branch.position))
    for scalar, value in _added_scalars(ctx.plan).items():
        ctx.model.get_parameter(scalar).fill_(value)
    ctx.zero_biases_()
    ctx.draw_embeddings_()
    method.initializer(ctx)


def _added_scalars(plan: ResidualPlan) -> dict[str, float]:
    """Return the initial values of the scalars that a conversion added, by parameter name."""
    added = () if plan.changes is None else plan.changes.added
    return {scalar.name: scalar.value for scalar in added if scalar.value is not None}


def _check_added_scalars(ctx: InitContext, method: Method) -> None:
    """Raise if a converted model has the scalars of another method, or if the plan does not list its scalars."""
    added = _added_scalars(ctx.plan)
    parameters = dict(ctx.model.named_parameters()) if added else {}
    by = "" if ctx.plan.changes is None else ctx.plan.changes.method
    if added and by != method.spec:
        raise ValueError(
            f"method '{method.spec}' expects its own scalars, got those of '{by}', by which the model was converted; "
            f"convert the original again, by '{method.spec}'"
        )
    for name, module in ctx.modules.items():
        missing = [scalar for scalar in scalars_of(module) if (f"{name}.{scalar}" if name else scalar) not in added]
        if missing:
            raise ValueError(
                f"expected the plan of the conversion, got one that does not list the scalar {missing[0]} of '{name}'; "
                "pass the plan that convert returned, or convert the original again"
            )
    for scalar in added:
        if scalar not in parameters:
            raise ValueError(f"expected a scalar '{scalar}', got a model without it; the plan belongs to another model")


def check_example(ctx: InitContext, method: Method) -> None:
    """Raise if a data-dependent method lacks a usable batch, or if the model has layers that it cannot measure."""
    if not method.needs_example:
        return
    if ctx.example is None:
        raise ValueError(
            f"method '{method.name}' sets its weights from data: expected a batch, got none; pass example="
        )
    given = (ctx.example,) if isinstance(ctx.example, Tensor) else ctx.example
    values = torch.cat([t.double().flatten() for t in given])
    if not (values.numel() and values.isfinite().all() and values.var(unbiased=False) > 0):
        shapes = " and ".join(str(tuple(t.shape)) for t in given)
        raise ValueError(
            f"method '{method.name}' sets its weights from data: expected a batch of finite values that vary, got "
            f"shape {shapes} without them; pass example=a batch of the training data"
        )
    for layer, module in ctx.each(ctx.plan.layers()):
        if not isinstance(module, WEIGHT_LAYERS):
            raise ValueError(
                f"method '{method.name}' measures the output of each layer: expected convolutions and linear layers, "
                f"got {type(module).__name__} at '{layer.name}'; use a method that needs no batch, such as 'fixup'"
            )


def _check(ctx: InitContext, method: Method) -> None:
    """Raise if the plan, the model's modules or the batch do not fit the method."""
    if "none" not in method.skips:
        ctx.plan.require_branches(method.name)
    check_example(ctx, method)
    for layer in ctx.plan.layers():
        ctx.module(layer)  # raises if the model does not have the layer
    named = {branch.name for branch in ctx.plan.branches}
    for name, module in ctx.modules.items():
        if isinstance(module, Residual) and module.branch is not None and name not in named:
            raise ValueError(
                f"expected a plan of every residual block, got one without '{name}'; the plan belongs to another model"
            )
    _check_added_scalars(ctx, method)
    remedy = f"build the model with method='{method.name}', or convert it"
    if ctx.plan.changes is not None:
        remedy = f"convert the original again, by '{method.spec}'"
    for layer, weighted in ctx.each(ctx.plan.hidden()):
        if weight_kind(weighted) != method.weight_kind:
            raise ValueError(
                f"method '{method.name}' expects {method.weight_kind} layers, got {type(weighted).__name__} at "
                f"'{layer.name}'; {remedy}"
            )
    if method.kind == "norm-free":
        for name, module in ctx.modules.items():
            if is_norm(module):
                raise ValueError(
                    f"method '{method.name}' expects a model without normalization, got {type(module).__name__} at "
                    f"'{name}'; {remedy}"
                )
    for branch in ctx.plan.branches if not _added_scalars(ctx.plan) else ():  # else the conversion added every scalar
        _check_scalars(ctx, method, branch.name, method.rule.at(branch.position), remedy)


def _check_scalars(ctx: InitContext, method: Method, name: str, values: dict[str, float], remedy: str) -> None:
    """Raise if a sum lacks a scalar whose initial value is not neutral."""
    residual = ctx.modules.get(name)
    for scalar, value in values.items():
        present = isinstance(residual, Residual) and not isinstance(getattr(residual, scalar), nn.Identity)
        if not present and value != NEUTRAL[scalar]:
            raise ValueError(
                f"method '{method.name}' expects a scalar {scalar} = {value:g} in the sum '{name}', got none; {remedy}"
            )
