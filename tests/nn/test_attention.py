"""Token embeddings, and attention against an oracle of plain loops in float64: self, causal, cross, masked, cached."""

import math

import pytest
import torch
from torch import Tensor, nn

from normfree.nn.attention import Attention, KeyValueCache, TokenEmbedding, sinusoids
from normfree.nn.scalars import ScalarBias


@pytest.mark.parametrize("width", [6, 7])
def test_sinusoids_follow_the_formula(width: int) -> None:
    found = sinusoids(3, 4, width, torch.zeros(1, dtype=torch.float64))
    half = (width + 1) // 2
    for row, t in enumerate(range(3, 7)):
        for i in range(width):
            angle = t * 10000 ** (-(i % half) / (half - 1))
            wanted = math.sin(angle) if i < half else math.cos(angle)
            assert found[row, i].item() == pytest.approx(wanted, abs=1e-5)


def test_positions_continue_where_they_were() -> None:
    embedding = TokenEmbedding(10, 8)
    tokens = torch.tensor([[4, 5, 6, 7]])
    torch.testing.assert_close(embedding(tokens)[:, 2:], embedding(tokens[:, 2:], 2))
    assert not torch.allclose(embedding(tokens)[:, 2:], embedding(tokens[:, 2:]))  # the control
    torch.testing.assert_close(
        embedding(tokens) - sinusoids(0, 4, 8, torch.zeros(1)), embedding.weight[tokens] * 8**0.5
    )


N, T, S, WIDTH, HEADS = 2, 5, 7, 12, 3


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def made(seed: int = 0, **options: object) -> Attention:
    """An attention in float64 whose every number is drawn, biases and scalars too."""
    attention = Attention(WIDTH, HEADS, **options).double()
    for parameter in attention.parameters():
        nn.init.normal_(parameter, std=0.5, generator=seeded(seed + parameter.numel()))
    return attention


def signal(seed: int, length: int) -> Tensor:
    return torch.randn(N, length, WIDTH, generator=seeded(seed), dtype=torch.float64)


def linear(layer: nn.Linear, x: list[float], shift: float = 0.0) -> list[float]:
    rows, bias = layer.weight.tolist(), layer.bias.tolist() if layer.bias is not None else [0.0] * len(layer.weight)
    return [sum(w * (v + shift) for w, v in zip(row, x, strict=True)) + b for row, b in zip(rows, bias, strict=True)]


def oracle(attention: Attention, x: Tensor, memory: Tensor | None, real: list[list[bool]] | None) -> Tensor:
    """softmax(q·k/√d) v by loops over sequences, heads, queries and keys."""
    shift = attention.memory_bias.value.item() if isinstance(attention.memory_bias, ScalarBias) else 0.0
    before_out = attention.bias.value.item() if isinstance(attention.bias, ScalarBias) else 0.0
    size = WIDTH // HEADS
    out = torch.zeros_like(x)
    for n in range(len(x)):
        source = (x if memory is None else memory)[n].tolist()
        queries = [linear(attention.q, v) for v in x[n].tolist()]
        keys = [linear(attention.k, v, shift) for v in source]
        values = [linear(attention.v, v, shift) for v in source]
        for t, query in enumerate(queries):
            seen = [s for s in range(len(keys)) if not (attention.causal and s > t) and (real is None or real[n][s])]
            joined: list[float] = []
            for h in range(HEADS):
                part = range(h * size, (h + 1) * size)
                logits = [sum(query[i] * keys[s][i] for i in part) / math.sqrt(size) for s in seen]
                weights = [math.exp(logit - max(logits)) for logit in logits]
                share = [w / sum(weights) for w in weights]
                joined += [sum(p * values[s][i] for p, s in zip(share, seen, strict=True)) for i in part]
            out[n, t] = torch.tensor(linear(attention.out, joined, before_out), dtype=torch.float64)
    return out


