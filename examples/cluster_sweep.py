"""A sweep on a cluster: Ray trains 16 runs on its nodes, and the same call finds all of them in the shared folder."""

import tempfile

import normfree as nf

# Ray starts a cluster of this machine here. For one of many machines, start Ray there, name its address with
# RAY_ADDRESS=HOST:6379, and choose a folder that all machines share: see docs/cluster.md.
GRID = {
    "methods": ["fixup", "he_in"],
    "models": ["resmlp-4-64", "resmlp-24-64"],
    "lrs": (0.1, 0.03),
    "seeds": (0, 1),
}


def main() -> None:
    base = nf.recipe("fashion", epochs=3)
    with tempfile.TemporaryDirectory() as folder:
        # Every run takes one CPU core. With `gpus_per_run=0.25`, four runs would share a GPU.
        try:
            found = nf.compare(base, **GRID, out=folder, on="ray", cpus_per_run=1)
        except ValueError as error:  # Ray is not installed, or the cluster does not answer
            raise SystemExit(str(error)) from None

        # Each method in each depth, at the rate with the best validation accuracy.
        for point in found.points:
            end = f"{point.test:.0%} at a rate of {point.lr}, {point.diverged} of {point.runs} runs diverged"
            print(f"{point.method} with {point.depth} layers: {end}")
        found.save("cluster_sweep.png")

        # A run that ended is read, wherever it was trained. So a sweep goes on after a crash, and can be extended.
        ended = []
        again = nf.compare(base, **GRID, out=folder, progress=lambda done, total, text: ended.append(done))
        print(f"the same call on this machine trains {len(again.runs) - ended[0]} of {len(again.runs)} runs")


if __name__ == "__main__":
    main()
