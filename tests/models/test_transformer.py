"""Transformers: parameter counts, plan, masks, decoding with a cache, shared weights, and errors."""

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_model
from torch import Tensor, nn

from normfree.conversion import convert
from normfree.conversion.folding.inference_folding import fold_
from normfree.graph import discover, unaccounted
from normfree.methods import get, initialize_, names
from normfree.models import BaseModel, Decoder, Encoder, Network, Transformer, build
from normfree.models.builder import find_family
from normfree.models.weight_files import load_weights
from normfree.nn.attention import PAD, Attention, real_positions
from normfree.nn.residual import Residual, lower_precision_, set_precision_

WORDS, CLASSES = 30, 5
NAMES = ("transformer-2-3-16-32-4", "encoder-3-16-32-4", "decoder-3-16-32-4")
SMALL = ("transformer-1-1-8-16-2", "encoder-2-8-16-2", "decoder-2-8-16-2")
METHODS = [name for name in names() if "sequence" in get(name).skips]


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def sentences(seed: int, length: int, real: tuple[int, ...]) -> Tensor:
    """A row of words for each number of real ones, filled up with padding."""
    tokens = torch.randint(4, WORDS, (len(real), length), generator=seeded(seed))
    for row, count in zip(tokens, real, strict=True):
        row[count:] = PAD
    return tokens


def batch(name: str) -> tuple[Tensor, ...]:
    source, target = sentences(1, 7, (7, 4, 1)), sentences(2, 6, (3, 6, 5))
    return (source, target) if find_family(name)[0].inputs == 2 else (source,)


def built(name: str, method: str = "layernorm", seed: int = 0, **options: Any) -> Any:
    sizes = (
        {"num_classes": WORDS}
        if find_family(name)[0].predicts_tokens
        else {"num_classes": CLASSES, "vocabulary": WORDS}
    )
    given = batch(name)
    settings = {"dropout": 0.0, "example": given if len(given) > 1 else given[0], "dtype": torch.float64}
    return build(name, method, generator=seeded(seed), **{**sizes, **settings, **options})


def shaken(model: nn.Module, seed: int = 9) -> nn.Module:
    """The model with every number moved, so that nothing is zero or one any more."""
    generator = seeded(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64).to(parameter))
    return model


# Counts and plan.


@pytest.mark.parametrize("method", ["fixup", "layernorm", "deepnorm"])
@pytest.mark.parametrize(
    ("name", "kind", "encoder", "decoder"),
    [(NAMES[0], Transformer, 2, 3), (NAMES[1], Encoder, 3, 0), (NAMES[2], Decoder, 0, 3)],
)
def test_plan_counts_branches_and_layers(name: str, kind: type, encoder: int, decoder: int, method: str) -> None:
    model = built(name, method, device="meta", example=None)
    assert isinstance(model, kind)
    assert isinstance(model, BaseModel)
    plan = model.plan
    cross = decoder if encoder else 0
    assert len(plan.branches) == 2 * encoder + 2 * decoder + cross
    assert {b.position.total for b in plan.branches} == {len(plan.branches)}
    degrees = [4, 2] * encoder + ([4, 4, 2] if cross else [4, 2]) * decoder
    assert [b.degree for b in plan.branches] == degrees
    for branch in plan.branches:
        inner = [layer.name.rpartition(".")[2] for layer in branch.layers]
        entries = [layer.name.rpartition(".")[2] for layer in branch.first_layers]
        assert inner == (["q", "k", "v", "out"] if branch.degree == 4 else ["linear1", "linear2"])
        assert entries == {4: ["q"] if "cross" in branch.name else ["q", "k", "v"], 2: ["linear1"]}[branch.degree]
        assert [layer.name for layer in branch.last_layers] == [branch.layers[-1].name]
        assert branch.shortcut == "identity"
    assert [layer.tied for layer in plan.classifier] == [name != NAMES[1]]
    assert plan.other_parameters == (("embedding.weight",) if name == NAMES[1] else ())
    assert not plan.stem
    assert not plan.body
    assert not unaccounted(model, plan)


