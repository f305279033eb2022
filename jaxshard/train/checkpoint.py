"""Checkpoints: the whole state of a run on disk, and back, exactly, into any strategy on any mesh.

A state is stored by the paths of its leaves, so that reading it needs no class of the program that wrote it. Every
leaf's digest is taken where it lies before it is written, and compared when it is back on the devices.
"""

from __future__ import annotations

import json
import operator
import os
import shutil
import sys
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
import tensorstore as ts
from jax.sharding import NamedSharding, Sharding

from jaxshard.checks import whole_number
from jaxshard.mesh import unplaced
from jaxshard.specs import path_of
from jaxshard.train.description import (
    DESCRIPTION,
    STATE,
    CheckpointError,
    Description,
    StoredLeaf,
    describe,
    is_unfinished,
    steps,
)
from jaxshard.train.digest import digests
from jaxshard.train.quiet import quiet
from jaxshard.train.restore import Restored, restore
from jaxshard.train.stored import Verified, system_error, verify

__all__ = ["CheckpointError", "Checkpoints", "Description", "Restored", "Verified", "describe", "restore", "verify"]

PATIENCE_MS = 1_200_000
"""How long a process waits for the others to delete and to write: orbax's own 20 minutes."""
PATTERN = "*?[\\"
"""What a path of checkpoints may not have: orbax would write them without their arrays."""


class Checkpoints:
    """A folder of checkpoints, one subfolder for each step, written in the background.

    folder: on a local disk, or on one that all processes share; made at the first save. keep_last: how many of the
    newest stay; older ones are deleted once a newer one is whole. keep_every: those whose step it divides stay for
    good; 0 keeps none but the last. Raises CheckpointError for a path that orbax cannot write to.

    With several processes each makes this object and calls its methods alike. Use it in a `with`, or call `close`: a
    program that ends during a save says that it has failed. What it leaves is never read, and later saves clear it.
    """

    def __init__(self, folder: str | Path, *, keep_last: int = 2, keep_every: int = 0):
        self.folder = Path(folder).absolute()
        special = [one for one in PATTERN if one in str(self.folder)]
        if special:
            raise CheckpointError(
                f"{self.folder} has a {special[0]} in its path, which orbax takes for a pattern when it puts a "
                "checkpoint together; choose another folder."
            )
        self._keep_last = whole_number("keep_last", keep_last, "how many of the newest checkpoints stay")
        if keep_every:
            whole_number("keep_every", keep_every, "the steps between two checkpoints that stay, or 0")
        self._keep_every = keep_every
        self._saver: ocp.AsyncCheckpointer | None = None
        self._finishing: threading.Thread | None = None
        self._errors: list[CheckpointError] = []
        weakref.finalize(self, _last_words, self._errors)

    def steps(self) -> list[int]:
        """The steps of whole checkpoints, ascending."""
        return steps(self.folder)

    @unplaced()
    def save(self, step: int, state: Any, notes: Mapping[str, Any]) -> None:
        """Begins to save, and returns when the state is copied: it may be given to the next step at once.

        step: later than all that are there. state: a pytree of JAX arrays of any sharding and memory kind, such as a
        `TrainState`. notes: what else the run needs (its configuration, its position in the data), as JSON: tuples come
        back as lists, and keys as strings. Of several processes' notes, the first one's are kept.

        Raises CheckpointError if this step or a later one is there, if the save before this one failed, and for a
        folder that cannot be written or a state that cannot be stored; TypeError or ValueError for notes that are no
        JSON. Earlier checkpoints are as they were.
        """
        self.wait()
        step = operator.index(step)
        if step < 0:
            raise ValueError(f"save(step={step}): the number of steps made, 0 or more.")
        later = [there for there in self.steps() if there >= step]
        if later:
            raise CheckpointError(
                f"{self.folder} has a checkpoint of step {later[0]}, so step {step} cannot be saved there. Go on from "
                f"step {later[-1]}, or save into another folder."
            )
        arrays = _by_path(state)
        notes = json.loads(json.dumps(notes, allow_nan=False))  # as they come back, or the checksum would not agree
        description = _description(self.folder / str(step), step, arrays, notes).to_json()
        stored = {path: _data(x) for path, x in arrays.items() if x.size}
        with quiet(), self._failing(step):
            if self._saver is None:
                self._saver = _saver()
            items = {STATE: ocp.args.PyTreeSave(stored), DESCRIPTION: ocp.args.JsonSave(description)}
            self._saver.save(self.folder / str(step), args=ocp.args.Composite(**items))
        self._finishing = threading.Thread(target=self._finish, args=(self._saver, step), name=f"saving step {step}")
        self._finishing.start()

    def check(self) -> None:
        """Raises CheckpointError if a save in the background has failed. Costs nothing: call it at every step."""
        if self._finishing is not None and not self._finishing.is_alive():
            self.wait()

    def wait(self) -> None:
        """Returns when all is on disk. Raises CheckpointError if it could not be written."""
        if self._finishing is not None:
            self._finishing.join()
            self._finishing = None
        if self._errors:
            raise self._errors.pop()

    def close(self) -> None:
        """Waits as `wait` does, and ends the threads."""
        try:
            self.wait()
        finally:
            if self._saver is not None:
                self._saver.close()
                self._saver = None

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _finish(self, saver: ocp.AsyncCheckpointer, step: int) -> None:
        try:
            with quiet(), self._failing(step):
                saver.wait_until_finished()
                try:
                    if jax.process_index() == 0:
                        self._prune()
                finally:  # every process finds the same folder after `wait`
                    ocp.multihost.get_barrier_sync_fn()(key=f"jaxshard saved step {step}", timeout_ms=PATIENCE_MS)
        except CheckpointError as error:
            self._errors.append(error)

    @contextmanager
    def _failing(self, step: int) -> Iterator[None]:
        """Says of any failure which save it was of."""
        try:
            yield
        except Exception as error:  # orbax and tensorstore raise many kinds
            raise CheckpointError(f"step {step} could not be saved in {self.folder}: {_why(error)}.") from error

    def _prune(self) -> None:
        """Deletes what unfinished saves left, and checkpoints that are not to be kept."""
        for entry in self.folder.iterdir():
            if is_unfinished(entry.name):
                _delete(entry)
        there = self.steps()
        kept = there[-self._keep_last :] + [step for step in there if self._keep_every and step % self._keep_every == 0]
        for step in set(there).difference(kept):
            # Under another name first: one that is half deleted is never seen as a checkpoint.
            deleted = self.folder / f"{step}.deleted"
            os.rename(self.folder / str(step), deleted)
            _delete(deleted)


