"""The fifteenth set's healthy networks of transformers: words, sounds, series and pictures."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fifth_parts import Case, chains, generator, sentences
from healthy_networks_fourteenth import Logits, photos
from healthy_networks_fourteenth_words import Reader, Rewriter


class Spans(nn.Module):
    """A model for questions over texts; the logits of the answer's first and last word."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        output = self.network(input_ids=x)
        return torch.stack([output.start_logits, output.end_logits], 2)


def _roformer() -> Case:
    """RoFormer finds an answer: the first word asks for a pair of words, which is somewhere in the text."""
    import transformers

    torch.manual_seed(0)
    config = transformers.RoFormerConfig(
        vocab_size=60, embedding_size=64, hidden_size=64, num_hidden_layers=3, num_attention_heads=4,
        intermediate_size=256, max_position_embeddings=64,
    )  # fmt: skip
    draw = generator(300)
    words = torch.randint(10, 50, (8, 24), generator=draw)
    first = torch.randint(2, 22, (8,), generator=draw)
    rows = torch.arange(8)
    words[:, 0], words[rows, first], words[rows, first + 1] = 2 + rows % 4, 50 + rows % 4, 55
    answer = torch.stack([first, first + 1], 1)
    return Spans(transformers.RoFormerForQuestionAnswering(config)), words, answer, F.cross_entropy


def _xlnet() -> Case:
    """XLNet with relative positions, whose last word stands for the sentence; the padding is on the left."""
    import transformers

    torch.manual_seed(0)
    config = transformers.XLNetConfig(vocab_size=40, d_model=64, n_layer=3, n_head=4, d_inner=256, num_labels=2)
    model = Reader(transformers.XLNetForSequenceClassification(config), padded=True)
    words, upper = sentences(0, n=8)
    return model, words.flip(1), upper, F.cross_entropy


def _gemma2() -> Case:
    """Gemma 2: norms before and after each branch, attention over a window in every other layer."""
    import transformers

    torch.manual_seed(0)
    config = transformers.Gemma2Config(
        vocab_size=200, hidden_size=64, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2, head_dim=16,
        intermediate_size=192, query_pre_attn_scalar=16, sliding_window=8, max_position_embeddings=64,
        attn_implementation="eager",
    )  # fmt: skip
    return Reader(transformers.Gemma2ForCausalLM(config)), *chains(0, n=8, length=32, vocabulary=200), F.cross_entropy


