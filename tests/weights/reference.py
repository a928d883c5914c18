"""GPT-2, ViT and ResNet in float64 NumPy, from weights under Hugging Face's names and in torch's layouts.

Written from the papers and from what transformers' modules of these names compute; nothing in it is jdist's.
"""

import math

import numpy as np


def random_weights(shapes, seed=0):
    """Weights of these shapes; those of norms near 1, variances above 0."""
    rng = np.random.default_rng(seed)
    made = {}
    for name, shape in shapes.items():
        values = rng.normal(size=shape) * (0.3 if len(shape) < 2 else (1.0 / math.prod(shape[1:])) ** 0.5)
        if name.endswith("running_var"):
            values = 0.5 + np.abs(values)
        elif "norm" in name.rpartition(".")[0].lower() or "ln_" in name:
            values = values + (1.0 if name.endswith("weight") else 0.0)
        made[name] = values.astype(np.float32)
    return made


def layer_norm(x, weight, bias, epsilon):
    mean = x.mean(-1, keepdims=True)
    variance = ((x - mean) ** 2).mean(-1, keepdims=True)
    return (x - mean) / np.sqrt(variance + epsilon) * weight + bias


def softmax(x):
    e = np.exp(x - x.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def attention(q, k, v, heads, causal):
    """[rows, length, width] each, as torch's `view(..., heads, width // heads)` splits them."""
    rows, length, width = q.shape
    q, k, v = (x.reshape(rows, length, heads, width // heads).transpose(0, 2, 1, 3) for x in (q, k, v))
    scores = q @ k.transpose(0, 1, 3, 2) / math.sqrt(width // heads)
    if causal:
        scores = np.where(np.tril(np.ones((length, length), bool)), scores, -np.inf)
    return (softmax(scores) @ v).transpose(0, 2, 1, 3).reshape(rows, length, width)


def gpt2_shapes(*, vocabulary, positions, layers, width, prefix="transformer."):
    shapes = {"wte.weight": (vocabulary, width), "wpe.weight": (positions, width)}
    for i in range(layers):
        for name, shape in {
            "ln_1.weight": (width,),
            "ln_1.bias": (width,),
            "attn.c_attn.weight": (width, 3 * width),  # Conv1D: [in, out]
            "attn.c_attn.bias": (3 * width,),
            "attn.c_proj.weight": (width, width),
            "attn.c_proj.bias": (width,),
            "ln_2.weight": (width,),
            "ln_2.bias": (width,),
            "mlp.c_fc.weight": (width, 4 * width),
            "mlp.c_fc.bias": (4 * width,),
            "mlp.c_proj.weight": (4 * width, width),
            "mlp.c_proj.bias": (width,),
        }.items():
            shapes[f"h.{i}.{name}"] = shape
    shapes |= {"ln_f.weight": (width,), "ln_f.bias": (width,)}
    return {prefix + name: shape for name, shape in shapes.items()}


def gpt2(weights, tokens, *, heads):
    """`GPT2LMHeadModel`: pre-norm, gelu_new, epsilon 1e-5, the head is the embedding."""
    w = {name.removeprefix("transformer."): x.astype(np.float64) for name, x in weights.items()}
    x = w["wte.weight"][tokens] + w["wpe.weight"][: tokens.shape[1]]
    for i in range(sum(name.endswith("ln_1.bias") for name in w)):
        at = f"h.{i}."
        h = layer_norm(x, w[at + "ln_1.weight"], w[at + "ln_1.bias"], 1e-5)
        q, k, v = np.split(h @ w[at + "attn.c_attn.weight"] + w[at + "attn.c_attn.bias"], 3, axis=-1)
        h = attention(q, k, v, heads, causal=True)
        x = x + h @ w[at + "attn.c_proj.weight"] + w[at + "attn.c_proj.bias"]
        h = layer_norm(x, w[at + "ln_2.weight"], w[at + "ln_2.bias"], 1e-5)
        h = h @ w[at + "mlp.c_fc.weight"] + w[at + "mlp.c_fc.bias"]
        h = 0.5 * h * (1 + np.tanh(math.sqrt(2 / math.pi) * (h + 0.044715 * h**3)))
        x = x + h @ w[at + "mlp.c_proj.weight"] + w[at + "mlp.c_proj.bias"]
    return layer_norm(x, w["ln_f.weight"], w["ln_f.bias"], 1e-5) @ w["wte.weight"].T


def vit_shapes(*, classes, patch, layers, width, hidden, num_patches):
    shapes = {
        "vit.embeddings.cls_token": (1, 1, width),
        "vit.embeddings.position_embeddings": (1, num_patches + 1, width),
        "vit.embeddings.patch_embeddings.projection.weight": (width, 3, patch, patch),
        "vit.embeddings.patch_embeddings.projection.bias": (width,),
    }
    linear = {f"attention.attention.{each}": (width, width) for each in ("query", "key", "value")}
    linear |= {
        "attention.output.dense": (width, width),
        "intermediate.dense": (hidden, width),
        "output.dense": (width, hidden),
    }
    for i in range(layers):
        for name, shape in linear.items():
            shapes[f"vit.encoder.layer.{i}.{name}.weight"] = shape
            shapes[f"vit.encoder.layer.{i}.{name}.bias"] = shape[:1]
        for name in ("layernorm_before", "layernorm_after"):
            for each in ("weight", "bias"):
                shapes[f"vit.encoder.layer.{i}.{name}.{each}"] = (width,)
    shapes |= {"vit.layernorm.weight": (width,), "vit.layernorm.bias": (width,)}
    return shapes | {"classifier.weight": (classes, width), "classifier.bias": (classes,)}


def vit(weights, images, *, heads):
    """`ViTForImageClassification`: images [rows, height, width, channels]; exact gelu, epsilon 1e-12."""
    w = {name.removeprefix("vit."): x.astype(np.float64) for name, x in weights.items()}
    kernel = w["embeddings.patch_embeddings.projection.weight"]
    patch = kernel.shape[-1]
    rows, height, width, channels = images.shape
    cut = images.reshape(rows, height // patch, patch, width // patch, patch, channels)
    x = np.einsum("rhpwqc,ocpq->rhwo", cut, kernel) + w["embeddings.patch_embeddings.projection.bias"]
    x = x.reshape(rows, -1, kernel.shape[0])
    x = np.concatenate([np.repeat(w["embeddings.cls_token"], rows, 0), x], 1) + w["embeddings.position_embeddings"]

    def linear(x, name):
        return x @ w[f"{name}.weight"].T + w[f"{name}.bias"]

    def norm(x, name):
        return layer_norm(x, w[f"{name}.weight"], w[f"{name}.bias"], 1e-12)

    for i in range(sum(name.endswith("layernorm_before.bias") for name in w)):
        at = f"encoder.layer.{i}."
        h = norm(x, at + "layernorm_before")
        q, k, v = (linear(h, f"{at}attention.attention.{each}") for each in ("query", "key", "value"))
        x = x + linear(attention(q, k, v, heads, causal=False), at + "attention.output.dense")
        h = linear(norm(x, at + "layernorm_after"), at + "intermediate.dense")
        h = h * 0.5 * (1 + np.vectorize(math.erf)(h / math.sqrt(2)))
        x = x + linear(h, at + "output.dense")
    return linear(norm(x, "layernorm")[:, 0], "classifier")


def resnet_shapes(*, classes, depths, features, stem, bottleneck):
    shapes = {}

    def conv_norm(name, out, into, size):
        shapes[f"{name}.convolution.weight"] = (out, into, size, size)
        for each in ("weight", "bias", "running_mean", "running_var"):
            shapes[f"{name}.normalization.{each}"] = (out,)

    conv_norm("resnet.embedder.embedder", stem, 3, 7)
    into = stem
    for s, (depth, out) in enumerate(zip(depths, features, strict=True)):
        for i in range(depth):
            at = f"resnet.encoder.stages.{s}.layers.{i}."
            if into != out or (s and i == 0):
                conv_norm(at + "shortcut", out, into, 1)
            parts = [(out // 4, into, 1), (out // 4, out // 4, 3), (out, out // 4, 1)]
            parts = parts if bottleneck else [(out, into, 3), (out, out, 3)]
            for c, part in enumerate(parts):
                conv_norm(f"{at}layer.{c}", *part)
            into = out
    return shapes | {"classifier.1.weight": (classes, into), "classifier.1.bias": (classes,)}


def convolve(x, kernel, stride):
    """torch's `Conv2d` with padding `size // 2`, on [rows, channels, height, width]."""
    size = kernel.shape[-1]
    x = np.pad(x, ((0, 0), (0, 0), (size // 2,) * 2, (size // 2,) * 2))
    windows = np.lib.stride_tricks.sliding_window_view(x, (size, size), (2, 3))[:, :, ::stride, ::stride]
    return np.einsum("rchwpq,ocpq->rohw", windows, kernel)


def resnet(weights, images, *, depths, bottleneck):
    """`ResNetForImageClassification` with running averages; images [rows, height, width, channels]."""
    w = {name.removeprefix("resnet."): x.astype(np.float64) for name, x in weights.items()}

    def conv_norm(x, name, stride, relu=True):
        x = convolve(x, w[f"{name}.convolution.weight"], stride)
        weight, bias, mean, var = (
            w[f"{name}.normalization.{each}"][:, None, None]
            for each in ("weight", "bias", "running_mean", "running_var")
        )
        x = (x - mean) / np.sqrt(var + 1e-5) * weight + bias
        return np.maximum(x, 0) if relu else x

    x = conv_norm(images.astype(np.float64).transpose(0, 3, 1, 2), "embedder.embedder", 2)
    x = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)), constant_values=-np.inf)
    x = np.lib.stride_tricks.sliding_window_view(x, (3, 3), (2, 3))[:, :, ::2, ::2].max((-1, -2))
    for s, depth in enumerate(depths):
        for i in range(depth):
            at, stride = f"encoder.stages.{s}.layers.{i}.", 2 if s and i == 0 else 1
            strides = (1, stride, 1) if bottleneck else (stride, 1)
            h = x
            for c, each in enumerate(strides):
                h = conv_norm(h, f"{at}layer.{c}", each, relu=c + 1 < len(strides))
            if f"{at}shortcut.convolution.weight" in w:
                x = conv_norm(x, f"{at}shortcut", stride, relu=False)
            x = np.maximum(h + x, 0)
    return x.mean((2, 3)) @ w["classifier.1.weight"].T + w["classifier.1.bias"]
