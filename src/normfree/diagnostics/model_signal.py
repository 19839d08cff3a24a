"""The signal of a model in one forward and one backward pass, as plain numbers."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field
from typing import Any

from normfree.diagnostics.autograd_graph import GraphFacts, Spot
from normfree.diagnostics.ends import InputFacts, OutputFacts
from normfree.diagnostics.layer_signals import LayerSignal
from normfree.diagnostics.sum_hooks import SumSignal
from normfree.plan import ResidualPlan


@dataclass(frozen=True)
class Gain:
    """One call of an innermost module.

    Attributes:
        name: The module.
        kind: Its class.
        factor: The second moment of its output over that of its input; over 1 for an embedding or a normalizer.
        bias: The second moment of its bias over that of its output without the bias; NaN without a bias.
        normalized: Whether a normalizer comes next, which undoes the scale.
    """

    name: str
    kind: str
    factor: float
    bias: float = math.nan
    normalized: bool = False


@dataclass(frozen=True, repr=False)
class Signal:
    """The signal of a model in one forward and one backward pass.

    Attributes:
        sums: The statistics at every residual sum, in the order of the plan; in a network without sums, at the output
            of every call of a hidden weight layer (`SumSignal.layer`).
        layers: The norms of weights and gradients of every weight layer, its dead units and equal filters.
        injected: The places where a random gradient was injected, '' if the gradient came from a loss. 'output' is
            the model's output, 'features' the input of a classifier whose weight is zero, and 'memory' the output of
            an encoder that all attentions of the decoder multiply by zero.
        loss: The loss, NaN if there was none.
        plan: The residual plan of the model.
        unmeasured: The first sum whose forward signal is not finite, or 'the output'; '' if all are finite. Gradients
            at such sums are NaN, and all gradients are if the output is not finite.
        output: The mean square of the model's output.
        missing_sums: The modules without a residual sum that return the shape they get, while most modules like them
            have a sum.
        constant_sums: Modules like these that add the same to every sample.
        inputs: The main input.
        head: The output, and the loss by chance.
        activations: The activation functions of a network without sums, the most frequent first.
        broken: The parameters and buffers that are not finite; empty if the signal is finite.
        origin: The innermost module that made non-finite numbers out of finite ones, or zeros out of others; '' if
            there is none.
        origin_kind: The class of that module.
        cut: The last layers outside of branches that change the output although they get no gradient.
        tiny_scales: The vectors of scales that are below the rounding of float32, but not zero.
        single_values: The normalizers whose groups are single values.
        half: Whether the network computes in float16.
        normalized: Whether there is a normalizer for at least every second weight layer.
        classifier_bias: The largest bias of the classifier above the mean of its biases.
        graph: The functions of the forward pass.
        unreachable: The fraction of the targets that the last function of the network cannot return.
        broadcast: Whether output and targets differ in shape, so that the loss compares every sample with every other.
        heavy_biases: The layers whose bias has a larger norm than their weight.
        shut_gates: The gates of recurrent layers that are shut by their biases, such as 'forget'.
        dropouts: The dropouts that drop so much that the noise is tenfold the signal.
        embeddings: The embeddings with a root mean square that is too large for an input.
        unused: The modules that take no part in the output, although modules like them do.
        gains: The gains of the innermost modules; empty unless the signal was looked at again.
        gradient_origin: The module with a derivative that is not finite, and its function in `gradient_function`.
    """

    sums: tuple[SumSignal, ...]
    layers: tuple[LayerSignal, ...]
    injected: str = ""
    loss: float = math.nan
    plan: ResidualPlan = field(default_factory=ResidualPlan)
    unmeasured: str = ""
    output: float = math.nan
    missing_sums: tuple[str, ...] = ()
    constant_sums: tuple[str, ...] = ()
    inputs: InputFacts = field(default_factory=InputFacts)
    head: OutputFacts = field(default_factory=OutputFacts)
    activations: tuple[str, ...] = ()
    broken: tuple[str, ...] = ()
    origin: str = ""
    origin_kind: str = ""
    cut: tuple[str, ...] = ()
    tiny_scales: tuple[str, ...] = ()
    single_values: tuple[str, ...] = ()
    half: bool = False
    normalized: bool = False
    classifier_bias: float = 0.0
    graph: GraphFacts = field(default_factory=GraphFacts)
    unreachable: float = 0.0
    broadcast: bool = False
    heavy_biases: tuple[str, ...] = ()
    shut_gates: tuple[Spot, ...] = ()
    dropouts: tuple[Spot, ...] = ()
    embeddings: tuple[Spot, ...] = ()
    unused: tuple[str, ...] = ()
    gains: tuple[Gain, ...] = ()
    gradient_origin: str = ""
    gradient_function: str = ""

    @property
    def plain(self) -> bool:
        """Whether the network has no residual sums, and was measured at its weight layers."""
        return bool(self.sums) and self.sums[0].layer

    def series(self, part: str, statistic: str = "variance") -> list[float]:
        """List one statistic over all sums.

        Args:
            part: 'sum', 'branch' or 'shortcut', or one of them followed by '_gradient'.
            statistic: 'variance', 'mean_square' or 'norm'.

        Returns:
            One number for each residual sum, in the order of the plan.
        """
        return [getattr(getattr(s, part), statistic) for s in self.sums]

    def to_json(self) -> dict[str, Any]:
        """Return the signal as plain data; numbers may be NaN or infinite."""
        layers = [{**asdict(layer), "ratio": layer.ratio} for layer in self.layers]
        return {
            "injected": self.injected,
            "loss": self.loss,
            "unmeasured": self.unmeasured,
            "output": self.output,
            "unsummed": list(self.missing_sums),  # key kept for compatibility with 0.1
            "inputs": asdict(self.inputs),
            "head": asdict(self.head),
            "sums": [asdict(s) for s in self.sums],
            "layers": layers,
        }

    def __repr__(self) -> str:
        loss = "" if math.isnan(self.loss) else f", loss {self.loss:.4g}"
        sums = "no residual sums" if self.plain else f"{len(self.sums)} residual sums"
        return f"Signal({sums}, {len(self.layers)} weight layers{loss})"
