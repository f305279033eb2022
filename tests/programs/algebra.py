"""Products, convolutions, decompositions, sorts and reductions of parameters."""

import jax
import jax.numpy as jnp
from jax import lax

from .program import Below, cross_entropy, examples, normals, program, squared_error

IMAGES = examples(x=(8, 8, 4), y=())
SEQUENCES = examples(x=(6, 16), y=())
SQUARE = normals(w=(8, 8), out=(8,))


@program(init=normals(q=(16, 4, 8), k=(16, 4, 8), v=(16, 4, 8), o=(4, 8, 16), out=(16,)), batch=SEQUENCES)
def attention_einsum(params, batch):
    """Kernels of shape (D, H, Dh) and (H, Dh, D)."""
    q, k, v = (jnp.einsum("btd,dhk->bhtk", batch["x"], params[name]) for name in "qkv")
    scores = jnp.einsum("bhtk,bhsk->bhts", q, k) / 8**0.5
    scores = jnp.where(jnp.tril(jnp.ones((6, 6), bool)), scores, -jnp.inf)
    h = jnp.einsum("bhts,bhsk,hkd->btd", jax.nn.softmax(scores), v, params["o"])
    return squared_error(h.mean(1) @ params["out"], batch)


@program(init=normals(q=(16, 32), kv=(2, 16, 16), o=(32, 16), out=(16,)), batch=SEQUENCES)
def attention_grouped(params, batch):
    """Four query heads on two key heads, by reshapes of flat kernels, with JAX's own attention."""
    q = (batch["x"] @ params["q"]).reshape(-1, 6, 4, 8)
    k, v = jnp.einsum("btd,nde->nbte", batch["x"], params["kv"]).reshape(2, -1, 6, 2, 8)
    h = jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(-1, 6, 32) @ params["o"]
    return squared_error(h.mean(1) @ params["out"], batch)


@program(init=normals(w=(16, 4, 4), out=(4, 4)))
def einsum_with_transposes(params, batch):
    """The contracted dims of the leaf lie apart, and both operands are reordered."""
    w = params["w"].reshape(2, 8, 4, 4)
    return squared_error(jnp.einsum("bd,adij,ji->ba", batch["x"], w, params["out"]).sum(1), batch)


