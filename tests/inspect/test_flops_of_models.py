"""FLOPs of the products in the gradients of four models: as counted by hand, most of XLA's."""

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers.flops import flops, shape_of, xla_flops
from models import ViT, cross_entropy

BATCH, LENGTH, WIDTH, HEADS = 2, 32, 128, 4


def block_products(batch, length, width, hidden):
    """A transformer's block: four projections, scores and their use, two layers of an MLP."""
    projections = 4 * width**2 + 2 * width * hidden
    return 2 * batch * length * (projections + 2 * length * width)


class LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, x):
        h = nn.LayerNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(num_heads=HEADS)(h, h)
        h = nn.gelu(nn.Dense(4 * WIDTH)(nn.LayerNorm()(x)))
        return x + nn.Dense(WIDTH)(h)


def linen_block():
    block, x = LinenBlock(), shape_of(BATCH, LENGTH, WIDTH)
    params = jax.eval_shape(block.init, jax.random.key(0), x)
    products = 3 * block_products(BATCH, LENGTH, WIDTH, 4 * WIDTH)

    def loss(params, x):
        return jnp.mean(jnp.square(jnp.asarray(block.apply(params, x))))

    return loss, (params, x), products


class EquinoxBlock(eqx.Module):
    norms: list
    attention: eqx.nn.MultiheadAttention
    mlp: eqx.nn.MLP

    def __init__(self, key):
        keys = jax.random.split(key)
        self.norms = [eqx.nn.LayerNorm(WIDTH), eqx.nn.LayerNorm(WIDTH)]
        self.attention = eqx.nn.MultiheadAttention(HEADS, WIDTH, key=keys[0])
        self.mlp = eqx.nn.MLP(WIDTH, WIDTH, 3 * WIDTH, 1, jax.nn.gelu, key=keys[1])

    def __call__(self, x):
        h = jax.vmap(self.norms[0])(x)
        x = x + self.attention(h, h, h)
        return x + jax.vmap(self.mlp)(jax.vmap(self.norms[1])(x))


class EquinoxTransformer(eqx.Module):
    embedding: eqx.nn.Embedding
    blocks: list
    head: eqx.nn.Linear

    def __init__(self, key):
        keys = jax.random.split(key, 4)
        self.embedding = eqx.nn.Embedding(50, WIDTH, key=keys[0])
        self.blocks = [EquinoxBlock(key) for key in keys[1:3]]
        self.head = eqx.nn.Linear(WIDTH, 50, key=keys[3])

    def __call__(self, tokens):
        x = jax.vmap(self.embedding)(tokens)
        for block in self.blocks:
            x = block(x)
        return jax.vmap(self.head)(x)


def equinox_transformer():
    model = eqx.filter_eval_shape(EquinoxTransformer, jax.random.key(0))
    params, static = eqx.partition(model, lambda leaf: hasattr(leaf, "shape"))
    tokens = shape_of(BATCH, LENGTH, dtype=jnp.int32)

    def loss(params, tokens, labels):
        return cross_entropy(jax.vmap(eqx.combine(params, static))(tokens), labels)

    blocks = 2 * block_products(BATCH, LENGTH, WIDTH, 3 * WIDTH)
    head = 2 * BATCH * LENGTH * WIDTH * 50
    return loss, (params, tokens, tokens), 3 * (blocks + head)


def vit():
    model, rng = ViT(layers=2), np.random.default_rng(0)
    args = jax.eval_shape(lambda: (model.init(rng), *model.batch(rng)))
    blocks = 2 * block_products(8, 65, 192, 768)
    patches, head = 2 * 8 * 64 * 48 * 192, 2 * 8 * 192 * 100
    return model.loss, args, 3 * (blocks + head) + 2 * patches  # images need no gradient


def _pairs(size, kernel, stride):
    """How often a kernel's elements meet inputs along an axis that is padded to `SAME`."""
    outputs = -(-size // stride)
    before = max(0, (outputs - 1) * stride + kernel - size) // 2
    places = (o * stride + k - before for o in range(outputs) for k in range(kernel))
    return sum(0 <= place < size for place in places)


def resnet_products(batch, image):
    """A ResNet-50's convolutions and head, forward; and the first convolution, among them."""

    def convolution(size, kernel, stride, inputs, outputs):
        return 2 * batch * _pairs(size, kernel, stride) ** 2 * inputs * outputs

    first = convolution(image, 7, 2, 3, 64)
    total, size, inputs = first, image // 4, 64
    for blocks, outputs, stride in ((3, 256, 1), (4, 512, 2), (6, 1024, 2), (3, 2048, 2)):
        total += convolution(size, 1, stride, inputs, outputs)  # the projection around a block
        for _ in range(blocks):
            total += convolution(size, 1, 1, inputs, outputs // 4)
            total += convolution(size, 3, stride, outputs // 4, outputs // 4)
            size //= stride
            total += convolution(size, 1, 1, outputs // 4, outputs)
            inputs, stride = outputs, 1
    return total + 2 * batch * 2048 * 1000, first


def resnet(image=224):
    def apply(images):
        return hk.nets.ResNet50(1000)(images, is_training=True)

    net = hk.transform_with_state(apply)
    images, labels = shape_of(2, image, image, 3), shape_of(2, dtype=jnp.int32)
    params, state = jax.eval_shape(net.init, jax.random.key(0), images)

    def loss(params, state, images, labels):
        return cross_entropy(net.apply(params, state, None, images)[0], labels)

    total, first = resnet_products(2, image)
    return loss, (params, state, images, labels), 3 * total - first


pytestmark = pytest.mark.usefixtures("standard_promotion")  # Haiku divides floats by integers


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "model",
    [linen_block, equinox_transformer, vit, pytest.param(resnet, marks=pytest.mark.slow)],
)
def test_products_equal_a_count_by_hand_and_are_most_of_what_xla_counts(model):
    loss, args, products = model()
    assert flops(jax.grad(loss), *args) == products
    assert 0.8 < products / xla_flops(jax.grad(loss), *args) < 1


@pytest.mark.thorough
def test_a_resnet_forward_equals_a_count_by_hand():
    loss, args, _ = resnet(64)
    assert flops(loss, *args) == resnet_products(2, 64)[0]
