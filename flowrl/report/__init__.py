"""What a run shows: progress, image grids, curves, the summary."""
