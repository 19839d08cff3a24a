"""A run's model again, from its folder."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from normfree.models import build
from normfree.models.foreign import create, is_foreign
from normfree.train import checkpoint
from normfree.train.config import TrainConfig
from normfree.train.distributed import Processes
from normfree.train.evaluation import Score, score
from normfree.train.forward import apply_precision_
from normfree.train.inputs import inputs_of, open_data
from normfree.train.runs import RunFolder


def read_config(run: str | Path) -> TrainConfig:
    """The configuration that a run was trained with.

    Raises `ValueError` when the folder holds no run.
    """
    path = RunFolder(run).config_path
    if not path.exists():
        raise ValueError(f"expected a run in '{run}', found no {path.name} there; give the folder that --out named")
    return TrainConfig.from_toml(path)


def load(run: str | Path, *, model: nn.Module | None = None, device: str = "cpu") -> nn.Module:
    """The model of a run with the weights of its last checkpoint, their moving average where there is one.

    In float32 and in evaluation mode. `model` is filled in the place of the one that the run names, which cannot always
    be made from its name when it was given to `fit`.

    Raises `ValueError` when the folder holds no run, one whose checkpoint is missing or damaged, or one of another
    model.
    """
    config = read_config(run)
    tensors, state = checkpoint.load(run)
    if model is not None:
        pass
    elif is_foreign(config.model):
        model = create(config.model)
    else:
        with torch.device("cpu"):
            model = build(
                config.model,
                config.method,
                num_classes=len(state["classes"]),
                form=config.form,
                example=torch.zeros(2, *state["input_shape"]),
                device="meta",
            ).to_empty(device="cpu")
    weights = {name.removeprefix("model."): t for name, t in tensors.items() if name.startswith("model.")}
    weights |= {name.removeprefix("average."): t for name, t in tensors.items() if name.startswith("average.")}
    _fill_(model, weights, run)
    return model.to(device).eval()


@torch.no_grad()
def _fill_(model: nn.Module, weights: dict[str, Tensor], run: str | Path) -> None:
    """Write all parameters and buffers, also those that no `state_dict` has."""
    own = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    wrong = [n for n in {**own, **weights} if n not in own or n not in weights or own[n].shape != weights[n].shape]
    if wrong:
        raise ValueError(
            f"expected the model of the run in '{run}', got {type(model).__name__}, which differs in '{wrong[0]}' and "
            f"{len(wrong) - 1} more; pass model= with one like that which was trained"
        )
    for name, tensor in own.items():
        tensor.copy_(weights[name])


def evaluate(run: str | Path, *, device: str = "cpu", data_dir: str | None = None) -> Score:
    """The test score of a run's model; on a GPU in the precision that it was trained in.

    Raises `ValueError` when the folder holds no run, or its data is not there.
    """
    config = read_config(run)
    if data_dir is not None:
        config = replace(config, data_dir=data_dir)
    model = load(run, device=device)
    precision = config.precision if torch.device(device).type == "cuda" else "float32"
    dtype = apply_precision_(model, precision)
    layout = bool(config.channels_last)
    inputs = inputs_of(
        config,
        open_data(config),
        device=torch.device(device),
        dtype=dtype,
        channels_last=layout,
        processes=Processes(),
    )
    return score(model, inputs.test())
