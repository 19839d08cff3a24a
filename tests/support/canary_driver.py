"""Compute canaries with the code of an earlier commit; `canaries.py` runs this file there, with PYTHONPATH set to it.

It uses only what all commits have had since the first stored run: `nf.fit`, `nf.TrainConfig`, and a step class with
`__call__`, `state`, `model` and `loss_sum`. It prints the figures by probe as JSON; null where the commit fails.
"""

from __future__ import annotations

import importlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

import normfree as nf


def main() -> None:
    """Read the job that the first argument names, and print the figures of its probes."""
    job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    found = {probe: _figures(settings, job["data"]) for probe, settings in job["probes"].items()}
    print(json.dumps(found))


def _figures(settings: dict[str, Any], data: dict[str, Any]) -> list[float] | None:
    text = settings["model"].startswith("transformer-")
    settings = {name: tuple(value) if isinstance(value, list) else value for name, value in settings.items()}
    steps: list[tuple[float, dict[str, torch.Tensor], dict[str, torch.Tensor]]] = []
    step_class = _first("normfree.train.engine.step:TrainStep", "normfree.train.step:Step")
    call = step_class.__call__

    def recorded(step: Any) -> None:
        names = [f"model.{name}" for name, _ in step.model.named_parameters()]
        sum_before, before = float(step.loss_sum), step.state()
        initial = {name: before[name].detach().clone() for name in names}
        call(step)
        trained = step.state()
        steps.append((float(step.loss_sum) - sum_before, initial, {name: trained[name].clone() for name in names}))

    step_class.__call__ = recorded
    try:
        config = nf.TrainConfig(**settings, device="cpu", precision="float32", compile=False, graph=False)
        result = nf.fit(config, data=_text(data) if text else _images(data))
    except Exception as error:  # the commit may lack the method, the setting or the kind of data
        print(f"{settings['method']} {settings['model']}: {type(error).__name__}: {error}", file=sys.stderr)
        return None
    finally:
        step_class.__call__ = call
    score = result.validation if text else result.test
    losses = [loss for loss, _, _ in steps] + ([] if score is None else [score.loss])
    return [float(f"{x:.7g}") for x in (*losses, *_parameter_figures(steps[0][1], steps[-1][2]))]


def _parameter_figures(initial: dict[str, torch.Tensor], trained: dict[str, torch.Tensor]) -> list[float]:
    """Return for scalars, vectors and larger tensors the number, the initial norm, and the norm of the change."""
    sums = torch.zeros(3, 3, dtype=torch.float64)
    for name, value in initial.items():
        before, after = value.double(), trained[name].double()
        kind = 0 if value.numel() == 1 else min(value.dim(), 2)
        sums[kind] += torch.stack((torch.tensor(value.numel()), before.square().sum(), (after - before).square().sum()))
    sums[:, 1:] = sums[:, 1:].sqrt()
    return [float(number) for number in sums.flatten()]


def _images(data: dict[str, Any]) -> Any:
    module = _first("normfree.data.images.image_set", "normfree.data.images")
    splits = [
        module.Split(torch.tensor(images, dtype=torch.uint8), torch.tensor(labels))
        for images, labels in (data["images"]["train"], data["images"]["test"])
    ]
    return module.image_set("canary", tuple("0123456789"), *splits)


def _text(data: dict[str, Any]) -> Any:
    prepared = _first("normfree.data.text.prepared_folder:Prepared", "normfree.data.prepared:Prepared")
    tokens = _first("normfree.data.text.tokens", "normfree.data.token_pairs")

    def pairs(_: Any, split: str) -> Any:
        return tokens.TokenPairs(*(tokens.TokenLines.of(side) for side in data["pairs"][split]))

    def vocabulary(_: Any) -> Any:
        return SimpleNamespace(model=b"")  # of which a fingerprint is taken

    kind = type("GeneratedText", (prepared,), {"pairs": pairs, "vocabulary": vocabulary})
    splits: dict[str, Any] = {split: {} for split in data["pairs"]}
    manifest = {"vocabulary": data["vocabulary"], "sides": ["source", "target"], "splits": splits, "inputs": {}}
    return kind(folder=Path("canary"), manifest={**manifest, "sha256": ""})


def _first(*places: str) -> Any:
    """Return the first of these modules, or attributes of modules, that there is."""
    for place in places:
        module, _, attribute = place.partition(":")
        try:
            found = importlib.import_module(module)
        except ModuleNotFoundError:
            continue
        return getattr(found, attribute) if attribute else found
    raise ModuleNotFoundError(f"expected one of {', '.join(places)}, found none")


if __name__ == "__main__":
    main()
