"""On PYTHONPATH it lets vLLM's GPU model runner (V2) start on a CPU, its kernels in Triton's interpreter.

vLLM takes that runner where Triton has an active driver; Triton's wheel has none for a CPU.
"""

import importlib.abc
import importlib.util
import os
import sys
import types

os.environ["TRITON_INTERPRET"] = "1"
CHANGED = ("triton.backends", "vllm.v1.sample.ops.topk_topp_sampler")


class Changed(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name not in CHANGED:
            return None
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            sys.meta_path.insert(0, self)
        run = spec.loader.exec_module

        def exec_module(module):
            run(module)
            if name == "triton.backends":
                driver = types.SimpleNamespace(is_active=lambda: True)
                module.backends["cpu"] = types.SimpleNamespace(driver=driver)
            else:  # its kernel for top-k and top-p is too much for the interpreter; there is one in torch beside it
                module.HAS_TRITON = False

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, Changed())
