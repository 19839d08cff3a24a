"""The page docs/models.md, from the rows that conversion.py has stored."""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import learning_rates
from subjects import CLASSES, IMAGES, PIXEL_CLASSES, TEXTS, WORDS

ORIGINAL = "original"
RATES = Path(__file__).parents[1] / "results" / "benchmarks" / "rates.json"  # shown at the end
STEPS, ALL_STEPS = 20, 40
SMALL_RATE = 1e-4  # for the parameters that have not moved
HIGH = 3.0  # a first loss above this many times the original's and a guess's is wrong
LEARNED = 0.9  # a model learns if its loss falls below this part of the first


def _commits(rows: Sequence[dict[str, Any]]) -> str:
    """The commits that made the rows, the most first, each with its number of rows."""
    counts = Counter(row["commit"][:12] for row in rows)
    return ", ".join(f"{commit} ({count} rows)" for commit, count in counts.most_common())


def _made_with(rows: Sequence[dict[str, Any]], origin: dict[str, Any]) -> str:
    """The versions that made the rows; if rows were made by several, those of the most rows first."""
    texts = (
        ", ".join(f"{name} {number}" for name, number in row.get("versions", origin["versions"]).items())
        for row in rows
    )
    counts = Counter(texts).most_common()
    return counts[0][0] if len(counts) == 1 else "; or ".join(f"{text} ({count} rows)" for text, count in counts)


def stuck_parameters(row: dict[str, Any], original: dict[str, Any]) -> list[str]:
    """Return the parameters that have not moved although they move in the original.

    A scalar that conversion has added may stay if it was measured to be idle in the original: at its place the gradient
    is exactly 0 there, too, or the branch that it multiplies is, such as a pool of single pixels minus its input.
    """
    may_stay = {*original.get("unmoved", ()), *row.get("idle", ())}
    return [name for name in row["unmoved"] if name not in may_stay]


def judge(row: dict[str, Any], original: dict[str, Any]) -> str:
    """Say in a word or two how a pair ended; what begins with WRONG must not happen."""
    if "failed" in row:
        return "WRONG: " + row["failed"].partition(":")[0]
    if "first" not in row:
        return "refused"
    if row is not original:
        if stuck := stuck_parameters(row, original):
            return f"WRONG: {len(stuck)} parameters never move"
        highest = HIGH * max(original.get("first", 0.0), row["chance"] or 0.0)
        if not row["first"] <= highest:
            return "WRONG: high first loss"
    if not math.isfinite(row["loss"]):
        return "diverges"
    return "learns" if row["loss"] < LEARNED * row["first"] else "slow"


