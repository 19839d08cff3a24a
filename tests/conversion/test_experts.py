"""Experts that get no samples of the example are converted as those beside them."""

import copy
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import normfree as nf
from normfree.conversion import load_converted, save_converted
from unusual_models import Stack
from unusual_models_second import CalledExperts, DenseExperts, Experts, few

METHODS = ("fixup", "skipinit", "rezero", "nf", "wn")


def network(block: type[nn.Module] = Experts) -> Stack:
    torch.manual_seed(0)
    return Stack(block)


def uncalled(model: nn.Module, x: Tensor) -> set[str]:
    """The experts that a forward pass does not call."""
    experts = {name: m for name, m in model.named_modules() if name.rpartition(".")[0].endswith("experts")}
    twin, called = copy.deepcopy(model), set()
    for name in experts:
        twin.get_submodule(name).register_forward_hook(lambda *_, name=name: called.add(name))
    twin(x)
    return set(experts) - called


@pytest.mark.parametrize("method", METHODS)
def test_uncalled_expert_is_treated_as_one_that_is_called(method: str) -> None:
    model, x = network(), few()
    idle = sorted(uncalled(model, x))
    assert idle
    converted, plan = nf.convert(model, method, x)
    layers = {layer.path for layer in plan.layers()}
    added = {record.name for record in plan.changes.added}
    for expert in idle:
        beside = next(f"{expert[:-1]}{i}" for i in range(8) if f"{expert[:-1]}{i}" not in idle)
        assert {f"{expert}.1.weight", f"{expert}.3.weight"} <= layers
        one, other = converted.get_submodule(expert), converted.get_submodule(beside)
        assert [type(m) for m in one.modules()] == [type(m) for m in other.modules()]
        for (name, a), (_, b) in zip(one.named_parameters(), other.named_parameters(), strict=True):
            if "delta" not in name:
                torch.testing.assert_close(a.std(unbiased=False), b.std(unbiased=False), rtol=0.35, atol=1e-6)
        own = {name.removeprefix(expert) for name in added if name.startswith(f"{expert}.")}
        assert own == {name.removeprefix(beside) for name in added if name.startswith(f"{beside}.")} - {".3.delta"}
    noted = [note for note in plan.changes.notes if "does not reach" in note and "as the experts beside them" in note]
    assert f"'{idle[0]}'" in noted[0]
    assert not any("left as they were" in note for note in plan.changes.notes)


def test_expert_that_nothing_is_like_stays_and_is_noted() -> None:
    """Its sizes differ from those of the others, so nothing tells how to convert it."""
    model, x = network(), few()
    idle = min(uncalled(model, x))
    experts, _, number = idle.rpartition(".")
    model.get_submodule(experts)[int(number)] = nn.Sequential(nn.Linear(16, 7), nn.GELU(), nn.Linear(7, 16))
    _, plan = nf.convert(model, "fixup", x)
    assert any("left as they were" in note and f"{idle}.0.weight" in note for note in plan.changes.notes)


@pytest.mark.parametrize("block", [CalledExperts, DenseExperts])
@pytest.mark.parametrize("method", METHODS)
def test_expert_that_gets_no_samples_any_more_is_no_obstacle(block: type[nn.Module], method: str) -> None:
    """It is called with an empty batch, or its output is masked: its gradient is 0, and that of another one is not."""
    _, plan = nf.convert(network(block), method, few())
    assert len(plan.branches) == 3


def test_a_dead_layer_beside_living_ones_is_refused_where_nothing_is_chosen() -> None:
    """The same list of modules without a choice by values: without the normalizer, the signal switches a path off."""

    class Paths(Experts):
        def forward(self, x: Tensor) -> Tensor:
            y = self.norm(x)
            return self.experts[0](y) + self.experts[1](y) * torch.relu(y.square().mean() - 0.5)

    x = 1e-3 * few()
    with pytest.raises(ValueError, match=r"experts.1.* would never learn: it had a gradient in the original"):
        nf.convert(network(Paths), "skipinit", x)


def test_converted_experts_are_saved_and_loaded(tmp_path: Path) -> None:
    converted, _ = nf.convert(network(), "fixup", few())
    save_converted(tmp_path / "saved", converted)
    loaded, _ = load_converted(tmp_path / "saved", network)
    assert all(torch.equal(value, loaded.state_dict()[name]) for name, value in converted.state_dict().items())


@pytest.mark.parametrize("method", ["fixup", "skipinit", "dyt"])
def test_mixtral_with_few_tokens_is_converted_and_every_part_learns(method: str) -> None:
    import transformers

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.MixtralConfig(vocab_size=50, num_key_value_heads=2, num_local_experts=8, **sizes)
    model, ids = transformers.MixtralForCausalLM(config), torch.tensor([[3, 7]])
    converted, plan = nf.convert(model, method, {"input_ids": ids})
    assert len(plan.branches) == 4
    assert not any("divided by its own scale" in note for note in plan.changes.notes)  # the router's shares are no norm
    before = {name: p.detach().clone() for name, p in converted.named_parameters()}
    optimizer = torch.optim.AdamW(nf.param_groups(converted, lr=1e-3), lr=1e-3, weight_decay=0.0)
    for _ in range(20):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(converted(input_ids=ids).logits[0], torch.tensor([7, 3])).backward()
        optimizer.step()
    assert [name for name, p in converted.named_parameters() if torch.equal(p, before[name])] == []
