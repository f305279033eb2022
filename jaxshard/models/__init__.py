"""Models to train: plain JAX and flax, which know nothing of parallelism."""
