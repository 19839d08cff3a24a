"""Sixty networks that train, for counting false alarms.

The models of torchvision, timm and transformers are small members of their families with the random weights of their
packages, as people have trained them; the others are this library's own, by methods that train. A false alarm is a
report that a reader would take for a fault of the network. Notes and the figures of the report are no alarms.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from fault_cases import CLASSES, Encoder, ResNet, Subject, densenet, images, mlp, scaled_resnet
from unseen_networks import Mixer, Recurrent, UNet

Build = Callable[[], Subject]
WORDS = 50


def _load_torchvision() -> None:
    """Import torchvision, which timm and transformers import, too, even if its compiled part does not load."""
    from normfree.models.third_party import create_model

    with torch.random.fork_rng(devices=[]):
        create_model("torchvision:squeezenet1_1")


def _torchvision(name: str, size: int = 64, **options: Any) -> Build:
    def build() -> Subject:
        _load_torchvision()
        import torchvision

        model = torchvision.models.get_model(name, weights=None, num_classes=CLASSES, **options)
        return Subject(model, *images(size, 8))

    return build


def _timm(name: str, size: int = 64, **options: Any) -> Build:
    def build() -> Subject:
        _load_torchvision()
        import timm

        return Subject(timm.create_model(name, pretrained=False, num_classes=CLASSES, **options), *images(size, 8))

    return build


SIZES = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 256}


def _text(kind: str, task: str = "SequenceClassification", **options: Any) -> Build:
    """A model of transformers of width 64 with four layers; its configuration is `kind` and `options`."""

    def build() -> Subject:
        _load_torchvision()
        import transformers as t

        special = {"vocab_size": WORDS, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
        config = getattr(t, f"{kind}Config")(**special, num_labels=CLASSES, **options)
        model = getattr(t, f"{kind}For{task}")(config)
        ids = torch.randint(3, WORDS, (8, 13))
        if task == "SequenceClassification":
            return Subject(model, {"input_ids": ids}, torch.arange(8))
        inputs = {"input_ids": ids[:, :-1]}
        if task == "ConditionalGeneration":
            inputs = {"input_ids": ids, "decoder_input_ids": ids[:, :-1]}
        return Subject(model, inputs, ids[:, 1:])

    return build


def _image_transformer(kind: str, **options: Any) -> Build:
    def build() -> Subject:
        _load_torchvision()
        import transformers as t

        config = getattr(t, f"{kind}Config")(num_labels=CLASSES, **options)
        example, targets = images(32, 8)
        return Subject(getattr(t, f"{kind}ForImageClassification")(config), {"pixel_values": example}, targets)

    return build


def _own(name: str, method: str, size: int = 16) -> Build:
    def build() -> Subject:
        import normfree as nf

        return Subject(nf.build(name, method=method, num_classes=CLASSES), *images(size, 8))

    return build


def _made(make: Callable[[], nn.Module], *example: int) -> Build:
    def build() -> Subject:
        return Subject(make(), torch.randn(16, *example), torch.arange(16) % CLASSES)

    return build


def _unet() -> Subject:
    return Subject(UNet(cut=False), images(batch=4)[0], torch.randint(4, (4, 16, 16)), nn.functional.cross_entropy)


PATCHES = {**SIZES, "image_size": 32, "patch_size": 8}

BUILDERS: dict[str, Build] = {
    **{
        f"torchvision {name}": _torchvision(name)
        for name in (
            "densenet121", "efficientnet_b0", "mnasnet0_5", "mobilenet_v2",
            "mobilenet_v3_small", "regnet_x_400mf", "regnet_y_400mf", "resnet18", "resnet50", "shufflenet_v2_x0_5",
            "squeezenet1_1", "swin_t",
        )
    },
    **{
        f"timm {name}": _timm(name)
        for name in (
            "convnext_atto", "convnextv2_atto", "darknet17", "edgenext_xx_small", "fbnetc_100", "ghostnet_050",
            "hrnet_w18_small", "inception_next_atto", "lcnet_050", "mixnet_s", "mobilenetv3_small_050",
            "mobilevit_xxs", "nf_resnet26", "poolformer_s12", "pvt_v2_b0", "regnetz_005", "repvgg_a0", "resnet26d",
            "resnetv2_50", "skresnet18",
        )
    },
    "timm cait_xxs24_224": _timm("cait_xxs24_224", img_size=64),
    "timm mixer_s32_224": _timm("mixer_s32_224", img_size=64),
    "timm resmlp_12_224": _timm("resmlp_12_224", img_size=64),
    "timm vit_tiny_patch16_224": _timm("vit_tiny_patch16_224", img_size=64),
    "transformers BERT": _text("Bert", **SIZES),
    "transformers RoBERTa": _text("Roberta", **SIZES),
    "transformers ELECTRA": _text("Electra", **SIZES),
    "transformers DistilBERT": _text("DistilBert", dim=64, n_layers=4, n_heads=4, hidden_dim=256),
    "transformers GPT-2": _text("GPT2", n_embd=64, n_layer=4, n_head=4),
    "transformers Llama": _text("Llama", "CausalLM", num_key_value_heads=2, **SIZES),
    "transformers Qwen2": _text("Qwen2", "CausalLM", num_key_value_heads=2, **SIZES),
    "transformers GPT-NeoX": _text("GPTNeoX", "CausalLM", **SIZES),
    "transformers T5": _text(
        "T5", "ConditionalGeneration", d_model=64, d_kv=16, d_ff=256, num_layers=4, num_heads=4
    ),
    "transformers ViT": _image_transformer("ViT", **PATCHES),
    "own resnet20 batchnorm": _own("resnet20", "batchnorm"),
    "own resnet110 fixup": _own("resnet110", "fixup"),
    "own resnet56 isograd": _own("resnet56", "isograd"),
    "own resnet56 skipinit": _own("resnet56", "skipinit"),
    "own preact_resnet50 nf": _own("preact_resnet50", "nf", 32),
    "plain MLP": _made(lambda: mlp(4), 32),
    "plain DenseNet": _made(densenet, 3, 16, 16),
    "residual network, scaled": _made(scaled_resnet, 3, 16, 16),
    "pre-norm encoder": _made(lambda: Encoder(8, norm_first=True), 8, 32),
    "post-norm encoder of 4 layers": _made(lambda: Encoder(4, norm_first=False), 8, 32),
    "mixer": _made(Mixer, 3, 16, 16),
    "recurrent network of 20 steps": _made(lambda: Recurrent("tanh", 1.0), 20, 8),
    "pre-activation ResNet": _made(ResNet, 3, 16, 16),
    "U-Net": _unet,
}  # fmt: skip
HEALTHY: tuple[str, ...] = tuple(BUILDERS)


def build_healthy(name: str) -> Subject:
    """Build a network and its batch; two calls give the same weights and the same batch."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return BUILDERS[name]()
