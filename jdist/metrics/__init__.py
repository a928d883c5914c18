"""Metrics that are exact over batches, replicas and processes, padding left out.

Start at `metric.Metric`: contributions that are added up, and the result that is computed of their total.

May import: replica, core and what is below them.
"""

from jdist.metrics.accuracy import accuracy as accuracy
from jdist.metrics.accuracy import top_k as top_k
from jdist.metrics.auc import auc as auc
from jdist.metrics.collect import collect as collect
from jdist.metrics.confusion import confusion_matrix as confusion_matrix
from jdist.metrics.confusion import f1 as f1
from jdist.metrics.confusion import precision as precision
from jdist.metrics.confusion import recall as recall
from jdist.metrics.mean import mean as mean
from jdist.metrics.metric import Metric as Metric
from jdist.metrics.sums import of_sums as of_sums
