"""On PYTHONPATH it lets vLLM's GPU model runner (V2) start on a CPU, its kernels in Triton's interpreter.

vLLM takes that runner where Triton has an active driver; Triton's wheel has none for a CPU. The variable
INTERPRETED_TRITON is the path of the package ``triton``, which is imported alone, without the torch beside it. As on a
GPU, a batch is scheduled before the tokens of the last one are known (asynchronous scheduling).
"""

import importlib.abc
import importlib.util
import os
import sys
import types

os.environ["TRITON_INTERPRET"] = "1"
TRITON = os.environ["INTERPRETED_TRITON"]


def add_driver(module):
    driver = types.SimpleNamespace(is_active=lambda: True)
    module.backends["cpu"] = types.SimpleNamespace(driver=driver)


def sort_in_torch(module):
    """The kernel for top-k and top-p is too much for the interpreter; there is one in torch beside it."""
    module.HAS_TRITON = False


def schedule_as_on_a_gpu(module):
    check = module.CpuPlatform.check_and_update_config

    def checked(cls, config):
        asynchronous = config.scheduler_config.async_scheduling
        check(config)
        config.scheduler_config.async_scheduling = asynchronous

    module.CpuPlatform.check_and_update_config = classmethod(checked)


CHANGES = {
    "triton.backends": add_driver,
    "vllm.v1.sample.ops.topk_topp_sampler": sort_in_torch,
    "vllm.platforms.cpu": schedule_as_on_a_gpu,
}


class Changed(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "triton":
            return importlib.util.spec_from_file_location(
                name, os.path.join(TRITON, "__init__.py"), submodule_search_locations=[TRITON]
            )
        if name not in CHANGES:
            return None
        sys.meta_path.remove(self)
        try:
            spec = importlib.util.find_spec(name)
        finally:
            sys.meta_path.insert(0, self)
        run = spec.loader.exec_module

        def exec_module(module):
            run(module)
            CHANGES[name](module)

        spec.loader.exec_module = exec_module
        return spec


sys.meta_path.insert(0, Changed())
