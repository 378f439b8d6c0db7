"""A server with a child that nothing ties to it, as SGLang's are while they load. No assertions."""

from __future__ import annotations

import subprocess
import sys
import time

if __name__ == "__main__":
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
    time.sleep(100)
