"""The environment of the agent task: a story, a calculator, and a price for each call of the calculator."""

from rlprims.environments import FirstMessages, Message, Step, answer_calls, tool
from rlprims.rewards.verifiers import tagged_answer


@tool
def calculate(formula: str) -> str:
    """Add, subtract or multiply two numbers.

    Args:
        formula: such as 19*3.
    """
    for sign, apply in (("+", int.__add__), ("-", int.__sub__), ("*", int.__mul__)):
        left, found, right = formula.partition(sign)
        if found and left.isdecimal() and right.isdecimal() and len(formula) <= 9:
            return str(apply(int(left), int(right)))
    return "?"


class Stories:
    """One story. The model may call the calculator, at a cost of `price`. At the end it answers in tags.

    The arguments before the star are the fields of a row, and those after it are settings.
    """

    def __init__(self, question: str, answer: str, *, price: float = 0.05) -> None:
        self.question, self.answer, self.price = question, answer, price

    def reset(self) -> FirstMessages:
        return [{"role": "user", "content": self.question}], [calculate]

    def step(self, message: Message) -> Step:
        results = answer_calls(message, [calculate])
        if results:
            texts = ["?" if "error" in result else result["content"] for result in results]
            answers = [{"role": "tool", "content": f"<result>{text}</result>"} for text in texts]
            return Step(answers, reward=-self.price * len(results))
        right = tagged_answer(message["content"], self.answer)["acc"]
        return Step(reward=right, done=True, columns={"acc": right})
