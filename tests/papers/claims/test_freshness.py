"""Runs are found by what they compute, and a claim says when its runs are not those of today's code."""

import json
from pathlib import Path
from typing import Any

import pytest

from normfree.storage.provenance import RELEASE
from normfree.storage.writing import write_json
from normfree.train import RunFolder, TrainConfig
from normfree.train.config import folder_name
from normfree_papers.claims import run_cache
from normfree_papers.claims.canary import probes_of, todays, tolerance
from normfree_papers.claims.run_cache import Freshness, KeptRun, RunCache, RunIndex, kept_runs

BASE = TrainConfig(model="resmlp-3-16-3", method="nf", data="fashion14", epochs=1)
TODAY = BASE.with_changes(method="nf")
BEFORE = BASE.with_changes(method="nf:bias=false")


def keep(out: Path, config: TrainConfig, release: str = RELEASE, *, resolved: bool = True, **result: Any) -> Path:
    """A kept run: the folder is named after the settings as asked for, and the file says how open ones came out."""
    run = RunFolder(out / "runs" / folder_name(config))
    run.path.mkdir(parents=True)
    made = config.resolved(cuda=False) if resolved else config
    text = made.to_toml()
    assert f'normfree = "{RELEASE}"\n' in text
    new = "" if release == "0.1" else f'normfree = "{release}"\n'  # release 0.1 did not name itself
    run.config_path.write_text(text.replace(f'normfree = "{RELEASE}"\n', new))
    run.metrics_path.write_text("")
    write_json(run.result_path, {"status": "finished", "commit": "0" * 40, "test": {"accuracy": 0.5}, **result})
    return run.path


def canary_of(config: TrainConfig, factor: float = 1.0) -> dict[str, Any]:
    """Today's canary of a run, with all figures of its method times a factor."""
    found = todays("cpu float32", probes_of(config))
    first = probes_of(config)[0]
    figures = {name: [x * (factor if name == first else 1.0) for x in numbers] for name, numbers in found.items()}
    return {"cpu float32": {"tolerance": tolerance("float32"), "figures": figures}}


def record(folder: Path, method: str | None = None) -> dict[str, dict[str, str]]:
    return {"one": {"folder": folder.name, **({} if method is None else {"method": method})}}


def freshness_of(out: Path, runs: dict[str, dict[str, str]]) -> Freshness:
    return run_cache.freshness_of(kept_runs(out / "runs", {"runs": runs}).values(), out)


def found(index: RunIndex, config: TrainConfig) -> Path | None:
    run = index.find(config)
    return None if run is None else run.path


# The index


@pytest.mark.parametrize("changes", [{}, {"precision": "float32"}, {"compile": False, "graph": False}])
def test_settings_that_were_left_open_are_found_again(tmp_path: Path, changes: dict[str, Any]) -> None:
    config = BASE.with_changes(**changes)
    folder = keep(tmp_path, config)
    assert KeptRun(folder).asked_config() == config
    assert RunFolder(folder).read_config() != config
    assert found(RunIndex(tmp_path / "runs"), config) == folder


def test_run_of_an_earlier_release_is_found_under_todays_spelling(tmp_path: Path) -> None:
    folder = keep(tmp_path, TODAY, "0.1")  # as release 0.1 wrote it
    index = RunIndex(tmp_path / "runs")
    assert folder.name == folder_name(TODAY)
    assert KeptRun(folder).asked_config().method == BEFORE.method
    assert found(index, BEFORE) == folder
    assert found(index, TODAY) == folder  # for want of a better one
    assert found(index, TODAY.with_changes(lr=0.3)) is None
    assert index.new_folder(TODAY).name == f"{folder_name(TODAY)}-{RELEASE}"  # nothing is written over
    assert index.new_folder(BEFORE.with_changes(lr=0.3)).name == folder_name(BEFORE.with_changes(lr=0.3))


