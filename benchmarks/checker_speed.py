"""Pictures a second that the shapes checker grades on one core: `OMP_NUM_THREADS=1 python benchmarks/checker_speed.py`.

Counts CPU seconds, so that other programs do not matter.
"""

from __future__ import annotations

import statistics
import time

import numpy as np

from flowrl.shapes.checker import check_images
from flowrl.shapes.render import render
from flowrl.shapes.scenes import CATEGORIES, all_specs, sample_scene

BATCH, BATCHES, REPEATS = 64, 16, 5


def main() -> None:
    """Times `REPEATS` passes over the same scenes and prints the median."""
    rng = np.random.default_rng(0)
    tables = [list(all_specs(category)) for category in CATEGORIES]
    specs = [tables[row % 6][(row // 6) % len(tables[row % 6])] for row in range(BATCH * BATCHES)]
    pixels = np.stack([np.asarray(render(sample_scene(spec, rng))) for spec in specs])
    speeds = []
    for _ in range(REPEATS):
        start = time.process_time()
        strict = [check_images(pixels[k : k + BATCH], specs[k : k + BATCH])[0] for k in range(0, len(specs), BATCH)]
        speeds.append(len(specs) / (time.process_time() - start))
    accuracy = np.concatenate(strict).mean()
    print(
        f"{statistics.median(speeds):.0f} images/s on one core (median of {REPEATS}, {min(speeds):.0f} to "
        f"{max(speeds):.0f}; batches of {BATCH}; strict accuracy {accuracy:.4f} on {len(specs)} drawn scenes)"
    )


if __name__ == "__main__":
    main()
