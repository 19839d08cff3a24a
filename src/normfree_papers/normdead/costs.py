"""The claim of `normdead` on what batch norm costs: batch size, statistics at test time, dropout, time and memory.

Reference: Hoedt, Hochreiter, Klambauer 2022, section 2.3 (the downsides of batch norm) and section 5.1.
"""

from __future__ import annotations

import time
from math import pi, sqrt
from typing import Any

import torch
from torch import Tensor, nn

from normfree.models import build
from normfree.nn.normalizers import normalizer
from normfree_papers.claims.claim import Cost, Measurement, Settings, aside, claim, expect, near
from normfree_papers.claims.depth_curves import chart, exponent, means
from normfree_papers.normdead.float64_draws import apart, batch_norm, generator, normal, rounding, undisturbed

_BATCHES = (8, 16, 32, 64, 128, 256)
_DROPPED = 0.2
_KEPT_VARIANCE = (0.5 - 0.5 / pi) / (0.5 / (1 - _DROPPED) - 0.5 / pi)
_MODEL = "resnet20"
_NETWORKS = {"none": "he_in", "batch norm": "batchnorm", "NF": "nf"}
_RUNNING = 2 * (16 * 7 + 32 * 6 + 64 * 6)  # mean and variance of 3 stages of 3 blocks with 2 norms, and of the last


def companion_change(batch: int, seed: int) -> float:
    """Relative change of the outputs of batch norm for one input when all others of its batch are drawn again."""
    g = generator(seed)
    norm: Any = normalizer("batch", 1024, spatial=False).double().train()
    first = normal((1, 1024), g)
    outs = [norm(torch.cat([first, normal((batch - 1, 1024), g)]))[:1] for _ in range(2)]
    return apart(outs[1].detach(), outs[0].detach())


def network(method: str, seed: int) -> nn.Module:
    """The pre-activation ResNet-20 of all comparisons."""
    return build(_MODEL, method, form="pre", generator=generator(seed))


@torch.no_grad()
def modes_apart(method: str, seed: int) -> float:
    """Relative difference of the logits in training and in inference, after 50 batches of the same noise."""
    g = generator(seed)
    model = network(method, seed).double().train()
    for _ in range(50):
        model(normal((8, 3, 16, 16), g))
    x = normal((8, 3, 16, 16), g)
    training = model(x)
    return apart(model.eval()(x), training)


@torch.no_grad()
def deviation_at_contrast(seed: int, *, training: bool) -> float:
    """Standard deviation after batch norm of inputs at twice the contrast of those that its averages have seen."""
    g = generator(seed)
    norm: Any = normalizer("batch", 64, spatial=False).double().train()
    norm.momentum = 1.0
    norm(normal((4096, 64), g))
    norm.train(training)
    return float(norm(2 * normal((4096, 64), g)).std())


@torch.no_grad()
def variance_after_dropout(seed: int) -> float:
    """Variance in inference after ReLU, dropout and a batch norm whose averages come from training with dropout."""
    g = generator(seed)
    torch.default_generator.manual_seed(seed + 10_000)  # dropout takes no generator
    norm: Any = normalizer("batch", 16, spatial=False).double().train()
    norm.momentum = 1.0
    norm(nn.functional.dropout(normal((60_000, 16), g).relu(), _DROPPED))
    return float(norm.eval()(normal((60_000, 16), g).relu()).var())


def step_seconds(models: dict[str, nn.Module], x: Tensor, y: Tensor, repeats: int) -> dict[str, float]:
    """The shortest of some forward and backward passes of each model, one after another."""
    found = dict.fromkeys(models, float("inf"))
    for _ in range(repeats):
        for name, model in models.items():
            started = time.perf_counter()
            nn.functional.cross_entropy(model(x), y).backward()
            found[name] = min(found[name], time.perf_counter() - started)
    return found


def saved_bytes(model: nn.Module, x: Tensor) -> int:
    """Bytes of all tensors that a forward pass keeps for the backward pass, each storage once, without parameters."""
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(x).sum()
    del loss
    return sum(kept.values())


