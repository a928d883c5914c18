"""Real environments: each rank finds its place, or is told by name what to write; none trains alone in silence."""

from __future__ import annotations

import warnings
from pathlib import Path
from string import Template
from typing import Any

import pytest
import yaml

import jdist
from jdist.cluster import resolve
from jdist.errors import ClusterConfigError

ROWS = yaml.safe_load(Path(__file__).with_name("environments.yaml").read_text(encoding="utf-8"))
FOUND, REFUSED, ALONE = ROWS["found"], ROWS["refused"], ROWS["alone"]


def environments(row: dict[str, Any]) -> list[dict[str, str]]:
    """The environment of each process."""
    ranks = row.get("ranks", 1)
    each = row.get("each", ranks)
    counts = {"ranks": ranks, "each": each, "hosts": ranks // each}
    found = []
    for rank, own in enumerate(row.get("own", [{}] * ranks)):
        host = rank // each
        place = {"rank": rank, "rank_1": rank + 1, "local": rank % each, "host": host, "host_1": host + 1}
        values = counts | place | own
        found.append({name: Template(value).substitute(values) for name, value in row["environ"].items()})
    return found


def each(rows: list[dict[str, Any]]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("row", rows, ids=[row["name"] for row in rows])


def place(environ: dict[str, str]) -> tuple[int, int] | str:
    """How many processes there are and which this is; the refusal."""
    try:
        spec = resolve(environ)
    except ClusterConfigError as exc:
        return str(exc)
    return spec.num_processes, spec.process_index


@each(FOUND)
def test_each_rank_finds_its_place(row):
    specs = [resolve(environ) for environ in environments(row)]
    assert [spec.process_index for spec in specs] == list(range(row["ranks"]))
    assert {spec.num_processes for spec in specs} == {row["ranks"]}
    assert {spec.coordinator_address for spec in specs} == {row["at"]}
    assert {spec.resolver for spec in specs} == {row["resolver"]}
    assert specs[0].address == row["at"]


@each(REFUSED)
def test_each_rank_is_told_what_to_write(row):
    for environ in environments(row):
        with pytest.raises(ClusterConfigError) as info:
            resolve(environ)
        assert not [text for text in row["says"] if text not in str(info.value)], str(info.value)


@each([row for row in REFUSED if "ranks" in row and "TF_CONFIG" not in row["environ"]])
def test_three_variables_mend_each_refusal(row):
    three = {"JAX_COORDINATOR_ADDRESS": "n1:7000", "JAX_NUM_PROCESSES": str(row["ranks"])}
    places = [place(environ | three | {"JAX_PROCESS_ID": str(i)}) for i, environ in enumerate(environments(row))]
    assert places == [(row["ranks"], rank) for rank in range(row["ranks"])]


@each(ALONE)
def test_one_process_stays_one_without_a_word(row, monkeypatch):
    (environ,) = environments(row)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert place(environ) == (1, 0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jdist.distribute(lambda state, batch: state, jdist.mirrored())


@each([row for row in FOUND + REFUSED if "ranks" in row])
def test_a_variable_less_makes_no_other_cluster(row):
    right = [(row["ranks"], rank) for rank in range(row["ranks"])]
    for missing in sorted(row["environ"].keys() - {row.get("only")}):
        left = [{k: v for k, v in environ.items() if k != missing} for environ in environments(row)]
        places = [place(environ) for environ in left]
        told = [found for found in places if isinstance(found, str)]
        wrong = [found for found, own in zip(places, right, strict=True) if found not in (own, (1, 0), *told)]
        assert not wrong, f"without {missing}: {wrong}"
        assert places == right or told, f"without {missing} each trains alone"


def test_each_names_where_it_is_from():
    assert not [row["name"] for row in FOUND + REFUSED if not row["source"]]
