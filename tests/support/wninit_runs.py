"""Made-up training runs for the claims of `wninit`."""

from collections.abc import Callable
from functools import cache

from made_up_runs import MadeUpRuns, measure
from normfree.train import TrainConfig
from normfree_papers.claims import registry as claims
from normfree_papers.claims.claim import Claim, Measurement
from normfree_papers.claims.judgement import Judgement
from normfree_papers.claims.seed_metrics import EndedRun

Made = Callable[[TrainConfig], EndedRun | None]
DIVERGED = EndedRun({"status": "diverged", "test": None, "validation": None}, ())


def made_up(test: float, validation: float | None = None) -> EndedRun:
    """A run that ended with this test accuracy in per cent; its held-out accuracy is the same unless given."""
    held = test if validation is None else validation
    metrics = [{"epoch": i, "train_accuracy": (test + i) / 100} for i in (1, 2)]
    scores = {"test": {"accuracy": test / 100}, "validation": {"accuracy": held / 100}}
    return EndedRun({"status": "finished", **scores}, metrics)


def get(name: str) -> Claim:
    return claims.get(f"wninit/{name}")


def measured(
    name: str, make: Made, scale: str = "full", seeds: tuple[int, ...] = (0,)
) -> tuple[Measurement, Judgement, MadeUpRuns]:
    return measure(get(name), lambda _, config: make(config), scale=scale, seeds=seeds)


def nothing(config: TrainConfig) -> None:
    return None


@cache
def asked_for(name: str) -> dict[str, TrainConfig]:
    """The runs of a full claim."""
    return measured(name, nothing, seeds=get(name).seeds_at("full"))[2].asked


def depth_of(config: TrainConfig) -> int:
    return int(config.model.split("-")[1])
