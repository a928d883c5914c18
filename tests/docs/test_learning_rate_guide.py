"""The examples of docs/learning_rate.md give what it says, and its config is one."""

import doctest
import re
from pathlib import Path

from jdist.experiment.load import load
from jdist.experiment.optimizer import check_optimizer, explain, fill_lengths
from jdist.experiment.validate import validate

GUIDE = (Path(__file__).parent.parent.parent / "docs" / "learning_rate.md").read_text()


def test_the_examples_of_the_guide_give_what_it_shows():
    blocks = re.findall(r"^```pycon\n(.*?)^```", GUIDE, re.DOTALL | re.MULTILINE)
    test = doctest.DocTestParser().get_doctest("\n".join(blocks), {}, "docs/learning_rate.md", None, 0)
    failures: list[str] = []
    result = doctest.DocTestRunner(verbose=False).run(test, out=failures.append)
    assert (result.failed, "".join(failures)) == (0, "")
    assert result.attempted > 10


def test_the_config_of_the_guide_is_taken_and_comes_to_what_it_says(tmp_path):
    (section,) = re.findall(r"^```yaml\n(.*?)^```", GUIDE, re.DOTALL | re.MULTILINE)
    path = tmp_path / "config.yaml"
    path.write_text(f"name: guide\ntask: {{make: 'jdist.tasks.digits:make'}}\n{section}")
    train = validate(load(path)).train
    optimizer = fill_lengths(train.optimizer.model_dump(), steps=5000)
    assert list(check_optimizer(optimizer, global_batch=train.global_batch)) == []
    assert f"`{explain(optimizer, global_batch=train.global_batch)}`" in GUIDE
