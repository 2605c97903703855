"""A world of gymnasium under a name of its own: the lake whose ice is not slippery."""

from gymnasium.envs.registration import register

register("Ice-v0", entry_point="gymnasium.envs.toy_text.frozen_lake:FrozenLakeEnv", kwargs={"is_slippery": False})
