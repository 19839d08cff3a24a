"""`fit`: prepare a run in its folder, and train."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import nn

from normfree.data import ImageSet
from normfree.extras import require_package
from normfree.nn.devices import device_of
from normfree.plan import ResidualPlan
from normfree.train.config import TrainConfig
from normfree.train.engine.environment import Stop, join_processes, seeded_generators
from normfree.train.engine.inputs import explained_worker_end
from normfree.train.engine.loop import Trainer
from normfree.train.engine.setup import prepare_training
from normfree.train.run.result import RunResult, Snapshot
from normfree.train.run.run_folder import RunFolder

if TYPE_CHECKING:
    from normfree.data.text.prepared_folder import Prepared


def fit(
    config: TrainConfig,
    *,
    model: nn.Module | None = None,
    data: ImageSet | Prepared | None = None,
    plan: ResidualPlan | None = None,
    out: str | Path | None = None,
    resume: bool = False,
    overwrite: bool = False,
    progress: Callable[[Snapshot], None] | None = None,
    command: str | None = None,
    picture: bool = True,
) -> RunResult:
    """Train a model, and test it at the end.

    SIGINT and SIGTERM let the run finish its step or batch and save. A run that diverges ends with the model of its
    last good checkpoint, or with the initial one. A third-party model that the configuration names is converted by its
    method, or stays as it is with the method 'as built'.

        result = nf.fit(nf.recipe("fashion", epochs=2), out="runs/fashion")
        print(result.test.accuracy)

    Args:
        config: All settings of the run.
        model: A model to train, instead of the configured model.
        data: Data to train on, instead of the configured data.
        plan: The plan of a given model that was converted, so that its parameters learn and decay as its method asks.
        out: The folder to keep the run in. A run in a folder can be resumed bit for bit after a signal, a kill or a
            power failure. None keeps nothing.
        resume: Whether to resume the run in `out`. Settings that change no number may differ, and `epochs`.
        overwrite: Whether to replace a run in `out`. It is removed when the new one is ready to train.
        progress: Called about twice a second with the state of the run.
        command: The command line to store in the result.
        picture: Whether to draw curves.png at the end.

    Returns:
        The scores, the trained model, and how the run ended.

    Raises:
        ValueError: If the configuration, the model and the data do not fit together, or the folder cannot be used.
        OSError: If the folder cannot be written.
    """
    started = time.perf_counter()
    device = device_of(config.device)
    if config.tensorboard:
        require_package("tensorboard", "tensorboard=true")
    with ExitStack() as stack:
        stack.enter_context(_explained_shortage(config))
        stack.enter_context(explained_worker_end())
        processes = stack.enter_context(join_processes(device))
        folder = RunFolder(out) if out is not None else None
        stop = stack.enter_context(Stop())
        stop.at_once = True  # nothing is to be saved before training begins
        seed_generators = stack.enter_context(seeded_generators(device))
        with processes.shared_errors():
            if folder is not None and processes.first:
                stack.enter_context(folder.hold(resume=resume, overwrite=overwrite))
            seed_generators(config.seed)  # third-party models draw their initial weights from torch's generators
            prepared = prepare_training(
                config, model=model, data=data, plan=plan, resume=resume, device=device, processes=processes
            )
            setup = stack.enter_context(prepared)
            trainer = Trainer(setup, folder if processes.first else None, stop, seed_generators, started)
        return trainer.run(resume=resume, progress=progress, command=command, picture=picture)


@contextmanager
def _explained_shortage(config: TrainConfig) -> Iterator[None]:
    """Turn an error of torch for lack of memory into one sentence."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:  # torch has a class of its own for a GPU only
        short = isinstance(error, torch.OutOfMemoryError | MemoryError)
        if not short and "allocate memory" not in str(error) and "enough memory" not in str(error):
            raise
        raise ValueError(
            f"expected '{config.model}' with batches of {config.batch_size:,} to fit into the memory, but it ran out; "
            "use a smaller batch_size, more micro-batches (accumulate) or recompute=1"
        ) from error