@claim(
    id="normdead/sec2_3_costs",
    where="Sections 2.3 (downsides of batch norm) and 5.1",
    statement="Batch norm is inaccurate for small batches, uses other statistics for inference, clashes with dropout, "
    "and costs time and memory.",
    paper_value="no numbers; each check quotes the paper",
    how="Outputs of batch norm under other companions, modes, contrasts and dropout in float64, and time and stored "
    "bytes of a training step of a pre-activation ResNet-20 with batch norm, without, and with NF.",
    cost=Cost(quick_seconds=15, full_seconds=50),
    precision="float64; time and bytes in float32",
    seeds=5,
    quick_seeds=3,
    departures=("time is that of a CPU",),
    checks=(
        expect("share of undefined outputs, batch of one", paper="zero standard deviation", low=1.0, high=1.0).derived(
            "equation 2 is 0/0 for a batch of one vector",
            why="the mean is the vector itself and the standard deviation 0",
            exact=True,
        ),
        expect("exponent of the change by companions", paper="not accurate enough", low=-0.55, high=-0.45).derived(
            "the change of an output by other companions falls as 1/√n with the batch size n",
            why="means and deviations of n draws vary by 1/√n; 0.05 for the terms in 1/n at a batch of 8",
        ),
        expect("change by companions over √(3/n), batch of 64", paper="not accurate enough", low=0.9, high=1.1).derived(
            "an output x̂ moves by √(3/n)",
            why="two means differ by √(2/n) and two deviations by √(1/n) of x; terms in 1/n are 2 %, and 1,024 "
            "channels leave 3 %",
        ),
        expect("logits in inference against training, batch norm", paper="different statistics", low=0.05).reading(
            "with batch norm a network computes something else in inference than in training",
            why="our reading of the word 'different': a twentieth of the logits at a batch of 8; less refutes it",
        ),
        rounding(
            "logits in inference against training, NF", "an NF-ResNet computes the same in both modes (the control)"
        ),
        expect("deviation at twice the contrast, inference", paper="especially problematic", low=1.9, high=2.1).derived(
            "where the data drift after training, batch norm no longer normalizes",
            why="the averages of training divide by 1, so that the deviation is 2; 4,096 draws leave 1 %",
        ),
        expect("deviation at twice the contrast, training", low=0.98, high=1.02).derived(
            "statistics of the batch do normalize (the control)",
            why="1 by definition, but for ε and the unbiased estimate",
        ),
        near(
            "variance in inference after dropout and batch norm",
            _KEPT_VARIANCE,
            share=0.02,
            paper="does not play well with dropout",
        ).derived(
            "after plain dropout of 20 % batch norm's averages are off: variance in inference, where 1 is wanted",
            why="Var[x]/(E[x²]/(1 - p) - E[x]²) = 0.73 for ReLU of N(0, 1); a million draws leave 0.3 %",
        ),
        expect("running averages of ResNet-20", paper="running averages", low=_RUNNING, high=_RUNNING).derived(
            "numbers that the running averages of a pre-activation ResNet-20 keep",
            why="two per channel of each norm: 2·(7·16 + 6·32 + 6·64)",
            exact=True,
        ),
        expect("bytes kept for the backward pass, batch norm over none", paper="memory increases", low=1.0).reading(
            "batch norm raises the memory of a training step",
            why="our reading of the word 'increase': more than without; 1 or less refutes it",
            exact=True,
        ),
        expect("time of a step, batch norm over none", paper="significant", low=1.1).reading(
            "batch norm makes a training step longer",
            why="our reading of the word 'significant': by a tenth or more; less refutes it",
        ),
        aside("time of a step, NF over none", paper="a certain computational overhead", low=1.0).reading(
            "centred weight norm makes a training step longer, too",
            why="our reading of the word 'certain': any; 1 or less refutes it",
        ),
    ),
)
@undisturbed
def sec2_3_costs(settings: Settings) -> Measurement:
    """What batch norm costs, item by item. Reference: normdead, section 2.3 and section 5.1."""
    batch, repeats = (16, 3) if settings.quick else (64, 8)

    def measured(seed: int) -> tuple[dict[str, float], dict[str, list[float]]]:
        g = generator(seed)
        changes = [companion_change(n, seed) for n in _BATCHES]
        x, y = torch.randn(batch, 3, 32, 32, generator=g), torch.randint(10, (batch,), generator=g)
        models = {name: network(method, seed).train() for name, method in _NETWORKS.items()}
        seconds = step_seconds(models, x, y, repeats)
        numbers = {
            "exponent of the change by companions": exponent(_BATCHES, changes),
            "change by companions over √(3/n), batch of 64": changes[_BATCHES.index(64)] / sqrt(3 / 64),
            "logits in inference against training, batch norm": modes_apart("batchnorm", seed),
            "logits in inference against training, NF": modes_apart("nf", seed),
            "deviation at twice the contrast, inference": deviation_at_contrast(seed, training=False),
            "deviation at twice the contrast, training": deviation_at_contrast(seed, training=True),
            "variance in inference after dropout and batch norm": variance_after_dropout(seed),
            "time of a step, batch norm over none": seconds["batch norm"] / seconds["none"],
            "time of a step, NF over none": seconds["NF"] / seconds["none"],
        }
        return numbers, {"measured": changes}

    numbers, curves = settings.over_seeds(measured)
    x = torch.zeros(8, 3, 32, 32)
    kept = {name: saved_bytes(network(method, 0).train(), x) for name, method in _NETWORKS.items()}
    undefined = batch_norm(normal((1, 64), generator(0))).isnan()
    values: dict[str, float | list[float]] = {
        **numbers,
        "share of undefined outputs, batch of one": float(undefined.double().mean()),
        "running averages of ResNet-20": float(_running_averages(network("batchnorm", 0))),
        "bytes kept for the backward pass, batch norm over none": kept["batch norm"] / kept["none"],
        "bytes kept for the backward pass, NF over none": kept["NF"] / kept["none"],
    }
    return Measurement(
        values=values,
        panels=(
            chart(
                "change of an output of batch norm by the other inputs of its batch",
                {"measured": means(curves["measured"]), "√(3/n)": (sqrt(3 / n) for n in _BATCHES)},
                "relative change",
                "batch size n",
                x=_BATCHES,
                log_x=True,
            ),
        ),
        notes=(
            "that weight decay does not regularize weights before batch norm follows from their scale invariance, "
            "which normdead/sec5_2 measures",
            f"time is the shortest of {repeats} steps of {batch} images on one machine's CPU",
        ),
    )


def _running_averages(model: nn.Module) -> int:
    ends = ("running_mean", "running_var")
    return sum(buffer.numel() for name, buffer in model.named_buffers() if name.endswith(ends))
