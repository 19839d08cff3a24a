"""Training on tokens: loss and score against brute force, models that learn, and what a run keeps."""

import json
import math
import sys
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import normfree as nf
from normfree.data.text.pair_batches import PairBatch, PairBatches
from normfree.data.text.prepared_folder import Prepared
from normfree.data.text.tokens import TokenPairs
from normfree.methods import names
from normfree.nn.attention import END, PAD, START
from normfree.nn.model_state import eval_mode
from normfree.train import RunFolder, RunResult, evaluate_translation, read_config
from normfree.train.engine import loop as engine
from normfree.train.engine import setup
from normfree.train.engine.distributed import Processes
from normfree.train.engine.forward import apply_precision_
from normfree.train.engine.setup import score, sum_scores
from normfree.train.engine.step import TrainStep
from normfree.train.text.text_data import TextData, token_loss, token_sums
from tiny_text import SIZE, copied, drawn, tiny_pairs, tiny_text, turned

ADAM = {"optimizer": "adam", "betas": (0.9, 0.98), "weight_decay": 0.0, "device": "cpu"}
TINY = {**ADAM, "model": "transformer-1-1-16-32-2", "lr": 1e-3, "batch_size": 60, "epochs": 1, "beam": 2}
TINY_TEXT = {**ADAM, "model": "decoder-2-16-32-2", "lr": 1e-3, "batch_size": 8, "block": 16, "epochs": 1}


def admits(method: str) -> bool:
    """Whether a Transformer can be built by the method."""
    try:
        nf.build("transformer-1-1-16-32-2", method, num_classes=9, device="meta")
    except ValueError:
        return False
    return True


METHODS = [name for name in names() if admits(name)]


def config(**changes: Any) -> nf.TrainConfig:
    return nf.TrainConfig(**{**TINY, **changes})


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


@pytest.fixture(autouse=True)
def no_picture(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine, "write_curves", lambda *_: None)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    return tiny_pairs(tmp_path_factory.mktemp("pairs"))


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    return tiny_text(tmp_path_factory.mktemp("text"))


# Loss and score


def brute_force(logits: Tensor, labels: Tensor, smoothing: float) -> tuple[float, float]:
    """Mean loss and hits of the real tokens, each by its definition in float64."""
    losses, hits = [], []
    for scores, label in zip(logits.double().flatten(0, 1), labels.flatten().tolist(), strict=True):
        if label != PAD:
            log_p = (scores - scores.max()) - math.log(float((scores - scores.max()).exp().sum()))
            losses.append(-(1 - smoothing) * float(log_p[label]) - smoothing * float(log_p.mean()))
            hits.append(int(scores.argmax()) == label)
    return sum(losses) / len(losses), sum(hits) / len(hits)


