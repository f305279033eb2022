"""Every test runs on 8 forced CPU devices, with strict dtype promotion and a cache of compiled programs."""

import os

# Before jax is imported: a GPU test run sets JAX_PLATFORMS=cuda,cpu itself.
os.environ.setdefault("JAX_PLATFORMS", "cpu")
# As `jaxshard.force_cpu_devices` sets them, and why.
os.environ.setdefault("PJRT_NPROC", "16")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import jax
import pytest

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")


def pytest_configure(config: pytest.Config) -> None:
    # Tests share small programs, and XLA's CPU compiler is most of their time.
    cache = config.cache
    if cache is not None:
        jax.config.update("jax_compilation_cache_dir", str(cache.mkdir(f"jax-{jax.__version__}")))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    gpus = "cuda" in os.environ["JAX_PLATFORMS"]
    for item in items:
        if item.get_closest_marker("gpu") and not gpus:
            item.add_marker(pytest.mark.skip(reason="needs a GPU: set JAX_PLATFORMS=cuda,cpu"))


@pytest.fixture(scope="module")
def compiled_once():
    """For modules that run whole trainings: see `trains.compiled_once`."""
    from trains import compiled_once  # here, because it imports the training program, which most tests do not need

    with compiled_once():
        yield
