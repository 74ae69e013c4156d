"""Run the explorer's modules under node, to compare them with Python."""

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

STATIC = Path(__file__).parents[2] / "regard" / "explorer" / "static"
NODE = shutil.which("node")
needs_node = pytest.mark.skipif(NODE is None, reason="node is not installed")


def run_node(script: str, request: Any) -> Any:
    """The answer of a script beside this file to a JSON request."""
    assert NODE is not None
    command = [NODE, str(Path(__file__).parent / script), str(STATIC)]
    done = subprocess.run(command, input=json.dumps(request), capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
