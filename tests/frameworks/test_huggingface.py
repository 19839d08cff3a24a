"""A real `Trainer`: groups, logged signal, checkpoints that resume and load; and a loud refusal by transformers."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import Dataset
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    BertForSequenceClassification,
    TrainingArguments,
)

import normfree as nf
from normfree.frameworks.huggingface import GroupedTrainer, HuggingFaceSignal, save_pretrained
from normfree.storage.writing import write_sealed_json

WORDS, LENGTH = 11, 6


class Sentences(Dataset[dict[str, Tensor]]):
    """Random words; the label tells whether the first is a high one."""

    def __init__(self, count: int) -> None:
        self.words = torch.randint(WORDS, (count, LENGTH), generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.words)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        words = self.words[index]
        return {"input_ids": words, "attention_mask": torch.ones_like(words), "labels": (words[0] > 4).long()}


def bert() -> BertForSequenceClassification:
    config = BertConfig(
        vocab_size=WORDS, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=16,
        max_position_embeddings=8, num_labels=2, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    torch.manual_seed(0)
    return BertForSequenceClassification(config)


def converted(method: str = "fixup") -> Any:
    example = {"input_ids": Sentences(4).words, "attention_mask": torch.ones(4, LENGTH, dtype=torch.long)}
    return nf.convert(bert(), method, example, generator=torch.Generator().manual_seed(0))[0]


def trainer(model: Any, out: Path, count: int = 8, every: int = 1, signal: bool = True, **settings: Any) -> Any:
    arguments = TrainingArguments(
        output_dir=str(out), learning_rate=0.01, per_device_train_batch_size=4, report_to=[], use_cpu=True, seed=3,
        logging_steps=1, save_strategy="epoch", num_train_epochs=2, disable_tqdm=True, **settings,
    )  # fmt: skip
    made = GroupedTrainer(model=model, args=arguments, train_dataset=Sentences(count))
    if signal:
        made.add_callback(HuggingFaceSignal(made, every=every))
    return made


def same(one: Any, two: Any) -> bool:
    held = two.state_dict()
    return all(torch.equal(t, held[name]) for name, t in one.state_dict().items())


def test_trainer_logs_the_signal_and_its_checkpoints_load(tmp_path: Path) -> None:
    model = converted()
    run = trainer(model, tmp_path)
    run.train()
    rates = {g["name"]: g["initial_lr"] for g in run.optimizer.param_groups}
    assert rates == {g["name"]: g["lr"] for g in nf.param_groups(model, lr=0.01)}
    logged = [entry for entry in run.state.log_history if "signal/loss" in entry]
    assert [entry["step"] for entry in logged] == [1, 2, 3, 4]
    assert all(0 < entry["signal/loss"] < 5 and entry["signal/forward_per_block"] > 0 for entry in logged)
    assert not model._forward_pre_hooks
    folder = tmp_path / "checkpoint-4"
    assert same(nf.load(folder), model)
    with pytest.raises(ValueError, match="normfree-bert"):
        AutoModelForSequenceClassification.from_pretrained(folder)
    twin = converted()
    trainer(twin, tmp_path / "unwatched", signal=False).train()
    assert same(twin, model)  # the signal leaves no trace


def test_saved_model_loads_by_normfree_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = converted("rezero")
    folder = save_pretrained(model, tmp_path / "saved")
    loaded = nf.load(folder)
    assert same(loaded, model)
    words = Sentences(4).words
    assert torch.equal(loaded(words).logits, model.eval()(words).logits)
    record = json.loads((folder / "plan.json").read_text(encoding="utf-8"))
    record["transformers"][0] = "Trainer"  # a name of transformers that is no model
    write_sealed_json(folder / "plan.json", record)
    with pytest.raises(ValueError, match="expected the name of a model of transformers, got 'Trainer'"):
        nf.load(folder)
    with pytest.raises(ValueError, match="expected a converted model, got BertForSequenceClassification"):
        save_pretrained(bert(), tmp_path / "plain")


def test_monitor_uses_the_models_own_loss() -> None:
    model = converted()
    with torch.no_grad():
        model.classifier.weight.normal_(0, 0.3, generator=torch.Generator().manual_seed(1))
    batch = {name: torch.stack([s[name] for s in map(Sentences(4).__getitem__, range(4))]) for name in Sentences(1)[0]}
    seen: list[tuple[dict[str, float], int]] = []
    monitor = nf.Monitor(model, log=lambda numbers, step: seen.append((numbers, step)))
    record = monitor.step(batch)
    expected = model(**batch).loss.item()
    assert record is not None
    assert record.loss == pytest.approx(expected, rel=1e-5)
    assert seen == [(record.scalars(), 0)]
    halved = nf.Monitor(model, loss=lambda output, _: output.loss / 2).step(batch)
    assert halved is not None
    ratios = [two / one for one, two in zip(record.backward, halved.backward, strict=True)]
    assert ratios == pytest.approx([0.25] * len(ratios), rel=1e-3)  # not a random gradient, whose size is fixed
    without = nf.Monitor(model).step({name: batch[name] for name in ("input_ids", "attention_mask")})
    assert without is not None
    assert math.isnan(without.loss)


@pytest.mark.slow
def test_two_epochs_resume_from_the_first_checkpoint(tmp_path: Path) -> None:
    whole = converted()
    run = trainer(whole, tmp_path / "whole", count=48, every=5)
    run.train()
    resumed = converted()
    again = trainer(resumed, tmp_path / "whole", count=48, every=5)
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-12"))
    held = whole.state_dict()
    for name, tensor in resumed.state_dict().items():
        torch.testing.assert_close(tensor, held[name], rtol=0, atol=0)
    losses = [entry["loss"] for entry in run.state.log_history if "loss" in entry]
    assert len(losses) == 24
    assert sum(losses[-4:]) < sum(losses[:4])
    assert [e["step"] for e in again.state.log_history if "signal/loss" in e] == [1, 6, 11, 16, 21]
    assert same(nf.load(tmp_path / "whole" / "checkpoint-24"), whole)
