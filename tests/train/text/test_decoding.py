"""Greedy and beam search, held against every sequence there is, and against a beam written with lists."""

import itertools
import math
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import normfree as nf
from normfree.models.transformer import Memory
from normfree.nn.attention import END, PAD, START, UNKNOWN
from normfree.nn.model_state import eval_mode
from normfree.train.text import decoding
from normfree.train.text.decoding import _SPECIAL, Longest, _limits, beam_search, source_plus_50

V = 7
WORDS = (UNKNOWN, 4, 5, 6)
SPECIAL = {PAD, START, END}
LONGEST = 3
EVERYTHING = sum(len(WORDS) ** n for n in range(LONGEST + 1))
SOURCES = [[END], [4, END], [5, 6, 4, 4, END], [6, 6, END], [1, 5, 4, 6, 5, 4, 4, END]]
PENALTIES = (-1.0, 0.0, 0.6, 1.0, 2.5)


class Prefixes:
    """The cache of a model that keeps no keys: all tokens so far, and the memory of each row."""

    def __init__(self, memory: Memory, length: int) -> None:
        self.memory, self.length = memory, length
        self.tokens = memory.real.new_zeros((len(memory.real), 0), dtype=torch.int64)

    def grow(self, target: Tensor) -> Tensor:
        self.tokens = torch.cat([self.tokens, target], 1)
        assert self.tokens.shape[1] <= self.length, "the search asks for more positions than it announced"
        return self.tokens

    def reorder(self, index: Tensor, *, memory: bool = True) -> "Prefixes":
        self.tokens = self.tokens[index]
        if memory:
            self.memory = Memory(self.memory.states[index], self.memory.real[index])
        return self


class Uncached(nn.Module):
    """A Transformer that reads the whole beginning again in each step."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def encode(self, source: Tensor) -> Memory:
        return self.model.encode(source)  # type: ignore[operator,no-any-return]

    def start_cache(self, memory: Memory, length: int) -> Prefixes:
        return Prefixes(memory, length)

    def decode(self, target: Tensor, memory: Memory, cache: Prefixes) -> Tensor:
        return self.model.decode(cache.grow(target), cache.memory)[:, -1:]  # type: ignore[operator,no-any-return]


class Table(nn.Module):
    """A made-up table: the logits of what follows a beginning, as a function of the source's tokens and it."""

    def __init__(self, row: Callable[[tuple[int, ...], tuple[int, ...]], Tensor]) -> None:
        super().__init__()
        self.row = row
        self.steps = 0

    def encode(self, source: Tensor) -> Memory:
        return Memory(source.unsqueeze(2).double(), source != PAD)

    def start_cache(self, memory: Memory, length: int) -> Prefixes:
        return Prefixes(memory, length)

    def decode(self, target: Tensor, memory: Memory, cache: Prefixes) -> Tensor:
        self.steps += 1
        prefixes = cache.grow(target)[:, 1:].tolist()
        sources = [[int(t) for t in row if t] for row in cache.memory.states.squeeze(2).tolist()]
        return torch.stack([self.row(tuple(s), tuple(p)) for s, p in zip(sources, prefixes, strict=True)]).unsqueeze(1)


@torch.no_grad()
def greedy(model: Any, source: Tensor, *, longest: Longest = source_plus_50) -> list[list[int]]:
    """The oracle: take the likeliest token at each step. Ties go to END, then to the smallest token id."""
    limits = _limits(model, source, longest)
    if not limits:
        return []
    with eval_mode(model):
        memory = model.encode(source)
        cache = model.start_cache(memory, max(limits) + 1)
        most, special = source.new_tensor(limits), source.new_tensor(_SPECIAL)
        taken = source.new_full((len(source), max(limits)), END)
        last, ended = source.new_full((len(source), 1), START), most < 1
        for step in range(max(limits)):
            logits = model.decode(last, memory, cache)[:, -1]
            highest, word = logits.index_fill(1, special, -math.inf).max(1)
            ended = ended | (logits[:, END] >= highest) | (most <= step)
            taken[:, step] = torch.where(ended, END, word)
            last = word.unsqueeze(1)
            if decoding._checks_at(step, source.device) and bool(ended.all()):
                break
    return [row[: row.index(END)] if END in row else row for row in taken.tolist()]


