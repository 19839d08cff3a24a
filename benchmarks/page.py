"""Write docs/benchmarks.md from the stored results: `python benchmarks/page.py`, or `make benchmarks-page`.

Every number on the page is read from `results/`; tests/test_documents.py makes the page again and compares.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from normfree.methods.method_registry import as_of
from normfree.report.panels import Curve, Panel
from normfree.report.plots import write_plot

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "benchmarks.md"
PICTURE = ROOT / "docs" / "images" / "stage-kernels.svg"
RESULTS = ROOT / "results"


def read(name: str) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((RESULTS / name).read_text(encoding="utf-8"))
    return content


def table(columns: list[str], rows: list[list[str]]) -> str:
    """A Markdown table; all columns but the first are aligned to the right."""
    lines = [columns, ["---", *["---:"] * (len(columns) - 1)], *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def source(name: str, result: dict[str, Any]) -> str:
    """Where numbers come from: the stored file, its command, and the machine."""
    hardware = result["hardware"]
    machine = hardware.get("gpu") or f"{hardware['cores']} cores of an {hardware['cpu']}"
    torch, commit = result["versions"]["torch"], result["commit"][:12]
    return f"[{name}](../results/{name}), by `{result['command']}`, on {machine}, torch {torch}, commit `{commit}`"


def training_speed() -> str:
    step, width, depth = (read(f"benchmarks/training-{name}.json") for name in ("step", "width", "depth"))
    speeds = [
        [
            _path(row["what"]),
            f"{row['images_per_second']:,.0f}",
            f"{row['milliseconds']:.1f}",
            f"{row['setup_seconds']:.1f}",
        ]
        for row in step["rows"]
        if "milliseconds" in row
    ]
    widths = [
        [row["what"], f"{row['images_per_second']:,.0f}", f"{row['tflop_per_second']:.0f}"] for row in width["rows"]
    ]
    depths = [
        [
            f"{row['layers']:,}",
            f"{1000 * row['step_seconds']:.1f}",
            f"{1e6 * row['seconds_a_layer']:.0f}",
            f"{row['epoch_seconds']:.0f}",
            f"{row['peak_gib']:.1f}",
            f"{row['setup_seconds']:.0f}",
        ]
        for row in depth["rows"]
    ]
    ratio = next(row["ratio"] for row in step["rows"] if "ratio" in row)
    columns = ["layers", "ms per step", "µs per step and layer", "s per epoch", "GiB", "s to set up"]
    return f"""## Training speed

By the compiled path of the engine, before it had stage kernels (commit `{step["commit"][:12]}`). The next section has
today's kernels. ResNet-110 on CIFAR-10 images with batches of 128. Fixup is {ratio:.2f} times as fast as batch norm in
the engine. The PyTorch rows are plain loops.

{table(["ResNet-110", "images/s", "ms per step", "s to set up"], speeds)}

{source("benchmarks/training-step.json", step)}.

A wide network, where matrix products dominate:

{table(["WRN-40-10", "images/s", "TFLOP/s"], widths)}

{source("benchmarks/training-width.json", width)}.

Deep networks: time and memory grow in proportion to the depth. Fixup wide ResNets of width 1 with batches of 64; an
epoch is 50,000 images, without set-up.

{table(columns, depths)}

{source("benchmarks/training-depth.json", depth)}."""


def _path(what: str) -> str:
    """The name of a row, with the path that the engine had at the time."""
    return what.replace("engine,", "engine, compiled path,")


def stage_kernels() -> str:
    found, deep = read("benchmarks/training-kernels.json"), read("benchmarks/training-deep.json")
    rows = [
        [
            row["what"],
            str(row["batch"]),
            row["precision"],
            f"{row['images_per_second']:,.0f}",
            f"{row['milliseconds']:.2f}",
            f"{row['steps']:,}",
            f"{row['epoch_seconds']:.1f}" if "epoch_seconds" in row else "",
            f"{row['peak_gib']:.1f}" if "peak_gib" in row else "",
            f"{row['setup_seconds']:.0f}",
        ]
        for row in found["rows"]
        if "batch" in row and not is_swept(row)
    ]
    earlier, batch = read("benchmarks/training-kernels-earlier.json"), read("benchmarks/training-batch.json")
    ratios = [row["ratio"] for result in (earlier, found, batch) for row in result["rows"] if "ratio" in row]
    accuracy = read("kernels/accuracy.json")
    first = found["rows"][0]
    images = first["steps"] * first["batch"] * 3 * 32**2 / 2**30
    columns = ["run", "batch", "precision", "images/s", "ms per step", "steps", "s per epoch", "GiB", "s to set up"]
    alone = deep["rows"][0]
    return f"""## Stage kernels

