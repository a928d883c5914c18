"""The training loop: `fit`, `evaluate`, `predict`, and `export`.

Start at `fit.fit`, which checks its arguments (`steps`, `data`) and goes round in `run.Run`.
`metric_totals` brings the metrics of steps and processes together.

May import: callbacks, metrics, checkpoint, strategies and what is below them; `loop.report` is a lower room of its own.
"""
