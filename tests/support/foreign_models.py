"""Other people's models in the smallest size that they come in, each with a batch to learn."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Not balanced: while a class token sees nothing of its image, a balanced batch gives a classifier at 0 no gradient.
LABELS = torch.tensor([0, 1, 1])


@dataclass(frozen=True)
class Case:
    """A model, an example it accepts, the targets of a fixed batch, and what is known of it: branches and norms."""

    model: nn.Module
    example: Any
    targets: Tensor
    branches: int
    norms: int

    def loss(self, model: nn.Module) -> Tensor:
        """Cross entropy on the fixed batch."""
        out = model(**self.example).logits if isinstance(self.example, dict) else model(self.example)
        return F.cross_entropy(out.flatten(0, -2), self.targets.flatten())


def _torchvision(name: str, branches: int, norms: int, size: int = 64, **options: Any) -> Callable[[], Case]:
    def make() -> Case:
        import torchvision

        model = torchvision.models.get_model(name, weights=None, num_classes=4, **options)
        return Case(model, torch.randn(3, 3, size, size), LABELS, branches, norms)

    return make


def _timm(name: str, branches: int, norms: int, size: int = 64, **options: Any) -> Callable[[], Case]:
    def make() -> Case:
        import timm

        model = timm.create_model(name, pretrained=False, num_classes=4, **options)
        return Case(model, torch.randn(3, 3, size, size), LABELS, branches, norms)

    return make


def _transformers(kind: str, branches: int, norms: int) -> Callable[[], Case]:
    def make() -> Case:
        import transformers as t

        ids, labels = torch.randint(0, 50, (3, 8)), LABELS
        text = {"vocab_size": 50, "bos_token_id": 0, "eos_token_id": 1}
        shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64}
        match kind:
            case "bert":
                model = t.BertForSequenceClassification(t.BertConfig(vocab_size=50, **shape))
                return Case(model, {"input_ids": ids}, labels, branches, norms)
            case "gpt2":
                model = t.GPT2LMHeadModel(t.GPT2Config(**text, n_embd=32, n_layer=2, n_head=2, n_positions=16))
                return Case(model, {"input_ids": ids}, ids, branches, norms)
            case "llama":
                model = t.LlamaForCausalLM(t.LlamaConfig(**text, **shape, num_key_value_heads=2))
                return Case(model, {"input_ids": ids}, ids, branches, norms)
            case "t5":
                config = t.T5Config(vocab_size=50, d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2)
                model = t.T5ForConditionalGeneration(config)
                return Case(model, {"input_ids": ids, "decoder_input_ids": ids}, ids, branches, norms)
            case _:
                model = t.ViTForImageClassification(t.ViTConfig(**shape, image_size=32, patch_size=8))
                return Case(model, {"pixel_values": torch.randn(3, 3, 32, 32)}, labels, branches, norms)

    return make


CASES: dict[str, Callable[[], Case]] = {
    "resnet18": _torchvision("resnet18", 8, 20),
    "resnet50": _torchvision("resnet50", 16, 53),
    "resnext50_32x4d": _torchvision("resnext50_32x4d", 16, 53),
    "wide_resnet50_2": _torchvision("wide_resnet50_2", 16, 53),
    "regnet_y_400mf": _torchvision("regnet_y_400mf", 16, 53),
    "mobilenet_v2": _torchvision("mobilenet_v2", 10, 52),
    "mobilenet_v3_small": _torchvision("mobilenet_v3_small", 6, 34),
    "efficientnet_b0": _torchvision("efficientnet_b0", 9, 49),
    "convnext_tiny": _torchvision("convnext_tiny", 18, 23),
    "vit_b_16": _torchvision("vit_b_16", 24, 25, size=32, image_size=32),
    "swin_t": _torchvision("swin_t", 24, 29),
    "resnetv2_50": _timm("resnetv2_50", 16, 49),
    "resnet26d": _timm("resnet26d", 8, 31),
    "convnext_atto": _timm("convnext_atto", 12, 17),
    "vit_tiny_patch16_224": _timm("vit_tiny_patch16_224", 24, 25, size=32, img_size=32),
    "mixer_s32_224": _timm("mixer_s32_224", 16, 17, size=64, img_size=64),
    "bert": _transformers("bert", 4, 5),
    "gpt2": _transformers("gpt2", 4, 5),
    "vit": _transformers("vit", 4, 5),
    "t5": _transformers("t5", 10, 12),
    "llama": _transformers("llama", 4, 5),
}
METHODS = ("fixup", "skipinit", "rezero", "small_branch", "hanin", "nf", "wn", "dyt")
REFUSED = {(model, method) for model in ("vit_b_16", "swin_t") for method in ("nf", "wn")}