def scattered(model: nn.Module) -> nn.Module:
    """Weights of a size at which no token is as likely as another."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.4, generator=generator)
    return model


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_loss_is_the_mean_over_real_tokens(pairs: Prepared, smoothing: float) -> None:
    for batch in TextData(pairs).batches(config(), "train").once():
        labels, tokens = batch[-2:]
        logits = torch.randn(*labels.shape, SIZE, generator=torch.Generator().manual_seed(1)) * 3
        assert tokens == (labels != PAD).sum()
        loss, hits = token_loss(lambda *_, found=logits: found, batch, smoothing)
        assert (float(loss), float(hits)) == pytest.approx(brute_force(logits, labels, smoothing), rel=1e-6)


def test_padding_has_no_part_in_loss_and_gradient(pairs: Prepared) -> None:
    model = TextData(pairs).build_model(config())[0]
    scattered(model)
    batch = TextData(pairs).batches(config(), "train").batch(0)
    wider = PairBatch(*(torch.nn.functional.pad(side, (0, 3), value=PAD) for side in batch[:3]), tokens=batch.tokens)
    gradients = []
    for given in (batch, wider):
        loss, hits = token_loss(model, given, 0.1)
        gradients.append((loss, hits, *torch.autograd.grad(loss, list(model.parameters()))))
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)  # rounding in float32
    with torch.no_grad():
        counted = torch.nn.functional.cross_entropy(model(*wider[:2]).flatten(0, 1), wider.target_out.flatten())
        assert abs(float(counted - token_loss(model, wider, 0.0)[0])) > 1e-2  # the control: with padding


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("kind", ["pairs", "text"])
def test_processes_together_have_the_loss_and_gradient_of_one(
    pairs: Prepared, text: Prepared, kind: str, world: int
) -> None:
    data = pairs if kind == "pairs" else text
    settings = config() if kind == "pairs" else nf.TrainConfig(**{**TINY_TEXT, "batch_size": 6})
    model = scattered(TextData(data).build_model(settings)[0])

    def of(processes: Processes, step: int) -> list[Tensor]:
        feed = TextData(data).batches(settings, "train", processes=processes)
        loss, hits = token_loss(model, feed.batch(torch.tensor(step)), 0.1, world=processes.world)
        return [loss, hits, *torch.autograd.grad(loss, list(model.parameters()))]

    for step in (0, 1, 2):
        alone = of(Processes(), step)
        parts = [of(Processes(rank, world), step) for rank in range(world)]
        for number, whole in enumerate(alone):
            mean = sum(part[number] for part in parts) / world
            torch.testing.assert_close(mean, whole, rtol=1e-4, atol=1e-4)


def test_score_is_that_of_the_sentences_one_by_one(pairs: Prepared) -> None:
    """No padding, no batches, float64; an empty sentence is a token, too."""
    model = scattered(TextData(pairs).build_model(config(dropout=0.5))[0])
    model.train()
    found = score(model, TextData(pairs).batches(config(), "test").once(), token_sums)
    assert model.training
    losses = hits = tokens = 0.0
    model.double()
    with eval_mode(model), torch.no_grad():
        for source, target in (pairs.pairs("test")[i] for i in range(len(pairs.pairs("test")))):
            labels = torch.tensor([[*target, END]])
            logits = model(torch.tensor([[*source, END]]), torch.tensor([[START, *target]]))
            loss, hit = brute_force(logits, labels, 0.0)
            losses, hits, tokens = losses + loss * labels.numel(), hits + hit * labels.numel(), tokens + labels.numel()
    assert tuple(found) == pytest.approx((losses / tokens, hits / tokens), rel=1e-6)


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("kind", ["pairs", "text"])
def test_processes_together_have_the_score_of_one(pairs: Prepared, text: Prepared, kind: str, world: int) -> None:
    data = pairs if kind == "pairs" else text
    settings = config() if kind == "pairs" else nf.TrainConfig(**{**TINY_TEXT, "batch_size": 6})
    model = scattered(TextData(data).build_model(settings)[0])
    parts: list[Tensor] = []
    for rank in range(world):
        feed = TextData(data).batches(settings, "test", processes=Processes(rank, world))
        sums_of = partial(token_sums, world=world)
        parts.append(sum_scores(model, feed.once(), sums_of))
    mean = torch.stack(parts).mean(0)
    alone = score(model, TextData(data).batches(settings, "test").once(), token_sums)
    assert (mean[:2] / mean[2]).tolist() == pytest.approx(list(alone), rel=1e-6)


# What is learnt

LEARNS = {**ADAM, "model": "transformer-1-1-32-64-4", "lr": 0.01, "batch_size": 400, "schedule": "cosine"}
LEARNS |= {"warmup": 20.0, "warmup_in": "steps", "beam": 2}


def learnt(folder: Path, rewrite: Any, method: str, *, longest: int, epochs: int) -> tuple[float, float]:
    """Accuracy of tokens and BLEU on other sentences, of which only the shortest may have been trained on."""
    data = tiny_pairs(folder, rewrite, longest=longest, train=3000, test=100)
    result = nf.fit(nf.TrainConfig(**{**LEARNS, "method": method, "epochs": epochs}), data=data)
    assert result.status == "finished"
    assert result.test
    assert result.bleu
    return result.test.accuracy, result.bleu.score


@pytest.mark.parametrize("method", [pytest.param("layernorm", marks=pytest.mark.slow), "fixup"])
def test_tiny_model_learns_to_copy(tmp_path: Path, method: str) -> None:
    accuracy, score = learnt(tmp_path, copied, method, longest=8, epochs=7)
    assert accuracy > 0.95
    assert score > 85


@pytest.mark.slow
@pytest.mark.parametrize("method", ["layernorm", "fixup"])
def test_tiny_model_learns_to_reverse(tmp_path: Path, method: str) -> None:
    accuracy, score = learnt(tmp_path, turned, method, longest=6, epochs=15)
    assert accuracy > 0.93
    assert score > 80


@pytest.mark.parametrize(("rewrite", "epochs"), [(drawn, 2), (copied, 0)])
def test_nothing_is_learnt_from_chance_or_without_training(tmp_path: Path, rewrite: Any, epochs: int) -> None:
    accuracy, score = learnt(tmp_path, rewrite, "fixup", longest=8, epochs=epochs)
    assert accuracy < 0.45
    assert score < 20


def unigram_loss(text: Prepared, split: str) -> float:
    """The mean loss of a model that knows how frequent each token of the training text is, and nothing else."""
    counts = Counter(text.text("train").stream().tolist())
    losses = [-math.log(counts[token] / counts.total()) for token in text.text(split).stream().tolist()]
    return sum(losses) / len(losses)


@pytest.mark.parametrize("method", [pytest.param("layernorm", marks=pytest.mark.slow), "fixup"])
def test_language_model_overfits_a_small_text(text: Prepared, method: str) -> None:
    settings = {**TINY_TEXT, "model": "decoder-2-32-64-4", "lr": 0.01, "epochs": 60, "schedule": "cosine"}
    perplexity = {}
    for epochs in (0, settings["epochs"]):
        result = nf.fit(nf.TrainConfig(**{**settings, "method": method, "epochs": epochs}), data=text)
        assert result.bleu is None
        assert result.test
        seen = score(result.model, TextData(text).batches(result.config, "train").once(), token_sums)
        perplexity[epochs] = [math.exp(loss) for loss in (seen.loss, result.test.loss)]
    unigram = [math.exp(unigram_loss(text, split)) for split in ("train", "test")]
    assert all(before > known for before, known in zip(perplexity[0], unigram, strict=True))  # the control
    after = perplexity[settings["epochs"]]
    # Two of thirteen tokens are free, so that all that can be known of another text leaves exp(2/13·ln 10) = 1.42.
    assert after[0] < 1.42 < 0.5 * unigram[0]
    assert after[1] > 2 * after[0]


# Every method, and arithmetic


def test_methods_for_transformers_are_those_of_the_issue() -> None:
    assert {"layernorm", "rmsnorm", "fixup", "tfixup", "deepnorm", "rezero", "skipinit", "admin", "dyt"} <= {*METHODS}
    assert "nf" not in METHODS


@pytest.mark.parametrize("method", METHODS)
def test_every_method_trains_a_step(pairs: Prepared, method: str) -> None:
    result = nf.fit(config(method=method, batch_size=4000, label_smoothing=0.1, lr=1e-2), data=pairs)
    assert (result.status, result.steps) == ("finished", 1)
    assert result.train_loss is not None
    assert math.isfinite(result.train_loss)
    assert result.test
    assert math.isfinite(result.test.loss)
    start = TextData(pairs).build_model(config(method=method, batch_size=4000))[0]
    assert any(not torch.equal(a, b) for a, b in zip(start.parameters(), result.model.parameters(), strict=True))


@pytest.mark.parametrize("method", ["layernorm", "fixup"])
@pytest.mark.parametrize("precision", ["bf16", "mixed"])
@pytest.mark.parametrize("kind", ["pairs", "text"])
def test_lower_precision_trains_on_the_cpu(
    pairs: Prepared, text: Prepared, kind: str, precision: Any, method: str
) -> None:
    data, settings = (pairs, TINY) if kind == "pairs" else (text, TINY_TEXT)
    common = {**settings, "method": method, "dropout": 0.1}
    result = nf.fit(nf.TrainConfig(**common, precision=precision), data=data)
    exact = nf.fit(nf.TrainConfig(**common, precision="float32"), data=data)
    assert result.config.precision == precision
    assert {parameter.dtype for parameter in result.model.parameters()} == {torch.float32}
    assert result.train_loss == pytest.approx(exact.train_loss, rel=0.03)
    assert result.train_loss != exact.train_loss  # else nothing was lowered


@pytest.mark.parametrize("changes", [{"form": "post", "method": "layernorm"}, {"clip": "agc"}, {"clip": "norm"}])
def test_form_and_clipping_are_those_of_the_settings(pairs: Prepared, changes: dict[str, Any]) -> None:
    result = nf.fit(config(**changes), data=pairs)
    assert result.status == "finished"
    assert getattr(result.model, "form") == changes.get("form", "pre")  # noqa: B009


# What a run keeps


@pytest.fixture(scope="module")
def kept(pairs: Prepared, tmp_path_factory: pytest.TempPathFactory) -> tuple[RunResult, Path]:
    """A run in a folder, with a moving average and dropout."""
    out = tmp_path_factory.mktemp("kept") / "run"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine, "write_curves", lambda *_: None)
        return nf.fit(config(method="fixup", dropout=0.1, ema=0.9, lr=1e-2), data=pairs, out=out), out


def test_run_keeps_result_vocabulary_and_translations(
    pairs: Prepared, kept: tuple[RunResult, Path], tmp_path_factory: pytest.TempPathFactory
) -> None:
    result, out = kept
    written = RunFolder(out).read_result()
    assert result.unit == "tokens"
    assert written["tokens_per_second"] == result.throughput > 0
    assert "images_per_second" not in written
    assert result.bleu
    assert written["bleu"] == {"score": result.bleu.score, "signature": result.bleu.signature}
    assert "tok:13a" in result.bleu.signature
    assert (out / "vocabulary.model").read_bytes() == pairs.vocabulary().model
    assert len((out / "translations.txt").read_text().split("\n")[:-1]) == len(pairs.references("test"))
    assert all(record["tokens_per_second"] > 0 for record in RunFolder(out).read_metrics())


def test_result_names_no_folder(kept: tuple[RunResult, Path], pairs: Prepared, tmp_path: Path) -> None:
    result, out = kept
    assert result.config.data == f"pairs:{pairs.folder}"
    assert pairs.folder.is_absolute()
    text = (out / "result.json").read_text()
    assert str(pairs.folder.parent) not in text
    assert json.loads(text)["config"]["data"] == "pairs:pairs"
    RunFolder(tmp_path).write_result(
        {"status": "finished", "command": f"normfree train --set data=pairs:{pairs.folder}", "see": "https://a.org/b/c"}
    )
    assert str(pairs.folder.parent) not in (tmp_path / "result.json").read_text()
    assert RunFolder(tmp_path).read_result()["see"] == "https://a.org/b/c"


@pytest.mark.parametrize(
    "changes",
    [
        {"method": "fixup", "ema": 0.9, "dropout": 0.1},
        {"method": "admin", "form": "post"},
        {"method": "layernorm"},
        {"method": "deepnorm", "precision": "mixed"},
    ],
)
def test_loaded_model_gives_the_logits_of_the_trained_one(
    pairs: Prepared, tmp_path: Path, changes: dict[str, Any]
) -> None:
    result = nf.fit(config(**changes), data=pairs, out=tmp_path)
    again = nf.load(tmp_path)
    batch = next(TextData(pairs).batches(config(), "test").once())
    assert not again.training
    assert torch.equal(again(*batch[:2]), result.model(*batch[:2]))
    state = {name: tensor.clone() for name, tensor in weights(again).items()}
    assert all(torch.equal(state[name], tensor) for name, tensor in weights(result.model).items())
    told: list[tuple[int, int]] = []
    assert evaluate_translation(tmp_path, progress=lambda *now: told.append(now)) == result.bleu
    assert told[-1] == (len(pairs.references("test")),) * 2
    if "precision" not in changes:  # a CPU evaluates in float32
        assert result.test
        assert list(nf.evaluate(tmp_path)) == pytest.approx(list(result.test), rel=1e-6)


def test_loaded_language_model_gives_the_logits_of_the_trained_one(text: Prepared, tmp_path: Path) -> None:
    result = nf.fit(nf.TrainConfig(**TINY_TEXT, dropout=0.2), data=text, out=tmp_path)
    batch = next(TextData(text).batches(result.config, "test").once())
    assert torch.equal(nf.load(tmp_path)(batch.target_in), result.model(batch.target_in))
    assert evaluate_translation(tmp_path) is None


def test_fingerprint_counts_what_changes_translations() -> None:
    base = config()
    prints = {base.fingerprint()}
    for changes in ({"dropout": 0.2}, {"block": 7}, {"beam": 3}, {"length_penalty": 0.5}, {"warmup_in": "steps"}):
        prints.add(base.with_changes(**changes).fingerprint())
    assert len(prints) == 6


# Refusals


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model": "resnet8"}, r"expected a model 'transformer-…' for data 'pairs:.*', got 'resnet8'"),
        ({"model": "decoder-1-16-32-2"}, r"expected a model 'transformer-…'"),
        ({"model": "encoder-1-16-32-2"}, r"expected a model 'transformer-…'"),
        ({"method": "nf"}, r"method 'nf' does not admit model 'transformer-1-1-16-32-2'"),
        ({"method": "as built"}, r"as built"),
        ({"accumulate": 2}, r"expected accumulate=1 for tokens, got 2"),
        ({"batch_size": 5}, r"longest sentence of 11 tokens in a batch of the train split, got batch_size=5; raise"),
        ({"flip": True}, r"setting flip=True has no effect on text; leave it out"),
        ({"mixup": 0.2}, r"setting mixup=\S+ has no effect on text"),
        ({"validation": 0.2}, r"setting validation=0\.2 has no effect on text"),
        ({"eval_batch_size": 10}, r"setting eval_batch_size=10 has no effect on text"),
        ({"recompute": 1}, r"recompute"),
        ({"form": "linear"}, r"linear"),
    ],
)
def test_what_cannot_be_trained_is_one_sentence(pairs: Prepared, changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says) as caught:
        nf.fit(config(**changes, data=f"pairs:{pairs.folder}"))
    assert "\n" not in str(caught.value)


def test_earlier_run_with_settings_that_text_does_not_use_is_loaded_and_resumed(
    pairs: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    earlier = config(data=f"pairs:{pairs.folder}", validation=0.2, eval_batch_size=10)
    with monkeypatch.context() as before:
        before.setattr(setup, "_require_effect", lambda *_, **__: None)  # before these settings were refused
        nf.fit(earlier, out=tmp_path / "run")
    assert isinstance(nf.load(tmp_path / "run"), nn.Module)
    longer = read_config(tmp_path / "run").with_changes(epochs=2)
    assert nf.fit(longer, out=tmp_path / "run", resume=True).status == "finished"
    with pytest.raises(ValueError, match="has no effect on text"):
        nf.fit(longer)


def test_zero_validation_of_the_recipes_for_text_is_accepted(pairs: Prepared) -> None:
    assert nf.fit(config(data=f"pairs:{pairs.folder}", validation=0.0)).status == "finished"
    assert {nf.recipe(name).validation for name in ("translation", "translation_iwslt", "language_model")} == {0.0}


def test_data_of_the_other_kind_is_called_by_its_name(pairs: Prepared, text: Prepared, tmp_path: Path) -> None:
    for name, right in ((f"text:{pairs.folder}", "pairs:"), (f"pairs:{text.folder}", "text:")):
        with pytest.raises(ValueError, match=rf"got the other kind; use the name '{right}"):
            nf.fit(config(data=name))
    with pytest.raises(ValueError, match="prepare the data first"):
        nf.fit(config(data=f"pairs:{tmp_path}"))


def test_images_do_not_train_a_transformer() -> None:
    for model in ("transformer-1-1-16-32-2", "decoder-1-16-32-2", "encoder-1-16-32-2"):
        with pytest.raises(ValueError, match=model) as caught:
            nf.fit(config(model=model, data="fashion14"))
        assert "\n" not in str(caught.value)


class Words(nn.Module):
    """A model of others, which reads what it is given and scores so many tokens."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.embedding, self.output = nn.Embedding(size, 8), nn.Linear(8, size)

    def forward(self, *tokens: Tensor) -> Tensor:
        scores: Tensor = self.output(self.embedding(tokens[-1]))
        return scores