@pytest.mark.parametrize("scalars", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("kind", ["self", "causal", "cross"])
@torch.no_grad()
def test_attention_equals_the_loops(kind: str, masked: bool, scalars: bool) -> None:
    attention = made(causal=kind == "causal", cross=kind == "cross", scalar_biases=scalars)
    x, memory = signal(1, T), signal(2, S) if kind == "cross" else None
    length = T if memory is None else S
    real = [[True] * length, [True] * (length - 2) + [False] * 2] if masked else None
    mask = None if real is None else torch.tensor(real)[:, None, None, :]
    torch.testing.assert_close(attention(x, memory, mask), oracle(attention, x, memory, real))


@torch.no_grad()
def test_oracle_tells_masks_apart() -> None:
    """The control: another mask, or none, is another result."""
    attention, x = made(), signal(1, T)
    whole = oracle(attention, x, None, None)
    assert not torch.allclose(whole, oracle(attention, x, None, [[True] * T, [True] * (T - 1) + [False]]))
    assert not torch.allclose(whole, oracle(made(causal=True), x, None, None))


@pytest.mark.parametrize("steps", [[1] * T, [2, 3], [T], [3, 1, 1]])
@torch.no_grad()
def test_cached_attention_equals_the_whole(steps: list[int]) -> None:
    attention, x = made(causal=True), signal(1, T)
    cache = attention.empty_cache(N, T + 2)
    parts = [attention(part, None, None, cache) for part in x.split(steps, dim=1)]
    torch.testing.assert_close(torch.cat(parts, 1), attention(x))
    assert cache.used == T


@torch.no_grad()
def test_remembered_memory_equals_the_memory() -> None:
    attention, x, memory = made(cross=True, scalar_biases=True), signal(1, T), signal(2, S)
    torch.testing.assert_close(attention(x, None, None, attention.memory_cache(memory)), attention(x, memory))


@torch.no_grad()
def test_reordered_cache_continues_the_chosen_rows() -> None:
    attention, x = made(causal=True), signal(1, T)
    for index in ([1, 0], [1, 1], [0, 1, 1]):
        cache = attention.empty_cache(N, T)
        attention(x[:, :3], None, None, cache)
        cache.reorder(torch.tensor(index))
        again = attention(x[index][:, 3:], None, None, cache)
        torch.testing.assert_close(again, attention(x[index])[:, 3:])


def test_full_cache_is_refused() -> None:
    attention, x = made(causal=True), signal(1, T)
    with pytest.raises(ValueError, match=r"expected at most 4 more positions of 2 sequences in the cache, got 5 of 2"):
        attention(x, None, None, attention.empty_cache(N, T - 1))
    cache = attention.empty_cache(N + 1, T)
    with pytest.raises(ValueError, match=r"of 3 sequences in the cache, got 5 of 2; .*reorder it"):
        attention(x, None, None, cache)
    assert cache.used == 0
    assert isinstance(cache, KeyValueCache)


def test_impossible_attention_is_refused() -> None:
    with pytest.raises(ValueError, match="expected a width that the heads divide, got 12 and 5"):
        Attention(12, 5)
    with pytest.raises(ValueError, match="expected causal or cross attention, got both"):
        Attention(12, 3, causal=True, cross=True)


def test_empty_batch_gives_an_empty_batch() -> None:
    assert made()(torch.zeros(0, T, WIDTH, dtype=torch.float64)).shape == (0, T, WIDTH)
    memory = torch.zeros(0, S, WIDTH, dtype=torch.float64)
    assert made(cross=True)(torch.zeros(0, T, WIDTH, dtype=torch.float64), memory).shape == (0, T, WIDTH)


def test_bias_of_the_keys_would_learn_nothing() -> None:
    """The reason why there is none: it adds the same number to every logit of a query."""
    attention, x = made(), signal(1, T)
    attention.k.bias = nn.Parameter(torch.ones(WIDTH, dtype=torch.float64))
    attention(x).square().sum().backward()
    assert attention.k.bias.grad.abs().max() < 1e-12 * attention.v.bias.grad.abs().max() * 1e3
    assert attention.q.bias.grad.abs().max() > 1e-3
