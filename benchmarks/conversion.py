"""Convert other people's models by each method, and measure how they start and learn.

    python benchmarks/conversion.py --markdown docs/models.md --json results/benchmarks/conversion.json

For each model and method: the residual branches found, the normalizers removed, the verdict on the signal before and
after, and the loss in 50 steps of AdamW on one fixed batch of noise with random labels, which shows whether the model
trains at all. A pair that is in the JSON file is not run again, except with --fresh. The page ends with the results of
rates.py.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import shlex
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import rates
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import normfree as nf
from normfree.conversion import convert
from normfree.conversion.norms import find_norms
from normfree.files import write_json
from normfree.models.third_party import create_model
from normfree.provenance import commit, hardware, versions
from normfree.report.progress import progress

METHODS = ("fixup", "skipinit", "rezero", "small_branch", "hanin", "wn", "nf", "dyt")
ORIGINAL = "original"
RATES = Path(__file__).parents[1] / "results" / "benchmarks" / "rates.json"  # of rates.py, for the end of the page
STEPS, CLASSES, IMAGES, TEXTS, WORDS = 50, 10, 4, 8, 50
RATE, NARROW_RATE = 3e-4, 1e-3  # for the models as they come, and for those of width 64


@dataclass(frozen=True)
class Subject:
    """A model, a batch that it accepts, labels, and the learning rate for all methods."""

    model: nn.Module
    inputs: Any
    labels: Tensor
    rate: float = RATE

    def loss(self, model: nn.Module) -> Tensor:
        out = model(**self.inputs).logits if isinstance(self.inputs, dict) else model(self.inputs)
        return F.cross_entropy(out.flatten(0, -2), self.labels.flatten())


def _load_torchvision() -> None:
    """Import torchvision, even if its compiled part does not load, without drawing global random numbers."""
    with torch.random.fork_rng(devices=[]):
        create_model("torchvision:resnet18")


def vision(library: str, name: str, size: int, **options: Any) -> Callable[[], Subject]:
    def make() -> Subject:
        _load_torchvision()
        if library == "torchvision":
            import torchvision

            model = torchvision.models.get_model(name, weights=None, num_classes=CLASSES, **options)
        else:
            import timm

            model = timm.create_model(name, pretrained=False, num_classes=CLASSES, **options)
        return Subject(model, torch.randn(IMAGES, 3, size, size), torch.arange(IMAGES) % CLASSES)

    return make


def text(kind: str) -> Callable[[], Subject]:
    def make() -> Subject:
        _load_torchvision()  # which transformers imports, too
        import transformers as t

        ids = torch.randint(3, WORDS, (TEXTS, 12))
        words = {"vocab_size": WORDS, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
        sizes = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 256}
        labels = torch.arange(TEXTS) % CLASSES
        match kind:
            case "BERT":
                config = t.BertConfig(**words, **sizes, num_labels=CLASSES)
                return Subject(t.BertForSequenceClassification(config), {"input_ids": ids}, labels, NARROW_RATE)
            case "GPT-2":
                config = t.GPT2Config(**words, n_embd=64, n_layer=4, n_head=4, n_positions=16)
                return Subject(t.GPT2LMHeadModel(config), {"input_ids": ids[:, :-1]}, ids[:, 1:], NARROW_RATE)
            case "Llama":
                config = t.LlamaConfig(**words, **sizes, num_key_value_heads=2)
                return Subject(t.LlamaForCausalLM(config), {"input_ids": ids[:, :-1]}, ids[:, 1:], NARROW_RATE)
            case "T5":
                config = t.T5Config(**words, d_model=64, d_kv=16, d_ff=256, num_layers=4, num_heads=4)
                inputs = {"input_ids": ids, "decoder_input_ids": ids[:, :-1]}
                return Subject(t.T5ForConditionalGeneration(config), inputs, ids[:, 1:], NARROW_RATE)
            case _:
                config = t.ViTConfig(**sizes, image_size=32, patch_size=8, num_labels=CLASSES)
                inputs = {"pixel_values": torch.randn(TEXTS, 3, 32, 32)}
                return Subject(t.ViTForImageClassification(config), inputs, labels, NARROW_RATE)

    return make


MODELS: dict[str, Callable[[], Subject]] = {
    "torchvision resnet18": vision("torchvision", "resnet18", 32),
    "torchvision resnet50": vision("torchvision", "resnet50", 32),
    "torchvision resnext50_32x4d": vision("torchvision", "resnext50_32x4d", 32),
    "torchvision wide_resnet50_2": vision("torchvision", "wide_resnet50_2", 32),
    "torchvision regnet_y_400mf": vision("torchvision", "regnet_y_400mf", 32),
    "torchvision mobilenet_v2": vision("torchvision", "mobilenet_v2", 32),
    "torchvision mobilenet_v3_small": vision("torchvision", "mobilenet_v3_small", 32),
    "torchvision efficientnet_b0": vision("torchvision", "efficientnet_b0", 32),
    "torchvision convnext_tiny": vision("torchvision", "convnext_tiny", 32),
    "torchvision vit_b_16": vision("torchvision", "vit_b_16", 32, image_size=32),
    "torchvision swin_t": vision("torchvision", "swin_t", 32),
    "timm resnetv2_50": vision("timm", "resnetv2_50", 32),
    "timm resnet26d": vision("timm", "resnet26d", 32),
    "timm convnext_atto": vision("timm", "convnext_atto", 32),
    "timm vit_tiny_patch16_224": vision("timm", "vit_tiny_patch16_224", 32, img_size=32),
    "timm mixer_s32_224": vision("timm", "mixer_s32_224", 64, img_size=64),
    "transformers BERT": text("BERT"),
    "transformers GPT-2": text("GPT-2"),
    "transformers ViT": text("ViT"),
    "transformers T5": text("T5"),
    "transformers Llama": text("Llama"),
}


def measure(name: str, method: str) -> dict[str, Any]:
    """One pair: what was found and removed, the verdict, and the loss before and after the steps, or why not."""
    began = time.perf_counter()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    subject = MODELS[name]()
    row: dict[str, Any] = {"model": name, "method": method}
    model, groups = subject.model, [{"params": list(subject.model.parameters())}]
    try:
        if method != ORIGINAL:
            model, plan = convert(model, method, subject.inputs, generator=torch.Generator().manual_seed(0))
            row |= {"branches": len(plan.branches), "removed": len(plan.changes.removed)}
            groups = nf.param_groups(model, lr=subject.rate, method=method, plan=plan)
        else:
            row |= {"branches": len(nf.discover(model, subject.inputs).branches), "norms": len(find_norms(model))}
    except ValueError as error:
        return row | {"refused": str(error)}
    found = nf.diagnose(model, subject.inputs, generator=torch.Generator().manual_seed(0))
    row["verdict"] = found.verdict.status
    optimizer = torch.optim.AdamW(groups, lr=subject.rate, weight_decay=0.0, fused=True)
    model.train()
    _without_dropout(model)
    losses: list[float] = []
    for _ in range(STEPS + 1):
        loss = subject.loss(model)
        losses.append(loss.item())
        if not math.isfinite(losses[-1]):
            break
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
    measured = {
        "loss_before": losses[0],
        "lowest": min(filter(math.isfinite, losses), default=math.nan),
        "loss": losses[-1],
    }
    return row | measured | {"seconds": round(time.perf_counter() - began, 1)}


def _without_dropout(model: nn.Module) -> None:
    """Switch off dropout and stochastic depth, so that every model that learns reaches a low loss."""
    for module in model.modules():
        if "drop" in type(module).__name__.lower() or type(module).__name__ == "StochasticDepth":
            module.eval()


def _work(pair: tuple[str, str]) -> dict[str, Any]:
    try:
        return measure(*pair)
    except Exception as error:  # one pair that fails must not end the table
        return {"model": pair[0], "method": pair[1], "failed": f"{type(error).__name__}: {error}"}


def markdown(rows: Sequence[dict[str, Any]], origin: dict[str, Any]) -> str:
    """Write the page: a table with one row per model and method."""
    lines = [
        "# Converted third-party models",
        "",
        f"Each model is built by its own package with random weights and {CLASSES} classes, converted, and trained "
        f"for {STEPS} steps of AdamW without weight decay and dropout, on one fixed batch of noise with fixed labels. "
        f"The batch has {IMAGES} images of 32 pixels a side (64 for the mixer). Models of the package transformers "
        f"have a width of 64, four layers (four and four for T5), a vocabulary of {WORDS} and a batch of {TEXTS}. "
        f"Chance is a loss of {math.log(CLASSES):.2f} for classes and {math.log(WORDS):.2f} for words.",
        "",
        "A low loss shows that a model learns at all. One batch does not rank methods. Once a batch is learned, AdamW "
        "may jump, so that the last loss can be above the lowest. The learning rate is "
        f"{RATE:g}, and {NARROW_RATE:g} for the package transformers. It was chosen after a first run with "
        f"{NARROW_RATE:g} for all models, in which four ended above their initial loss: `vit_b_16` by fixup and by "
        "hanin, `swin_t` by fixup, `mixer_s32_224` by wn.",
        "",
        'The verdict is that of `normfree diagnose` on the same batch, before conversion (row "original") and '
        "after it; *preserved* and *growing* are good.",
        "",
        "The learning rates at which converted models diverge are [below](#learning-rates).",
        "",
        f"Made by `{origin['command']}` with "
        + ", ".join(f"{name} {number}" for name, number in origin["versions"].items())
        + f" at commit {', '.join(sorted({row['commit'][:12] for row in rows}))}.",
    ]
    notes: dict[str, str] = {}
    lines += [
        "",
        "| model | method | branches | norms removed | verdict | loss at the start | lowest | after 50 steps |",
    ]
    lines += ["| --- | --- | ---: | ---: | --- | ---: | ---: | ---: |"]
    for name in MODELS:
        of_model = {row["method"]: row for row in rows if row["model"] == name}
        for method in (ORIGINAL, *METHODS):
            if method not in of_model:
                continue
            row = of_model[method]
            label = f"`{name}`" if method == ORIGINAL else ""
            if "loss" not in row:
                key = notes.setdefault(_reason(row), str(len(notes) + 1))
                lines.append(f"| {label} | {method} | | | refused [{key}] | | | |")
                continue
            gone = row.get("removed", f"of {row.get('norms')}")
            losses = (_number(row[when]) for when in ("loss_before", "lowest", "loss"))
            cells = (row["branches"], gone, row["verdict"], *losses)
            lines.append(f"| {label} | {method} | " + " | ".join(map(str, cells)) + " |")
    if notes:
        lines += ["", "Refused:", "", *[f"{key}. {text}" for text, key in notes.items()]]
    lines += ["", "## Learning rates", "", *rates.markdown(json.loads(RATES.read_text(encoding="utf-8")))]
    return "\n".join(lines) + "\n"


def _reason(row: dict[str, Any]) -> str:
    """Return the first reason of a refusal, without the name of the model."""
    if "failed" in row:
        return f"{row['model']} failed: {row['failed']}"
    reason = row["refused"].partition(": ")[2] or row["refused"]
    return reason.split("; ")[0].replace("|", "\\|")


def _number(value: Any) -> str:
    value = float(value)
    if not math.isfinite(value):
        return "diverged"
    return "< 0.001" if value < 0.001 else f"{value:.3f}" if value < 100 else f"{value:.1e}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", help="parts of the names of the models to run, separated by commas")
    parser.add_argument("--methods", help="the methods to run, separated by commas", default=",".join(METHODS))
    parser.add_argument("--markdown", type=Path, metavar="FILE")
    parser.add_argument("--json", type=Path, metavar="FILE", help="store the rows, and do not run those that are there")
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--fresh", action="store_true", help="run the chosen models again")
    given = parser.parse_args()
    wanted = given.models.split(",") if given.models else [""]
    models = [name for name in MODELS if any(part in name for part in wanted)]
    pairs = [(name, method) for name in models for method in (ORIGINAL, *given.methods.split(","))]
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    if given.json is not None and given.json.exists():
        stored = json.loads(given.json.read_text())
        rows = {(row["model"], row["method"]): {"commit": stored["commit"], **row} for row in stored["rows"]}
    left = [pair for pair in pairs if given.fresh or pair not in rows]
    known = {name: version(name) for name in ("torchvision", "timm", "transformers")}
    command = "python " + shlex.join(["benchmarks/conversion.py", *_command(sys.argv[1:])])
    if given.models and rows:
        command = stored["command"]  # the whole table is not made by a command for some rows
    origin = {"command": command, "commit": commit(), "versions": {**versions(), **known}, "hardware": hardware()}
    if rows.keys() - set(left) and stored["versions"] != origin["versions"]:
        raise SystemExit(f"expected the versions that '{given.json}' was made with, {stored['versions']}; use --fresh")
    done = 0
    # Workers are spawned, because torch's threads do not survive a fork.
    with (
        multiprocessing.get_context("spawn").Pool(given.jobs) as pool,
        progress("conversions", len(pairs), done=len(pairs) - len(left)) as update,
    ):
        for row in pool.imap_unordered(_work, left):
            rows[row["model"], row["method"]] = row | {"commit": origin["commit"]}
            done += 1
            update(len(pairs) - len(left) + done, len(pairs), f"{row['model']}, {row['method']}")
            _keep(given.json, origin, rows)
    _keep(given.json, origin, rows)
    page = markdown([rows[pair] for pair in sorted(rows, key=_place)], origin)
    if given.markdown is not None:
        given.markdown.write_text(page, encoding="utf-8")
    else:
        print(page)


def _keep(path: Path | None, origin: dict[str, Any], rows: dict[tuple[str, str], dict[str, Any]]) -> None:
    if path is not None:
        write_json(path, {**origin, "rows": [rows[pair] for pair in sorted(rows, key=_place)]})


def _place(pair: tuple[str, str]) -> tuple[int, int]:
    order = (ORIGINAL, *METHODS)
    return list(MODELS).index(pair[0]), order.index(pair[1]) if pair[1] in order else len(order)


def _command(words: list[str]) -> list[str]:
    """Return the command without absolute folders and without --fresh."""
    short = [os.path.relpath(word) if os.path.isabs(word) else word for word in words]
    return [word for word in short if word != "--fresh"]


if __name__ == "__main__":
    main()
