"""The fourteenth set's healthy networks of transformers that read or write words."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fifth_parts import Case, chains, generator, sentences


class Reader(nn.Module):
    """A model of transformers for words, of which 0 pads if `padded`; one row of logits per word or per sentence."""

    def __init__(self, network: nn.Module, padded: bool = False) -> None:
        super().__init__()
        self.network, self.padded = network, padded

    def forward(self, x: Tensor) -> Tensor:
        options = {"attention_mask": (x != 0).long()} if self.padded else {}
        logits = self.network(input_ids=x, **options).logits
        return logits.flatten(0, 1) if logits.dim() == 3 else logits


def _albert() -> Case:
    """ALBERT, whose layers share their weights."""
    import transformers

    torch.manual_seed(0)
    config = transformers.AlbertConfig(
        vocab_size=40, embedding_size=32, hidden_size=64, num_hidden_layers=4, num_attention_heads=4,
        intermediate_size=256, max_position_embeddings=32, num_labels=2,
    )  # fmt: skip
    model = Reader(transformers.AlbertForSequenceClassification(config), padded=True)
    return model, *sentences(0, n=8), F.cross_entropy


def _electra() -> Case:
    """ELECTRA's discriminator, which says of each word whether it was replaced."""
    import transformers

    torch.manual_seed(0)
    config = transformers.ElectraConfig(
        vocab_size=100, embedding_size=32, hidden_size=64, num_hidden_layers=3, num_attention_heads=4,
        intermediate_size=256, max_position_embeddings=64,
    )  # fmt: skip
    real, _ = chains(0, n=8, length=48, vocabulary=99)
    draw = generator(240)
    chosen = torch.rand(real.shape, generator=draw) < 0.15
    seen = torch.where(chosen, torch.randint(99, real.shape, generator=draw), real) + 1
    replaced = (seen != real + 1).float()
    return Reader(transformers.ElectraForPreTraining(config)), seen, replaced, F.binary_cross_entropy_with_logits


def _gpt_neox() -> Case:
    """GPT-NeoX: attention and perceptron side by side, rotary positions."""
    import transformers

    torch.manual_seed(0)
    config = transformers.GPTNeoXConfig(
        vocab_size=200, hidden_size=64, num_hidden_layers=3, num_attention_heads=4, intermediate_size=256,
        max_position_embeddings=64, bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    return Reader(transformers.GPTNeoXForCausalLM(config)), *chains(0, n=8, length=32, vocabulary=200), F.cross_entropy


def _mixtral() -> Case:
    """Mixtral: two of four experts for each word."""
    import transformers

    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        vocab_size=200, hidden_size=64, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=96, num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=64,
    )  # fmt: skip
    return Reader(transformers.MixtralForCausalLM(config)), *chains(0, n=8, length=32, vocabulary=200), F.cross_entropy


class Rewriter(nn.Module):
    """An encoder and a decoder of transformers; the second row of a pair is what has been written so far."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: Tensor) -> Tensor:
        return self.network(input_ids=x[:, 0], decoder_input_ids=x[:, 1]).logits.flatten(0, 1)


def _bart() -> Case:
    """BART, which restores sentences of which words were masked."""
    import transformers

    torch.manual_seed(0)
    config = transformers.BartConfig(
        vocab_size=100, d_model=64, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=256, decoder_ffn_dim=256, max_position_embeddings=64,
        pad_token_id=1, bos_token_id=0, eos_token_id=2, decoder_start_token_id=2, forced_eos_token_id=None,
    )  # fmt: skip
    whole = chains(0, n=8, length=24, vocabulary=96)[0] + 4
    masked = whole.masked_fill(torch.rand(whole.shape, generator=generator(241)) < 0.3, 3)
    begun = torch.cat([torch.full((8, 1), 2), whole[:, :-1]], 1)
    model = Rewriter(transformers.BartForConditionalGeneration(config))
    return model, torch.stack([masked, begun], 1), whole.flatten(), F.cross_entropy


def _modernbert() -> Case:
    """ModernBERT, which gives each word a tag; the tag of padding does not count."""
    import transformers

    torch.manual_seed(0)
    config = transformers.ModernBertConfig(
        vocab_size=60, hidden_size=64, num_hidden_layers=4, num_attention_heads=4, intermediate_size=96,
        max_position_embeddings=64, local_attention=8, global_attn_every_n_layers=2, num_labels=5, pad_token_id=0,
        bos_token_id=1, cls_token_id=1, eos_token_id=2, sep_token_id=2, attn_implementation="sdpa",
    )  # fmt: skip
    seen, _ = sentences(0, n=8, length=32, vocabulary=60)
    tags = (seen % 5).masked_fill(seen == 0, -100).flatten()
    return Reader(transformers.ModernBertForTokenClassification(config), padded=True), seen, tags, F.cross_entropy


LIBRARY: dict[str, Callable[[], Case]] = {
    "transformers_albert": _albert,
    "transformers_electra": _electra,
    "transformers_gpt_neox": _gpt_neox,
    "transformers_mixtral": _mixtral,
    "transformers_bart": _bart,
    "transformers_modernbert": _modernbert,
}