def test_run_of_today_comes_before_that_of_an_earlier_release(tmp_path: Path) -> None:
    old = keep(tmp_path, TODAY, "0.1")
    new = old.with_name(f"{old.name}-{RELEASE}")
    keep(tmp_path / "other", TODAY).rename(new)
    index = RunIndex(tmp_path / "runs")
    assert (found(index, TODAY), found(index, BEFORE)) == (new, old)


def test_order_of_the_options_does_not_matter(tmp_path: Path) -> None:
    folder = keep(tmp_path, BASE.with_changes(method="nf:beta=0.5,bias=false"))
    assert found(RunIndex(tmp_path / "runs"), BASE.with_changes(method="nf:bias=false,beta=0.5")) == folder


def test_cache_uses_an_earlier_run_and_names_it(tmp_path: Path) -> None:
    folder = keep(tmp_path, TODAY, "0.1")
    cache = RunCache(tmp_path / "runs", tmp_path / "work", only=())
    assert cache({"one": TODAY, "two": BEFORE, "three": TODAY.with_changes(seed=9)})["three"] is None
    assert cache.records == {
        "one": {"folder": folder.name, "method": "nf"},
        "two": {"folder": folder.name, "method": "nf:bias=false"},
    }
    assert list(cache.missing) == ["three"]


# Stale, fresh or unknown


def test_run_by_an_earlier_definition_is_stale(tmp_path: Path) -> None:
    folder = keep(tmp_path, TODAY, "0.1")
    told = Freshness("stale", ("1 of 1 runs made with nf:bias=false, not nf",))
    assert freshness_of(tmp_path, record(folder, "nf")) == told
    assert freshness_of(tmp_path, record(folder)) == told  # the result is of release 0.1, too
    assert freshness_of(tmp_path, record(folder, "nf:bias=false")).state == "unknown"


def test_run_with_todays_canary_is_fresh_and_with_another_one_stale(tmp_path: Path) -> None:
    fresh = keep(tmp_path, TODAY, canary=canary_of(TODAY))
    close = keep(tmp_path, TODAY.with_changes(seed=1), canary=canary_of(TODAY, 1 + 0.1 * tolerance("float32")))
    stale = keep(tmp_path, TODAY.with_changes(seed=2), canary=canary_of(TODAY, 1 + 10 * tolerance("float32")))
    none = keep(tmp_path, TODAY.with_changes(seed=3))
    states = [freshness_of(tmp_path, record(folder, "nf")).state for folder in (fresh, close, stale, none)]
    assert states == ["fresh", "fresh", "stale", "unknown"]
    every = {folder.name: record(folder, "nf")["one"] for folder in (fresh, close, stale, none)}
    assert freshness_of(tmp_path, every) == Freshness(
        "stale",
        (
            f"1 of 4 runs for which today's code computes other reference values ({probes_of(TODAY)[0]})",
            "1 of 4 runs without reference values to compare",
        ),
    )


def test_canary_of_an_earlier_commit_is_looked_up(tmp_path: Path) -> None:
    folder = keep(tmp_path, TODAY, "0.1", commit="abc")
    other = keep(tmp_path, TODAY.with_changes(seed=1), "0.1", commit="def")
    commits = {"abc": canary_of(BEFORE), "def": "unknown"}
    (tmp_path / "canaries.json").write_text(json.dumps({"commits": commits}))
    assert freshness_of(tmp_path, record(folder, "nf:bias=false")).state == "fresh"
    assert freshness_of(tmp_path, record(other, "nf:bias=false")).state == "unknown"


def test_without_runs_there_is_nothing_to_say(tmp_path: Path) -> None:
    assert freshness_of(tmp_path, {}) == freshness_of(tmp_path, {"one": {}}) == Freshness()
    gone = freshness_of(tmp_path, {"one": {"folder": "gone"}})
    assert gone == Freshness("unknown", ("1 of 1 runs no longer kept",))
