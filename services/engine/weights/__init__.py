"""From a checkpoint to weights in memory, shared or split."""
