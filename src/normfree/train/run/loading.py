"""A model again from its folder: that of a run, or of a conversion."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from normfree.conversion.saving import (
    PLAN,
    Factory,
    convert_again,
    is_converted,
    load_converted,
    original,
    read_example,
    read_plan,
)
from normfree.data.text.prepared_folder import VOCABULARY, Prepared
from normfree.data.text.vocabulary import Vocabulary
from normfree.models import build, find_family
from normfree.models.foreign import is_foreign
from normfree.models.special_tokens import random_words
from normfree.train.config import TrainConfig
from normfree.train.engine.distributed import Processes
from normfree.train.engine.evaluation import Score
from normfree.train.engine.forward import apply_precision_
from normfree.train.engine.hardware import device_of
from normfree.train.engine.inputs import Data, inputs_of, is_folder, open_data
from normfree.train.engine.model_setup import classes_of, require_images
from normfree.train.run import checkpoint
from normfree.train.run.run_folder import RunFolder
from normfree.train.text.token_runs import is_tokens, require_data, translate_test, translates_test
from normfree.train.text.translation import Bleu


def read_config(run: str | Path) -> TrainConfig:
    """The configuration that a run was trained with.

    Raises `ValueError` when the folder holds no run.
    """
    path = RunFolder(run).config_path
    if not path.exists():
        raise ValueError(f"expected a run in '{run}', found no {path.name} there; give the folder that --out named")
    if not path.stat().st_size:  # all defaults, which is not what was trained
        raise ValueError(f"expected the configuration of a run in '{path}', got an empty file; start the run anew")
    return TrainConfig.from_toml(path)


def load(
    folder: str | Path, factory: Factory | None = None, *, model: nn.Module | None = None, device: str = "cpu"
) -> nn.Module:
    """The model of a run or of a conversion, from its folder, in evaluation mode.

    A run's has the weights of its last checkpoint, their moving average where there is one, in float32. `factory` gives
    the original of a model that was converted, where its name is not enough: a function, a model like it, or another
    name. `model` is filled as it is, in the place of the one that a run names, which cannot always be made from its
    name when it was given to `fit`.

    Raises `ValueError` when the folder holds neither, when a file is missing or damaged, and for another model.
    """
    if is_converted(folder):
        if model is not None:
            raise ValueError(
                f"expected a factory for the converted model in '{folder}', got model=; pass what gives its original"
            )
        return load_converted(folder, factory)[0].to(device)
    if not RunFolder(folder).config_path.exists():
        raise ValueError(
            f"expected a run in '{folder}' or a converted model, found no config.toml and no {PLAN} there; "
            "give the folder that --out named"
        )
    config = read_config(folder)
    tensors, state = checkpoint.load(folder)
    weights = {name.removeprefix("model."): t for name, t in tensors.items() if name.startswith("model.")}
    weights |= {name.removeprefix("average."): t for name, t in tensors.items() if name.startswith("average.")}
    if model is None:
        model = _made(Path(folder), config, state, factory)
    _fill_(model, weights, folder)
    return model.to(device).eval()


def holds_model(folder: str | Path) -> bool:
    """Whether `load` would look into a folder: that of a run, or of a conversion."""
    return RunFolder(folder).config_path.exists() or is_converted(folder)


def noise_for(folder: str | Path, *, batch: int = 8, length: int | None = None, seed: int = 0) -> Any:
    """Random inputs as the model of a run or of a conversion reads them, without its data.

    N(0, 1) numbers in the shape of the images, or words of the vocabulary in sequences of some length. What a converted
    model reads other than one batch of numbers is the example that it was converted with.

    Raises `ValueError` as `load` does.
    """
    generator = torch.Generator().manual_seed(seed)
    if is_converted(folder):
        example = read_example(folder)
        if not isinstance(example, Tensor) or not example.is_floating_point():
            return example
        return torch.randn(batch, *example.shape[1:], generator=generator).to(example.dtype)
    config, state = read_config(folder), checkpoint.load_state(folder)
    if "vocabulary" not in state:
        return torch.randn(batch, *state["input_shape"], generator=generator)
    family = find_family(config.model)[0]
    return random_words(family.inputs, (batch, length or family.size), generator, state["vocabulary"])


def _made(folder: Path, config: TrainConfig, state: dict[str, Any], factory: Factory | None) -> nn.Module:
    """The model of a run, of which only the structure matters."""
    if "vocabulary" in state:
        settings = {"num_classes": state["vocabulary"], "dropout": config.dropout, "form": config.form}
        made: nn.Module = build(config.model, config.method, **settings, device="meta").to_empty(device="cpu")
        return made
    if factory is None and not is_foreign(config.model):
        with torch.device("cpu"):
            return build(
                config.model,
                config.method,
                num_classes=len(state["classes"]),
                form=config.form,
                example=torch.zeros(2, *state["input_shape"]),
                device="meta",
            ).to_empty(device="cpu")
    made = original(config.model if factory is None else factory, len(state["classes"]))
    if not (folder / PLAN).exists():
        return made
    noise = torch.randn(2, *state["input_shape"], generator=torch.Generator().manual_seed(0))
    return convert_again(made, read_plan(folder), noise)


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


def load_vocabulary(run: str | Path) -> Vocabulary:
    """The vocabulary of a run on text, as it was when the run began.

    Raises `ValueError` when it is missing or damaged.
    """
    path = Path(run) / VOCABULARY
    found = Vocabulary.load(path)
    known = checkpoint.load_state(run).get("vocabulary_sha256")
    if known not in (None, hashlib.sha256(found.model).hexdigest()):
        raise ValueError(f"expected '{path}' as it was written, got one that was altered; copy it from the data again")
    return found


def evaluate(
    run: str | Path,
    *,
    device: str = "cpu",
    data_dir: str | None = None,
    progress: Callable[[int], None] | None = None,
) -> Score:
    """The test score of a run's model; on a GPU in the precision that it was trained in.

    `data_dir` is where the data lies now, if it moved: the folder of data sets, or the image folder or prepared folder
    of text that the run was trained on. `progress` is told after each batch how many are done.

    Raises `ValueError` when the folder holds no run, or its data is not there or other than it was.
    """
    config = _moved(read_config(run), data_dir)
    place = device_of(device)
    data = _data_of(run, config)
    model = load(run, device=str(place))
    precision = config.precision if place.type == "cuda" else "float32"
    dtype = apply_precision_(model, precision)
    layout = bool(config.channels_last)
    inputs = inputs_of(config, data, device=place, dtype=dtype, channels_last=layout, processes=Processes())
    if inputs.test is None:
        raise ValueError(f"expected a test split in '{config.data}', found none; prepare the data with one")
    return inputs.score(model, _counted(inputs.test(), progress))


def _counted(batches: Iterable[Any], progress: Callable[[int], None] | None) -> Iterator[Any]:
    for done, batch in enumerate(batches, 1):
        yield batch
        if progress is not None:
            progress(done)


def evaluate_translation(
    run: str | Path,
    *,
    device: str = "cpu",
    data_dir: str | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Bleu | None:
    """BLEU of a run's model on the test sentences, by the run's beam; None where it does not translate any.

    Arguments and errors are those of `evaluate`; `progress` is told how many sentences are done, and of how many.
    """
    config = _moved(read_config(run), data_dir)
    if not is_tokens(config.data):
        return None  # before any image is read
    data = _data_of(run, config)
    if not isinstance(data, Prepared) or not translates_test(data):
        return None
    return translate_test(load(run, device=str(device_of(device))), config, data, progress)[1]


def _moved(config: TrainConfig, folder: str | None) -> TrainConfig:
    """The configuration with data that lies elsewhere now."""
    if folder is None:
        return config
    if is_tokens(config.data):
        return replace(config, data=f"{config.data.partition(':')[0]}:{folder}")
    if is_folder(config.data):
        return replace(config, data=f"folder:{folder}")
    return replace(config, data_dir=folder)


def _data_of(run: str | Path, config: TrainConfig) -> Data:
    """The data of a run, refused where its tokens or labels mean other words or classes than the model learnt."""
    data, state = open_data(config), checkpoint.load_state(run)
    if isinstance(data, Prepared):
        require_data(data, state, run, whole=False)
    else:
        require_images({"classes": list(classes_of(data))}, state, run)
    return data
