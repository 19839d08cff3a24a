"""Networks of the tenth set on words and series, each with its fault or mended."""

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fifth_parts import Case, chains, generator, sentences, series

WORDS = 100


def layer(width: int, heads: int = 4) -> nn.TransformerEncoderLayer:
    return nn.TransformerEncoderLayer(width, heads, 2 * width, 0.0, batch_first=True, norm_first=True)


class Decoder(nn.Module):
    """Two causal layers over words and their places, and a score for each next word."""

    def __init__(self, width: int, last: nn.Module, length: int = 24) -> None:
        super().__init__()
        self.token_embedding, self.places = nn.Embedding(WORDS, width), nn.Embedding(length, width)
        for embedding in (self.token_embedding, self.places):
            nn.init.normal_(embedding.weight, std=0.02)
        self.layers = nn.ModuleList(layer(width) for _ in range(2))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, WORDS, bias=False)
        self.to_scores = last
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(length), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        x = self.token_embedding(tokens) + self.places.weight[:length]
        for block in self.layers:
            x = block(x, src_mask=self.mask[:length, :length], is_causal=True)
        return self.to_scores(self.head(self.norm(x))).flatten(0, 1)


def gpt_probabilities_into_cross_entropy(broken: bool = True, batch: int = 0) -> Case:
    torch.manual_seed(0)
    return Decoder(64, nn.Softmax(-1) if broken else nn.Identity()), *chains(batch), F.cross_entropy


def gpt_tied_to_standard_normal_words(broken: bool = True, batch: int = 0) -> Case:
    torch.manual_seed(0)
    model = Decoder(256, nn.Identity())
    if broken:
        nn.init.normal_(model.token_embedding.weight)
    model.head.weight = model.token_embedding.weight
    return model, *chains(batch, n=16), F.cross_entropy


class SentenceClassifier(nn.Module):
    """Two Transformer layers over words, with a mask for the padding, and a classifier on the first token."""

    def __init__(self, inverted: bool, vocabulary: int = 40, length: int = 20, width: int = 32) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(vocabulary, width)
        self.places = nn.Parameter(0.02 * torch.randn(length, width))
        self.encoder = nn.TransformerEncoder(layer(width), 2, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, 2)
        self.inverted = inverted

    def forward(self, tokens: Tensor) -> Tensor:
        mask = tokens != 0 if self.inverted else tokens == 0
        return self.head(self.encoder(self.token_embedding(tokens) + self.places, src_key_padding_mask=mask)[:, 0])


def encoder_padding_mask_inverted(broken: bool = True, batch: int = 0) -> Case:
    torch.manual_seed(0)
    return SentenceClassifier(inverted=broken), *sentences(batch), F.cross_entropy


class SeriesClassifier(nn.Module):
    """A recurrent network and a classifier on its last output; the series come as (batch, steps, features)."""

    def __init__(self, recurrent: nn.LSTM | nn.GRU, width: int) -> None:
        super().__init__()
        self.recurrent = recurrent
        self.head = nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        outputs, _ = self.recurrent(x)
        return self.head(outputs[:, -1])


def lstm_runs_over_the_batch(broken: bool = True, batch: int = 0) -> Case:
    torch.manual_seed(0)
    lstm = nn.LSTM(4, 48, num_layers=2, batch_first=not broken)
    return SeriesClassifier(lstm, 48), *series(batch), F.cross_entropy


def gru_weights_of_standard_normal(broken: bool = True, batch: int = 0) -> Case:
    torch.manual_seed(0)
    gru = nn.GRU(4, 96, num_layers=2, batch_first=True)
    for name, parameter in gru.named_parameters():
        if "bias" in name:
            nn.init.zeros_(parameter)
        elif broken:
            nn.init.normal_(parameter)
        else:
            nn.init.xavier_normal_(parameter)
    return SeriesClassifier(gru, 96), *series(batch, steps=40), F.cross_entropy


