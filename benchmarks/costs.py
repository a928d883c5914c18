"""What it costs to measure what a run costs: `jdist.fit` unchanged, and with nothing measured.

    python benchmarks/costs.py [--devices 1 2] [--rounds 60]

The same steps on the same batches in memory, in one process, in turn; "without" has `Costs` of `jdist.loop.run` replaced by one
that does nothing. Measured are the time of the steps behind the first 20, and the processor time of all threads meanwhile, in
short runs and many rounds, since these machines drift. "busy" computes for some 5 ms; "asleep" waits as long in a callback of
Python, which takes the interpreter from the loop; "empty" does nothing. A row goes to a file every 20 steps. "without the
thread" has no `DeviceWatch`. "without again" is the noise. Target: under 0.5 % of a step of 5 ms, 25 us.

Before that, what the loop calls is timed by itself, on steps that are over when their call returns and on those that are not,
with a row every 20 steps: it leaves out how threads disturb each other, and has no noise of steps.
"""

from __future__ import annotations

import contextlib
import itertools
import tempfile
import time

from pairs import alternate, compare, on_cpu_devices

_WARM_STEPS = 20


class Nothing:
    """Takes the place of `Costs`."""

    def __init__(self, strategy, *, begun):
        pass

    def begin(self, step, folder, *, ideal_step_s, trains=True):
        pass

    def waits(self, batches):
        return batches

    def called(self, token, step, consumed=None):
        pass

    def during(self, part, step):
        return contextlib.nullcontext()

    def row(self, step):
        return {}

    def spent(self):
        return {}

    def end(self, outcome, step):
        pass

    def close(self):
        pass


def measure(rounds: int) -> None:
    import jax
    import jax.numpy as jnp
    import numpy as np

    import jdist
    from jdist.loop import run
    from jdist.loop.costs import Costs

    class Unwatched(Costs):
        """Costs without the thread that waits for the devices: it counts every moment of a call to the steps."""

        def __init__(self, strategy, *, begun):
            super().__init__(strategy, begun=begun)
            assert self._watch is not None
            self._watch.close()
            self._watch = None
            self.clock._idle_since = lambda: 0.0

    strategy = jdist.mirrored()
    own_part(strategy)

    def empty(w, batch):
        return w + 1, {"loss": w}

    def sleep(x):
        time.sleep(0.005)
        return np.float32(0)

    def asleep(w, batch):
        slept = jax.pure_callback(sleep, jax.ShapeDtypeStruct((), jnp.float32), w)
        return w + slept + 1, {"loss": w + slept}

    def busy(w, batch):
        x = jax.lax.fori_loop(0, 500, lambda i, x: jnp.sin(x) * 1.001, batch["x"])
        return w + 1, {"loss": x.sum()}

    batch = {"x": np.ones(8192 * strategy.num_replicas, np.float32)}
    batches = list(strategy.distribute_dataset([batch] * 8))
    spent = np.zeros(2)  # time, processor time

    def timed(steps):
        begun = np.zeros(2)
        for i, batch in zip(range(_WARM_STEPS + steps), itertools.cycle(batches)):
            if i == _WARM_STEPS:
                begun = np.array([time.perf_counter(), time.process_time()])
            yield batch
        spent[:] += np.array([time.perf_counter(), time.process_time()]) - begun

    with tempfile.TemporaryDirectory() as folder:
        for name, function, steps in (("empty", empty, 400), ("asleep for 5 ms", asleep, 80), ("busy", busy, 60)):
            step = jdist.distribute(function, strategy, returns=("state", "metrics"), verify="off")

            def runner(costs, step=step, steps=steps):
                def fit():
                    run.Costs = costs
                    jdist.fit(step, jnp.float32(0), timed(steps), log_to=folder, progress=False)

                return fit

            sides = {"with": Costs, "without the thread": Unwatched, "without": Nothing, "without again": Nothing}
            both = alternate({side: runner(costs) for side, costs in sides.items()}, rounds, clock=spent.copy)
            for i, what in enumerate(("time", "processor time")):
                times = {side: [float(each[i]) for each in laps] for side, laps in both.items()}
                for side in ("with", "without the thread", "without again"):
                    c = compare(times[side], times["without"])
                    print(
                        f"{len(jax.devices())} devices, {name}, {what}: {side} / without: {c.ratio:.4f} "
                        f"[{c.ratio_low:.4f}, {c.ratio_high:.4f}], "
                        f"{c.difference / steps * 1e6:+.1f} us of {c.seconds / steps * 1e6:,.0f} us a step",
                        flush=True,
                    )


def own_part(strategy) -> None:
    """Prints what the loop's calls take by themselves, in processor time of their thread."""
    import statistics

    import jax
    import jax.numpy as jnp

    from jdist.loop.costs import Costs

    class Running:
        """A token of a step that is over only when the next one is made."""

        def is_ready(self):
            return False

        def block_until_ready(self):
            time.sleep(3600)

    steps = 20_000
    ready = jax.block_until_ready(jnp.float32(0))
    for name, token in (("over at once", ready), ("still running", Running())):
        laps = []
        for _ in range(5):
            costs = Costs(strategy, begun=time.monotonic())
            costs.begin(0, None, ideal_step_s=1e-3)
            begin = time.thread_time()
            for step, _ in enumerate(costs.waits(itertools.repeat(None, steps)), 1):
                costs.called(token, step)
                if step % 20 == 0:
                    costs.row(step)
            laps.append((time.thread_time() - begin) / steps)
            costs.close()
        print(f"the loop's own part, steps {name}: {statistics.median(laps) * 1e6:.1f} us a step", flush=True)


if __name__ == "__main__":
    on_cpu_devices(measure, __doc__, __file__, devices=[1, 2], rounds=60)
