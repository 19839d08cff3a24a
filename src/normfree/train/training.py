"""`fit`: train a model by a configuration.

`fit` opens the data, builds the model, checks both, and hands them to the training loop in `normfree.train.engine`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from torch import nn

from normfree.conversion import Changes
from normfree.data import ImageSet
from normfree.data.text.prepared_folder import Prepared
from normfree.models import BaseModel
from normfree.models.foreign import is_foreign
from normfree.nn.devices import device_of
from normfree.plan import ResidualPlan
from normfree.train.config import TrainConfig
from normfree.train.data import Data, as_data, open_data
from normfree.train.engine.distributed import join_processes
from normfree.train.engine.environment import Stop, seeded_generators, torch_settings
from normfree.train.engine.loop import Trainer
from normfree.train.engine.setup import TrainSetup
from normfree.train.image_data import AS_BUILT
from normfree.train.run.result import RunResult, Snapshot
from normfree.train.run.run_folder import RunFolder


def fit(
    config: TrainConfig,
    *,
    model: nn.Module | None = None,
    data: ImageSet | Prepared | None = None,
    plan: ResidualPlan | None = None,
    out: str | Path | None = None,
    resume: bool = False,
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
        model: A model to train in place of the one that the configuration names.
        data: Data to train on in place of those that the configuration names.
        plan: The plan of a given model that was converted, so that its parameters learn and decay as its method asks.
        out: The folder to keep the run in. A run in a folder can be resumed bit for bit after a signal, a kill or a
            power failure. None keeps nothing.
        resume: Whether to resume the run in `out`.
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
    with ExitStack() as stack:
        processes = stack.enter_context(join_processes(device))
        folder = RunFolder(out) if out is not None else None
        stop = stack.enter_context(Stop())
        seed_generators = stack.enter_context(seeded_generators(device))
        with processes.shared_errors():
            if folder is not None and processes.first:
                stack.enter_context(folder.hold(resume=resume))
            opened = open_data(config) if data is None else as_data(data)
            opened.require_usable()
            seed_generators(config.seed)
            if plan is not None and model is None:
                raise ValueError("expected a plan beside the model that was converted, got one alone; pass model=, too")
            trained, plan = opened.build_model(config) if model is None else (model, plan)
            if not resume:  # a run that was begun may go on
                _require_effect(config, opened, given=model is not None)
            if model is not None or is_foreign(config.model):
                opened.require_scores(trained, config)
            if model is not None:
                config = config.with_changes(**model_settings(config, model, plan))
            if data is not None:
                config = config.with_changes(data=opened.name)
            branches = len(trained.plan.branches) if isinstance(trained, BaseModel) else 0
            config = config.resolved(cuda=device.type == "cuda", branches=branches, world=processes.world)
            if config.graph and device.type != "cuda":
                remedy = "resume the run where there is one" if resume else "use graph=false"
                raise ValueError(f"expected a GPU for graph=true, got device '{device}'; {remedy}")
            stack.enter_context(torch_settings(device, config))
            setup = TrainSetup(config, trained, plan, opened, device, processes)
            stack.callback(setup.release)
            trainer = Trainer(setup, folder if processes.first else None, stop, seed_generators, started)
        return trainer.run(resume=resume, progress=progress, command=command, picture=picture)


def model_settings(config: TrainConfig, model: nn.Module, plan: ResidualPlan | None = None) -> dict[str, Any]:
    """Return the settings that name a given model: its own name, method and form.

    The method of a converted model is that of its conversion; if the plan does not say, that of the configuration.
    """
    if isinstance(model, BaseModel):
        return {"model": model.name, "method": model.method.spec, "form": model.form}
    method = AS_BUILT
    if plan is not None and isinstance(plan.changes, Changes):
        method = plan.changes.method
    elif plan is not None and plan.changes is None:
        method = config.method
    return {"model": f"{type(model).__module__}:{type(model).__qualname__}", "method": method}


def _require_effect(config: TrainConfig, data: Data, *, given: bool) -> None:
    """Raise `ValueError` for a setting that would change the name of the run and nothing else.

    A `given` model takes the place of the one that the configuration names.
    """
    names, where = list(data.unused_settings), data.kind
    if is_foreign(config.model) and not given:
        names, where = [*names, "form"], f"{where} and a third-party model"
    for name in names:
        value, default = getattr(config, name), getattr(TrainConfig, name)
        if value != default:
            raise ValueError(
                f"expected {name}={default} for {where}, where it changes nothing, got {value}; leave it out"
            )