def test_given_model_is_trained_if_it_fits(pairs: Prepared, text: Prepared, tmp_path: Path) -> None:
    given = nf.build("transformer-1-1-16-32-2", "fixup", num_classes=SIZE)
    result = nf.fit(config(model="?", method="layernorm"), model=given, data=pairs)
    assert result.config.model == "transformer-1-1-16-32-2"
    assert result.config.method.startswith("fixup")
    other = nf.fit(nf.TrainConfig(**TINY_TEXT), model=Words(SIZE), data=text, out=tmp_path)
    assert other.status == "finished"
    assert other.config.data == f"text:{text.folder}"


@pytest.mark.parametrize(
    ("model", "says"),
    [
        (lambda: nf.build("transformer-1-1-16-32-2", "fixup", num_classes=SIZE - 1), rf"got \(2, \d+, {SIZE - 1}\)"),
        (lambda: nf.build("transformer-1-1-16-32-2", "fixup", num_classes=SIZE + 1), rf"got \(2, \d+, {SIZE + 1}\)"),
        (lambda: nf.build("decoder-1-16-32-2", "fixup", num_classes=SIZE), "failed"),
        (lambda: nf.build("resnet8", "fixup"), "failed"),
        (lambda: Words(SIZE), "expected a normfree Transformer to translate the test split, got Words"),
    ],
)
def test_given_model_that_does_not_fit_is_one_sentence(pairs: Prepared, model: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says) as caught:
        nf.fit(config(), model=model(), data=pairs)
    assert "\n" not in str(caught.value)


