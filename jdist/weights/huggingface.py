"""Rules for the names under which Hugging Face's transformers keeps GPT-2, ViT and ResNet."""

from __future__ import annotations

from typing import Any

Rule = tuple[Any, ...]
_LINEAR = "out in -> in out"  # torch's kernels are [out, in], flax's [in, out]
_CONV = "out in height width -> height width in out"
_NORM = (("weight", "scale"), ("bias", "bias"))


def gpt2(*, heads: int | None = None) -> list[Rule]:
    """Lists the rules of GPT-2: `GPT2LMHeadModel`, with or without "transformer." before its names.

    The tree is that of `examples.models.gpt2.GPT2`: names as in the files, with `h_0`, `h_1`, ... for the layers, or `h` for a
    stack of them, over which a scan goes. The projection to queries, keys and values is one, `attn/c_attn`, or three,
    `attn/query`, `attn/key` and `attn/value` with kernels [in, heads, width]. The output layer is the embedding; a file that
    repeats it must have it the same.

    Args:
        heads: the model's, which the shape of `attn/c_attn` does not show: with them a file is refused if the
            `config.json` next to it says another number.

    Example:
        >>> gpt2()[0]
        ('[transformer.]wte.weight', 'wte/embedding')
    """
    rules: list[Rule] = [
        ("[transformer.]wte.weight", "wte/embedding"),
        ("lm_head.weight", "wte/embedding"),
        ("[transformer.]wpe.weight", "wpe/embedding"),
        *(("[transformer.]ln_f." + torch, "ln_f/" + flax) for torch, flax in _NORM),
        # The causal mask, which files of older versions have.
        ("[transformer.]h.{layer}.attn.bias", None),
        ("[transformer.]h.{layer}.attn.masked_bias", None),
    ]
    for layer, stack in (("h_{layer}", ""), ("h", "layer ")):
        for norm in ("ln_1", "ln_2"):
            for torch, flax in _NORM:
                rules.append(_of_layer(f"{norm}.{torch}", f"{layer}/{norm}/{flax}", "out", "out", stack))
        for dense in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj"):
            path = dense.replace(".", "/")
            out, numbers = "out", None
            if dense == "attn.c_attn" and heads is not None:
                out, numbers = "(qkv heads width)", {"qkv": 3, "heads": heads}
            # Its Conv1D is [in, out], as flax's kernels are.
            rules.append(
                _of_layer(f"{dense}.weight", f"{layer}/{path}/kernel", f"in {out}", f"in {out}", stack, numbers)
            )
            rules.append(_of_layer(f"{dense}.bias", f"{layer}/{path}/bias", out, out, stack, numbers))
        for i, each in enumerate(("query", "key", "value")):
            split = "(qkv heads width)", "heads width", stack, {"qkv": i}
            rules.append(_of_layer("attn.c_attn.bias", f"{layer}/attn/{each}/bias", *split))
            split = "in (qkv heads width)", "in heads width", stack, {"qkv": i}
            rules.append(_of_layer("attn.c_attn.weight", f"{layer}/attn/{each}/kernel", *split))
    return rules


def _of_layer(name: str, path: str, torch: str, flax: str, stack: str, numbers: dict[str, int] | None = None) -> Rule:
    rule = (f"[transformer.]h.{{layer}}.{name}", path, f"{torch} -> {stack}{flax}")
    return rule if numbers is None else (*rule, numbers)


def vit() -> list[Rule]:
    """Lists the rules of the vision transformer: `ViTForImageClassification`, and `ViTModel` without its pooler.

    The tree is that of `examples.models.vit.ViT`. For other classes load all but the head:
    `only=lambda path: "head" not in path`.

    Example:
        >>> vit()[-2]
        ('classifier.weight', 'head/kernel', 'out in -> in out')
    """
    embeddings, layer = "[vit.]embeddings.", "[vit.]encoder.layer.{layer}."
    rules: list[Rule] = [
        (f"{embeddings}cls_token", "cls"),
        (f"{embeddings}position_embeddings", "positions"),
        (f"{embeddings}patch_embeddings.projection.weight", "patches/kernel", _CONV),
        (f"{embeddings}patch_embeddings.projection.bias", "patches/bias"),
        ("[vit.]pooler.dense.weight", None),
        ("[vit.]pooler.dense.bias", None),
    ]
    for each in ("query", "key", "value"):
        name, path = f"{layer}attention.attention.{each}", f"layer_{{layer}}/attention/{each}"
        rules.append((f"{name}.weight", f"{path}/kernel", "(heads width) in -> in heads width"))
        rules.append((f"{name}.bias", f"{path}/bias", "(heads width) -> heads width"))
    name, path = f"{layer}attention.output.dense", "layer_{layer}/attention/out"
    rules.append((f"{name}.weight", f"{path}/kernel", "out (heads width) -> heads width out"))
    rules.append((f"{name}.bias", f"{path}/bias"))
    for torch, flax in (("intermediate", "up"), ("output", "down")):
        rules.append((f"{layer}{torch}.dense.weight", f"layer_{{layer}}/{flax}/kernel", _LINEAR))
        rules.append((f"{layer}{torch}.dense.bias", f"layer_{{layer}}/{flax}/bias"))
    for torch, flax in _NORM:
        rules.append((f"{layer}layernorm_before.{torch}", f"layer_{{layer}}/norm_1/{flax}"))
        rules.append((f"{layer}layernorm_after.{torch}", f"layer_{{layer}}/norm_2/{flax}"))
        rules.append((f"[vit.]layernorm.{torch}", f"norm/{flax}"))
    return [*rules, ("classifier.weight", "head/kernel", _LINEAR), ("classifier.bias", "head/bias")]


def resnet() -> list[Rule]:
    """Lists the rules of ResNet: `ResNetForImageClassification`, of basic blocks or of bottlenecks.

    The tree is that of `examples.models.resnet.ResNet`, {"params": ..., "batch_stats": ...}.

    Example:
        >>> resnet()[0][:2]
        ('[resnet.]embedder.embedder.convolution.weight', 'embedder/convolution/kernel')
    """
    rules: list[Rule] = []
    layer = "[resnet.]encoder.stages.{stage}.layers.{layer}."
    for name, path in (
        ("[resnet.]embedder.embedder", "embedder"),
        (f"{layer}shortcut", "stage_{stage}_layer_{layer}/shortcut"),
        (f"{layer}layer.{{part}}", "stage_{stage}_layer_{layer}/layer_{part}"),
    ):
        rules.append((f"{name}.convolution.weight", f"{path}/convolution/kernel", _CONV))
        for torch, flax in (*_NORM, ("running_mean", "mean"), ("running_var", "var")):
            rules.append((f"{name}.normalization.{torch}", f"{path}/normalization/{flax}"))
        rules.append((f"{name}.normalization.num_batches_tracked", None))  # torch's own counter
    return [*rules, ("classifier.1.weight", "classifier/kernel", _LINEAR), ("classifier.1.bias", "classifier/bias")]
