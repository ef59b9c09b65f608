"""Snapshots too long to stand inline: compared with ``expected/<name>.txt`` beside the test.

``EXPECTTEST_ACCEPT=1 pytest`` writes them anew, as it does expecttest's inline ones.
"""

import os
from pathlib import Path


def check(test_file: str, name: str, text: str) -> None:
    path = Path(test_file).parent / "expected" / f"{name}.txt"
    if os.environ.get("EXPECTTEST_ACCEPT"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    assert text == path.read_text(), f"{path} differs; EXPECTTEST_ACCEPT=1 pytest accepts the new text"