def test_missing_sacrebleu_is_told_before_training(
    pairs: Prepared, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("sacrebleu", "sacrebleu.metrics", "sacrebleu.metrics.bleu"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(ValueError, match="needs sacrebleu"):
        nf.fit(config(), data=pairs, out=tmp_path)
    assert not RunFolder(tmp_path).exists


def test_run_trains_and_translates_without_sentencepiece(pairs: Prepared, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    result = nf.fit(config(), data=pairs)
    assert result.bleu


def test_diverging_run_is_not_translated(pairs: Prepared, monkeypatch: pytest.MonkeyPatch) -> None:
    """The last step makes the loss infinite, which no later step sees."""
    monkeypatch.setattr(TextData, "translate_test", lambda *_: pytest.fail("translated"))
    result = nf.fit(config(method="he_in", optimizer="sgd", lr=1e30, batch_size=4000), data=pairs)
    assert (result.status, result.bleu) == ("diverged", None)


# On a GPU: a graph a shape, layers compiled for any length


def token_step(method: str, *, compile: bool, precision: str = "float32", device: str = "cuda") -> TrainStep:
    """A step on made-up pairs of several lengths, which needs no vocabulary."""
    draws = torch.Generator().manual_seed(0)
    lengths = torch.randint(2, 30, (200,), generator=draws).tolist()
    made = [torch.randint(4, 40, (n,), generator=draws).tolist() for n in lengths]
    feed = PairBatches(TokenPairs.of((line, line[::-1]) for line in made), tokens=200, device=device)
    model = nf.build("transformer-2-2-32-64-2", method, num_classes=40, dropout=0.0, generator=draws).to(device).train()
    apply_precision_(model, precision)
    config = nf.TrainConfig(optimizer="adam", betas=(0.9, 0.98), compile=compile)
    step = TrainStep(model, nf.param_groups(model, lr=1e-3), feed, config, loss=token_loss)
    step.start_epoch(0, [1.0] * feed.steps)
    return step


def trained(step: TrainStep) -> tuple[float, Tensor]:
    """The mean loss of an epoch, and the weights after it."""
    for _ in range(step.feed.steps):
        step()
    return float(step.loss_sum) / step.feed.steps, step.masters.values.clone()


def test_step_on_tokens_has_several_shapes_and_learns() -> None:
    step = token_step("fixup", compile=False, device="cpu")
    assert len(step.feed.shapes) >= 3
    first, _ = trained(step)
    step.clear_metrics()
    step.start_epoch(1, [1.0] * step.feed.steps)
    assert trained(step)[0] < first


@pytest.mark.gpu
@pytest.mark.parametrize("method", ["layernorm", "fixup"])
def test_captured_steps_of_every_shape_equal_the_eager_ones(cuda: None, method: str) -> None:
    eager, captured = (token_step(method, compile=compiled) for compiled in (False, True))
    start = eager.masters.values.clone()
    captured.capture()
    captured.start_epoch(0, [1.0] * captured.feed.steps)
    assert torch.equal(captured.masters.values, start)
    (loss, values), (same_loss, same) = trained(eager), trained(captured)
    assert same_loss == pytest.approx(loss, rel=1e-4)
    assert (same - values).norm() < 1e-2 * (values - start).norm()  # Adam divides small gradients by their own size


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["bf16", "mixed"])
def test_short_types_train_on_a_gpu(cuda: None, precision: str) -> None:
    step = token_step("fixup", compile=True, precision=precision)
    step.capture()
    step.start_epoch(0, [1.0] * step.feed.steps)
    plain = trained(token_step("fixup", compile=False))[0]
    assert trained(step)[0] == pytest.approx(plain, rel=0.02)
