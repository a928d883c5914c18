"""The curves of several runs in one picture."""

from jdist.loop.report import curves


def drawn(tmp_path, monkeypatch, runs, **options):
    """The figure that was drawn."""
    made, make = [], curves.new_figure

    def new_figure(num_panels):
        made.append(make(num_panels))
        return made[-1]

    monkeypatch.setattr(curves, "new_figure", new_figure)
    said = curves.plot_runs(runs, tmp_path / "curves.png", title="both", **options)
    assert said == f"curves: {tmp_path / 'curves.png'}"
    return made[0]


def entries(figure):
    return [text.get_text() for text in figure.axes[0].get_legend().get_texts()]


def test_the_legend_says_which_line_is_what_whichever_panel_has_it(tmp_path, monkeypatch):
    a = [{"step": 1, "loss": 3.0}, {"step": 2, "loss": 2.0, "eval/loss": 2.5, "eval/confusion": [[1]]}]
    b = [{"step": 1, "eval/accuracy": 0.5}]
    figure = drawn(tmp_path, monkeypatch, {"a": a, "b": b})
    assert [panel.get_ylabel() for panel in figure.axes] == ["loss", "accuracy"]
    assert entries(figure) == ["a", "b", "evaluation", "training"]


def test_where_there_is_one_kind_of_line_it_needs_no_name(tmp_path, monkeypatch):
    runs = {name: [{"step": 1, "loss": 3.0}, {"step": 2, "loss": 2.0}] for name in "ab"}
    assert entries(drawn(tmp_path, monkeypatch, runs)) == ["a", "b"]
    many = {str(i): [{"step": 1, "loss": 3.0, "eval/loss": 1.0}] for i in range(11)}
    assert entries(drawn(tmp_path, monkeypatch, many)) == list(many)
