"""Losses that name the mesh axes.

Where it can be said without axes, `single_device_loss` says it (and must where JAX cannot map the collective
over two named axes, as with all_gather); the others depend on the mesh, and `Program.reference` maps them
over the parts under the same names.
"""

import jax
import jax.numpy as jnp
from jax import lax

from .program import AXES, cross_entropy, examples, layer, normals, program, squared_error, unit

DENSE = normals(w=(8, 16), out=(16,))
PLACES = unit((16,))


def _plain(params, batch):
    return squared_error(jnp.tanh(batch["x"] @ params["w"]) @ params["out"], batch)


@program(init=DENSE, names_axes=True, single_device_loss=_plain)
def pmean_of_loss(params, batch):
    return lax.pmean(_plain(params, batch), AXES)


@program(init=DENSE, names_axes=True, single_device_loss=_plain)
def pmean_axis_by_axis(params, batch):
    """Over one axis, then over the other."""
    return lax.pmean(lax.pmean(_plain(params, batch), "shard"), "replica")


@program(init=DENSE, names_axes=True, single_device_loss=_plain)
def psum_of_sums(params, batch):
    """The sum of all errors over the number of all examples."""
    errors = (jnp.tanh(batch["x"] @ params["w"]) @ params["out"] - batch["y"]) ** 2
    total, count = lax.psum((errors.sum(), jnp.float32(errors.size)), AXES)
    return total / count


@program(init=DENSE, names_axes=True, single_device_loss=_plain)
def pmean_of_leaf(params, batch):
    """The mean over devices of a parameter, which is the parameter."""
    return _plain({**params, "w": lax.pmean(params["w"], AXES)}, batch)


@program(init=DENSE, names_axes=True, single_device_loss=_plain)
def axis_size_and_constant(params, batch):
    """A psum of a literal, against the size of the axes."""
    ratio = lax.psum(1.0, AXES) / (lax.axis_size("replica") * lax.axis_size("shard"))
    return ratio * _plain(params, batch)


BATCH_NORM = normals(w=(8, 16), scale=(16,), shift=(16,), out=(16,))


def _normalise(params, h, mean):
    centred = h - mean(h)
    scaled = centred * lax.rsqrt(mean(centred**2) + 1e-3)
    return jnp.tanh(scaled * (1 + params["scale"]) + params["shift"])


def _batch_norm_whole(params, batch):
    h = _normalise(params, batch["x"] @ params["w"], lambda h: h.mean(0))
    return squared_error(h @ params["out"], batch)


@program(init=BATCH_NORM, names_axes=True, single_device_loss=_batch_norm_whole)
def batch_norm_synchronised(params, batch):
    """Statistics of the whole batch: gradients flow from every device to every other."""
    h = _normalise(params, batch["x"] @ params["w"], lambda h: lax.pmean(h.mean(0), AXES))
    return squared_error(h @ params["out"], batch)


@program(init=BATCH_NORM, names_axes=True, per_example=False)
def batch_norm_by_shard(params, batch):
    """Statistics over one mesh axis alone: the loss depends on the mesh."""
    h = _normalise(params, batch["x"] @ params["w"], lambda h: lax.pmean(h.mean(0), "shard"))
    return squared_error(h @ params["out"], batch)


@program(init=BATCH_NORM, per_example=False)
def batch_norm_by_part(params, batch):
    """No axis is named: each device has statistics of its own."""
    h = _normalise(params, batch["x"] @ params["w"], lambda h: h.mean(0))
    return squared_error(h @ params["out"], batch)


def _scan_norm(params, batch, mean):
    def body(h, w):
        h, _ = layer(h, w)
        return h - mean(h), None

    h, _ = lax.scan(body, batch["x"] @ params["into"], params["layers"])
    return squared_error(h @ params["out"], batch)


@program(
    init=normals(into=(8, 16), layers=(3, 16, 16), out=(16,)),
    names_axes=True,
    single_device_loss=lambda params, batch: _scan_norm(params, batch, lambda h: h.mean(0)),
)
def pmean_in_scan(params, batch):
    """Every layer centres its activations over the whole batch."""
    return _scan_norm(params, batch, lambda h: lax.pmean(h.mean(0), AXES))


@program(
    init=normals(into=(8, 16), layers=(3, 16, 16), out=(16,)),
    names_axes=True,
    single_device_loss=lambda params, batch: _scan_norm(params, batch, lambda h: h.mean(0)),
)
def pmean_in_remat(params, batch):
    """The same, in a region that is recomputed, collectives and all."""
    mean = jax.checkpoint(lambda h: lax.pmean(h.mean(0), AXES))
    return jax.checkpoint(lambda params, batch: _scan_norm(params, batch, mean))(params, batch)


def _soft_maximum(params, batch):
    scores = batch["x"] @ params["w"] @ params["out"]
    return jax.nn.logsumexp(scores) + squared_error(scores, batch)


@program(init=DENSE, names_axes=True, single_device_loss=_soft_maximum)
def log_sum_exp_over_batch(params, batch):
    """pmax of what carries no gradient, psum of what does, and a logarithm of that."""
    scores = batch["x"] @ params["w"] @ params["out"]
    largest = lax.pmax(lax.stop_gradient(scores.max()), AXES)
    return jnp.log(lax.psum(jnp.exp(scores - largest).sum(), AXES)) + largest + squared_error(scores, batch)


def _contrast(a, b, labels):
    a, b = (h / jnp.linalg.norm(h, axis=1, keepdims=True) for h in (a, b))
    return cross_entropy(5 * a @ b.T, labels)


@program(
    init=normals(image=(8, 16), text=(6, 16)),
    batch=examples(image=(8,), text=(6,)),
    names_axes=True,
    single_device_loss=lambda params, batch: _contrast(
        batch["image"] @ params["image"], batch["text"] @ params["text"], jnp.arange(16)
    ),
)
def contrastive_gathered(params, batch):
    """Every example is told from all others: features are gathered from all devices."""
    image, text = batch["image"] @ params["image"], batch["text"] @ params["text"]
    everyone = lax.all_gather(text, AXES, tiled=True)
    labels = lax.axis_index(AXES) * len(image) + jnp.arange(len(image))
    return _contrast(image, everyone, labels)


@program(init=normals(image=(8, 16), text=(6, 16)), batch=examples(image=(8,), text=(6,)), per_example=False)
def contrastive_by_part(params, batch):
    """Negatives come from the same part alone."""
    image, text = batch["image"] @ params["image"], batch["text"] @ params["text"]
    return _contrast(image, text, jnp.arange(len(image)))


@program(
    init=DENSE,
    names_axes=True,
    single_device_loss=lambda params, batch: _plain(params, {**batch, "x": batch["x"] * PLACES[:, None]}),
)
def axis_index_places_examples(params, batch):
    """Each example is scaled by its place in the global batch."""
    count = batch["x"].shape[0]
    places = lax.dynamic_slice_in_dim(jnp.asarray(PLACES), lax.axis_index(AXES) * count, count)
    return _plain(params, {**batch, "x": batch["x"] * places[:, None]})