def page(rows: Sequence[dict[str, Any]], origin: dict[str, Any]) -> str:
    """Write the page: a table with one row per model and method, and the results of learning_rates.py."""
    originals = {row["model"]: row for row in rows if row["method"] == ORIGINAL}
    judged = [(row, judge(row, originals[row["model"]])) for row in rows]
    trained = [row for row in rows if "rate" in row]
    found = sum(row["suggested"] for row in trained)
    words = [word for row, word in judged if row["method"] != ORIGINAL]
    counts = ", ".join(
        f"{sum(word.startswith(kind) for word in words)} {meaning}"
        for kind, meaning in (
            ("learns", "learn"), ("slow", "learn slowly"), ("diverges", "diverge"), ("refused", "are refused"),
            ("WRONG", "are wrong"),
        )
    )  # fmt: skip
    lines = [
        "# Converted third-party models",
        "",
        f"{len(originals)} models, built by their own packages with random weights. Each is converted and trained for "
        f"{STEPS} steps of AdamW, without weight decay and dropout, on one fixed batch of noise with fixed targets.",
        "",
        f"- Models of images get {IMAGES} images of 32 to 128 pixels a side, with {CLASSES} classes, or "
        f"{PIXEL_CLASSES} classes for each pixel.",
        f"- Models of text get {TEXTS} texts of 12 words out of {WORDS}. They have a width of 64 and four layers.",
        "- Models of diffusers predict noise.",
        "",
        f"A uniform guess has a loss of {math.log(CLASSES):.2f} for classes, {math.log(PIXEL_CLASSES):.2f} for pixels, "
        f"{math.log(WORDS):.2f} for words and 1 for noise.",
        "",
        f"Of {len(words)} conversions, {counts}.",
        "",
        "- *learns*: after the steps, the loss is below "
        f"{LEARNED:g} of the first; *slow*: it is not; *diverges*: a loss is not finite. One batch does not rank "
        "methods.",
        "- *WRONG*: a parameter that moves in the original has not moved after "
        f"{ALL_STEPS} steps, the first loss is above {HIGH:g} times both the original's and a guess's, or the program "
        "failed. No row should be of this kind.",
        "- The signal is what `normfree diagnose` says of the batch, before conversion (row *original*) and after it.",
        "- The rate is the one that `nf.find_lr` suggests for AdamW on this model, method and batch, by a short "
        "search: one run of 25 steps raises the rate from 1e-5 to 0.03, and a third of the rate at the lowest loss is "
        f"halved until {STEPS} steps lower the loss. It was found for {found} of {len(trained)} rows. A rate in "
        "brackets was given, because the search takes longer than the steps.",
        f"- *Unmoved* counts the parameters that have not changed after {ALL_STEPS} steps, neither in the run at the "
        f"rate of the table nor in one at {SMALL_RATE:g}. A parameter that does not change in the original either is "
        "no error.",
        "",
        "The learning rates at which converted models diverge are [below](#learning-rates).",
        "",
        f"Made by `{origin['command']}` with {_made_with(rows, origin)}"
        + f" at commit {_commits(rows)}; the [stored rows](../results/benchmarks/conversion.json) name theirs.",
        "",
        "| model | method | branches | norms removed | signal | rate | first loss "
        f"| after {STEPS} steps | unmoved | result |",
        "| --- | --- | ---: | ---: | --- | ---: | ---: | ---: | ---: | --- |",
    ]
    notes: dict[str, str] = {}
    for row, word in judged:
        label = f"`{row['model']}`" if row["method"] == ORIGINAL else ""
        if word.startswith(("refused", "WRONG: ")) and "first" not in row:
            key = notes.setdefault(_reason(row), str(len(notes) + 1))
            lines.append(f"| {label} | {row['method']} | | | | | | | | {word} [{key}] |")
            continue
        gone = row.get("removed", f"of {row.get('norms')}")
        rate = f"{row['rate']:.2g}" if row["suggested"] else f"({row['rate']:.2g})"
        cells = (row.get("branches", "refused"), gone, row["verdict"], rate)
        losses = (_number(row["first"]), _number(row["loss"]))
        lines.append(
            f"| {label} | {row['method']} | "
            + " | ".join(map(str, (*cells, *losses, len(row["unmoved"]), word)))
            + " |"
        )
    if notes:
        lines += ["", "Refused or failed:", "", *[f"{key}. {text}" for text, key in notes.items()]]
    lines += ["", "## Learning rates", "", *learning_rates.markdown(json.loads(RATES.read_text(encoding="utf-8")))]
    return "\n".join(lines) + "\n"


def _reason(row: dict[str, Any]) -> str:
    """Return the first reason of a refusal, without the name of the model, as text in which no character is markup.

    Reasons hold names of modules and messages of other packages.
    """
    if "failed" in row:
        reason = f"{row['model']} failed: {row['failed']}"
    else:
        reason = (row["refused"].partition(": ")[2] or row["refused"]).split("; ")[0]
    return re.sub(r"([\\`*_<>\[\]|~#])", r"\\\1", " ".join(reason.split()))


def _number(value: Any) -> str:
    value = float(value)
    if not math.isfinite(value):
        return "not finite"
    return "< 0.001" if value < 0.001 else f"{value:.3f}" if value < 100 else f"{value:.1e}"