Whole steps by the [stage kernels](kernels.md), beside the compiled path, plain loops and loops by `torch.compile`, all
in one run (commit `{found["commit"][:12]}`). Over {len(ratios)} runs, Fixup by the kernels is {min(ratios):.1f} to
{max(ratios):.1f} times as fast as the fastest batch norm. In the run of this table all other paths are slower than in
the run over the batch below: the compiled path with batch norm reaches {speed(found, NORMED):,.0f} images/s, there
{speed(batch, NORMED):,.0f}; the plain loop reaches {speed(found, PLAIN):,.0f}, there {speed(batch, PLAIN):,.0f}.
Seconds per epoch are extrapolated from the measured steps to 50,000 images, without set-up.

{table(columns, rows)}

{source("benchmarks/training-kernels.json", found)}.
{source("benchmarks/training-kernels-earlier.json", earlier)}.

10,000 layers in a process of their own: {alone["setup_seconds"]:.1f} s to set up, {alone["epoch_seconds"]:.1f} s per
epoch, {alone["peak_gib"]:.1f} GiB.
{source("benchmarks/training-deep.json", deep)}.

Both paths train to the same error: Fixup's ResNet-110 after {accuracy["epochs"]} epochs of CIFAR-10 has a mean test
error of {accuracy["mean_error"]["stage"]:.2f} % by the kernels and {accuracy["mean_error"]["compiled"]:.2f} % by the
compiled path, over {len(accuracy["seeds"])} seeds. The 95 % interval of the difference is
{accuracy["interval"][0]:.2f} to {accuracy["interval"][1]:.2f} points.
{source("kernels/accuracy.json", accuracy)}.

![images per second and memory](images/{PICTURE.name})

The same paths over the depth of a ResNet at batch 128, in the run of the first table of this section. The engine keeps
the images of all measured steps on the GPU, and its GiB include them: 3 KiB per image, {images:.1f} GiB for ResNet-110
by the kernels.

{table_of_curves("depth", found["rows"])}

The same paths over the batch of ResNet-110 (commit `{batch["commit"][:12]}`):

{table_of_curves("batch", batch["rows"])}

