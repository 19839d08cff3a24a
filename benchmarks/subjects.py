"""Other people's models for the benchmark of conversion: `MODELS`, with a batch and a loss each.

Every model is built by its own package with random weights: the small members of many families, or a configuration of
width 64 where the package takes one. diffusers and segmentation_models_pytorch are used by nothing else here; where
they are not installed, their models are left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normfree.models.third_party import create_model

CLASSES, IMAGES, TEXTS, WORDS, PIXEL_CLASSES = 10, 4, 8, 50, 4
PACKAGES = ("torchvision", "timm", "transformers", "diffusers", "segmentation_models_pytorch")


@dataclass(frozen=True)
class Subject:
    """A model, an input that it accepts, its loss, and the loss of a guess where there is one."""

    model: nn.Module
    inputs: Any
    loss_of: Callable[[Any], Tensor]
    chance: float | None = None

    def loss(self, model: nn.Module) -> Tensor:
        match self.inputs:
            case dict():
                return self.loss_of(model(**self.inputs))
            case tuple():
                return self.loss_of(model(*self.inputs))
            case _:
                return self.loss_of(model(self.inputs))


Maker = Callable[[], Subject]


def is_installed(package: str) -> bool:
    return find_spec(package) is not None


def import_packages() -> None:
    """Import all packages, torchvision first, which the others import, even if its compiled part does not load."""
    with torch.random.fork_rng(devices=[]):
        create_model("torchvision:squeezenet1_1")
    for package in filter(is_installed, PACKAGES):
        import_module(package)


def classified(model: nn.Module, inputs: Any, labels: Tensor, read: Callable[[Any], Tensor] | None = None) -> Subject:
    """A subject whose outputs are logits over the last dimension."""

    def loss(out: Any) -> Tensor:
        logits = read(out) if read is not None else out
        return F.cross_entropy(logits.flatten(0, -2), labels.flatten())

    return Subject(model, inputs, loss, math.log(WORDS if labels.dim() > 1 else CLASSES))


def logits_of(out: Any) -> Tensor:
    return out.logits


def vision(library: str, name: str, size: int = 64, **options: Any) -> Maker:
    def make() -> Subject:
        if library == "torchvision":
            import torchvision

            model = torchvision.models.get_model(name, weights=None, num_classes=CLASSES, **options)
        else:
            import timm

            model = timm.create_model(name, pretrained=False, num_classes=CLASSES, **options)
        return classified(model, torch.randn(IMAGES, 3, size, size), torch.arange(IMAGES) % CLASSES)

    return make


def small_vision_transformer() -> Subject:
    import torchvision

    model = torchvision.models.VisionTransformer(
        image_size=32, patch_size=8, num_layers=4, num_heads=4, hidden_dim=64, mlp_dim=256, num_classes=CLASSES
    )
    return classified(model, torch.randn(IMAGES, 3, 32, 32), torch.arange(IMAGES) % CLASSES)


def video(name: str, frames: int = 8, size: int = 32) -> Maker:
    def make() -> Subject:
        import torchvision

        model = torchvision.models.get_model(name, weights=None, num_classes=CLASSES)
        return classified(model, torch.randn(IMAGES, 3, frames, size, size), torch.arange(IMAGES) % CLASSES)

    return make


def segmented(model: nn.Module, size: int, read: Callable[[Any], Tensor]) -> Subject:
    """A subject that gives a class to each pixel."""
    labels = torch.randint(PIXEL_CLASSES, (IMAGES, size, size))

    def loss(out: Any) -> Tensor:
        logits = read(out)
        return F.cross_entropy(F.interpolate(logits, size=labels.shape[-2:]), labels)

    return Subject(model, torch.randn(IMAGES, 3, size, size), loss, math.log(PIXEL_CLASSES))


def torchvision_segmentation(name: str, size: int = 64) -> Maker:
    def make() -> Subject:
        import torchvision

        options = {"weights": None, "weights_backbone": None, "num_classes": PIXEL_CLASSES}
        return segmented(torchvision.models.get_model(name, **options), size, lambda out: out["out"])

    return make


def detection(name: str, **options: Any) -> Maker:
    """A detector of torchvision in training: images and boxes go in, losses come out."""

    def make() -> Subject:
        import torchvision

        model = torchvision.models.get_model(name, weights=None, weights_backbone=None, num_classes=4, **options)
        boxes = [{"boxes": torch.tensor([[8.0, 8.0, 40.0, 48.0]]), "labels": torch.tensor([1 + i])} for i in range(2)]
        images = [torch.rand(3, 64, 64) for _ in range(2)]
        return Subject(model, (images, boxes), lambda losses: sum(losses.values(), torch.zeros(())))

    return make


def smp(kind: str, encoder: str, size: int = 64, **options: Any) -> Maker:
    def make() -> Subject:
        import segmentation_models_pytorch

        model = getattr(segmentation_models_pytorch, kind)(
            encoder, encoder_weights=None, classes=PIXEL_CLASSES, **options
        )
        return segmented(model, size, lambda out: out)

    return make


SIZES = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 256}
BART = {
    "d_model": 64, "encoder_layers": 3, "decoder_layers": 3, "encoder_attention_heads": 4, "decoder_attention_heads": 4,
    "encoder_ffn_dim": 256, "decoder_ffn_dim": 256, "max_position_embeddings": 32,
}  # fmt: skip


def text(kind: str, task: str, **options: Any) -> Maker:
    """A model of transformers over words."""

    def make() -> Subject:
        import transformers

        special = {"vocab_size": WORDS, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
        config = getattr(transformers, f"{kind}Config")(**{**special, "num_labels": CLASSES, **options})
        model = getattr(transformers, f"{kind}{'' if task == 'LMHeadModel' else 'For'}{task}")(config)
        ids = torch.randint(3, WORDS, (TEXTS, 12))
        match task:
            case "SequenceClassification":
                return classified(model, {"input_ids": ids}, torch.arange(TEXTS) % CLASSES, logits_of)
            case "ConditionalGeneration" | "MTModel":
                inputs = {"input_ids": ids, "decoder_input_ids": ids[:, :-1]}
                return classified(model, inputs, ids[:, 1:], logits_of)
            case "MaskedLM":
                return classified(model, {"input_ids": ids}, ids.roll(1, 0), logits_of)
            case _:
                return classified(model, {"input_ids": ids[:, :-1], "use_cache": False}, ids[:, 1:], logits_of)

    return make


def picture(kind: str, size: int = 32, **options: Any) -> Maker:
    """An image classifier of transformers."""

    def make() -> Subject:
        import transformers

        config = getattr(transformers, f"{kind}Config")(num_labels=CLASSES, **options)
        model = getattr(transformers, f"{kind}ForImageClassification")(config)
        inputs = {"pixel_values": torch.randn(TEXTS, 3, size, size)}
        return classified(model, inputs, torch.arange(TEXTS) % CLASSES, logits_of)

    return make


def segformer() -> Subject:
    import transformers as t

    config = t.SegformerConfig(num_labels=PIXEL_CLASSES, hidden_sizes=[16, 32, 40, 64], depths=[1, 1, 1, 1])
    subject = segmented(t.SegformerForSemanticSegmentation(config), 64, logits_of)
    return Subject(subject.model, {"pixel_values": subject.inputs}, subject.loss_of, subject.chance)


def wav2vec2() -> Subject:
    import transformers as t

    config = t.Wav2Vec2Config(
        **SIZES, conv_dim=[32, 32], conv_stride=[5, 4], conv_kernel=[10, 8], num_conv_pos_embeddings=16, num_labels=10,
        num_conv_pos_embedding_groups=4, num_feat_extract_layers=2, apply_spec_augment=False, layerdrop=0.0,
    )  # fmt: skip
    model = t.Wav2Vec2ForSequenceClassification(config)
    return classified(model, {"input_values": torch.randn(TEXTS, 800)}, torch.arange(TEXTS) % CLASSES, logits_of)


def clip() -> Subject:
    import transformers as t

    words = {"vocab_size": WORDS, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
    config = t.CLIPConfig(
        text_config={**SIZES, **words, "max_position_embeddings": 16},
        vision_config={**SIZES, "image_size": 32, "patch_size": 8},
        projection_dim=32,
    )
    ids = torch.randint(3, WORDS, (TEXTS, 12))
    ids[:, -1] = 1
    inputs = {"input_ids": ids, "pixel_values": torch.randn(TEXTS, 3, 32, 32)}
    labels = torch.arange(TEXTS)
    return Subject(
        t.CLIPModel(config), inputs, lambda out: F.cross_entropy(out.logits_per_image, labels), math.log(TEXTS)
    )


def denoised(build: Callable[[Any], nn.Module], inputs: Callable[[], dict[str, Any]], channels: int = 4) -> Maker:
    """A model of diffusers that predicts noise; a guess of zero has a loss of 1."""

    def make() -> Subject:
        import diffusers

        given = inputs()
        sample = given.get("sample", given.get("hidden_states"))
        noise = torch.randn(len(sample), channels, *sample.shape[2:]) if sample.dim() == 4 else torch.randn_like(sample)
        return Subject(build(diffusers), given, lambda out: F.mse_loss(out.sample, noise), 1.0)

    return make


def _latents(channels: int = 4, size: int = 16, **more: Any) -> dict[str, Any]:
    return {"sample": torch.randn(IMAGES, channels, size, size), "timestep": torch.arange(IMAGES) * 100, **more}


def _patches(size: int = 8, channels: int = 4, **more: Any) -> dict[str, Any]:
    return {"hidden_states": torch.randn(IMAGES, channels, size, size), "timestep": torch.arange(IMAGES) * 100, **more}


def _flux_inputs() -> dict[str, Any]:
    return {
        "hidden_states": torch.randn(IMAGES, 16, 16), "encoder_hidden_states": torch.randn(IMAGES, 6, 32),
        "pooled_projections": torch.randn(IMAGES, 32), "timestep": torch.rand(IMAGES),
        "img_ids": torch.zeros(16, 3), "txt_ids": torch.zeros(6, 3),
    }  # fmt: skip


def _autoencoder(kind: str, **options: Any) -> Maker:
    def make() -> Subject:
        import diffusers

        images = torch.randn(IMAGES, 3, 32, 32)
        model = getattr(diffusers, kind)(**options)
        return Subject(model, {"sample": images}, lambda out: F.mse_loss(out.sample, images), 1.0)

    return make


UNET = {
    "sample_size": 16, "in_channels": 4, "out_channels": 4, "layers_per_block": 1, "block_out_channels": (32, 64),
    "norm_num_groups": 8,
}  # fmt: skip
LEVELS = {"block_out_channels": (16, 32), "norm_num_groups": 8, "latent_channels": 4}
DIT = {"num_attention_heads": 4, "attention_head_dim": 16, "num_layers": 4, "sample_size": 8, "patch_size": 2}


def _small(**options: Any) -> dict[str, Any]:
    return {**SIZES, **options}


TORCHVISION: dict[str, Maker] = {
    "resnet18": vision("torchvision", "resnet18", 32),
    "resnet50": vision("torchvision", "resnet50", 32),
    "resnext50_32x4d": vision("torchvision", "resnext50_32x4d", 32),
    "regnet_x_400mf": vision("torchvision", "regnet_x_400mf", 32),
    "regnet_y_400mf": vision("torchvision", "regnet_y_400mf", 32),
    "mobilenet_v2": vision("torchvision", "mobilenet_v2", 32),
    "mobilenet_v3_small": vision("torchvision", "mobilenet_v3_small", 32),
    "efficientnet_b0": vision("torchvision", "efficientnet_b0", 32),
    "convnext_tiny": vision("torchvision", "convnext_tiny", 32),
    "VisionTransformer": small_vision_transformer,
    "swin_t": vision("torchvision", "swin_t", 32),
    "densenet121": vision("torchvision", "densenet121"),
    "googlenet": vision("torchvision", "googlenet", aux_logits=False, init_weights=True),
    "mnasnet0_5": vision("torchvision", "mnasnet0_5", 32),
    "shufflenet_v2_x0_5": vision("torchvision", "shufflenet_v2_x0_5", 32),
    "squeezenet1_1": vision("torchvision", "squeezenet1_1"),
    "mc3_18": video("mc3_18"),
    "deeplabv3_mobilenet_v3_large": torchvision_segmentation("deeplabv3_mobilenet_v3_large"),
    "lraspp_mobilenet_v3_large": torchvision_segmentation("lraspp_mobilenet_v3_large"),
    "retinanet_resnet50_fpn": detection("retinanet_resnet50_fpn", min_size=64, max_size=64),
    "ssdlite320_mobilenet_v3_large": detection("ssdlite320_mobilenet_v3_large"),
}
AT_32 = (
    "convnext_atto", "convnextv2_atto", "cs3darknet_s", "darknet17", "dla46_c", "edgenext_xx_small",
    "efficientnet_lite0", "efficientvit_b0", "ese_vovnet19b_slim", "fasternet_t0", "fastvit_t8", "fbnetc_100",
    "gernet_s", "ghostnet_050", "hrnet_w18_small", "inception_next_atto", "lcnet_050", "mambaout_femto", "mixnet_s",
    "mobilenetv1_100", "mobilenetv2_035", "mobilenetv3_small_050", "mobilenetv4_conv_small", "mobileone_s0",
    "mobilevit_xxs", "mobilevitv2_050", "nf_regnet_b0", "nf_resnet26", "poolformer_s12", "pvt_v2_b0", "regnetz_005",
    "repghostnet_050", "repvgg_a0", "repvit_m0_9", "res2net50_26w_4s", "resnest14d", "resnet26d", "resnetv2_50",
    "resnetv2_50x1_bit", "rexnet_100", "semnasnet_075", "shvit_s1", "skresnet18", "starnet_s050", "swiftformer_xs",
    "tf_efficientnetv2_b0", "tiny_vit_5m_224", "xcit_nano_12_p16_224",
)  # fmt: skip
AT_64 = (
    "cait_xxs24_224", "convit_tiny", "eva02_tiny_patch14_224", "gcvit_xxtiny", "gmlp_ti16_224", "levit_128s",
    "maxvit_rmlp_pico_rw_256", "mixer_s32_224", "pit_ti_224", "visformer_tiny", "vit_tiny_patch16_224",
)  # fmt: skip
TIMM = {name: vision("timm", name, 32) for name in AT_32} | {name: vision("timm", name, img_size=64) for name in AT_64}
TRANSFORMERS: dict[str, Maker] = {
    "ALBERT": text("Albert", "SequenceClassification", **_small(embedding_size=32)),
    "BERT": text("Bert", "SequenceClassification", **SIZES),
    "DeBERTa-v2": text("DebertaV2", "SequenceClassification", **SIZES),
    "DistilBERT": text("DistilBert", "SequenceClassification", dim=64, n_layers=4, n_heads=4, hidden_dim=256),
    "ELECTRA": text("Electra", "SequenceClassification", **SIZES),
    "ModernBERT": text("ModernBert", "SequenceClassification", **SIZES, cls_token_id=0, sep_token_id=1),
    "MPNet": text("MPNet", "SequenceClassification", **SIZES),
    "RoBERTa": text("Roberta", "SequenceClassification", **SIZES),
    "BLOOM": text("Bloom", "CausalLM", hidden_size=64, n_layer=4, n_head=4),
    "Falcon": text("Falcon", "CausalLM", **SIZES),
    "Gemma": text("Gemma", "CausalLM", **_small(num_key_value_heads=2, head_dim=16)),
    "Gemma 2": text("Gemma2", "CausalLM", **_small(num_key_value_heads=2, head_dim=16)),
    "GPT-2": text("GPT2", "LMHeadModel", n_embd=64, n_layer=4, n_head=4, n_positions=16),
    "GPT-J": text("GPTJ", "CausalLM", n_embd=64, n_layer=4, n_head=4, rotary_dim=8, n_positions=16),
    "GPT-NeoX": text("GPTNeoX", "CausalLM", **SIZES),
    "Llama": text("Llama", "CausalLM", **_small(num_key_value_heads=2)),
    "Mamba": text("Mamba", "CausalLM", hidden_size=64, num_hidden_layers=4, state_size=8),
    "Mistral": text("Mistral", "CausalLM", **_small(num_key_value_heads=2)),
    "OLMo 2": text("Olmo2", "CausalLM", **SIZES),
    "OPT": text("OPT", "CausalLM", hidden_size=64, num_hidden_layers=4, num_attention_heads=4, ffn_dim=256,
                word_embed_proj_dim=64, max_position_embeddings=32),
    "Phi": text("Phi", "CausalLM", **SIZES),
    "Qwen3": text("Qwen3", "CausalLM", **_small(num_key_value_heads=2, head_dim=16)),
    "BART": text("Bart", "ConditionalGeneration", **BART),
    "T5": text("T5", "ConditionalGeneration", d_model=64, d_kv=16, d_ff=256, num_layers=4, num_heads=4),
    "BEiT": picture("Beit", **SIZES, image_size=32, patch_size=8),
    "ConvNeXT": picture("ConvNext", hidden_sizes=[16, 32, 48, 64], depths=[1, 1, 2, 1]),
    "DINOv2": picture("Dinov2", **_small(image_size=28, patch_size=7), size=28),
    "ResNet": picture("ResNet", hidden_sizes=[16, 32, 48, 64], depths=[1, 1, 2, 1], embedding_size=16),
    "Swin": picture("Swin", image_size=32, patch_size=4, embed_dim=24, depths=[1, 2], num_heads=[2, 4], window_size=4),
    "ViT": picture("ViT", **SIZES, image_size=32, patch_size=8),
    "SegFormer": segformer,
    "wav2vec 2.0": wav2vec2,
    "CLIP": clip,
}  # fmt: skip
# Families whose configurations have the same names for the sizes, by the names of their classes.
ENCODERS = ("Ernie", "MegatronBert", "Nystromformer", "RoFormer")
DECODERS = (
    "Cohere", "Glm", "Granite", "Mixtral", "Nemotron", "Olmo", "Persimmon", "Phi3", "Qwen2", "SmolLM3", "StableLm",
    "Starcoder2",
)  # fmt: skip
TWO_STACKS = ("Blenderbot", "MBart", "Pegasus")
PATCHES = ("Data2VecVision", "DeiT", "Dinov2WithRegisters", "IJepa")
STAGES = {"hidden_sizes": [16, 32, 48, 64], "depths": [1, 1, 2, 1]}
WINDOWS = {"image_size": 32, "patch_size": 4, "embed_dim": 24, "depths": [1, 2]}
TRANSFORMERS |= (
    {kind: text(kind, "SequenceClassification", **SIZES) for kind in ENCODERS}
    | {kind: text(kind, "CausalLM", **_small(num_key_value_heads=2)) for kind in DECODERS}
    | {kind: text(kind, "CausalLM", n_embd=64, n_layer=4, n_head=4, n_positions=16, rotary_dim=8)
       for kind in ("CodeGen", "GPTBigCode")}
    | {"BioGpt": text("BioGpt", "CausalLM", **SIZES),
       "XGLM": text("XGLM", "CausalLM", d_model=64, num_layers=4, attention_heads=4, ffn_dim=256)}
    | {kind: text(kind, "ConditionalGeneration", **BART) for kind in TWO_STACKS}
    | {kind: picture(kind, **SIZES, image_size=32, patch_size=8) for kind in PATCHES}
    | {kind: picture(kind, **STAGES) for kind in ("ConvNextV2", "PoolFormer")}
    | {"RegNet": picture("RegNet", **STAGES, embedding_size=16, groups_width=8),
       "Swinv2": picture("Swinv2", **WINDOWS, num_heads=[2, 4], window_size=4),
       "FocalNet": picture("FocalNet", **WINDOWS, hidden_sizes=[24, 48], focal_levels=[2, 2], focal_windows=[3, 3])}
)  # fmt: skip
DIFFUSERS: dict[str, Maker] = {
    "UNet2DModel": denoised(
        lambda d: d.UNet2DModel(**UNET, down_block_types=("DownBlock2D", "AttnDownBlock2D"),
                                up_block_types=("AttnUpBlock2D", "UpBlock2D")), _latents),
    "UNet2DConditionModel": denoised(
        lambda d: d.UNet2DConditionModel(**UNET, down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
                                         up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"), cross_attention_dim=32,
                                         attention_head_dim=4),
        lambda: _latents(encoder_hidden_states=torch.randn(IMAGES, 6, 32))),
    "DiTTransformer2DModel": denoised(
        lambda d: d.DiTTransformer2DModel(**DIT, in_channels=4, num_embeds_ada_norm=1000),
        lambda: _patches(class_labels=torch.arange(IMAGES))),
    "PixArtTransformer2DModel": denoised(
        lambda d: d.PixArtTransformer2DModel(**DIT, in_channels=4, out_channels=4, cross_attention_dim=64,
                                             caption_channels=32, use_additional_conditions=False),
        lambda: _patches(encoder_hidden_states=torch.randn(IMAGES, 6, 32),
                         added_cond_kwargs={"resolution": None, "aspect_ratio": None})),
    "SD3Transformer2DModel": denoised(
        lambda d: d.SD3Transformer2DModel(**DIT, in_channels=4, out_channels=4, joint_attention_dim=32,
                                          caption_projection_dim=64, pooled_projection_dim=32, pos_embed_max_size=8),
        lambda: _patches(encoder_hidden_states=torch.randn(IMAGES, 6, 32),
                         pooled_projections=torch.randn(IMAGES, 32))),
    "FluxTransformer2DModel": denoised(
        lambda d: d.FluxTransformer2DModel(patch_size=1, in_channels=16, num_layers=2, num_single_layers=2,
                                           attention_head_dim=16, num_attention_heads=4, joint_attention_dim=32,
                                           pooled_projection_dim=32, axes_dims_rope=(4, 6, 6)), _flux_inputs),
    "UNet2DModel, residual sampling": denoised(
        lambda d: d.UNet2DModel(**UNET, down_block_types=("ResnetDownsampleBlock2D",) * 2,
                                up_block_types=("ResnetUpsampleBlock2D",) * 2), _latents),
    "AutoencoderKL": _autoencoder("AutoencoderKL", **LEVELS, down_block_types=("DownEncoderBlock2D",) * 2,
                                  up_block_types=("UpDecoderBlock2D",) * 2),
    "VQModel": _autoencoder("VQModel", block_out_channels=(16, 32), norm_num_groups=8, num_vq_embeddings=32,
                            down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2),
    "AutoencoderTiny": _autoencoder("AutoencoderTiny", encoder_block_out_channels=(16, 16),
                                    decoder_block_out_channels=(16, 16), num_encoder_blocks=(1, 2),
                                    num_decoder_blocks=(2, 1)),
}  # fmt: skip
SEGMENTATION: dict[str, Maker] = {
    "Unet resnet18": smp("Unet", "resnet18"),
    "Unet mobilenet_v2": smp("Unet", "mobilenet_v2"),
    "MAnet mobilenet_v2": smp("MAnet", "mobilenet_v2", decoder_channels=(64, 32, 32, 16, 16)),
    "Linknet resnet18": smp("Linknet", "resnet18"),
    "FPN resnet18": smp("FPN", "resnet18"),
    "PSPNet resnet18": smp("PSPNet", "resnet18"),
    "PAN mobilenet_v2": smp("PAN", "mobilenet_v2", 128),
    "DeepLabV3 mobilenet_v2": smp("DeepLabV3", "mobilenet_v2"),
    "DeepLabV3Plus resnet18": smp("DeepLabV3Plus", "resnet18"),
    "Segformer mit_b0": smp("Segformer", "mit_b0"),
}
GROUPS = {
    "torchvision": TORCHVISION, "timm": TIMM, "transformers": TRANSFORMERS, "diffusers": DIFFUSERS,
    "segmentation_models_pytorch": SEGMENTATION,
}  # fmt: skip
MODELS: dict[str, Maker] = {
    f"{package.partition('_')[0]} {name}": maker for package, group in GROUPS.items() for name, maker in group.items()
}


def is_available(name: str) -> bool:
    """Whether the package of a model is installed."""
    return any(is_installed(package) for package in PACKAGES if package.startswith(name.split()[0]))
