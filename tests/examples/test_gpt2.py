"""GPT-2 on packed rows: a text's logits are those that it has alone. Its weights are tested in tests/weights/test_models.py."""

import grain
import jax
import numpy as np
import pytest

from examples.models.gpt2 import GPT2

TOLERANCE = 1e-5  # float32; what was seen is 6e-7


@pytest.mark.parametrize("stacked", [False, True])
def test_a_text_in_a_packed_row_is_as_it_is_alone(stacked):
    model = GPT2(vocabulary=30, positions=12, layers=2, width=16, heads=2, stacked=stacked)
    texts = [np.random.default_rng(i).integers(30, size=size) for i, size in enumerate((5, 4, 9))]
    rows = grain.MapDataset.source([{"tokens": text} for text in texts]).to_iter_dataset()
    packed = grain.experimental.FirstFitPackIterDataset(rows, length_struct={"tokens": 12}, num_packing_bins=2)
    batch = next(iter(packed.batch(2)))
    segments, positions = batch["tokens_segment_ids"], batch["tokens_positions"]
    assert sorted(segments.max(axis=1)) == [1, 2]  # one row has two texts
    params = jax.jit(model.init)(jax.random.key(0), batch["tokens"])

    apply = jax.jit(model.apply)  # far quicker than one operation at a time
    logits = apply(params, batch["tokens"], segment_ids=segments, position_ids=positions)
    starts = [(row, start) for row, start in np.argwhere(positions == 0) if segments[row, start] > 0]
    by_size = {int((segments[row] == segments[row, start]).sum()): logits[row, start:] for row, start in starts}
    for text in texts:
        alone = apply(params, text[None])[0]
        np.testing.assert_allclose(by_size[len(text)][: len(text)], alone, atol=TOLERANCE)
    whole = apply(params, batch["tokens"])
    assert np.abs(whole - logits).max() > 100 * TOLERANCE  # without segments the second text sees the first
