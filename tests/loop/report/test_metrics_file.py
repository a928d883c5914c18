"""Whether less or more of a metric is better, as far as its name says."""

import pytest

from jdist.loop.report.metrics_file import better


@pytest.mark.parametrize(
    ("mode", "metrics"),
    [
        ("min", "loss eval/loss loss2 val-loss mean_absolute_error bits_per_byte cross_entropy nll"),
        ("min", "brier_score fid_score inaccuracy"),
        ("max", "accuracy eval/AUC val_acc f1_score macro-F1 top5 top_5 top-1 top_k R2 mean_iou ndcg@10"),
        (None, "score right stop stop_2 close closs glossary terror desktop top_layer feature_map"),
        (None, "neg_mean_squared_error accuracy_drop loss_scale top_1_error"),
    ],
)
def test_a_name_says_it_by_whole_words_or_not_at_all(mode, metrics):
    found = {metric: better(metric) for metric in metrics.split()}
    assert found == dict.fromkeys(found, mode)
