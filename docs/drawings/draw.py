"""Draws docs/drawings/*.svg: where state, batch and gradients live under each strategy, and how they move.

    python docs/drawings/draw.py

Each drawing has a background of its own, so that it reads in light and in dark.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from html import escape
from pathlib import Path

HERE = Path(__file__).parent
STYLE = """
text{font:13px system-ui,sans-serif;fill:#1b2330}.small{font-size:11.5px}.title{font-weight:600}.soft{fill:#5b6675}
.ground{fill:#fbfcfe}.frame{fill:#f1f4f9;stroke:#97a3b4;stroke-dasharray:5 4}.plain{fill:#fff;stroke:#97a3b4}
.state{fill:#d6e6ff;stroke:#3b77c8}.batch{fill:#d9f0dc;stroke:#3d8f4c}.grad{fill:#ffe6cc;stroke:#cf7a1c}
.line{fill:none;stroke:#5b6675;stroke-width:1.6}.line.state{stroke:#3b77c8;fill:none}.line.batch{stroke:#3d8f4c;fill:none}
.line.grad{stroke:#cf7a1c;fill:none}.watch{stroke-dasharray:2 4}
@media(prefers-color-scheme:dark){text{fill:#e6ebf2}.soft{fill:#a5b1c2}.ground{fill:#1c222c}.frame{fill:#242c38;stroke:#6d7a8d}
.plain{fill:#2c3543;stroke:#6d7a8d}.state{fill:#1f3f6e;stroke:#6ea3ee}.batch{fill:#20492a;stroke:#63b873}
.grad{fill:#5c3a12;stroke:#e79a45}.line{stroke:#a5b1c2}.line.state{stroke:#6ea3ee}.line.batch{stroke:#63b873}.line.grad{stroke:#e79a45}}
"""
KINDS = ("plain", "state", "batch", "grad")


@dataclass
class Drawing:
    """Shapes in pixels, origin at the top left, y down."""

    width: int
    height: int
    title: str
    parts: list[str] = field(default_factory=list)

    def text(self, x: float, y: float, words: str, style: str = "", anchor: str = "middle") -> None:
        self.parts.append(f'<text class="{style}" x="{x:g}" y="{y:g}" text-anchor="{anchor}">{escape(words)}</text>')

    def frame(self, x: float, y: float, w: float, h: float, label: str) -> None:
        """A machine or a process: what holds other things."""
        self.parts.append(f'<rect class="frame" x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="10"/>')
        self.text(x + 12, y + 18, label, "small soft", "start")

    def box(self, x: float, y: float, w: float, h: float, lines: str, kind: str = "plain") -> None:
        """A thing that holds state, a batch or gradients; the first of its lines is its name."""
        self.parts.append(f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="6"/>')
        rows = lines.split("\n")
        top = y + h / 2 - (len(rows) - 1) * 8 + 4.5
        for i, row in enumerate(rows):
            self.text(x + w / 2, top + 16 * i, row, "title" if i == 0 and len(rows) > 1 else "small")

    def arrow(self, *points: tuple[float, float], kind: str = "", both: bool = False, watch: bool = False) -> None:
        path = " ".join(f"{'L' if i else 'M'}{x:g} {y:g}" for i, (x, y) in enumerate(points))
        head = kind or "plain"
        start = f' marker-start="url(#{head}-head)"' if both else ""
        style = " ".join(filter(None, ("line", kind, "watch" if watch else "")))
        self.parts.append(f'<path class="{style}" d="{path}" marker-end="url(#{head}-head)"{start}/>')

    def legend(self, y: float, *kinds: tuple[str, str]) -> None:
        """What the colours mean, in a row."""
        x = 24.0
        for kind, words in kinds:
            self.parts.append(f'<rect class="{kind}" x="{x:g}" y="{y - 10:g}" width="14" height="12" rx="3"/>')
            self.text(x + 20, y, words, "small soft", "start")
            x += 34 + 6.3 * len(words)

    def svg(self) -> str:
        heads = "".join(
            f'<marker id="{kind}-head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" '
            f'markerUnits="userSpaceOnUse" orient="auto-start-reverse"><path class="line {kind}" d="M1 1L7 4L1 7"/></marker>'
            for kind in KINDS
        )
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" role="img" '
            f'width="{self.width}" height="{self.height}"><title>{escape(self.title)}</title>\n<style>{STYLE}</style>\n'
            f'<defs>{heads}</defs>\n<rect class="ground" width="{self.width}" height="{self.height}" rx="12"/>\n'
            + "\n".join(self.parts)
            + "\n</svg>\n"
        )


LEGEND = (("state", "state: parameters, optimiser"), ("batch", "batch"), ("grad", "gradients"))


def overview() -> Drawing:
    d = Drawing(800, 400, "A step is written once; the strategy says where it runs")
    d.frame(24, 70, 212, 206, "written once")
    d.box(44, 104, 172, 62, "your train step\none replica, its slice", "plain")
    d.box(44, 182, 172, 30, "create_state(key)", "state")
    d.box(44, 226, 172, 30, "a dataset of global batches", "batch")
    d.arrow((236, 173), (290, 173))
    d.frame(292, 70, 196, 206, "a strategy: one word")
    for i, (words, kind) in enumerate(
        (("where the state lives", "state"), ("how a batch is cut up", "batch"), ("how gradients meet", "grad"))
    ):
        d.box(312, 104 + 46 * i, 156, 34, words, kind)
    d.text(390, 258, "compiled once, checked", "small soft")
    targets = (
        ("default, one_device", "one device"),
        ("mirrored", "all devices of a machine"),
        ("tpu", "a TPU, or a pod of them"),
        ("multi_worker", "many machines in step"),
        ("sharded", "a part of the state on each device"),
        ("central_storage", "state in host memory"),
        ("parameter_server", "servers, and workers at their pace"),
    )
    for i, (name, words) in enumerate(targets):
        y = 18 + 50 * i
        d.box(556, y, 220, 42, f"{name}\n{words}")
        d.arrow((488, 173), (522, 173), (522, y + 21), (554, y + 21))
    d.text(400, 384, "the same step, the same loop, the same checkpoint", "small soft")
    return d


def one_device() -> Drawing:
    d = Drawing(700, 230, "one_device: state, batch and gradients on one device")
    d.frame(24, 24, 240, 150, "host")
    d.box(48, 55, 192, 40, "dataset, global batches", "batch")
    d.text(144, 136, "a thread puts the next batches", "small soft")
    d.text(144, 152, "on the device ahead of the loop", "small soft")
    d.frame(380, 24, 296, 150, "the device")
    d.box(404, 54, 112, 42, "whole batch", "batch")
    d.box(540, 84, 112, 42, "whole state", "state")
    d.box(404, 116, 112, 42, "gradients", "grad")
    d.arrow((240, 75), (402, 75), kind="batch")
    d.arrow((460, 96), (460, 114), kind="batch")
    d.arrow((516, 137), (596, 137), (596, 128), kind="grad")
    d.text(560, 152, "update", "small soft")
    d.legend(206, *LEGEND)
    return d


def mirrored() -> Drawing:
    d = Drawing(800, 390, "mirrored: a copy of the state on every device, an all-reduce between them")
    d.frame(24, 24, 752, 316, "one machine")
    d.box(204, 52, 392, 34, "global batch, cut by rows", "batch")
    for i in range(4):
        x = 48 + 178 * i
        d.arrow((253 + 98 * i, 86), (253 + 98 * i, 102), (x + 80, 102), (x + 80, 120), kind="batch")
        d.frame(x, 122, 160, 136, f"device {i} = replica {i}")
        d.box(x + 14, 148, 132, 28, "whole state, a copy", "state")
        d.box(x + 14, 182, 132, 28, "its rows", "batch")
        d.box(x + 14, 216, 132, 28, "gradients of its rows", "grad")
        d.arrow((x + 80, 244), (x + 80, 280), kind="grad", both=True)
    d.box(48, 282, 694, 36, "all-reduce: every replica gets the mean gradient, and makes the same update", "grad")
    d.legend(366, *LEGEND)
    return d


def tpu() -> Drawing:
    d = Drawing(800, 350, "tpu: replicas in the order of the interconnect; slices meet over the data-centre network")
    order = ((0, 0), (1, 0), (2, 0), (3, 0), (3, 1), (2, 1), (1, 1), (0, 1))
    for s in range(2):
        left = 24 + 400 * s
        d.frame(left, 24, 352, 218, f"slice {s}: devices joined by the interconnect")
        at = [(left + 24 + 80 * x, 60 + 88 * y) for x, y in order]
        for i, (x, y) in enumerate(at):
            d.box(x, y, 62, 58, f"{8 * s + i}\nstate", "state")
            nx, ny = at[(i + 1) % 8]
            if ny == y:
                step = 62 if nx > x else 0
                d.arrow((x + step, y + 29), (nx + 62 - step, ny + 29), kind="grad")
            else:
                down = ny > y
                d.arrow((x + 31, y + (58 if down else 0)), (nx + 31, ny + (0 if down else 58)), kind="grad")
        d.text(left + 176, 228, "replicas side by side on the mesh are neighbours here", "small soft")
    d.arrow((378, 133), (422, 133), kind="grad", both=True)
    d.text(400, 270, "only the sums of whole slices cross the data-centre network", "small")
    d.text(400, 290, "each host reads the rows of its own devices", "small soft")
    d.legend(326, LEGEND[0], ("grad", "gradients, round the ring"))
    return d


def multi_worker() -> Drawing:
    d = Drawing(800, 410, "multi_worker: a copy of the state on every device of every process")
    for p in range(2):
        left = 24 + 400 * p
        d.frame(left, 24, 352, 268, f"machine {p}: process {p}, the same program")
        d.box(left + 24, 52, 304, 32, "the same dataset; makes its own rows", "batch")
        for i in range(2):
            x = left + 24 + 160 * i
            d.arrow((x + 72, 84), (x + 72, 106), kind="batch")
            d.frame(x, 108, 144, 132, f"replica {2 * p + i}")
            d.box(x + 12, 134, 120, 26, "whole state", "state")
            d.box(x + 12, 166, 120, 26, "its rows", "batch")
            d.box(x + 12, 198, 120, 26, "gradients", "grad")
            d.arrow((x + 72, 224), (x + 72, 304), kind="grad", both=True)
    d.box(
        48,
        306,
        704,
        34,
        "all-reduce within and between the processes: one mean gradient, the same update everywhere",
        "grad",
    )
    d.arrow((424, 262), (376, 262), watch=True, both=True)
    d.text(400, 254, "watch", "small soft")
    d.text(24, 368, "dotted: the watch, by which a lost process ends all others, with its name", "small soft", "start")
    d.legend(394, *LEGEND)
    return d


def central_storage() -> Drawing:
    d = Drawing(800, 420, "central_storage: one copy of the state, in host memory, a part with each replica")
    d.frame(24, 24, 752, 124, "host memory: ONE copy of parameters and optimiser state, in parts; the update runs here")
    d.frame(24, 190, 752, 150, "")
    for i in range(4):
        x = 52 + 178 * i
        d.box(x, 50, 150, 36, f"part {i} of every array", "state")
        d.box(x, 100, 150, 34, f"update of part {i}", "state")
        d.arrow((x + 75, 100), (x + 75, 88), kind="state")
        d.box(x, 206, 150, 28, "gathers the whole array", "state")
        d.box(x, 240, 150, 28, "its rows", "batch")
        d.box(x, 274, 150, 28, f"sum of gradients, part {i}", "grad")
        d.arrow((x, 68), (x - 10, 68), (x - 10, 220), (x - 1, 220), kind="state")
        d.arrow((x + 150, 288), (x + 160, 288), (x + 160, 117), (x + 151, 117), kind="grad")
    d.text(400, 326, "devices: hold parameters and gradients only while they compute", "small soft")
    d.text(
        24,
        364,
        "blue, down: each device fetches its own part; they gather the rest among themselves",
        "small soft",
        "start",
    )
    d.text(
        24, 382, "orange, up: reduce-scatter leaves each device one part of the summed gradient", "small soft", "start"
    )
    d.legend(406, *LEGEND)
    return d


def sharded() -> Drawing:
    d = Drawing(800, 400, "sharded: a part of the state on every device")
    d.frame(24, 24, 752, 290, "devices of one machine, a replica each")
    for i in range(4):
        x = 52 + 178 * i
        d.box(x, 50, 150, 36, f"part {i} of every array", "state")
        d.box(x, 110, 150, 28, "one layer, whole", "state")
        d.box(x, 144, 150, 28, "its rows", "batch")
        d.box(x, 178, 150, 28, "gradient of the layer", "grad")
        d.box(x, 230, 150, 28, f"sum, part {i}", "grad")
        d.box(x, 264, 150, 34, f"update of part {i}", "state")
        d.arrow((x + 75, 86), (x + 75, 108), kind="state")
        d.arrow((x + 75, 206), (x + 75, 228), kind="grad")
        d.arrow((x, 281), (x - 10, 281), (x - 10, 68), (x - 1, 68), kind="state")
        if i:
            d.arrow((x - 101, 97), (x + 73, 97), kind="state", both=True)
            d.arrow((x - 101, 217), (x + 73, 217), kind="grad", both=True)
    d.text(
        24, 340, "blue: all-gather of a layer where the loss uses it, in the backward pass again", "small soft", "start"
    )
    d.text(24, 358, "orange: reduce-scatter leaves each device its part of the summed gradient", "small soft", "start")
    d.legend(384, *LEGEND)
    return d


def parameter_server() -> Drawing:
    d = Drawing(800, 420, "parameter_server: the state on servers, steps on workers, each at its own pace")
    d.frame(24, 24, 200, 330, "your program (chief)")
    d.box(44, 56, 160, 78, "coordinator\ntraces, schedules,\nsorts out losses")
    d.box(44, 160, 160, 40, "dataset (or on workers)", "batch")
    d.box(44, 226, 160, 46, "state: a handle\nfetch brings it whole")
    d.box(44, 290, 160, 46, "metrics: futures\nreading one waits")
    for i in range(2):
        y = 24 + 172 * i
        d.frame(310, y, 190, 158, f"worker {i}: none of your code")
        d.box(328, y + 30, 154, 32, "parameters as pulled", "state")
        d.box(328, y + 70, 154, 32, "a batch", "batch")
        d.box(328, y + 110, 154, 32, "gradients", "grad")
        d.arrow((204, 180), (266, 180), (266, y + 86), (326, y + 86), kind="batch")
    for i in range(2):
        y = 24 + 172 * i
        d.frame(600, y, 176, 158, f"ps {i}")
        d.box(616, y + 36, 144, 50, "its shards\nof every large array", "state")
        d.box(616, y + 108, 144, 34, "applies the optimiser", "state")
        d.arrow((688, y + 108), (688, y + 88), kind="state")
    for w in range(2):
        for s in range(2):
            wy, sy = 24 + 172 * w, 24 + 172 * s
            d.arrow(
                (614, sy + 52 + 14 * w),
                (560 - 10 * w, sy + 52 + 14 * w),
                (560 - 10 * w, wy + 40 + 12 * s),
                (484, wy + 40 + 12 * s),
                kind="state",
            )
            d.arrow(
                (482, wy + 120 + 12 * s),
                (526 + 10 * w, wy + 120 + 12 * s),
                (526 + 10 * w, sy + 118 + 14 * w),
                (614, sy + 118 + 14 * w),
                kind="grad",
            )
    d.text(
        400,
        378,
        'blue: pull; orange: push. Nobody waits for another worker (mode="sync": one gradient of each makes an update)',
        "small soft",
    )
    d.legend(404, *LEGEND)
    return d


DRAWINGS = (overview, one_device, mirrored, tpu, multi_worker, sharded, central_storage, parameter_server)

if __name__ == "__main__":
    for draw in DRAWINGS:
        (HERE / f"{draw.__name__}.svg").write_text(draw().svg())
