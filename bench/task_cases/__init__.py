"""The rooms of `bench/tasks.py`."""

import sys
from pathlib import Path

# The documents and the agent are an example's, which is no installed package.
sys.path.append(str(Path(__file__).resolve().parents[2]))