def test_parameters_of_the_iwslt_size_are_counted_by_hand() -> None:
    """6 + 6 layers, 512 wide, 1024 inner, 10,000 words in one matrix, layer norm before each branch."""
    model = build("transformer-6-6-512-1024-4", "layernorm", num_classes=10_000, device="meta")
    attention = 4 * 512**2 + 3 * 512
    feedforward = 2 * 512 * 1024 + 512 + 1024
    norms = (6 * 2 + 6 * 3 + 2) * 2 * 512
    assert sum(p.numel() for p in model.parameters()) == 18 * attention + 12 * feedforward + norms + 10_000 * 512
    bare = build("transformer-6-6-512-1024-4", "tfixup", num_classes=10_000, device="meta")
    assert sum(p.numel() for p in bare.parameters()) == 18 * attention + 12 * feedforward + 10_000 * 512


@pytest.mark.parametrize("name", NAMES)
def test_forms_put_the_norms_before_or_behind(name: str) -> None:
    for form in ("pre", "post"):
        model = built(name, "layernorm", form=form, device="meta", example=None)
        for block in (m for m in model.modules() if isinstance(m, Residual)):
            held = {
                part: any(isinstance(m, nn.LayerNorm) for m in getattr(block, part).modules())
                for part in ("entry", "exit")
            }
            assert held == {"entry": form == "pre", "exit": form == "post"}
        assert any(isinstance(m, nn.LayerNorm) for m in model.head) == (form == "pre")


# Every method.


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("method", METHODS)
def test_every_method_runs_and_learns(method: str, name: str) -> None:
    for form in (form for form in get(method).forms if form != "linear"):
        model = built(name, method, form=form, dtype=torch.float32)
        silent = {key for key, _ in model.named_parameters()}
        for _ in range(4):  # an encoder behind attentions that start at zero learns a step later than the others
            model.zero_grad()
            out = model(*batch(name))
            loss = nn.functional.cross_entropy(out.flatten(0, -2), torch.arange(out[..., 0].numel()) % CLASSES)
            loss.backward()
            gradients = {key: p.grad for key, p in model.named_parameters()}
            assert all(g.isfinite().all() for g in gradients.values())
            silent = {key for key in silent if not gradients[key].any()}
            with torch.no_grad():
                length = torch.stack([g.norm() for g in gradients.values()]).norm()
                for key, parameter in model.named_parameters():
                    parameter.sub_(gradients[key] * (0.05 / length))
        assert not silent
        assert out.shape == ((3, CLASSES) if name == SMALL[1] else (3, batch(name)[-1].shape[1], WORDS))


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("method", METHODS)
def test_initialization_writes_every_number_by_its_seed_alone(method: str, name: str) -> None:
    model = built(name, method, device="meta").to_empty(device="cpu")
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data.fill_(torch.nan)
    example = batch(name) if len(batch(name)) > 1 else batch(name)[0]
    before = torch.get_rng_state()
    initialize_(model, method, example=example, generator=seeded(0))
    assert torch.equal(torch.get_rng_state(), before)
    again = built(name, method).state_dict()
    assert all(torch.equal(tensor, again[key]) for key, tensor in model.state_dict().items())
    if name != SMALL[1]:
        assert model.classifier.weight is model.embedding.weight


# Who sees what, by brute force.


def moved(first: Tensor, second: Tensor) -> Tensor:
    """Which positions differ."""
    return (first - second).abs().amax(-1) > 1e-12


@pytest.mark.parametrize("form", ["pre", "post"])
@pytest.mark.parametrize("name", [NAMES[0], NAMES[2]])
@torch.no_grad()
def test_a_target_word_changes_itself_and_what_comes_after(name: str, form: str) -> None:
    model = shaken(built(name, form=form))
    *source, _ = batch(NAMES[0]) if name == NAMES[0] else (None,)
    target = sentences(2, 6, (6, 6, 6))
    before = model(*source, target)
    for t in range(6):
        other = target.clone()
        other[:, t] = 4 + (other[:, t] - 3) % (WORDS - 4)
        changed = moved(model(*source, other), before)
        assert changed.all(0).tolist() == changed.any(0).tolist() == [s >= t for s in range(6)]


