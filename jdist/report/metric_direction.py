"""The direction in which a metric improves, by its name."""

from __future__ import annotations

import re
from typing import Literal

Mode = Literal["min", "max"]


_LESS_NAMES = (
    "loss losses logloss error errors err inaccuracy misclassification perplexity ppl bits bpb bpc bpd nats nll xent bce "
    "kl kld divergence brier crps ece eer mse rmse nrmse msle rmsle mae mape smape wer cer fpr fnr fid fvd kid lpips regret"
)
_MORE_NAMES = (
    "acc accuracy auc prauc rocauc auroc auprc f1 precision recall sensitivity specificity "
    "iou miou dice psnr ssim bleu rouge meteor chrf ndcg mrr r2 reward"
)
NAMES = tuple(f"{_LESS_NAMES} {_MORE_NAMES}".split())


def _words(words: str) -> re.Pattern[str]:
    """Matches any of these as a whole word: letters beside it make another one (stop is no top), `_`, `-` and digits do not."""
    return re.compile(rf"(?<![a-z])({'|'.join(words.split())})(?![a-z])")


_LESS = _words(rf"{_LESS_NAMES} cross_?entropy")
_MORE = _words(rf"{_MORE_NAMES} top[_-]?\d+ top[_-]?k")
# These reverse the others, or measure something else: neg_mean_squared_error, loss_scale.
_REVERSED = _words("neg negative minus inverse drop gap reduction improvement scale weight")


def better(metric: str) -> Mode | None:
    """Finds by its name whether less or more of a metric is better; a "score" may be either."""
    name = metric.rpartition("/")[2].lower()
    less, more = _LESS.search(name) is not None, _MORE.search(name) is not None
    return None if less == more or _REVERSED.search(name) else "min" if less else "max"