{source("benchmarks/training-batch.json", batch)}."""


NORMED, PLAIN = "batchnorm, compiled", "batchnorm, plain loop"
SWEPT = {
    "fixup, stage kernels": "Fixup, stage kernels",
    "fixup, compiled": "Fixup, compiled",
    NORMED: "batch norm, engine",
    PLAIN: "batch norm, plain loop",
}


def speed(result: dict[str, Any], path: str) -> float:
    """The images/s of ResNet-110 at batch 128 by a path."""
    rows = (row for row in result["rows"] if row.get("path") == path)
    found: float = next(row["images_per_second"] for row in rows if (row["model"], row["batch"]) == ("resnet110", 128))
    return found


def is_swept(row: dict[str, Any]) -> bool:
    """Whether a row belongs only to the curves over depth and batch."""
    return row.get("model", "").startswith("resnet") and (row["model"], row["batch"]) != ("resnet110", 128)


def curves(axis: str, rows: list[dict[str, Any]]) -> dict[str, dict[int, dict[str, Any]]]:
    """The rows of each path by depth at batch 128, or by batch of ResNet-110, where every path was measured."""
    found: dict[str, dict[int, dict[str, Any]]] = {name: {} for name in SWEPT.values()}
    for row in rows:
        if row.get("path") in SWEPT and row["model"].startswith("resnet"):
            depth, batch = int(row["model"].removeprefix("resnet")), row["batch"]
            if (batch == 128) if axis == "depth" else (depth == 110):
                found[SWEPT[row["path"]]][depth if axis == "depth" else batch] = row
    whole = set.intersection(*(set(points) for points in found.values()))
    return {name: {place: points[place] for place in sorted(whole)} for name, points in found.items()}


def table_of_curves(axis: str, rows: list[dict[str, Any]]) -> str:
    """The table over depth or batch; empty if no place was measured by every path."""
    paths = curves(axis, rows)
    cells = [
        [
            f"{place:,}",
            *(
                f"{points[place]['images_per_second']:,.0f} ({points[place]['peak_gib']:.1f} GiB)"
                for points in paths.values()
            ),
        ]
        for place in next(iter(paths.values()))
    ]
    return table([axis, *(f"{name}, images/s" for name in paths)], cells) if cells else ""


def panels_over_depth_and_batch(swept: Mapping[str, list[dict[str, Any]]]) -> tuple[Panel, ...]:
    """Images/s and memory over depth, and over batch, from the rows of each."""
    titles = {"depth": "batch 128", "batch": "ResNet-110"}
    panels = []
    for axis, rows in swept.items():
        for field, label in (("images_per_second", "images/s"), ("peak_gib", "GiB")):
            drawn = tuple(
                Curve(name, tuple(row[field] for row in points.values()), x=tuple(map(float, points)))
                for name, points in curves(axis, rows).items()
            )
            panels.append(Panel(f"{label}, {titles[axis]}", drawn, label, x_label=axis, log_x=True))
    return tuple(panels)


def saving() -> str:
    result = read("benchmarks/saving.json")
    rows = [
        [
            f"{row['round'] + 1}",
            row["saves"],
            f"{row['images_per_second']:,.0f}",
            f"{row['seconds']:.1f}",
            str(row["checkpoints"]),
        ]
        for row in result["rows"]
    ]
    size = result["rows"][0]["checkpoint_bytes"] / 2**20
    low, high = result["interval"]
    return f"""## Training that saves

Fixup's ResNet-110 on CIFAR-10 by the stage kernels, with a checkpoint of {size:.0f} MiB every
{result["seconds_between"]:g} seconds and without, in turn in one run. Time is that of the clock, with the pauses for
copying the state. The throughput with checkpoints is {result["ratio"]:.2%} of that without (95 % interval {low:.2%} to
{high:.2%}, {len(result["ratios"])} pairs of runs).

{table(["pair", "checkpoints", "images/s", "s", "saved meanwhile"], rows)}

{source("benchmarks/saving.json", result)}."""


def converted_speed() -> str:
    loop, fit = (read(f"benchmarks/converted-{name}.json") for name in ("speed", "fit"))

    def shown(result: dict[str, Any]) -> str:
        rows = [
            [
                row["method"],
                f"{row['images_per_second']:,.0f}",
                f"{row['milliseconds']:.1f}",
                f"{row['speed_ratio']:.2f}",
                f"{row['peak_gib']:.2f}",
                f"{row['memory_ratio']:.2f}",
            ]
            for row in result["rows"]
        ]
        return table(["ResNet-50", "images/s", "ms per step", "relative", "GiB", "relative"], rows)

    steps = 45  # of the stored run, in an epoch
    data = steps * fit["batch"] * 3 * fit["size"] ** 2 / 2**30
    return f"""## Speed of converted models

torchvision's ResNet-50 at {loop["size"]} pixels with batches of {loop["batch"]}, as built (batch norm) and converted.
A plain training loop by `torch.compile` in bf16 autocast, channels last, on one batch:

{shown(loop)}

{source("benchmarks/converted-speed.json", loop)}.

Whole steps of `nf.fit` in bf16. The images of {steps} steps are on the GPU and take {data:.1f} GiB of every row.

{shown(fit)}