@program(init=normals(kernel=(3, 3, 4, 8), bias=(8,), head=(8, 16), out=(16,)), batch=IMAGES)
def convolution(params, batch):
    h = lax.conv_general_dilated(
        batch["x"], params["kernel"], (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    h = jax.nn.relu(h + params["bias"])
    pooled = lax.reduce_window(h, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    return squared_error(pooled.mean((1, 2)) @ params["head"] @ params["out"], batch)


@program(init=normals(depthwise=(8, 1, 3), up=(16, 8, 3), out=(16,)), batch=examples(x=(6, 8), y=()))
def convolution_depthwise(params, batch):
    """A group for every channel, then a transposed convolution."""
    dims = ("NCH", "OIH", "NCH")
    x = batch["x"].swapaxes(1, 2)
    h = lax.conv_general_dilated(x, params["depthwise"], (1,), "SAME", dimension_numbers=dims, feature_group_count=8)
    h = lax.conv_transpose(jnp.tanh(h), params["up"], (2,), "SAME", dimension_numbers=dims)
    return squared_error(h.mean(2) @ params["out"], batch)


@program(init=normals(router=(16, 4), experts=(4, 16, 8), out=(8,)), batch=SEQUENCES)
def ragged_dot_experts(params, batch):
    """A mixture of experts: tokens sorted by expert, one ragged product, sorted back."""
    tokens = batch["x"].reshape(-1, 16)
    gates = jax.nn.softmax(tokens @ params["router"])
    expert = jnp.argmax(gates, axis=1)
    order = jnp.argsort(expert)
    h = lax.ragged_dot(tokens[order], params["experts"], jnp.bincount(expert, length=4))
    h = h[jnp.argsort(order)] * jnp.max(gates, axis=1, keepdims=True)
    return squared_error(h.reshape(-1, 6, 8).mean(1) @ params["out"], batch)


@program(init=normals(router=(8, 4), experts=(4, 8, 16), out=(16,)))
def top_k_experts(params, batch):
    """Two of four experts for each example, their weights gathered."""
    values, chosen = lax.top_k(batch["x"] @ params["router"], 2)
    h = jnp.einsum("bd,bkde->bke", batch["x"], params["experts"][chosen])
    return squared_error(jnp.einsum("bke,bk,e->b", h, jax.nn.softmax(values), params["out"]), batch)


@program(init=SQUARE)
def sort_of_leaf(params, batch):
    """Rows sorted, and the rows themselves ordered by another leaf."""
    w = jnp.sort(params["w"], axis=1)[jnp.argsort(params["out"])]
    return squared_error(jnp.sort(batch["x"], axis=1) @ w @ jnp.sort(params["out"]), batch)


@program(init=SQUARE)
def cumulative_leaf(params, batch):
    """Sums, products and maxima along the dims of a leaf."""
    w = jnp.cumsum(params["w"], axis=0) + lax.cummax(params["w"], axis=1, reverse=True)
    out = jnp.cumprod(1 + 0.1 * params["out"]) - lax.cumlogsumexp(params["out"])
    return squared_error(jnp.tanh(batch["x"] @ w) @ out, batch)


@program(init=SQUARE)
def reductions_of_leaf(params, batch):
    """Each dim of a leaf goes through one reduction or another."""
    w = params["w"]
    v = w.max(0) + w.min(1) + w.mean(1) + jnp.prod(1 + 0.1 * w, axis=0) + w.std(0) + jnp.linalg.norm(w)
    h = jnp.tanh(0.3 * batch["x"] * (v + jax.nn.logsumexp(w, axis=0)))
    return squared_error(h @ params["out"], batch)


@program(init=normals(decay=(8,), w=(8, 8), out=(8,)), batch=examples(x=(6, 8), y=()))
def associative_scan_states(params, batch):
    """A linear recurrence in logarithmic depth, its decay a leaf."""
    decay = jnp.broadcast_to(jax.nn.sigmoid(params["decay"]), batch["x"].shape)

    def combine(a, b):
        return a[0] * b[0], b[0] * a[1] + b[1]

    _, states = lax.associative_scan(combine, (decay, batch["x"] @ params["w"]), axis=1)
    return squared_error(jnp.tanh(states).mean(1) @ params["out"], batch)


@program(init=normals(factors=(6, 8, 8), out=(8,)))
def associative_scan_of_leaf(params, batch):
    """All partial products of a stack of matrices."""
    products = lax.associative_scan(jnp.matmul, params["factors"])
    return squared_error(jnp.tanh(batch["x"] @ products.mean(0)) @ params["out"], batch)


@program(init=SQUARE)
def linalg_solve(params, batch):
    """Solves with a well-conditioned matrix made from a leaf."""
    system = params["w"] @ params["w"].T + jnp.eye(8)
    return squared_error(jnp.linalg.solve(system, batch["x"].T).T @ params["out"], batch)


@program(init=SQUARE)
def linalg_cholesky(params, batch):
    """A Gaussian's log-likelihood, by a Cholesky factor and a triangular solve."""
    factor = jnp.linalg.cholesky(params["w"] @ params["w"].T + jnp.eye(8))
    z = lax.linalg.triangular_solve(factor, (batch["x"] + params["out"]).T, left_side=True, lower=True)
    return 0.5 * jnp.mean(jnp.sum(z**2, axis=0)) + jnp.log(jnp.diagonal(factor)).sum()


@program(init=normals(w=(16, 8), out=(16,)))
def linalg_qr(params, batch):
    """An orthonormal layer."""
    q, _ = jnp.linalg.qr(params["w"])
    return squared_error(jnp.tanh(batch["x"] @ q.T) @ params["out"], batch)


@program(init=SQUARE)
def linalg_log_determinant(params, batch):
    """A normalising flow of one linear layer."""
    w = params["w"] + 2 * jnp.eye(8)
    z = jnp.tanh(batch["x"] @ w) + params["out"]
    return 0.5 * jnp.mean(jnp.sum(z**2, axis=1)) - jnp.linalg.slogdet(w)[1]


@program(init=SQUARE)
def linalg_exponential(params, batch):
    """A rotation: the exponential of a skew matrix, which JAX writes with branches and loops."""
    rotation = jax.scipy.linalg.expm(params["w"] - params["w"].T)
    return squared_error(jnp.tanh(batch["x"] @ rotation) @ params["out"], batch)


@program(init=normals(kernel=(16,), w=(8, 16), out=(16,)))
def fourier_transform_of_leaf(params, batch):
    """A circular convolution by way of the frequencies."""
    h = jnp.fft.rfft(batch["x"] @ params["w"]) * jnp.fft.rfft(params["kernel"])
    return squared_error(jnp.fft.irfft(h, 16) @ params["out"], batch)


@program(init=normals(a=(2, 4), b=(4, 4), u=(8,), v=(8,), out=(16,)))
def kronecker_and_outer(params, batch):
    w = jnp.kron(params["a"], params["b"]) + jnp.outer(params["u"], jnp.tile(params["v"], 2))
    return squared_error(jnp.tanh(batch["x"] @ w) @ params["out"], batch)


@program(init=normals(table=(32, 16), out=(16, 32)), batch=examples(tokens=Below(32, (6,)), y=Below(32)))
def log_sum_exp_loss(params, batch):
    """Cross-entropy written out, with a z-loss."""
    logits = params["table"][batch["tokens"]].mean(1) @ params["out"]
    z = jax.nn.logsumexp(logits, axis=1)
    picked = jnp.take_along_axis(logits, batch["y"][:, None], axis=1)[:, 0]
    return jnp.mean(z - picked + 0.01 * z**2) + 0.0 * cross_entropy(logits, batch["y"])