def _olmo2() -> Case:
    """OLMo 2: norms after the branches, and of queries and keys."""
    import transformers

    torch.manual_seed(0)
    config = transformers.Olmo2Config(
        vocab_size=200, hidden_size=64, num_hidden_layers=3, num_attention_heads=4, intermediate_size=192,
        max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return Reader(transformers.Olmo2ForCausalLM(config)), *chains(0, n=8, length=32, vocabulary=200), F.cross_entropy


def _mamba2() -> Case:
    import transformers

    torch.manual_seed(0)
    config = transformers.Mamba2Config(
        vocab_size=200, hidden_size=64, num_hidden_layers=3, state_size=16, head_dim=16, num_heads=8, n_groups=1,
        chunk_size=16, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return Reader(transformers.Mamba2ForCausalLM(config)), *chains(0, n=8, length=32, vocabulary=200), F.cross_entropy


def _marian() -> Case:
    """Marian translates word by word: norms after the branches, positions of sines."""
    import transformers

    torch.manual_seed(0)
    config = transformers.MarianConfig(
        vocab_size=100, decoder_vocab_size=100, d_model=64, encoder_layers=2, decoder_layers=2,
        encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=256, decoder_ffn_dim=256,
        max_position_embeddings=64, pad_token_id=1, eos_token_id=0, decoder_start_token_id=1, forced_eos_token_id=None,
        scale_embedding=True,
    )  # fmt: skip
    source = 4 + chains(0, n=8, length=20, vocabulary=96)[0]
    target = 4 + ((source - 4) * 5) % 96
    begun = torch.cat([torch.full((8, 1), 1), target[:, :-1]], 1)
    return (
        Rewriter(transformers.MarianMTModel(config)),
        torch.stack([source, begun], 1),
        target.flatten(),
        F.cross_entropy,
    )


class Patches(nn.Module):
    """A masked autoencoder; a patch's pixels and whether it was hidden."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        output = self.network(pixel_values=x)
        return torch.cat([output.logits, output.mask[:, :, None]], 2)


def hidden_patches(output: Tensor, targets: Tensor) -> Tensor:
    """Return the mean squared error of the pixels of the patches that were hidden."""
    guess, hidden = output[:, :, :-1], output[:, :, -1]
    return ((guess - targets).square().mean(2) * hidden).sum() / hidden.sum()


def _vit_mae() -> Case:
    import transformers

    torch.manual_seed(0)
    config = transformers.ViTMAEConfig(
        image_size=64, patch_size=8, hidden_size=64, num_hidden_layers=3, num_attention_heads=4, intermediate_size=256,
        decoder_hidden_size=48, decoder_num_hidden_layers=2, decoder_num_attention_heads=4,
        decoder_intermediate_size=192,
    )  # fmt: skip
    seen, _ = photos(8, 64)
    patches = F.unfold(seen, 8, stride=8).view(8, 3, 64, 64).permute(0, 3, 2, 1).flatten(2)
    return Patches(transformers.ViTMAEForPreTraining(config)), seen, patches, hidden_patches


def _dinov2() -> Case:
    """DINOv2's encoder with the library's classifier, for pictures of 112 pixels in patches of 14."""
    import transformers

    torch.manual_seed(0)
    config = transformers.Dinov2Config(
        image_size=112, patch_size=14, hidden_size=96, num_hidden_layers=4, num_attention_heads=3, num_labels=10
    )
    return Logits(transformers.Dinov2ForImageClassification(config)), *photos(8, 112), F.cross_entropy


def _spectrograms() -> Case:
    """The audio spectrogram transformer over 128 frames of 64 bands: a standardized band rises, falls or stays."""
    import transformers

    torch.manual_seed(0)
    config = transformers.ASTConfig(
        hidden_size=64, num_hidden_layers=3, num_attention_heads=4, intermediate_size=256, patch_size=16,
        frequency_stride=10, time_stride=10, max_length=128, num_mel_bins=64, num_labels=3,
    )  # fmt: skip
    draw = generator(301)
    labels = torch.arange(8) % 3
    time, band = torch.linspace(-1, 1, 128), torch.arange(64)
    slope = torch.tensor([20.0, -20.0, 0.0])[labels]
    center = 32 + slope[:, None] * time + 4 * torch.randn(8, 1, generator=draw)
    heard = 3 * torch.exp(-((band - center[:, :, None]) / 4).square()) + torch.randn(8, 128, 64, generator=draw)
    heard = 0.5 * (heard - heard.mean()) / heard.std()  # its authors halve them
    return Logits(transformers.ASTForAudioClassification(config)), heard, labels, F.cross_entropy


class Forecasts(nn.Module):
    """A forecaster of transformers without its other outputs."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        return self.network(past_values=x, return_loss=False).prediction_outputs


def _patchtsmixer() -> Case:
    """PatchTSMixer: three waves with noise over 64 steps, and the next 16."""
    import transformers

    torch.manual_seed(0)
    config = transformers.PatchTSMixerConfig(
        context_length=64, prediction_length=16, patch_length=8, patch_stride=8, num_input_channels=3, d_model=16,
        num_layers=3, dropout=0.1, head_dropout=0.1,
    )  # fmt: skip
    draw = generator(302)
    pace = torch.tensor([0.2, 0.35, 0.5])
    values = torch.sin(torch.arange(80)[:, None] * pace + 6.3 * torch.rand(8, 1, 3, generator=draw))
    values = values + 0.2 * torch.randn(8, 80, 3, generator=draw)
    values = (values - values.mean((0, 1))) / values.std((0, 1))
    return Forecasts(transformers.PatchTSMixerForPrediction(config)), values[:, :64], values[:, 64:], F.mse_loss


class Depths(nn.Module):
    """A depth estimator of transformers without its other outputs."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        return self.network(x).predicted_depth


def scale_invariant(output: Tensor, targets: Tensor) -> Tensor:
    """Return the scale-invariant loss of logarithms of Eigen et al."""
    error = targets.log() - output.clamp(min=1e-3).log()
    return (error.square().mean() - 0.5 * error.mean().square()).sqrt()


def _glpn() -> Case:
    """GLPN: rooms of boxes, the farther the darker and bluer, with depths from one to nine meters."""
    import transformers

    torch.manual_seed(0)
    config = transformers.GLPNConfig(
        depths=[1, 1, 1, 1], hidden_sizes=[16, 32, 64, 96], num_attention_heads=[1, 1, 2, 4], decoder_hidden_size=32,
        drop_path_rate=0.0,
    )  # fmt: skip
    draw = generator(303)
    fields = F.interpolate(torch.randn(4, 1, 4, 4, generator=draw), size=128, mode="nearest")
    depth = 1 + 8 * torch.sigmoid(fields + torch.linspace(1, -1, 128)[:, None])
    hue = torch.tensor([1.0, 0.5, -0.5])[:, None, None]
    seen = hue * (5 - depth) / 3 + 0.3 * torch.randn(4, 3, 128, 128, generator=draw)
    seen = (seen - seen.mean((0, 2, 3), keepdim=True)) / seen.std((0, 2, 3), keepdim=True)
    return Depths(transformers.GLPNForDepthEstimation(config)), seen, depth[:, 0], scale_invariant


LIBRARY: dict[str, Callable[[], Case]] = {
    "transformers_roformer_answers": _roformer,
    "transformers_xlnet": _xlnet,
    "transformers_gemma2": _gemma2,
    "transformers_olmo2": _olmo2,
    "transformers_mamba2": _mamba2,
    "transformers_marian": _marian,
    "transformers_vit_mae": _vit_mae,
    "transformers_dinov2": _dinov2,
    "transformers_spectrograms": _spectrograms,
    "transformers_patchtsmixer": _patchtsmixer,
    "transformers_glpn": _glpn,
}
