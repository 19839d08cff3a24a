"""Folded scalars: the same function and the same gradients, in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from normfree.models import build
from normfree.nn.scalars import ScalarBias, ScalarMultiplier
from normfree.nn.training_scalar_folding import ParameterSlot, ScalarFolding, foldable_deltas, foldable_layers


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def scattered(model: nn.Module) -> nn.Module:
    """Random weights, and scalars far from neutral, so that none may be left out."""
    draws = seeded(7)
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(torch.randn(p.shape, generator=draws) * (p.shape[1] ** -0.5 if p.dim() > 1 else 0.3))
        for module in model.modules():
            if isinstance(module, ScalarMultiplier) and module.learnable:
                module.set_(float(1 + 0.3 * torch.randn((), generator=draws)))
    return model


def sentences() -> tuple[Tensor, Tensor]:
    return torch.randint(4, 40, (6, 9), generator=seeded(1)), torch.randint(4, 40, (6, 7), generator=seeded(2))


def folded_exactly(network: nn.Module) -> int:
    """Fold the scalars of a float64 network, compare outputs and gradients, and return the number of δ that moved.

    In float64 only a wrong formula makes a difference; all parameters that learn count as of a short type.
    """
    plain = copy.deepcopy(network)
    expected = plain(*sentences())
    slope = torch.randn(expected.shape, generator=seeded(3), dtype=torch.float64)
    expected.backward(slope)
    foldable = {id(found.layer.weight): found for found in foldable_layers(network)}
    learning = [p for p in network.parameters() if p.requires_grad]
    parameters = sorted(learning, key=lambda p: foldable[id(p)].kind if id(p) in foldable else ())
    slots, end = [], 0
    for p in parameters:
        size = -(-p.numel() // 64) * 64
        slots.append(ParameterSlot(p, end, end, size))
        end += size
    values = torch.zeros(end, dtype=torch.float64)
    views = {p: slice(start, start + p.numel()) for p, start, *_ in slots}
    for p, stretch in views.items():
        values[stretch] = p.detach().flatten()
    computing = values.clone()
    for p, stretch in views.items():
        p.data = computing[stretch].view(p.shape)
    folding = ScalarFolding(network, foldable, network.streams(), slots, values)
    folding.enable_()
    without = network(*sentences())
    folding.fold_weights_(values, computing)
    out = network(*sentences())
    torch.testing.assert_close(out, expected, rtol=1e-11, atol=1e-11)
    assert (without - expected).norm() > 0.01 * expected.norm()  # the scalars do matter
    out.backward(slope)
    gradient = torch.zeros(end, dtype=torch.float64)
    for p, stretch in views.items():
        if p.grad is not None:
            gradient[stretch] = p.grad.flatten()
    folding.unfold_gradients_(values, gradient)
    for (name, wanted), p in zip(plain.named_parameters(), network.named_parameters(), strict=True):
        if wanted.requires_grad:
            got = gradient[views[p[1]]].view(p[1].shape)
            assert (got - wanted.grad).norm() <= 1e-10 * max(wanted.grad.norm(), 1.0), name
    return len(folding.deltas)


BIASED = "fixup:transformer=biased"


@pytest.mark.parametrize(
    ("method", "deltas"),
    [("fixup", 0), (BIASED, 10), ("fixup_bounded:transformer=biased", 10), ("rezero", 0), ("skipinit", 0)],
)
def test_folded_layers_compute_the_same_function_and_gradients(method: str, deltas: int) -> None:
    network = scattered(build("transformer-2-2-32-64-2", method, num_classes=40, dropout=0.0)).double()
    assert folded_exactly(network) == deltas


def one_entry(m: nn.Module) -> None:
    m.encoder[1].attention.entry = m.encoder[0].attention.entry


def one_layer(m: nn.Module) -> None:
    m.encoder[1] = m.encoder[0]


def one_delta(m: nn.Module) -> None:
    m.encoder[1].attention.delta = m.encoder[0].attention.delta


def one_delta_value(m: nn.Module) -> None:
    m.encoder[1].attention.delta.value = m.encoder[0].attention.delta.value


def one_memory_bias(m: nn.Module) -> None:
    m.decoder[1].cross.branch.memory_bias.value = m.decoder[0].cross.branch.memory_bias.value


def end_is_a_delta(m: nn.Module) -> None:
    m.head.bias.value = m.decoder[0].attention.delta.value


def one_beta(m: nn.Module) -> None:
    m.encoder[1].attention.beta = m.encoder[0].attention.beta


def one_value_layer(m: nn.Module) -> None:
    m.encoder[1].attention.branch.v = m.encoder[0].attention.branch.v


def still_head(m: nn.Module) -> None:
    m.head.requires_grad_(False)


def still_decoder(m: nn.Module) -> None:
    m.decoder[0].requires_grad_(False)


def fixed_end(m: nn.Module) -> None:
    m.head.bias = ScalarBias(0.2, learnable=False).double()


def still_deltas(m: nn.Module) -> None:
    m.encoder[0].attention.delta.requires_grad_(False)


CHANGES = (one_entry, one_layer, one_delta, one_delta_value, one_memory_bias, end_is_a_delta, one_beta, one_value_layer)


CHANGES += (still_head, still_decoder, fixed_end, still_deltas)


@pytest.mark.parametrize("change", CHANGES)
def test_shared_or_frozen_parameters_are_not_folded(change: Callable[[nn.Module], None]) -> None:
    network = scattered(build("transformer-2-2-32-64-2", BIASED, num_classes=40, dropout=0.0)).double()
    change(network)
    assert folded_exactly(network) in ((4, 6, 10) if change in (one_beta, one_value_layer) else (0, 4, 6))


def test_stream_with_another_reader_keeps_its_biases() -> None:
    """A δ cannot move past a norm, nor to a sum that is read without a bias."""
    model = build("transformer-2-1-32-64-2", BIASED, num_classes=40)
    taken = {found.bias for found in foldable_layers(model) if found.bias is not None}
    encoder, decoder = ([block.delta for block in stream.blocks] for stream in model.streams())
    carried = foldable_deltas(model, model.streams(), taken)
    assert carried[model.encoder[1].attention.entry.bias] == encoder[:2]
    assert carried[model.decoder[0].cross.branch.memory_bias] == encoder
    assert carried[model.head.bias] == decoder
    model.decoder[0].feedforward.exit = nn.LayerNorm(32)
    left = foldable_deltas(model, model.streams(), taken)
    assert not {*decoder} & {delta for deltas in left.values() for delta in deltas}
    del model.head.bias
    assert foldable_deltas(model, model.streams(), taken - {model.encoder[1].attention.entry.bias}) == {}


def test_bias_of_a_shared_layer_is_not_folded() -> None:
    model = build("transformer-1-1-32-64-2", BIASED, num_classes=40)
    entry = model.encoder[0].attention.entry
    assert any(found.bias is entry.bias for found in foldable_layers(model))
    model.encoder[0].attention.branch.q.weight = model.encoder[0].attention.branch.k.weight  # q can no longer
    left = foldable_layers(model)
    assert not any(found.bias is entry.bias for found in left)  # so v must not
    assert any(found.bias is model.encoder[0].attention.branch.bias for found in left)
