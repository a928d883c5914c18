"""Models of Hugging Face's transformers: their files and jdist's models give their logits, and they open what jdist saves.

`make test-loaders` runs this where transformers is not installed; `test_models.py` has the same models in NumPy.
"""

import os

import jax
import numpy as np
import pytest

import jdist
from examples.models.gpt2 import GPT2
from examples.models.resnet import ResNet
from examples.models.vit import ViT

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # all that is opened is on this disk
WHERE = "transformers is not installed; `make test-loaders` runs these tests"
torch = pytest.importorskip("torch", reason=WHERE)
hf = pytest.importorskip("transformers", reason=WHERE)

# Of libraries about themselves.
pytestmark = [pytest.mark.filterwarnings(f"ignore::{kind}") for kind in ("DeprecationWarning", "FutureWarning")]
TOLERANCE = 1e-4  # two programs in float32, over a few layers
TOKENS = np.random.default_rng(1).integers(50, size=(3, 11))
IMAGES = np.random.default_rng(2).normal(size=(2, 16, 16, 3)).astype(np.float32)


def gpt2():
    config = hf.GPT2Config(
        vocab_size=50, n_positions=16, n_embd=24, n_layer=2, n_head=3, bos_token_id=0, eos_token_id=0
    )
    return hf.GPT2LMHeadModel(config)


def vit():
    config = hf.ViTConfig(
        hidden_size=24,
        num_hidden_layers=2,
        num_attention_heads=3,
        intermediate_size=40,
        image_size=16,
        patch_size=4,
        num_labels=7,
    )
    return hf.ViTForImageClassification(config)


def resnet(layer_type, stem):
    config = hf.ResNetConfig(
        embedding_size=stem, hidden_sizes=[16, 24], depths=[1, 2], layer_type=layer_type, num_labels=5
    )
    return hf.ResNetForImageClassification(config)


GPT = {"vocabulary": 50, "positions": 16, "layers": 2, "width": 24, "heads": 3}
RESNET = {"num_classes": 5, "depths": (1, 2), "features": (16, 24)}
# By name: theirs, ours, what both are given, and the rules.
CASES = {
    "gpt2": (gpt2, GPT2(**GPT), TOKENS, jdist.weights.gpt2),
    "gpt2 stacked": (gpt2, GPT2(**GPT, stacked=True), TOKENS, jdist.weights.gpt2),
    "vit": (vit, ViT(num_classes=7, patch=4, layers=2, width=24, heads=3, hidden=40), IMAGES, jdist.weights.vit),
    "resnet bottleneck": (
        lambda: resnet("bottleneck", 8),
        ResNet(**RESNET, stem=8),
        IMAGES,
        jdist.weights.resnet,
    ),
    # Its first layer needs no shortcut.
    "resnet basic": (
        lambda: resnet("basic", 16),
        ResNet(**RESNET, stem=16, bottleneck=False),
        IMAGES,
        jdist.weights.resnet,
    ),
}


def randomized(model):
    """All of its numbers at random: as it comes, norms do nothing and the running averages are those of no data."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, values in model.state_dict().items():
            if name.endswith("num_batches_tracked"):
                continue
            noise = torch.randn(values.shape, generator=generator)
            if values.ndim > 1:
                values.copy_(noise * (values.shape[-1] if "embeddings" in name else values[0].numel()) ** -0.5)
            elif name.endswith("running_var"):
                values.copy_(0.5 + noise.abs())
            else:
                values.add_(noise * 0.3)
    return model.eval()


def logits(model, given):
    with torch.inference_mode():
        images = given.dtype == np.float32
        return model(torch.tensor(given.transpose(0, 3, 1, 2) if images else given)).logits.numpy()


@pytest.fixture(scope="module", params=CASES)
def case(request, tmp_path_factory):
    """A model of transformers, saved in one file and in several; its logits; ours for it."""
    make, ours, given, rules = CASES[request.param]
    theirs, folder = randomized(make()), tmp_path_factory.mktemp("model")
    theirs.save_pretrained(folder / "one")
    theirs.save_pretrained(folder / "several", max_shard_size="8KB")
    want = logits(theirs, given)
    assert np.abs(want).max() > 0.5  # else all would pass
    return folder, theirs, want, ours, given, rules()


@pytest.mark.parametrize("saved", ["one", "several"])
def test_the_logits_are_those_of_transformers(case, saved):
    folder, _, want, ours, given, rules = case
    files = [path.name for path in (folder / saved).glob("*.safetensors")]
    assert (len(files) > 1) == (saved == "several")
    shapes = jax.eval_shape(ours.init, jax.random.key(0), given)
    for strategy in (jdist.one_device(), jdist.sharded(jax.devices()[:5], whole_below=16)):
        variables = strategy.fetch(jdist.weights.load(folder / saved, strategy.shapes(shapes), rules))
        assert np.abs(np.asarray(ours.apply(variables, given)) - want).max() < TOLERANCE


@pytest.mark.parametrize("max_file_bytes", [10**9, 8_000])
def test_transformers_opens_what_jdist_saves(case, max_file_bytes, tmp_path):
    """With their config beside it: the same logits to the bit, and no weight that is missing or of no use."""
    folder, theirs, want, ours, given, rules = case
    strategy = jdist.sharded(jax.devices()[:5], whole_below=16)
    like = strategy.shapes(jax.eval_shape(ours.init, jax.random.key(0), given))
    variables = jdist.weights.load(folder / "one", like, rules)
    files = jdist.weights.save(variables, tmp_path, rules, max_file_bytes=max_file_bytes)
    assert (len(files) > 1) == (max_file_bytes < 10**9)
    theirs.config.save_pretrained(tmp_path)
    opened, met = type(theirs).from_pretrained(tmp_path, output_loading_info=True)
    # torch's own counter is in no leaf; its absence changes nothing in evaluation.
    assert [name for name in met["missing_keys"] if not name.endswith("num_batches_tracked")] == []
    assert [list(met[name]) for name in ("unexpected_keys", "mismatched_keys")] == [[], []]
    assert logits(opened.eval(), given).tobytes() == want.tobytes()