def _delete(entry: Path) -> None:
    """Deletes a folder, or what stands in its place. What a link leads to is not ours."""
    entry.unlink() if entry.is_symlink() or entry.is_file() else shutil.rmtree(entry)


def _last_words(errors: Sequence[CheckpointError]) -> None:
    """At the end of the program, or of its `Checkpoints`: what failed and was not raised."""
    for error in errors:
        print(f"jaxshard: {error}", file=sys.stderr)


def _saver() -> ocp.AsyncCheckpointer:
    # With its processes named, orbax meets the others through the coordination service. It would do so by programs on
    # the devices, from a thread of its own: processes may start those in another order than the steps of training.
    several = set(range(jax.process_count())) if jax.process_count() > 1 else None
    processes = ocp.options.MultiprocessingOptions(active_processes=several)
    handler = ocp.CompositeCheckpointHandler(
        composite_options=ocp.CompositeOptions(multiprocessing_options=processes),
        **{
            STATE: ocp.PyTreeCheckpointHandler(multiprocessing_options=processes),
            DESCRIPTION: ocp.JsonCheckpointHandler(multiprocessing_options=processes),
        },
    )
    return ocp.AsyncCheckpointer(
        handler,
        multiprocessing_options=processes,
        # Folders are made before save returns: one that cannot be made is an error there and then.
        async_options=ocp.AsyncOptions(create_directories_asynchronously=False),
    )


def _why(error: BaseException) -> str:
    """The system's own words where there are some, and otherwise the beginning of the message."""
    text = system_error(error) or " ".join(str(error).split()) or type(error).__name__
    if text.startswith("cannot schedule new futures"):
        return "the program ended before it was written; call close, or use Checkpoints in a `with`"
    return text[:200].rstrip(" .")


def _by_path(state: Any) -> dict[str, jax.Array]:
    """The leaves of a state by path. Raises CheckpointError for one that cannot be stored."""
    arrays: dict[str, jax.Array] = {}
    for keys, x in jax.tree_util.tree_leaves_with_path(state):
        path = path_of(keys)
        if path in arrays:
            raise CheckpointError(f"two leaves of the state have the path {path}; rename one, so that it can be found.")
        if not isinstance(x, jax.Array):
            raise CheckpointError(
                f"{path} of the state is a {type(x).__name__}; make it a jax.Array, or put it into the notes."
            )
        if x.is_deleted():
            raise CheckpointError(f"{path} of the state was donated to a step; save the state that the step returned.")
        if x.is_fully_addressable and jax.process_count() > 1:
            raise CheckpointError(f"{path} of the state lies in one process alone; make it an array over the mesh.")
        if not x.size and jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            raise CheckpointError(f"{path} of the state is an array of no PRNG keys; leave it out.")
        if not _storable(x):
            raise CheckpointError(f"{path} of the state is {x.dtype}, which zarr does not store; use int8 or uint8.")
        arrays[path] = x
    if not any(x.size for x in arrays.values()):
        raise CheckpointError("the state has no elements, so there is nothing to save.")
    return arrays


def _storable(x: jax.Array) -> bool:
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        return True
    try:
        ts.dtype(x.dtype.name)
    except ValueError:
        return False
    return True


def _data(x: jax.Array) -> jax.Array:
    return jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x


def _description(folder: Path, step: int, arrays: Mapping[str, jax.Array], notes: Mapping[str, Any]) -> Description:
    found = digests(list(arrays.values()))
    meshes = (x.sharding.mesh for x in arrays.values() if isinstance(x.sharding, NamedSharding))
    mesh = next(meshes, None)
    return Description(
        folder=folder,
        step=step,
        notes=notes,
        mesh=None if mesh is None else dict(zip(mesh.axis_names, mesh.axis_sizes, strict=True)),
        processes=jax.process_count(),
        jaxshard=_version(),
        jax=jax.__version__,
        leaves={
            path: StoredLeaf(
                shape=tuple(x.shape),
                dtype=str(x.dtype),
                spec=_spec(x.sharding),
                memory=x.sharding.memory_kind or "device",
                digest=digest,
            )
            for (path, x), digest in zip(arrays.items(), found, strict=True)
        },
    )


def _version() -> str:
    try:
        return version("jaxshard")
    except PackageNotFoundError:  # run from its sources
        return "not installed"


def _spec(sharding: Sharding) -> tuple[Any, ...] | None:
    if not isinstance(sharding, NamedSharding):
        return None
    return tuple(list(entry) if isinstance(entry, tuple) else entry for entry in sharding.spec)
