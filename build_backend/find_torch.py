"""Print the folder of torch's headers, without importing torch; nothing where there is no torch.

In pip's isolated build torch can't be imported, but the interpreter still belongs to the environment that the
package goes into: its headers serve.
"""

import importlib.util
import sysconfig
from pathlib import Path

spec = importlib.util.find_spec("torch")
places = [Path(spec.origin).parent] if spec and spec.origin else []
places += [Path(sysconfig.get_path(scheme)) / "torch" for scheme in ("platlib", "purelib")]
print(next((p / "include" for p in places if (p / "include/torch/csrc/stable/library.h").exists()), ""))