{source("benchmarks/converted-fit.json", fit)}. The run used `EPOCH = {steps}`; the
script at that commit had another number."""


def translation_speed() -> str:
    result = read("benchmarks/translation-h200.json")
    rows = [[row["method"], f"{row['tokens_per_second']:,.0f}", f"{row['ratio']:.2f}"] for row in result["rows"]]
    return f"""## Translation speed

`{result["model"]}` on Multi30k, the whole step with its data; {result["padding"]:.0%} of the positions are padding.
Fixup is that of release 0.1 (`fixup:transformer=biased,scalar_lr=0.1,slow_biases=false`); today's is not measured.

{table(["method", "target tokens/s", "relative"], rows)}

{source("benchmarks/translation-h200.json", result)}."""


def measurement_cost() -> str:
    parts = []
    for name in ("propagation-cpu", "propagation-h200"):
        result = read(f"benchmarks/{name}.json")
        columns = ["model", "batch", "ms per plain pass"]
        passes = {"propagation": "measurement", "diagnosis": "diagnosis"}
        passes = {key: word for key, word in passes.items() if key in result["times"][0]["median"]}
        columns += [column for word in passes.values() for column in (f"ms per {word}", "relative")]
        rows = []
        for time in sorted(result["times"], key=lambda time: (time["model"], time["batch"])):
            median = time["median"]
            row = [time["model"].replace(":", ", "), str(time["batch"]), f"{1000 * median['plain']:,.0f}"]
            for key in passes:
                row += [f"{1000 * median[key]:,.0f}", f"{median[key] / median['plain']:.2f}"]
            rows.append(row)
        parts.append(f"{table(columns, rows)}\n\n{source(f'benchmarks/{name}.json', result)}.")
    deep = read("benchmarks/propagation-h200-deep.json")
    peak = deep["deep"]["peak_mib"]
    memory = (
        f"A measurement needs no more memory than a plain pass: {peak['propagation'] / 1024:.1f} and "
        f"{peak['plain'] / 1024:.1f} GiB for `{deep['deep']['model']}` with batches of {deep['deep']['batch']} "
        f"({source('benchmarks/propagation-h200-deep.json', deep)})."
    )
    return "\n\n".join(
        [
            "## Cost of a diagnosis",
            "One measurement of the signal (`propagate`, as in a `Monitor`) and one diagnosis (`diagnose`, with its\n"
            "checks) beside one plain forward and backward pass, medians of repeated passes. At small batches on a\n"
            "GPU even the plain pass is limited by Python.",
            *parts,
            memory,
        ]
    )


def cifar() -> str:
    values = read("fixup/table1.json")["values"]
    errors = [[row, _by_seed(values[f"test error, {row}"])] for row in ("Fixup", "batch norm")]
    figure = read("fixup/fig3.json")
    shown = {"batch norm": "batch norm", "Fixup": "Fixup", "Fixup with scalars at 10/L": "`fixup:scalar_lr=10/L`"}
    rows = []
    for depth in ("10", "100", "1,000", "10,000"):
        row = [depth]
        for method in shown:
            value = figure["values"].get(f"accuracy, {method}, {depth} layers")
            row.append("" if value is None else _accuracy(value))
        rows.append(row)
    return f"""## Accuracy on CIFAR-10