@pytest.mark.parametrize("name", NAMES[:2])
@torch.no_grad()
def test_padding_of_the_source_changes_nothing(name: str) -> None:
    model = shaken(built(name))
    source, *target = batch(name)
    before = model(source, *target)
    # The row of the padding in the matrix, which also is an output where it is shared: compare the other outputs.
    outputs = slice(1, None) if target else slice(None)
    model.embedding.weight[PAD] += 5.0
    torch.testing.assert_close(model(source, *target)[..., outputs], before[..., outputs], rtol=1e-10, atol=1e-10)
    longer = nn.functional.pad(source, (0, 3), value=PAD)
    torch.testing.assert_close(model(longer, *target)[..., outputs], before[..., outputs], rtol=1e-10, atol=1e-10)
    for row, count in enumerate((7, 4, 1)):
        alone = model(source[row : row + 1, :count], *(t[row : row + 1] for t in target))
        torch.testing.assert_close(alone[..., outputs], before[row : row + 1, ..., outputs], rtol=1e-10, atol=1e-10)
    for t in range(7):  # the control: every real word counts
        other = source.clone()
        other[:, t] = torch.where(other[:, t] == PAD, PAD, 4 + (other[:, t] - 3) % (WORDS - 4))
        changed = moved(model(other, *target)[..., outputs], before[..., outputs])
        assert (changed if name == NAMES[1] else changed.all(1)).tolist() == [count > t for count in (7, 4, 1)]


@torch.no_grad()
def test_padding_behind_a_target_changes_nothing_before_it() -> None:
    for name in (NAMES[0], NAMES[2]):
        model = shaken(built(name))
        source = batch(NAMES[0])[:1] if name == NAMES[0] else ()
        target = sentences(2, 6, (6, 6, 6))
        short = model(*source, target[:, :4])
        torch.testing.assert_close(model(*source, target)[:, :4], short)


@torch.no_grad()
def test_sequence_of_padding_alone_is_defined() -> None:
    empty = torch.full((2, 3), PAD)
    assert real_positions(empty).all()
    assert real_positions(sentences(1, 4, (2, 4))).tolist() == [[True, True, False, False], [True] * 4]
    assert built(NAMES[0])(empty, sentences(2, 5, (5, 5))).isfinite().all()
    assert built(NAMES[1])(empty).isfinite().all()


# Decoding with a cache.


@pytest.mark.parametrize("method", ["layernorm", "fixup", "deepnorm"])
@pytest.mark.parametrize("steps", [[1] * 6, [3, 1, 2], [6]])
@torch.no_grad()
def test_cached_decoding_equals_uncached(method: str, steps: list[int]) -> None:
    model = shaken(built(NAMES[0], method))
    source, target = batch(NAMES[0])
    memory = model.encode(source)
    cache = model.start_cache(memory, 8)
    parts = [model.decode(part, memory, cache) for part in target.split(steps, 1)]
    torch.testing.assert_close(torch.cat(parts, 1), model(source, target))
    torch.testing.assert_close(model.decode(target, memory), model(source, target))
    assert cache.used == 6
    alone = shaken(built(NAMES[2], method))
    cache = alone.start_cache(3, 6)
    torch.testing.assert_close(torch.cat([alone(p, cache) for p in target.split(steps, 1)], 1), alone(target))


@pytest.mark.parametrize("index", [[2, 0, 1], [0, 0, 2], [1, 1, 0, 2, 2]])
@torch.no_grad()
def test_reordered_cache_continues_the_chosen_rows(index: list[int]) -> None:
    model = shaken(built(NAMES[0]))
    source, target = batch(NAMES[0])
    memory = model.encode(source)
    cache = model.start_cache(memory, 6)
    model.decode(target[:, :4], memory, cache)
    assert cache.reorder(torch.tensor(index)) is cache
    torch.testing.assert_close(
        model.decode(target[index][:, 4:], memory, cache), model(source[index], target[index])[:, 4:]
    )


@torch.no_grad()
def test_reordering_may_leave_the_memory_where_rows_stay_with_their_source() -> None:
    model = shaken(built(NAMES[0]))
    source, target = batch(NAMES[0])
    source = source[[0, 0, 0]]
    memory = model.encode(source)
    cache = model.start_cache(memory, 6)
    model.decode(target[:, :4], memory, cache)
    kept = cache.memory[0].keys
    cache.reorder(torch.tensor([2, 2, 0]), memory=False)
    assert cache.memory[0].keys is kept
    order = [2, 2, 0]
    torch.testing.assert_close(model.decode(target[order][:, 4:], memory, cache), model(source, target[order])[:, 4:])


@torch.no_grad()
def test_cache_that_is_full_is_refused() -> None:
    model = built(NAMES[2])
    cache = model.start_cache(3, 4)
    with pytest.raises(ValueError, match="expected at most 4 more positions of 3 sequences in the cache, got 6"):
        model(batch(NAMES[0])[1], cache)


# Shared weights, copies, files, types.


