"""Checks that hold for every picture in SVG."""

import itertools
import xml.etree.ElementTree as ET

from jdist.support.svg import text_width

_SVG = "{http://www.w3.org/2000/svg}"


def check_picture(svg: str) -> list[str]:
    """Checks that a picture is whole XML with a title and a description, and that no text is cut off or covers another.

    Returns:
        Its texts.
    """
    root = ET.fromstring(svg)
    assert root.tag == f"{_SVG}svg"
    assert root.find(f"{_SVG}title").text
    assert len(root.find(f"{_SVG}desc").text) > 10
    width, height = float(root.get("width")), float(root.get("height"))
    boxes = []
    for node in root.iter(f"{_SVG}text"):
        x, y = float(node.get("x")), float(node.get("y"))
        wide = text_width(node.text, node.get("class"))
        left = x - {"start": 0.0, "middle": 0.5, "end": 1.0}[node.get("text-anchor", "start")] * wide
        boxes.append((left, y - 9, left + wide, y + 2, node.text))
        assert left >= -0.5, f"{node.text!r} begins left of the picture"
        assert left + wide <= width + 0.5, f"{node.text!r} ends right of the picture"
        assert y - 9 > 0, node.text
        assert y < height, node.text
    for a, b in itertools.combinations(boxes, 2):
        is_apart = a[2] <= b[0] + 0.5 or b[2] <= a[0] + 0.5 or a[3] <= b[1] or b[3] <= a[1]
        assert is_apart, f"{a[4]!r} covers {b[4]!r}"
    return [text for *_, text in boxes]
