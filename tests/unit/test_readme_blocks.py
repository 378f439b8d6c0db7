from pathlib import Path

import pytest

from tests.support.readme import runnable_blocks

PAGE = """\
# Title

```python
raise SystemExit("not marked")
```

<!-- run: http -->
```python
import os
print("http://127.0.0.1:8080", os.environ["SHOAL_URL"])
```

text

<!-- run: [0-9]+ -->

```bash
echo 127.0.0.1:8080
false
echo not reached
```
"""


def page(folder: Path, text: str) -> Path:
    path = folder / "README.md"
    path.write_text(text)
    return path


def test_blocks_are_the_marked_ones_in_order(tmp_path):
    """Only a block behind a mark runs, and it knows its line."""
    blocks = runnable_blocks(page(tmp_path, PAGE))
    assert [(str(b), b.language, b.says) for b in blocks] == [
        ("README.md:9", "python", "http"),
        ("README.md:18", "bash", "[0-9]+"),
    ]


def test_block_speaks_to_the_server_under_test(tmp_path):
    """The written address becomes the server's, and a failing command fails the block."""
    python, bash = runnable_blocks(page(tmp_path, PAGE))
    done = python.run("http://127.0.0.1:9", tmp_path)
    assert (done.returncode, done.stdout) == (0, "http://127.0.0.1:9 http://127.0.0.1:9\n")
    failed = bash.run("http://127.0.0.1:9", tmp_path)
    assert (failed.returncode, failed.stdout) == (1, "127.0.0.1:9\n")


@pytest.mark.parametrize(
    "text",
    [
        "<!-- run: a -->\ntext\n",
        "<!-- run: a -->\n```rust\nx\n```\n",
        "<!-- run: a -->\n```python\n",
        "<!-- run -->\n```python\nx\n```\n",
    ],
)
def test_mark_without_a_block_is_an_error(tmp_path, text):
    """A promise that cannot be kept is not passed over."""
    with pytest.raises(ValueError, match=r"README\.md"):
        runnable_blocks(page(tmp_path, text))
