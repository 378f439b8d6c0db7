"""The shim of the bundle `sglang`, in processes of its own: it changes how a process imports."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from shoal.bundles.definition import BUILTIN, read

# A torch and an SGLang as small as the shim can tell apart, in place of the real ones.
TORCH = """
class cuda:
    is_available = staticmethod(lambda: {gpu})
class Tensor:
    def pin_memory(self):
        raise RuntimeError("no GPU")
def tensor(*values, pin_memory=False):
    if pin_memory:
        raise RuntimeError("no GPU")
    return values
arange = empty = empty_like = full = ones = zeros = zeros_like = tensor
"""
SGLANG = """
import torch
import torchvision.transforms as T
from sgl_kernel import fast
mode: T.Mode.best | None = None
"""


def said(folder: Path, program: str, *, gpu: bool = False) -> subprocess.CompletedProcess[str]:
    """What a process says that starts with the shim, as those of the bundle do."""
    (folder / "torch.py").write_text(TORCH.format(gpu=gpu))
    (folder / "sglang").mkdir(exist_ok=True)
    (folder / "sglang" / "__init__.py").write_text("from sglang.server import fast")
    (folder / "sglang" / "server.py").write_text(SGLANG)
    (folder / "shim.py").write_text((BUILTIN / "sglang_shim.py").read_text())
    return subprocess.run(
        [
            sys.executable,
            "-I",
            "-S",
            "-c",
            f"import sys; sys.path.insert(0, {str(folder)!r})\nimport shim\n{program}",
        ],
        check=False,
        capture_output=True,
        text=True,
    )


def test_shim_lets_absent_packages_be_named_and_never_called(tmp_path):
    """Parts and parts of parts have names; a call says which package is missing."""
    done = said(tmp_path, "import sglang; print(sglang.fast.__name__); sglang.fast(1)")
    assert done.stdout.strip() == "sgl_kernel.fast"
    assert "RuntimeError: sgl_kernel.fast was called" in done.stderr


def test_shim_leaves_memory_unpinned_where_there_is_no_gpu(tmp_path):
    """Both ways to ask for pinned memory give ordinary memory."""
    done = said(
        tmp_path,
        "import sglang, torch; t = torch.Tensor()\n"
        "print(torch.tensor(1, pin_memory=True), t.pin_memory() is t)",
    )
    assert done.stdout.strip() == "(1,) True", done.stderr


def test_shim_changes_nothing_with_a_gpu_or_before_sglang(tmp_path):
    """Where torch sees a GPU, a missing package is missing; so it is before SGLang is imported."""
    assert "No module named 'torchvision'" in said(tmp_path, "import sglang", gpu=True).stderr
    assert "No module named 'sgl_kernel'" in said(tmp_path, "import sgl_kernel").stderr


def test_shim_loads_nothing_for_who_only_looks(tmp_path):
    """To find out whether SGLang is installed costs no torch."""
    program = (
        "import importlib.util as u; print(u.find_spec('sglang').name, 'torch' in sys.modules)"
    )
    assert said(tmp_path, program).stdout.strip() == "sglang False"


def test_shim_prefers_an_installed_package(tmp_path):
    """A real package of the name is the one that is imported."""
    (tmp_path / "sgl_kernel.py").write_text("fast = 'real'")
    assert said(tmp_path, "import sglang; print(sglang.fast)").stdout.strip() == "real"


def test_bundle_sglang_pins_every_package():
    """Nothing is chosen at build time, and the shim is that of the package."""
    (bundle,) = [each for each in read() if each.name == "sglang"]
    assert all("==" in line for line in bundle.definition.requirements)
    assert bundle.shim == (BUILTIN / "sglang_shim.py").read_text()
