"""Weights under Hugging Face's names: jdist's models compute what the reference does, and save what they were given."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import jdist
from examples.models.gpt2 import GPT2
from examples.models.resnet import ResNet
from examples.models.vit import ViT
from jdist.errors import BatchError, CheckpointError
from tests.weights import reference

TOLERANCE = 1e-4  # float32 against float64, over two layers
GPT = {"vocabulary": 50, "positions": 16, "layers": 2, "width": 24}
VIT = {"classes": 7, "patch": 4, "layers": 2, "width": 24, "hidden": 40}
TOKENS = np.random.default_rng(1).integers(50, size=(3, 11))
IMAGES = np.random.default_rng(2).normal(size=(2, 16, 16, 3)).astype(np.float32)


def gpt2_weights(**options):
    return reference.random_weights(reference.gpt2_shapes(**GPT, **options))


def saved(tmp_path, weights):
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    return tmp_path / "model.safetensors"


def load(file, model, example, rules, strategy=None, **options):
    strategy = strategy or jdist.sharded(jax.devices()[:5], whole_below=16)
    shapes = jax.eval_shape(model.init, jax.random.key(0), example)
    variables = jdist.weights.load(file, strategy.shapes(shapes), rules, **options)
    return strategy.fetch(variables)


def assert_logits(got, want):
    assert np.abs(np.asarray(got) - want).max() < TOLERANCE
    assert np.abs(want).max() > 0.5  # else all would pass


def saved_again(variables, tmp_path, rules):
    (file,) = jdist.weights.save(variables, tmp_path / "again", rules)
    return load_file(file)


def there_and_back(tmp_path, weights, model, example, rules, **more):
    """Says what a model computes with weights, which it is given with `more`, and gives back alone."""
    variables = load(saved(tmp_path, weights | more), model, example, rules)
    jax.tree.map(np.testing.assert_array_equal, saved_again(variables, tmp_path, rules), weights)
    return model.apply(variables, example)


@pytest.mark.parametrize("heads", [None, 3])
@pytest.mark.parametrize("stacked", [False, True])
def test_gpt2(tmp_path, stacked, heads):
    weights, model = gpt2_weights(), GPT2(**GPT, heads=3, stacked=stacked)
    if heads:
        (tmp_path / "config.json").write_text('{"n_head": 3}')
    got = there_and_back(tmp_path, weights, model, TOKENS, jdist.weights.gpt2(heads=heads))
    assert_logits(got, reference.gpt2(weights, TOKENS, heads=3))


def test_gpt2_as_older_files_have_it(tmp_path):
    """Without "transformer.", with the causal masks, and with the head beside the embedding that it is tied to."""
    weights = gpt2_weights(prefix="")
    mask = np.tril(np.ones((1, 1, 16, 16), np.float32))
    more = {f"h.{i}.attn.bias": mask for i in range(2)} | {"lm_head.weight": weights["wte.weight"]}
    model = GPT2(**GPT, heads=3)
    variables = load(saved(tmp_path, weights | more), model, TOKENS, jdist.weights.gpt2())
    assert_logits(model.apply(variables, TOKENS), reference.gpt2(weights, TOKENS, heads=3))
    untied = {"lm_head.weight": weights["wte.weight"] + np.float32(1)}
    with pytest.raises(CheckpointError, match=r"tensor lm_head\.weight: has other values than another tensor"):
        load(saved(tmp_path, weights | untied), model, TOKENS, jdist.weights.gpt2())


@pytest.mark.parametrize("stacked", [False, True])
def test_a_fused_projection_goes_into_three(tmp_path, stacked):
    """A tree with flax's own attention takes GPT-2's weights, and gives them back."""
    weights = gpt2_weights()

    def shape(*of):
        return jax.ShapeDtypeStruct((2, *of) if stacked else of, jnp.float32)

    def layer():
        split = {"attn": {each: {"kernel": shape(24, 3, 8), "bias": shape(3, 8)} for each in ("query", "key", "value")}}
        split["attn"]["c_proj"] = {"kernel": shape(24, 24), "bias": shape(24)}
        split["mlp"] = {"c_fc": {"kernel": shape(24, 96), "bias": shape(96)}}
        split["mlp"]["c_proj"] = {"kernel": shape(96, 24), "bias": shape(24)}
        return split | {f"ln_{i}": {"scale": shape(24), "bias": shape(24)} for i in (1, 2)}

    tree = {"h": layer()} if stacked else {"h_0": layer(), "h_1": layer()}
    tree |= {"ln_f": {each: jax.ShapeDtypeStruct((24,), jnp.float32) for each in ("scale", "bias")}}
    for name, rows in (("wte", 50), ("wpe", 16)):
        tree |= {name: {"embedding": jax.ShapeDtypeStruct((rows, 24), jnp.float32)}}
    strategy = jdist.sharded(jax.devices()[:5], whole_below=16)
    loaded = jdist.weights.load(saved(tmp_path, weights), strategy.shapes(tree), jdist.weights.gpt2())
    params = strategy.fetch(loaded)
    key = params["h"]["attn"]["key"] if stacked else params["h_1"]["attn"]["key"]
    kernel = key["kernel"][1] if stacked else key["kernel"]
    want = np.split(weights["transformer.h.1.attn.c_attn.weight"], 3, axis=1)[1]
    np.testing.assert_array_equal(kernel.reshape(24, 24), want)
    again = saved_again(loaded, tmp_path, jdist.weights.gpt2())
    jax.tree.map(np.testing.assert_array_equal, again, weights)


def test_another_number_of_heads_is_refused_where_the_config_beside_the_file_says_it(tmp_path):
    file, model = saved(tmp_path, gpt2_weights()), GPT2(**GPT, heads=4)
    load(file, model, TOKENS, jdist.weights.gpt2(heads=4))  # nothing tells
    (tmp_path / "config.json").write_text('{"n_head": 3}')
    says = r"the config.json next to it says that its model has 3 attention heads, and leaf .*kernel of shape \[24, 72\] has 4"
    with pytest.raises(CheckpointError, match=says):
        load(file, model, TOKENS, jdist.weights.gpt2(heads=4))
    with pytest.raises(CheckpointError, match=r"its shape .* does not fit the axes of the rule"):
        load(file, model, TOKENS, jdist.weights.gpt2(heads=5))

    file = saved(tmp_path, reference.random_weights(reference.vit_shapes(**VIT, num_patches=16)))
    model = ViT(num_classes=7, patch=4, layers=2, width=24, heads=3, hidden=40)
    load(file, model, IMAGES, jdist.weights.vit())
    (tmp_path / "config.json").write_text('{"num_attention_heads": 6}')
    with pytest.raises(CheckpointError, match=r"has 6 attention heads, and leaf .*kernel of shape \[24, 3, 8\] has 3"):
        load(file, model, IMAGES, jdist.weights.vit())
    (tmp_path / "config.json").write_text("what else is called so")
    load(file, model, IMAGES, jdist.weights.vit())


def test_vit(tmp_path):
    shapes = reference.vit_shapes(**VIT, num_patches=16)
    weights = reference.random_weights(shapes)
    model = ViT(num_classes=7, patch=4, layers=2, width=24, heads=3, hidden=40)
    got = there_and_back(tmp_path, weights, model, IMAGES, jdist.weights.vit())
    assert_logits(got, reference.vit(weights, IMAGES, heads=3))


@pytest.mark.parametrize("bottleneck", [True, False])
def test_resnet(tmp_path, bottleneck):
    size = {"depths": (1, 2), "features": (16, 24), "stem": 8, "bottleneck": bottleneck}
    weights = reference.random_weights(reference.resnet_shapes(classes=5, **size))
    counters = {"resnet.embedder.embedder.normalization.num_batches_tracked": np.zeros((), np.int64)}
    model = ResNet(num_classes=5, **size)
    got = there_and_back(tmp_path, weights, model, IMAGES, jdist.weights.resnet(), **counters)
    assert_logits(got, reference.resnet(weights, IMAGES, depths=size["depths"], bottleneck=bottleneck))


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_16_bits_go_into_float32_exactly_and_back_when_asked(tmp_path, dtype):
    weights = {name: x.astype(dtype) for name, x in gpt2_weights().items()}
    model = GPT2(**GPT, heads=3)
    variables = load(saved(tmp_path, weights), model, TOKENS, jdist.weights.gpt2())
    assert {x.dtype.name for x in jax.tree.leaves(variables)} == {"float32"}
    assert_logits(model.apply(variables, TOKENS), reference.gpt2(weights, TOKENS, heads=3))

    narrow = jax.tree.map(lambda x: x.astype(dtype), variables)
    again = saved_again(narrow, tmp_path, jdist.weights.gpt2())
    jax.tree.map(np.testing.assert_array_equal, again, weights)
    assert {x.dtype for x in again.values()} == {jnp.dtype(dtype)}

    (tmp_path / "wide").mkdir()
    wide = saved(tmp_path / "wide", gpt2_weights())
    like = jdist.mirrored().shapes(narrow)
    with pytest.raises(CheckpointError, match=f"has dtype float32, and leaf .* {dtype.dtype.name}: .*cast=True"):
        jdist.weights.load(wide, like, jdist.weights.gpt2())
    cast = jdist.weights.load(wide, like, jdist.weights.gpt2(), cast=True)
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, cast), narrow)


def test_inputs_that_a_model_does_not_take():
    """flax would give NaN for the one, and leave the last pixels of the other out."""
    with pytest.raises(BatchError, match="a sequence has 17 tokens, and the model `positions` for 16"):
        GPT2(**GPT, heads=3).init(jax.random.key(0), jnp.zeros((1, 17), jnp.int32))
    with pytest.raises(BatchError, match="images are 16 x 18, which `patch`, 4, does not divide"):
        ViT(patch=4).init(jax.random.key(0), jnp.zeros((1, 16, 18, 3)))
