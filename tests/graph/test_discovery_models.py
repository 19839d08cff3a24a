"""Discovery on third-party models: number, degree and stages of the branches, and every weight accounted for."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import timm
import torch
import torchvision
import transformers
from torch import Tensor, nn

from normfree import discover
from normfree.graph import unaccounted
from normfree.plan import ResidualPlan

IDS = torch.zeros(2, 7, dtype=torch.long)
SIZES: dict[str, Any] = {
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "intermediate_size": 32,
}
WORDS: dict[str, Any] = {"vocab_size": 50, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def images(size: int) -> Tensor:
    return torch.zeros(2, 3, size, size)


@dataclass(frozen=True)
class Known:
    """A model and its known plan: degrees by branch, stages, shortcuts that are no identities, weight layers."""

    build: Callable[[], nn.Module]
    example: Any
    degrees: list[int]
    stages: tuple[int, ...]
    projections: int = 0
    body: int = 0
    aside: int = 0


def vision(name: str, degrees: list[int], stages: tuple[int, ...], size: int = 32, **more: Any) -> Known:
    return Known(lambda: getattr(torchvision.models, name)(), images(size), degrees, stages, **more)


def timm_model(name: str, degrees: list[int], stages: tuple[int, ...], size: int = 32, **more: Any) -> Known:
    options = {"img_size": size} if name.startswith(("vit", "mixer")) else {}
    return Known(lambda: timm.create_model(name, **options), images(size), degrees, stages, **more)


def gpt2(**options: Any) -> nn.Module:
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(n_embd=16, n_layer=3, n_head=2, **WORDS, **options))


def t5(layers: int = 2, feed_forward: str = "relu") -> nn.Module:
    config = transformers.T5Config(
        d_model=16, d_kv=8, d_ff=32, num_layers=layers, num_heads=2, feed_forward_proj=feed_forward, **WORDS
    )
    return transformers.T5ForConditionalGeneration(config)


def llama() -> nn.Module:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(num_key_value_heads=1, **WORDS, **SIZES))


RESNET50 = (3, 4, 6, 3)
PAIRS = {"ids": IDS, "mask": {"input_ids": IDS, "attention_mask": torch.ones_like(IDS)}}
T5_EXAMPLE = {"input_ids": IDS, "decoder_input_ids": IDS[:, :5]}
KNOWN = {
    "resnet18": vision("resnet18", [2] * 8, (2, 2, 2, 2), size=64, projections=3),
    "resnet50": vision("resnet50", [3] * 16, RESNET50, size=64, projections=4),
    "resnext50_32x4d": vision("resnext50_32x4d", [3] * 16, RESNET50, size=64, projections=4),
    "wide_resnet50_2": vision("wide_resnet50_2", [3] * 16, RESNET50, size=64, projections=4),
    "regnet_y_400mf": vision("regnet_y_400mf", [3] * 16, (1, 3, 6, 6), projections=4),
    "mobilenet_v2": vision("mobilenet_v2", [3] * 10, (1, 2, 3, 2, 2), size=64, body=16),
    "mobilenet_v3_small": vision("mobilenet_v3_small", [3] * 6, (1, 2, 1, 2), size=64, body=17),
    "efficientnet_b0": vision("efficientnet_b0", [3] * 9, (1, 1, 2, 2, 3), size=64, body=26),
    "convnext_tiny": vision("convnext_tiny", [3] * 18, (3, 3, 9, 3), body=3, aside=18),
    "swin_t": vision("swin_t", [4, 2] * 12, (4, 4, 12, 4), size=64, body=3, aside=12),
    "vit_b_16": Known(
        lambda: torchvision.models.VisionTransformer(32, 16, 12, 4, 32, 64), images(32), [4, 2] * 12, (24,), aside=2
    ),
    "resnetv2_50": timm_model("resnetv2_50", [3] * 16, RESNET50, size=64, projections=4),
    "resnet26d": timm_model("resnet26d", [3] * 8, (2, 2, 2, 2), size=64, projections=4),
    "convnext_atto": timm_model("convnext_atto", [3] * 12, (2, 2, 6, 2), size=64, body=3),
    "vit_tiny_patch16_224": timm_model("vit_tiny_patch16_224", [4, 2] * 12, (24,), aside=2),
    "mixer_s32_224": timm_model("mixer_s32_224", [2] * 16, (16,), size=64),
    "seresnet18": timm_model("seresnet18", [2] * 8, (2, 2, 2, 2), size=64, projections=3),
    "bert": Known(
        lambda: transformers.BertForSequenceClassification(transformers.BertConfig(**WORDS, **SIZES)),
        IDS, [4, 2] * 3, (6,), body=1, aside=3,
    ),
    "gpt2": Known(gpt2, IDS, [4, 2] * 3, (6,), aside=1),
    "gpt2 with mask": Known(gpt2, PAIRS["mask"], [4, 2] * 3, (6,), aside=1),
    "gpt2 eager": Known(lambda: gpt2(attn_implementation="eager"), IDS, [4, 2] * 3, (6,), aside=1),
    "vit": Known(
        lambda: transformers.ViTForImageClassification(
            transformers.ViTConfig(image_size=32, patch_size=16, **SIZES)
        ),
        images(32), [4, 2] * 3, (6,), aside=2,
    ),
    "t5": Known(t5, T5_EXAMPLE, [4, 2] * 2 + [4, 4, 2] * 2, (4, 6), aside=2),
    "t5, 3 layers": Known(lambda: t5(3), T5_EXAMPLE, [4, 2] * 3 + [4, 4, 2] * 3, (6, 9), aside=2),
    "t5, gated": Known(lambda: t5(2, "gated-gelu"), T5_EXAMPLE, [4, 3] * 2 + [4, 4, 3] * 2, (4, 6), aside=2),
    "llama": Known(llama, IDS, [4, 3] * 3, (6,), aside=1),
    "llama with mask": Known(llama, PAIRS["mask"], [4, 3] * 3, (6,), aside=1),
    "torch's encoder": Known(
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 3),
        torch.zeros(2, 4, 8), [4, 2] * 3, (6,),
    ),
    "side by side": Known(
        lambda: transformers.GPTNeoXForCausalLM(transformers.GPTNeoXConfig(**WORDS, **SIZES)),
        IDS, [4] * 3, (3,), aside=1,
    ),
}  # fmt: skip


def build(name: str) -> nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return KNOWN[name].build()


@pytest.mark.parametrize("name", KNOWN)
def test_branches_degrees_and_stages_are_the_known_ones(name: str) -> None:
    known, model = KNOWN[name], build(name)
    for training in (True, False):
        plan = discover(model.train(training), known.example)
        assert [branch.degree for branch in plan.branches] == known.degrees
        assert plan.stage_sizes == known.stages
        assert sum(branch.shortcut != "identity" for branch in plan.branches) == known.projections
        assert {branch.shortcut for branch in plan.branches} <= {"identity", "projection"}
        assert (len(plan.body), len(plan.other_parameters), len(plan.classifier)) == (
            known.body, known.aside, int(name != "torch's encoder"),
        )  # fmt: skip
        assert unaccounted(model, plan) == ()
        branches = len(known.degrees)
        assert str(plan).startswith(f"{branches} residual branches in {len(known.stages)} stage")


def plan_of(name: str) -> ResidualPlan:
    return discover(build(name).eval(), KNOWN[name].example)


def test_real_sizes_have_the_same_counts() -> None:
    """The two that the issue names by the sizes of their papers."""
    with torch.device("meta"):
        vit = discover(torchvision.models.vit_b_16(), images(224))
        resnet = discover(torchvision.models.resnet50(), images(64))
    assert len(vit.branches) == 24
    assert {b.degree for b in resnet.branches} == {3}
    assert resnet.stage_sizes == RESNET50


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("vit_b_16", ("self_attention", "in_proj_weight", 3, False)),
        ("swin_t", ("attn.qkv", "weight", 3, False)),
        ("vit_tiny_patch16_224", ("attn.qkv", "weight", 3, False)),
        ("gpt2", ("attn.c_attn", "weight", 3, True)),
        ("gpt2 eager", ("attn.c_attn", "weight", 3, True)),
        ("side by side", ("attention.query_key_value", "weight", 3, False)),
    ],
)
def test_fused_projections_are_three_parts(name: str, expected: tuple[str, str, int, bool]) -> None:
    layers = plan_of(name).branches[0].layers
    first = layers[0]
    assert first.name.endswith(expected[0])
    assert (first.parameter, first.parts, first.transposed) == expected[1:]
    assert {layer.parts for layer in layers[1:]} == {1}
    assert {layer.transposed for layer in layers} == {expected[3]}


@pytest.mark.parametrize("name", ["bert", "vit", "llama", "t5"])
def test_separate_projections_are_three_entries(name: str) -> None:
    attention = plan_of(name).branches[0]
    assert len(attention.first_layers) == 3
    assert {layer.parts for layer in attention.layers} == {1}
    assert len(attention.last_layers) == 1


def test_cross_attention_has_one_entry_and_reads_the_encoder() -> None:
    cross = plan_of("t5").branches[5]
    assert [layer.name.rpartition(".")[2] for layer in cross.layers] == ["q", "k", "v", "o"]
    assert [layer.name.rpartition(".")[2] for layer in cross.first_layers] == ["q"]


@pytest.mark.parametrize("name", ["gpt2", "t5"])
def test_output_layer_that_shares_the_embedding_is_tied(name: str) -> None:
    assert [layer.tied for layer in plan_of(name).classifier] == [True]
    assert [layer.tied for layer in plan_of("llama").classifier] == [False]


def test_squeeze_and_excitation_layers_are_gates_and_never_last() -> None:
    for name, per_branch in (("regnet_y_400mf", 2), ("efficientnet_b0", 2), ("seresnet18", 2), ("resnet18", 0)):
        for branch in plan_of(name).branches:
            assert sum(layer.gate for layer in branch.layers) == per_branch
            assert not branch.last.gate
    assert [layer.name for layer in plan_of("seresnet18").branches[0].last_layers] == ["layer1.0.conv2"]


def test_branches_side_by_side_end_in_two_layers() -> None:
    for branch in plan_of("side by side").branches:
        assert [layer.name.rpartition(".")[2] for layer in branch.last_layers] == ["dense", "dense_4h_to_h"]


def test_activations_of_other_libraries_are_seen() -> None:
    """GPT-2's GELU is written out, MobileNet's ReLU6 a class of its own: the layers after them read an activation."""
    assert [layer.reads_activation for layer in plan_of("gpt2").branches[1].layers] == [False, True]
    assert [layer.reads_activation for layer in plan_of("mobilenet_v2").branches[0].layers] == [False, True, True]


def test_plan_of_a_transformer_prints_its_pattern() -> None:
    assert str(plan_of("vit_b_16")).splitlines() == [
        "24 residual branches in 1 stage",
        "├─ stem        conv_proj",
        "├─ stage 1: 12 × 2 branches  (encoder.layers.encoder_layer_0#1 … encoder.layers.encoder_layer_11#2)",
        "│     [self_attention.in_proj_weight ×3, self_attention.out_proj] m = 4 + identity",
        "│     [mlp.0, mlp.3] + identity",
        "└─ classifier  heads.head",
    ]
    text = str(plan_of("t5"))
    assert "2 × 2 branches  (encoder.block.0.layer.0 … encoder.block.1.layer.1)" in text
    assert "2 × 3 branches  (decoder.block.0.layer.0 … decoder.block.1.layer.2)" in text
    assert "└─ classifier  lm_head (tied)" in text
    assert "block.2.fc1 (gate)" in str(plan_of("efficientnet_b0"))