def drawn_row(source: tuple[int, ...], prefix: tuple[int, ...]) -> Tensor:
    generator = torch.Generator().manual_seed(hash((source, prefix)) % 2**31)
    return 2 * torch.randn(V, generator=generator, dtype=torch.float64)


def tiny(method: str = "layernorm", seed: int = 0, **options: object) -> nn.Module:
    """A Transformer of random weights, large enough that what it says depends on what it read."""
    generator = torch.Generator().manual_seed(seed)
    model = nf.build("transformer-1-2-8-16-2", method=method, num_classes=V, dropout=0.0, **options).double()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1 or parameter.numel() == 1:  # biases would say the same whatever was read
                scale = 2.0 if "cross" in name else 0.6
                parameter.copy_(scale * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return model.eval()


def models() -> list[nn.Module]:
    return [Table(drawn_row), tiny("layernorm", 3), tiny("fixup", 1), tiny("fixup", 3)]


def padded(sources: list[list[int]] = SOURCES, more: int = 0) -> Tensor:
    width = max(map(len, sources)) + more
    return torch.tensor([row + [PAD] * (width - len(row)) for row in sources])


def log_probabilities(model: nn.Module, source: list[int], prefix: tuple[int, ...]) -> Tensor:
    """log p of each token after a beginning, without cache, padding or batch."""
    with torch.no_grad():
        if isinstance(model, Table):
            logits = model.row(tuple(source), prefix)
        else:
            logits = model(torch.tensor([source]), torch.tensor([[START, *prefix]]))[0, -1]
    return logits.double().log_softmax(0)


def normalized(log_p: float, tokens: tuple[int, ...], penalty: float) -> float:
    return log_p / (len(tokens) + 1) ** penalty


def every_end(model: nn.Module, source: list[int]) -> dict[tuple[int, ...], float]:
    """log p of every sequence of at most LONGEST words, its END counted."""
    log_p = {(): 0.0}
    ends = {}
    for length in range(LONGEST + 1):
        for tokens in itertools.product(WORDS, repeat=length):
            after = log_probabilities(model, source, tokens).tolist()
            ends[tokens] = log_p[tokens] + after[END]
            log_p.update({(*tokens, word): log_p[tokens] + after[word] for word in WORDS})
    assert len(ends) == EVERYTHING
    return ends


def listed_beam(model: nn.Module, source: list[int], beam: int, penalty: float, longest: int) -> list[int]:
    """The rule of the docstring in plain lists, one sentence at a time, and no end as long as anything goes on."""
    held: list[tuple[float, float, tuple[int, ...]]] = [(0.0, 0.0, ())]  # score, log p, tokens
    best: tuple[float, tuple[int, ...]] = (float("-inf"), ())
    for step in range(longest + 1):
        candidates = [h for h in held if h[2] and h[2][-1] == END]
        for _, log_p, tokens in (h for h in held if not h[2] or h[2][-1] != END):
            after = log_probabilities(model, source, tokens).tolist()
            for token in (END,) if step == longest else (END, *WORDS):
                total = log_p + after[token]
                candidates.append((total / (step + 1) ** penalty, total, (*tokens, token)))
        held = sorted(candidates, reverse=True)[:beam]
        best = max([best, *((score, tokens[:-1]) for score, _, tokens in held if tokens[-1] == END)])
    return list(best[1])


@pytest.mark.parametrize("model", models(), ids=["table", "layernorm", "fixup", "fixup again"])
def test_full_beam_is_exhaustive_search(model: nn.Module) -> None:
    ends = [every_end(model, source) for source in SOURCES]
    found = set()
    for penalty in PENALTIES:
        expected = [list(max(e, key=lambda t: normalized(e[t], t, penalty))) for e in ends]
        assert beam_search(model, padded(), beam=EVERYTHING, length_penalty=penalty, longest=LONGEST) == expected
        found |= {(len(tokens), penalty) for tokens in expected}
    assert len({length for length, _ in found}) > 1, "the penalty makes no difference: the test shows nothing"


@pytest.mark.parametrize("model", models(), ids=["table", "layernorm", "fixup", "fixup again"])
@pytest.mark.parametrize("beam", [1, 2, 3, 5])
def test_narrow_beam_follows_its_rule(model: nn.Module, beam: int) -> None:
    for penalty in (0.0, 1.0, 2.5):
        expected = [listed_beam(model, source, beam, penalty, 6) for source in SOURCES]
        assert beam_search(model, padded(), beam=beam, length_penalty=penalty, longest=6) == expected


def test_narrow_beam_is_not_exhaustive() -> None:
    model = Table(drawn_row)
    wide = beam_search(model, padded(), beam=EVERYTHING, longest=LONGEST)
    assert beam_search(model, padded(), beam=2, longest=LONGEST) != wide


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("method", ["layernorm", "fixup"])
def test_beam_of_one_is_greedy(method: str, dtype: torch.dtype) -> None:
    lengths = set()
    for seed in range(5):
        model = tiny(method, seed).to(dtype)
        expected = greedy(model, padded(), longest=12)
        for penalty in (0.0, 1.0):
            assert beam_search(model, padded(), beam=1, length_penalty=penalty, longest=12) == expected
        lengths |= set(map(len, expected))
    assert {0, 12} < lengths, "some end early, some late, some not at all"


def test_beam_of_one_is_greedy_among_equals() -> None:
    def coarse(source: tuple[int, ...], prefix: tuple[int, ...]) -> Tensor:
        return drawn_row(source, prefix).sign()

    model = Table(coarse)
    sources = [[*tokens, END] for tokens in itertools.product(WORDS, repeat=2)]
    found = greedy(model, padded(sources), longest=9)
    assert found == beam_search(model, padded(sources), beam=1, longest=9)
    assert any(found)
    level = Table(lambda source, prefix: torch.zeros(V))
    assert greedy(level, padded()) == beam_search(level, padded(), beam=1) == [[]] * len(SOURCES)


def test_beam_of_one_keeps_the_order_of_logits_that_hardly_differ() -> None:
    """With float32 scores the word and END would become equal, and END would win."""
    row = torch.full((V,), -20.0)
    row[6], row[END] = 2e-7, 1e-7
    model = Table(lambda source, prefix: row)
    assert greedy(model, padded(), longest=30) == [[6] * 30] * len(SOURCES)
    assert beam_search(model, padded(), beam=1, longest=30) == [[6] * 30] * len(SOURCES)


@pytest.mark.parametrize("method", ["layernorm", "fixup", "rezero"])
def test_batched_is_single(method: str) -> None:
    model = tiny(method, 3)
    for decode in (greedy, lambda *a, **k: beam_search(*a, beam=3, **k)):
        for longest in (source_plus_50, 5, lambda length: 2 * length):
            single = [decode(model, torch.tensor([source]), longest=longest)[0] for source in SOURCES]
            for more in (0, 4):
                assert decode(model, padded(more=more), longest=longest) == single
            assert decode(model, padded(SOURCES[::-1]), longest=longest) == single[::-1]
            assert len({tuple(row) for row in single}) > 1, "all are the same: the test shows nothing"
    filled = padded()
    filled[filled == PAD] = 4  # the control: what stands behind a sentence would matter were it not padding
    assert beam_search(model, filled) != beam_search(model, padded())


@pytest.mark.parametrize("beam", [1, 4])
def test_cached_is_uncached(beam: int) -> None:
    for seed in (0, 1, 3):
        model = tiny("fixup", seed)
        expected = beam_search(Uncached(model), padded(), beam=beam, longest=10)
        assert beam_search(model, padded(), beam=beam, longest=10) == expected
        assert greedy(model, padded(), longest=10) == greedy(Uncached(model), padded(), longest=10)
        assert max(map(len, expected)) > 3


def chances(**rows: dict[int, float]) -> Table:
    """A table from the probabilities after beginnings, which are written as digits."""
    known = {tuple(map(int, name.strip("_"))): row for name, row in rows.items()}

    def row(source: tuple[int, ...], prefix: tuple[int, ...]) -> Tensor:
        after = known.get(prefix, {END: 1.0})
        return torch.tensor([after.get(token, 0.0) for token in range(V)], dtype=torch.float64).log()

    return Table(row)


def test_ended_hypotheses_compete_by_the_penalty() -> None:
    """One word has probability 0.3 with its end, three words 0.216: 0.3^(1/2) < 0.216^(1/4), 0.3 > 0.216."""
    model = chances(_={4: 0.3, 5: 0.6, 6: 0.1}, _5={5: 0.6, 6: 0.4}, _55={5: 0.6, 6: 0.4}, _6={6: 1.0}, _56={6: 1.0})
    source = padded([[4, END]])
    assert beam_search(model, source, beam=2, length_penalty=0.0) == [[4]]
    assert beam_search(model, source, beam=2, length_penalty=1.0) == [[5, 5, 5]]
    tie = torch.tensor([0.216, 0.3]).double().log()
    turn = float(
        (tie[0] / tie[1]).log() / torch.tensor(2.0).double().log()
    )  # where both scores are equal: n is 4 and 2
    assert 0 < turn < 1
    assert beam_search(model, source, beam=2, length_penalty=turn - 0.01) == [[4]]
    assert beam_search(model, source, beam=2, length_penalty=turn + 0.01) == [[5, 5, 5]]


def test_an_end_counts_only_among_the_best() -> None:
    """END at once has the best mean there will be, but two words are likelier: it counts from a width of 3."""
    poor = {END: 0.05, 4: 0.05, 5: 0.45, 6: 0.45}
    model = chances(_={4: 0.36, 5: 0.34, END: 0.3}, _4=poor, _5=poor)
    source = padded([[4, END]])
    assert len(beam_search(model, source, beam=2, longest=1)[0]) == 1
    assert beam_search(model, source, beam=3, longest=1) == [[]]


@pytest.mark.parametrize("decode", [greedy, beam_search])
def test_decoding_ends_at_longest(decode: Callable[..., list[list[int]]]) -> None:
    row = torch.tensor([9.0, 0.0, 9.0, -9.0, 1.0, 0.0, 0.0])
    model = Table(lambda source, prefix: row)
    assert decode(model, padded(), longest=4) == [[4] * 4] * len(SOURCES)
    assert decode(model, padded(), longest=0) == [[]] * len(SOURCES)
    assert decode(model, padded()) == [[4] * (len(source) + 50) for source in SOURCES]
    assert decode(model, padded(), longest=lambda n: n // 2) == [[4] * (len(source) // 2) for source in SOURCES]


@pytest.mark.parametrize("decode", [greedy, beam_search])
def test_special_tokens_never_appear(decode: Callable[..., list[list[int]]]) -> None:
    def row(source: tuple[int, ...], prefix: tuple[int, ...]) -> Tensor:
        logits = drawn_row(source, prefix)
        logits[[PAD, START]] += 20.0
        return logits

    found = decode(Table(row), padded())
    assert any(found)
    assert not SPECIAL & {token for tokens in found for token in tokens}


@pytest.mark.parametrize("decode", [greedy, beam_search])
def test_a_diverged_model_comes_to_an_end(decode: Callable[..., list[list[int]]]) -> None:
    found = decode(Table(lambda source, prefix: torch.full((V,), float("nan"))), padded(), longest=5)
    assert len(found) == len(SOURCES)
    assert not SPECIAL & {token for tokens in found for token in tokens}


@pytest.mark.parametrize("decode", [greedy, beam_search])
def test_an_empty_sentence_is_translated(decode: Callable[..., list[list[int]]]) -> None:
    model = tiny("fixup", 1)
    (alone,) = decode(model, torch.tensor([[END]]))
    assert decode(model, torch.tensor([[END, PAD, PAD]])) == [alone]
    assert len(alone) <= 51
    assert decode(model, torch.zeros((0, 3), dtype=torch.int64)) == []


@pytest.mark.parametrize("autocast", [False, True])
def test_half_precision_works(autocast: bool) -> None:
    model = tiny("layernorm", 6).to(torch.float32 if autocast else torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
        found = beam_search(model, padded(), beam=3, longest=8)
        assert beam_search(model, padded(), beam=1, longest=8) == greedy(model, padded(), longest=8)
    assert any(found)


@pytest.mark.parametrize("decode", [greedy, beam_search])
def test_modes_and_gradients_are_left_alone(decode: Callable[..., list[list[int]]]) -> None:
    model = nf.build("transformer-1-1-8-16-2", method="fixup", num_classes=V, dropout=0.5)
    model.train()
    model.encoder.eval()
    modes = [module.training for module in model.modules()]
    seen = []
    model.classifier.register_forward_hook(lambda m, i, out: seen.append((m.training, out.requires_grad)))
    assert decode(model, padded(), longest=6) == decode(model, padded(), longest=6)
    assert set(seen) == {(False, False)}
    assert [module.training for module in model.modules()] == modes
    assert torch.is_grad_enabled()
    with pytest.raises(IndexError):
        decode(model, torch.tensor([[V, END]]))
    assert [module.training for module in model.modules()] == modes


class Waits(TorchDispatchMode):
    """Counts the operations for which a host waits on a device."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        name = str(func)
        self.count += any(part in name for part in ("_local_scalar_dense", "nonzero", "masked_select", "is_nonzero"))
        return func(*args, **(kwargs or {}))


def ends_after(*lengths: int) -> Table:
    """Source number i is translated by a word as often as the i-th length says."""
    word, end = torch.zeros(V), torch.zeros(V)
    word[4] = end[END] = 30.0
    return Table(lambda source, prefix: word if len(prefix) < lengths[len(source) - 1] else end)


@pytest.mark.parametrize("decode", [greedy, beam_search])
def test_device_is_seldom_waited_for(decode: Callable[..., list[list[int]]], monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = (3, 40, 0, 7, 21)
    sources = [[4] * n + [END] for n in range(5)]
    expected = [[4] * n for n in lengths]
    assert decode(ends_after(*lengths), padded(sources), longest=60) == expected
    counts = {}
    for every in (1, 8):
        monkeypatch.setattr(decoding, "_checks_at", lambda step, device, every=every: step % every == every - 1)
        model = ends_after(*lengths)
        with Waits() as waits:
            assert decode(model, padded(sources), longest=60) == expected
        counts[every] = waits.count
        assert 41 <= model.steps <= 41 + every
    assert counts[8] <= 8
    assert counts[1] > 30


def test_bad_ends_do_not_cut_a_sentence_off() -> None:
    """The model is sure of 40 words; the other places of the beam fill with ends that are as bad as any word."""
    assert beam_search(ends_after(40), padded([[END]]), beam=5) == [[4] * 40]


def test_a_search_ends_when_nothing_better_can_come() -> None:
    sure = torch.full((V,), -30.0, dtype=torch.float64)
    sure[END] = 0.0
    model = Table(lambda source, prefix: sure)
    assert beam_search(model, padded(), beam=4) == [[]] * len(SOURCES)
    assert model.steps == 1


@pytest.mark.parametrize("decode", [greedy, beam_search])
def test_bad_input_is_refused(decode: Callable[..., list[list[int]]]) -> None:
    model = tiny()
    with pytest.raises(ValueError, match=r"expected a source \(N, S\) of tokens as int64, got \(3,\) of torch.int64"):
        decode(model, torch.tensor([4, 5, END]))
    with pytest.raises(ValueError, match=r"got \(1, 1\) of torch.float32"):
        decode(model, torch.ones(1, 1))
    with pytest.raises(ValueError, match=r"an empty sentence is a row of END"):
        decode(model, torch.zeros((2, 0), dtype=torch.int64))
    with pytest.raises(ValueError, match="0 or more, as the longest translation, got -1"):
        decode(model, padded(), longest=-1)
    with pytest.raises(ValueError, match=r"as the longest translation, got 1\.5"):
        decode(model, padded(), longest=lambda n: n * 1.5)
    with pytest.raises(ValueError, match="expected a model that encodes and decodes, got Decoder"):
        decode(nf.build("decoder-1-8-16-2", method="fixup", num_classes=V), padded())


@pytest.mark.parametrize("bad", [{"beam": 0}, {"length_penalty": float("nan")}, {"length_penalty": 11.0}])
def test_bad_settings_are_refused(bad: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="expected a beam of 1 or more and a length penalty from -10 to 10, got"):
        beam_search(tiny(), padded(), **bad)


@pytest.mark.gpu
@pytest.mark.parametrize("decode", [greedy, beam_search])
def test_gpu_gives_the_same_and_is_seldom_waited_for(decode: Callable[..., list[list[int]]]) -> None:
    model = tiny("fixup", 3)
    expected = decode(model, padded(), longest=40)
    model, source = model.cuda(), padded().cuda()
    assert decode(model, source, longest=40) == expected
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            decode(model, source, longest=40)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert len([w for w in caught if "synchroniz" in str(w.message)]) < 35  # of 41 steps
