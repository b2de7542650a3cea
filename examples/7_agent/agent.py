"""An agent with a calculator: it knows nothing of streamrl, only the client of a model and a question.

The model may write <37*45>; the agent answers 1665, and asks again. Any other text is the final answer.
"""

import ast
import operator
import re

OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}
NUM_CALLS = 3


def calculate(expression):
    """The value of two numbers with an operator between them; "?" for anything else."""
    try:
        match ast.parse(expression, mode="eval").body:
            case ast.BinOp(ast.Constant(int(left)), kind, ast.Constant(int(right))) if type(kind) in OPERATORS:
                return str(OPERATORS[type(kind)](left, right))
    except (SyntaxError, ValueError):
        pass
    return "?"


async def run(client, record):
    messages = [{"role": "user", "content": record["prompt"]}]
    for _ in range(NUM_CALLS):
        completion = await client.chat.completions.create(model="policy", messages=messages)
        answer = completion.choices[0].message.content
        messages.append({"role": "assistant", "content": answer})
        call = re.fullmatch(r"<(.*)>", answer.strip())
        if call is None:
            return {"reward": float(answer.strip() == str(record["answer"])), "calls": len(messages) // 2 - 1.0}
        messages.append({"role": "user", "content": calculate(call[1])})
    return 0.0
