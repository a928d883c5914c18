"""Metrics that are exact over batches, replicas and processes, padding left out.

Start at `metric.Metric`: contributions that are added up, and the result that is computed of their total.

May import: replica, core and what is below them.
"""

from jdist.metrics.classes import accuracy as accuracy
from jdist.metrics.classes import auc as auc
from jdist.metrics.classes import confusion_matrix as confusion_matrix
from jdist.metrics.classes import f1 as f1
from jdist.metrics.classes import precision as precision
from jdist.metrics.classes import recall as recall
from jdist.metrics.classes import top_k as top_k
from jdist.metrics.metric import Metric as Metric
from jdist.metrics.metric import collect as collect
from jdist.metrics.metric import mean as mean
from jdist.metrics.metric import of_sums as of_sums