@pytest.mark.parametrize("name", NAMES)
def test_copies_states_and_types_keep_the_model(name: str, tmp_path: Path) -> None:
    model = shaken(built(name, "fixup", dtype=torch.float32))
    inputs = batch(name)
    wanted = model(*inputs)
    other = built(name, "fixup", dtype=torch.float32, seed=1)
    assert not torch.equal(other(*inputs), wanted)
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(*inputs), wanted)
    twin = copy.deepcopy(model)
    assert torch.equal(twin(*inputs), wanted)
    save_model(model, str(tmp_path / "model.safetensors"))
    fresh = built(name, "fixup", dtype=torch.float32, seed=1)
    load_weights(tmp_path / "model.safetensors", fresh)
    assert torch.equal(fresh(*inputs), wanted)
    shared = name != NAMES[1]
    assert all(
        (m.classifier.weight is m.embedding.weight) == shared for m in (model, other, twin, fresh, twin.double())
    )
    torch.testing.assert_close(twin(*inputs), wanted.double(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("method", ["fixup", "layernorm", "rmsnorm", "dyt"])
@pytest.mark.parametrize("name", NAMES)
def test_short_types_reach_every_layer(name: str, method: str) -> None:
    wanted = built(name, method, dtype=torch.float32)(*batch(name))
    lowered = lower_precision_(built(name, method, dtype=torch.float32), torch.bfloat16)
    mixed = set_precision_(built(name, method, dtype=torch.float32))
    for model, dtype in ((lowered, torch.bfloat16), (mixed, torch.float32)):
        out = model(*batch(name))
        assert out.dtype is dtype
        out.float().square().sum().backward()
        assert (out.float() - wanted).abs().max() < 0.1


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_compiled_model_equals_the_plain_one(name: str) -> None:
    model = shaken(built(name, "fixup", dtype=torch.float32))
    torch.testing.assert_close(torch.compile(model)(*batch(name)), model(*batch(name)), rtol=1e-4, atol=1e-4)


def test_two_vocabularies_have_two_matrices() -> None:
    model = build(NAMES[0], "fixup", num_classes=WORDS, vocabulary=50, generator=seeded(0))
    assert model.source_embedding.weight.shape == (50, 16)
    assert model.classifier.weight is model.embedding.weight
    assert model.plan.other_parameters == ("source_embedding.weight",)
    assert discover(model, *batch(NAMES[0])) == model.plan
    assert model(torch.full((2, 3), 49), batch(NAMES[0])[1][:2]).shape == (2, 6, WORDS)


def test_dropout_is_where_the_setting_puts_it() -> None:
    for dropout, count in ((0.0, 0), (0.1, 1 + 2 * 3 + 3 * 4)):
        model = built(NAMES[0], dropout=dropout, device="meta", example=None)
        assert sum(isinstance(m, nn.Dropout) for m in model.modules()) == count
    model = built(NAMES[0], dropout=None)
    assert {m.p for m in model.modules() if isinstance(m, nn.Dropout)} == {0.1}
    assert not torch.equal(model(*batch(NAMES[0])), model(*batch(NAMES[0])))
    model.eval()
    assert torch.equal(model(*batch(NAMES[0])), model(*batch(NAMES[0])))


# Conversion.


@pytest.mark.parametrize("form", ["pre", "post"])
@pytest.mark.parametrize("name", NAMES)
def test_layer_norm_converted_to_fixup_is_built_like_fixup(name: str, form: str) -> None:
    model = built(name, "layernorm", form=form, dtype=torch.float32)
    converted, plan = convert(model, "fixup", batch(name), generator=seeded(0))
    wanted = built(name, "fixup", dtype=torch.float32)
    assert replace(plan, changes=None) == wanted.plan == converted.plan
    assert not any(isinstance(m, nn.LayerNorm) for m in converted.modules())
    for kind in ("q", "k", "v", "linear1"):
        named = [n for n, _ in wanted.named_modules() if n.rpartition(".")[2] == kind]
        ours, theirs = (
            torch.cat([m.get_submodule(n).weight.flatten() for n in named]).std() for m in (wanted, converted)
        )
        assert (theirs / ours).item() == pytest.approx(1.0, abs=5 * (256 * len(named)) ** -0.5)
    assert not any(converted.get_submodule(layer.name).weight.any() for b in plan.branches for layer in b.last_layers)
    torch.testing.assert_close(converted(*batch(name)), _without_branches(converted)(*batch(name)))


def _without_branches(model: nn.Module) -> nn.Module:
    bare = copy.deepcopy(model)
    for module in bare.modules():
        if isinstance(module, Residual):
            module.branch = None
    return bare


@pytest.mark.parametrize("name", NAMES)
def test_scalars_of_fixup_fold_into_the_weights(name: str) -> None:
    model = shaken(built(name, "fixup")).eval()
    wanted = model(*batch(name))
    record = fold_(model, batch(name))
    assert not record.kept
    torch.testing.assert_close(model(*batch(name)), wanted)


# Refusals.


def refuse(match: str, name: str, method: str = "layernorm", **options: Any) -> None:
    with pytest.raises(ValueError, match=match) as caught:
        build(name, method, **options)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("method", [m for m in names() if "sequence" not in get(m).skips])
def test_method_for_images_is_refused_by_name(method: str) -> None:
    refuse(
        rf"method '{method}' does not admit model 'encoder-1-8-8-2', whose skip connections are 'sequence'",
        "encoder-1-8-8-2",
        method,
    )


@pytest.mark.parametrize("method", ["tfixup", "deepnorm", "admin", "rmsnorm", "fixup_bounded"])
def test_method_for_sequences_is_refused_on_images(method: str) -> None:
    refuse(rf"method '{method}' does not admit model 'resnet8'.*expected one of: .*fixup", "resnet8", method)


def test_impossible_settings_are_refused() -> None:
    refuse(r"expects a width that its heads divide, got 10 and 4 heads", "encoder-1-10-8-4")
    refuse(r"expects positive numbers in its name, got a 0", "decoder-0-8-8-2")
    refuse(r"has the forms 'pre' and 'post', got 'linear'", "decoder-1-8-8-2", form="linear")
    refuse(
        r"method 'deepnorm' does not admit the block form 'pre'; expected post",
        "decoder-1-8-8-2",
        "deepnorm",
        form="pre",
    )
    refuse(r"expected a dropout in \[0, 1\), got 1", "decoder-1-8-8-2", dropout=1.0)
    refuse(r"expects a vocabulary of more than its 4 special tokens, got 4", "decoder-1-8-8-2", num_classes=4)
    refuse(r"expects a vocabulary of more than its 4 special tokens, got 3", "encoder-1-8-8-2", vocabulary=3)
    refuse(
        r"predicts the tokens that it reads: expected one vocabulary, got 9 and num_classes 8",
        "decoder-1-8-8-2",
        num_classes=8,
        vocabulary=9,
    )
    refuse(r"reads no tokens, so it has no vocabulary or dropout", "resnet8", dropout=0.1)
    refuse(r"reads no tokens", "mlp-3-8", vocabulary=10)
    refuse(
        r"expects a method with plain weight layers and branches, got 'fixup:.*branches=false",
        "encoder-1-8-8-2",
        "fixup:branches=false",
    )
    refuse(
        r"expects an example of 2 int64 tensors \(N, T\), got torch.int64 \(2, 3\)",
        "transformer-1-1-8-8-2",
        example=torch.ones(2, 3, dtype=torch.int64),
    )
    refuse(
        r"expects an example of 1 int64 tensor \(N, T\), got torch.float32 \(2, 3\)",
        "decoder-1-8-8-2",
        example=torch.ones(2, 3),
    )
    refuse(
        r"expects tokens from 0 to 7, got 1 to 8; give it a larger vocabulary",
        "decoder-1-8-8-2",
        num_classes=8,
        example=torch.tensor([[1, 8]]),
    )
    refuse(
        r"expected an example of one tensor, got 2; only Transformers read two",
        "resnet8",
        example=(torch.ones(1), torch.ones(1)),
    )
    refuse(r"method 'admin' sets its weights from data: expected a batch, got none", "decoder-1-8-8-2", "admin")


def test_models_of_images_and_of_sequences_have_one_base() -> None:
    assert issubclass(Network, BaseModel)
    assert all(
        issubclass(kind, BaseModel) and not issubclass(kind, Network) for kind in (Transformer, Encoder, Decoder)
    )
    model = built(NAMES[0], "fixup", device="meta", example=None)
    assert (model.name, model.method.name, model.form) == (NAMES[0], "fixup", "pre")
    assert "transformer-2-3-16-32-4, method=fixup" in repr(model)
    assert sum(isinstance(m, Attention) for m in model.modules()) == 2 + 2 * 3