class GatedLayer(nn.Module):
    """Attention and an MLP, each scaled, shifted and gated by the time as in a diffusion Transformer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, elementwise_affine=False)
        self.attention = nn.MultiheadAttention(width, 4, batch_first=True)
        self.norm2 = nn.LayerNorm(width, elementwise_affine=False)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.modulation = nn.Sequential(nn.SiLU(), nn.Linear(width, 6 * width))
        nn.init.zeros_(self.modulation[1].weight)
        nn.init.zeros_(self.modulation[1].bias)

    def forward(self, x: Tensor, time: Tensor) -> Tensor:
        shift1, scale1, gate1, shift2, scale2, gate2 = self.modulation(time)[:, None].chunk(6, -1)
        h = self.norm1(x) * (1 + scale1) + shift1
        x = x + gate1 * self.attention(h, h, h, need_weights=False)[0]
        h = self.norm2(x) * (1 + scale2) + shift2
        return x + gate2 * self.mlp(h)


class DiffusionTransformer(nn.Module):
    """Gated layers over the patches of a noisy picture; the last column of each patch is the time."""

    def __init__(self, zero_projections: bool, width: int = 32, depth: int = 2) -> None:
        super().__init__()
        self.patches = nn.Linear(16, width)
        self.places = nn.Parameter(0.2 * torch.randn(16, width))
        self.time = nn.Sequential(nn.Linear(32, width), nn.SiLU(), nn.Linear(width, width))
        self.blocks = nn.ModuleList(GatedLayer(width) for _ in range(depth))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 16)
        if zero_projections:
            for block in self.blocks:
                for projection in (block.attention.out_proj, block.mlp[2]):
                    nn.init.zeros_(projection.weight)
                    nn.init.zeros_(projection.bias)

    def forward(self, x: Tensor) -> Tensor:
        angles = x[:, 0, 16:] * 1.5 ** torch.arange(16.0)
        time = self.time(torch.cat([angles.sin(), angles.cos()], 1))
        x = self.patches(x[..., :16]) + self.places
        for block in self.blocks:
            x = block(x, time)
        return self.head(self.norm(x))


def noisy_pictures(batch: int, n: int = 64) -> tuple[Tensor, Tensor]:
    """Return the patches of noisy pictures of four patterns, half of them erased, with the time; and the clean ones."""
    patterns = F.interpolate(torch.randn(4, 1, 4, 4, generator=generator(14)), size=16, mode="bicubic")
    patches = F.unfold(patterns, 4, stride=4).transpose(1, 2)
    draw = generator(1000 + batch)
    clean = 1.5 * patches[torch.randint(4, (n,), generator=draw)]
    time = torch.rand(n, 1, 1, generator=draw)
    seen = (torch.rand(n, 16, 1, generator=draw) < 0.5).float()
    noisy = (seen * clean + (1 + time) / 2 * torch.randn(clean.shape, generator=draw)) / (1.5 + time / 2)
    return torch.cat([noisy, time.expand(n, 16, 1)], 2), clean


def diffusion_gates_and_projections_zero(broken: bool = True, batch: int = 0) -> Case:
    torch.manual_seed(0)
    return DiffusionTransformer(zero_projections=broken), *noisy_pictures(batch), F.mse_loss


class Unit(nn.Module):
    """Each vector divided by its length, in half precision or not."""

    def __init__(self, half: bool) -> None:
        super().__init__()
        self.dtype = torch.float16 if half else torch.float32

    def forward(self, x: Tensor) -> Tensor:
        return F.normalize(x.to(self.dtype), dim=-1).to(x.dtype)


class UnitWords(nn.Module):
    """Vectors of words (zero for the padding) of length one, an MLP on each, and a classifier on their mean."""

    def __init__(self, half: bool, width: int = 32) -> None:
        super().__init__()
        self.token_embedding = nn.Embedding(40, width, padding_idx=0)
        self.to_unit_length = Unit(half)
        self.mlp = nn.Sequential(nn.Linear(width, 64), nn.ReLU(), nn.Linear(64, width))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        known = (tokens != 0).float()[..., None]
        vectors = self.mlp(self.to_unit_length(self.token_embedding(tokens)))
        return self.head(self.norm((vectors * known).sum(1) / known.sum(1)))


def words_of_length_one_in_half(broken: bool = True, batch: int = 0) -> Case:
    torch.manual_seed(0)
    return UnitWords(half=broken), *sentences(batch), F.cross_entropy


class TopicBert(nn.Module):
    """BERT of transformers with random weights, and a classifier on its pooled output."""

    def __init__(self, spread: float) -> None:
        from transformers import BertConfig, BertModel

        super().__init__()
        config = BertConfig(
            vocab_size=40, hidden_size=48, num_hidden_layers=3, num_attention_heads=4, intermediate_size=96,
            max_position_embeddings=32, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
            initializer_range=spread, attn_implementation="eager",
        )  # fmt: skip
        self.bert = BertModel(config)
        self.head = nn.Linear(48, 2)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.bert(input_ids=tokens, attention_mask=(tokens != 0).long()).pooler_output)


def transformers_bert_initializer_range_one(broken: bool = True, batch: int = 0) -> Case:
    torch.manual_seed(0)
    return TopicBert(1.0 if broken else 0.02), *sentences(batch), F.cross_entropy
