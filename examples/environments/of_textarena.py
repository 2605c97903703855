"""Games of TextArena for one player: ``environment: of_textarena.TextArena``.

A row names a game and a seed, ``{"name": "GuessTheNumber-v0", "seed": 3}``. Tried with textarena 0.7.4.
"""

from typing import Any

from rlprims.environments import FirstMessages, Message, Step


class TextArena:
    """One game: the new part of each observation is the user's message, and the last turn gets the game's reward.

    ``columns`` has ``invalid_move``, 1 if the game ended because of an invalid move.

    Args:
        name: the argument of ``textarena.make``.
        seed: the seed of ``reset``.
    """

    def __init__(self, name: str, seed: int | None = None) -> None:
        self.name, self.seed, self.seen = name, seed, ""

    def reset(self) -> FirstMessages:
        import textarena

        self.game: Any = textarena.make(self.name)
        self.game.reset(num_players=1, seed=self.seed)
        return [{"role": "user", "content": self._new_text()}]

    def step(self, message: Message) -> Step:
        done, _ = self.game.step(message["content"])
        if not done:
            return Step([{"role": "user", "content": self._new_text()}])
        rewards, info = self.game.close()
        return Step(reward=float(rewards[0]), done=True, columns={"invalid_move": float(info[0]["invalid_move"])})

    def _new_text(self) -> str:
        """The new part of the observation: observations repeat the game from its beginning."""
        player, text = self.game.get_observation()
        if player != 0:
            raise ValueError(f"{self.name}: it is the turn of player {player}, expected a game for one player")
        new = text.removeprefix(self.seen) or text
        self.seen = text
        return str(new)
