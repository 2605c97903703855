"""A test of a library that is not installed is not collected; elsewhere the peers' own environment runs it."""

from importlib.util import find_spec

NEEDS = {
    "test_audit_openrlhf.py": ("openrlhf",),
    "test_audit_trl.py": ("trl",),
    "test_audit_verl.py": ("verl",),
    "test_data_proto_tables.py": ("pandas", "pyarrow"),
    "test_data_proto_through_ray.py": ("ray",),
    "test_liger_loss.py": ("liger_kernel",),
    "test_openrlhf_reward.py": ("openrlhf",),
    "test_peer_laws.py": ("liger_kernel", "trl", "verl"),
    "test_torchrl_loss.py": ("torchrl",),
    "test_trl_preference.py": ("trl",),
    "test_trl_trainer.py": ("trl",),
    "test_verl_install.py": ("verl",),
    "test_verl_rewards.py": ("verl",),
}
collect_ignore = [file for file, packages in NEEDS.items() if any(find_spec(name) is None for name in packages)]