Test error of ResNet-110 after 200 epochs, in per cent, by seed ([table 1 of Fixup](claims.md#fixup-table1)). An error
of 90 is chance: that run lost its signal in the first epoch.

{table(["method", "test error"], errors)}

Test accuracy of wide ResNets of width 1 after one epoch, in per cent, with the standard deviation where there are
three seeds ([figure 3 of Fixup](claims.md#fixup-fig3)). With a tenth of the learning rate for its scalars, as in the
authors' code, Fixup stays at chance with 10,000 layers; finding 2 of the [findings](findings.md) explains why.

{table(["layers", *shown.values()], rows)}"""


def _by_seed(value: dict[str, Any]) -> str:
    return ", ".join(f"{of:.2f}" for of in value["values"])


def _accuracy(value: dict[str, Any]) -> str:
    spread = f" ± {value['std']:.1f}" if "std" in value else ""
    return f"{value['mean']:.1f}{spread}"


def converted() -> str:
    result = read("conversion/resnet18/comparison.json")
    release = ".".join(result["runs"][0]["origin"]["versions"]["normfree"].split(".")[:2])
    methods = [as_of(p["method"], release, "torchvision:resnet18") for p in result["points"]]
    rows = [
        [method, f"{p['lr']:g}", f"{100 * p['test']:.1f}"] for method, p in zip(methods, result["points"], strict=True)
    ]
    rates = " and ".join(f"{lr:g}" for lr in sorted(result["lrs"]))
    return f"""## Converted models

Test accuracy of torchvision's ResNet-18 after {result["settings"]["epochs"]} epochs of CIFAR-10, in per cent: each
method at the better of the learning rates {rates} by validation, one seed, on one H200, with the methods of release
{release} in today's spelling ([the runs](../results/conversion/resnet18/)). [models.md](models.md) lists every model
and method, and [the largest stable learning rates](models.md#learning-rates).

{table(["method", "learning rate", "test accuracy"], rows)}"""


def translation() -> str:
    rows = []
    for data, name in (("Multi30k", "table3_multi30k"), ("Europarl", "table3_europarl")):
        result = read(f"fixup/{name}.json")
        values = result["values"]
        rows.append([data, _bleu(values["BLEU, layer norm"]), _bleu(values["BLEU, Fixup"]), str(len(result["seeds"]))])
    points = read("transformers/depth/comparison.json")["points"]
    depths = sorted({p["depth"] for p in points})
    methods = list(dict.fromkeys(p["method"] for p in points))
    bleu = {(p["method"], p["depth"]): p["bleu"] for p in points}
    deep = [[f"`{method}`", *(f"{bleu[method, depth]:.1f}" for depth in depths)] for method in methods]
    return f"""## Translation, German to English

All Transformers of this section are those of release 0.1: `fixup:transformer=biased,scalar_lr=0.1,slow_biases=false`,
layer norm before the sum, no weight decay. The networks of the authors of Fixup are not run yet.

BLEU of a small model ([Multi30k](claims.md#fixup-table3-multi30k)) and of the paper's model
([Europarl](claims.md#fixup-table3-europarl)):

{table(["data", "layer norm", "Fixup", "seeds"], rows)}

BLEU on Multi30k after six epochs, by the number of layers, one seed ([findings](findings.md)):

{table(["method", *(f"{depth} layers" for depth in depths)], deep)}

[transformers/depth](../results/transformers/depth/)."""


def _bleu(value: dict[str, Any]) -> str:
    return f"{value['mean']:.1f}"


def page() -> str:
    """The whole page as Markdown."""
    head = """# Benchmarks

Every number here is read from [results/](../results/) by `make benchmarks-page`; a test compares the page with the
stored results. [benchmarks/](../benchmarks/) has the commands that measure, and [claims.md](claims.md) the numbers of
the papers.

| word | meaning |
| --- | --- |
| engine | training by `nf.fit` and `normfree train`, by one of two paths |
| compiled path | the engine with `torch.compile` and one CUDA graph per step |
| stage kernels | the engine with one CUDA kernel per stage of residual blocks, where they apply |
| whole step | a step of the engine: gathering, cropping and flipping the batch; forward, backward and update |
| plain loop | forward, backward and update in eager PyTorch, on one fixed batch |
| loop by `torch.compile` | the same with a compiled model |
| s to set up | building the model, compiling, capturing |"""
    sections = [
        training_speed(),
        stage_kernels(),
        saving(),
        converted_speed(),
        translation_speed(),
        measurement_cost(),
        cifar(),
        converted(),
        translation(),
    ]
    return "\n\n".join([head, *sections]) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    swept = {"depth": "benchmarks/training-kernels.json", "batch": "benchmarks/training-batch.json"}
    write_plot(panels_over_depth_and_batch({axis: read(name)["rows"] for axis, name in swept.items()}), PICTURE)
    print(f"wrote {PAGE.relative_to(ROOT)}")
