"""Common mistakes in files, records and rewards, and the words that the message must hold.

`test_malformed_input` tries them all, each under a number of its own.
"""

import json

GOOD = {"question": "1 + 1 = ?", "answer": "2"}
OTHERS = [{"question": f"{a} + 1 = ?", "answer": str(a + 1)} for a in range(2, 30)]
REWARD = "def reward_fn(messages, answer):\n    return float(messages[-1]['content'] == answer)\n"


def lines(*records) -> str:
    """Records as JSON Lines, before 28 good ones; a text is a line as it is."""
    texts = [one if isinstance(one, str) else json.dumps(one) for one in (*records, *OTHERS)]
    return "\n".join(texts) + "\n"


FILES = {
    "no such file": ("gone.jsonl", None, "no such file"),
    "no such folder": ("gone/", None, "no such file"),
    "an unknown kind": ("train.xlsx", b"PK", "its name must end in .jsonl, .ndjson, .json, .csv"),
    "a packed file": ("train.jsonl.gz", b"\x1f\x8b", "unpack it first"),
    "an empty file": ("train.jsonl", b"", "holds no records"),
    "blank lines only": ("train.jsonl", b"\n \n\r\n", "holds no records"),
    "an empty list": ("train.json", b"[]", "holds no records"),
    "an unfinished list": ("train.json", b'[{"question": "1"}', "train.json is not JSON"),
    "a list of texts": ("train.json", b'["1 + 1", "2 + 2"]', "record 1: a str, not an object"),
    "an object in place of a list": ("train.json", b'{"data": [{}]}', "no prompt: it has the fields data"),
    "a number": ("train.json", b"7", "record 1: a int, not an object"),
    "deeper than JSON goes": ("train.json", b"[" * 100_000, "train.json is not JSON"),
    "UTF-16": ("train.jsonl", lines(GOOD).encode("utf-16"), "record 1: not "),
    "Latin-1": ("train.jsonl", lines('{"question": "é", "answer": "2"}').encode("latin-1"), "save the file as UTF-8"),
    "a Python literal": ("train.jsonl", lines("{'question': '1 + 1', 'answer': '2'}"), "record 1: not JSON"),
    "a cut line": ("train.jsonl", lines(GOOD, '{"question": "1 +'), "record 2: not JSON"),
    "two objects on a line": ("train.jsonl", lines(GOOD, '{"question": "a"}{"question": "b"}'), "record 2: not JSON"),
    "NaN in JSON": ("train.jsonl", lines('{"question": "a", "answer": NaN}'), "record 1: not JSON"),
    "a list on a line": ("train.jsonl", lines('["1 + 1", "2"]'), "record 1: a list, not an object"),
    "CSV without a header": ("train.csv", b"", "must begin with a line of distinct column names"),
    "CSV with one column twice": ("train.csv", b"question,question\na,b\n", "distinct column names"),
    "CSV with a comma that is not quoted": ("train.csv", b"question,answer\n1, 2 or 3?,2\n", "(line 2): more fields"),
    "CSV with a missing field": ("train.csv", b"question,answer\na,1\nb\n", "record 2 (line 3): fewer fields"),
    "CSV with an open quote": ("train.csv", b'question,answer\n"a,1\n', "record 1: unexpected end of data: does a"),
    "CSV in Latin-1": ("train.csv", "question,answer\né,1\n".encode("latin-1"), "save it as UTF-8"),
    "Parquet that is not": ("train.parquet", b"PAR1 no", "is not a readable parquet file"),
    "Arrow that is not": ("train.arrow", b"no", "is not a readable arrow file"),
    "a split of a file": ("test@train.jsonl", None, "a single file has no split 'test'"),
    **{f"half a character in its {name}": ("train.json", json.dumps([{**GOOD, name: "\ud83d"}, *OTHERS]).encode(),
                                           f"record 1: field '{name}' holds half a character")
       for name in ("question", "answer", "more")},
    "one prompt for all": ("train.jsonl", (json.dumps(GOOD) + "\n") * 9, "holds one prompt only"),
}

USER, ASSISTANT = {"role": "user", "content": "1 + 1"}, {"role": "assistant", "content": "2"}
RECORDS = {
    "no prompt": ({"text": "1 + 1", "answer": "2"}, "no prompt: it has the fields text, answer"),
    "no fields": ({}, "no prompt: it has no fields"),
    "an empty prompt": ({"question": " ", "answer": "2"}, "field 'question' is empty"),
    "a number as the prompt": ({"question": 11, "answer": "2"}, "field 'question' is 11 (int): give a text, or a list"),
    "null as the prompt": ({"question": None, "answer": "2"}, "field 'question' is None (NoneType)"),
    "no messages": ({"messages": []}, "field 'messages' is [] (list)"),
    "a text among messages": ({"messages": [USER, "hello"]}, "field 'messages', message 2 is 'hello' (str)"),
    "a message without a role": ({"messages": [{"content": "hi"}]}, "message 1 is {'content': 'hi'} (dict)"),
    "an unknown role": ({"messages": [{"role": "human", "content": "hi"}]}, "has the role 'human' (str): allowed are"),
    "a number as content": ({"messages": [{"role": "user", "content": 3}]}, "has 3 (int) as its content: give a text"),
    "an image": (
        {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "text only, images and audio",
    ),
    "the answer among messages": ({"messages": [USER, ASSISTANT]}, "ends with an assistant message: leave it out"),
    **{f"{name} as text that {what}": ({name: text} | (GOOD if others else {}), f"'{name}' holds text that is not JSON")
       for name, others in (("messages", False), ("tools", True), ("test_cases", True))
       for what, text in (("has no end", "[" * 100_000), ("has half a character", '["\\uD83D"]'))},
    "arguments of a call without end": (
        {"messages": [{"role": "assistant", "tool_calls": [{"name": "a", "arguments": "[" * 100_000}]}, USER]},
        "field 'messages', message 1 has",
    ),
    "messages as broken text": ({"messages": '[{"role": "user", '}, "field 'messages' holds text that is not JSON"),
    "tests that are a list": ({**GOOD, "test_cases": ["1"]}, "field 'test_cases' is ['1'] (list)"),
    "tests as broken text": ({**GOOD, "test_cases": "{inputs: 1}"}, "field 'test_cases' holds text that is not JSON"),
    "tests without outputs": ({**GOOD, "test_cases": {"inputs": ["1"]}}, "has None (NoneType) as its outputs"),
    "tests of unequal lengths": (
        {**GOOD, "test_cases": {"inputs": ["1", "2"], "outputs": ["1"]}}, "2 inputs and 1 outputs: give one output",
    ),
    "tests with a number": (
        {**GOOD, "test_cases": {"inputs": ["1", 2], "outputs": ["1", "2"]}}, "has 2 (int) as number 2 of its inputs",
    ),
    "a prompt of over a mebibyte": (
        {**GOOD, "question": "x" * (1 << 20)}, "it has 1,048,607 bytes as JSON, 1,048,578 of them in field 'question'",
    ),
    "another field of over a mebibyte": ({**GOOD, "context": ["é" * 200_000]}, "of them in field 'context': at most"),
    "tools that are text": ({**GOOD, "tools": ["search"]}, "field 'tools' is ['search'] (list): give a list of JSON"),
}

FN = "def reward_fn(messages, answer):\n    "
REWARDS = {
    "nothing": ("", "defines no reward. Found: nothing"),
    "another name": ("def score(messages):\n    return 1\n", "defines no reward. Found: score"),
    "two rewards": (REWARD + "def reward(completion):\n    return 1\n", "more than one reward: reward_fn, reward"),
    "no return": (FN + "answer == 1", "returned None: return a number"),
    "a text": (FN + "return '1.0'", "returned the text '1.0'"),
    "bytes": (FN + "return b'1'", "returned the text b'1'"),
    "NaN": (FN + "return float('nan')", "returned nan: a reward must be a finite number"),
    "infinity": (FN + "return -float('inf')", "returned -inf: a reward must be a finite number"),
    "huge": (FN + "return 1e30", "returned 1e+30: beyond 1e+06 it is taken for a mistake"),
    "an integer without end": (FN + "return 10**400", "reward_fn returned 1000000"),
    "a complex number": (FN + "return 1j", "returned 1j (complex)"),
    "an object": (FN + "return object()", "returned <object object"),
    "a function": (FN + "return max", "returned <built-in function max>"),
    "two values": (FN + "return 1.0, 0.5", "returned (1.0, 0.5), 2 values for one answer"),
    "no values": (FN + "return []", "returned [], 0 values for one answer"),
    "an empty dict": (FN + "return {}", "returned an empty dict"),
    "only parts that are texts": (FN + "return {'pred': 'x'}", "{'pred': 'x'}, which holds no number"),
    "a part that is NaN": (FN + "return {'a': float('nan')}", "part 'a', returned nan"),
    "a part without a name": (FN + "return {1: 1.0}", "returned a part named 1"),
    "a huge sum of parts": (FN + "return {'a': 9e5, 'b': 9e5}", "the sum of its parts returned 1.8e+06"),
    "a part with a long name": (FN + f"return {{'{'x' * 33}': 1.0}}", "returned a part named 'xxx"),
    "a coroutine": ("async def score(): return 1\n" + FN + "return score()", "returned a coroutine: define"),
    "an unknown field": ("def reward_fn(completion, gold):\n    return 1", "asks for gold, which this record does not"),
    "a required option": ("def reward_fn(completion, *, scale):\n    return 1", "asks for scale"),
    "positional only": ("def reward_fn(messages, /):\n    return 1", "parameters before a `/`"),
    "a batch of another length": ("def reward_fn(completions):\n    return [1, 1]", "for one completion it ret"),
    "a batch that is a number": ("def reward_fn(completions):\n    return 1.0", "for one completion it returned 1.0"),
    "an exception": (FN + "return messages[99]['content']", "raised IndexError: list index out of range"),
    "an exit": (FN + "raise SystemExit(3)", "SystemExit"),
    "a hang": ("import threading\n" + FN + "threading.Event().wait()", "ran for more than env.step_timeout_s=0.2"),
    "a broken file": ("def reward_fn(messages, answer)\n    return 1", "failed while it was loaded: SyntaxError"),
    "a list as system prompt": ("system_prompt = ['Add.']\n" + REWARD, "system_prompt must be a text, got ['Add.']"),
    "a missing package": ("import no_such_package\n" + REWARD, "No module named 'no_such_package'"),
    "a huge value of a class": (
        "from streamrl import Step\nclass Mine:\n    def reward(self, record, completion):\n        return Step(1e9)\n",
        "reward 1e+09 is beyond 1e+06",
    ),
}

# --- what only some answers show: (form of the reward, what it does for the answer `bad`, what the message holds) ----

FORMS = {
    "plain": "import threading, math, numpy\ndef reward_fn(completion):\n    if completion != 'bad':\n"
             "        return 1.0\n    {}\n",
    "async": "import asyncio\nasync def reward_fn(completion):\n    if completion != 'bad':\n"
             "        return 1.0\n    {}\n",
    "batched": "def reward_fn(completions):\n    return [{} if one == 'bad' else 1.0 for one in completions]\n",
    "class": "from streamrl import Step\nclass Mine:\n    def reward(self, record, completion):\n"
             "        if completion != 'bad':\n            return 1.0\n        {}\n",
}
LATE = {
    "nothing": ("plain", "return None", "returned None: return a number"),
    "a text": ("plain", "return 'ten'", "returned the text 'ten'"),
    "a text of a number": ("plain", "return '1.0'", "returned the text '1.0'"),
    "NaN": ("plain", "return float('nan')", "returned nan: a reward must be a finite number"),
    "infinity": ("plain", "return math.inf", "returned inf: a reward must be a finite number"),
    "NaN of numpy": ("plain", "return numpy.float32('nan')", "returned nan: a reward must be a finite number"),
    "an array": ("plain", "return numpy.zeros(3)", "returned array([0., 0., 0.]) (ndarray)"),
    "huge": ("plain", "return 1e30", "returned 1e+30: beyond 1e+06"),
    "an integer without end": ("plain", "return 10 ** 400", "returned 1000000"),
    "an empty dict": ("plain", "return {}", "returned an empty dict"),
    "a dict of texts": ("plain", "return {'reward': 'good'}", "part 'reward', returned the text 'good'"),
    "a dict with None": ("plain", "return {'reward': None, 'format': 1.0}", "part 'reward', returned None"),
    "a dict with infinity": ("plain", "return {'reward': 1.0, 'format': -math.inf}", "part 'format', returned -inf"),
    "a dict of lists": ("plain", "return {'reward': [1.0, 2.0]}", "part 'reward', returned [1.0, 2.0] (list)"),
    "a dict with another key": ("plain", "return {2: 1.0}", "returned a part named 2"),
    "too many parts": ("plain", "return {f'p{i}': 0.0 for i in range(70)}", "parts of 70 names, at most 63"),
    "two values": ("plain", "return [1, 2]", "returned [1, 2], 2 values for one answer"),
    "a nested list": ("plain", "return [[1.0, 2.0]]", "returned [1.0, 2.0], 2 values for one answer"),
    "a set": ("plain", "return {1.0}", "returned {1.0} (set)"),
    "a generator": ("plain", "return (x for x in [1.0])", "returned a generator: it holds `yield`"),
    "a class": ("plain", "return float", "returned <class 'float'> (type)"),
    "KeyError": ("plain", "raise KeyError('gold')", "KeyError: 'gold'"),
    "an exit": ("plain", "raise SystemExit", "raised SystemExit: environments must raise an Exception"),
    "StopIteration": ("plain", "return next(iter([]))", "StopIteration"),
    "recursion without end": ("plain", "return reward_fn(completion)", "RecursionError"),
    "no memory": ("plain", "raise MemoryError('too large')", "MemoryError: too large"),
    "an error that cannot be shown": (
        "plain", "raise type('Odd', (Exception,), {'__str__': lambda self: 1 / 0})", "Odd",
    ),
    "an error that is no UTF-8": ("plain", "raise ValueError('\\ud800')", "ValueError: ?"),
    "a hang": ("plain", "threading.Event().wait(3)", "ran for more than env.step_timeout_s=0.3"),
    "an await without end": ("async", "await asyncio.Event().wait()", "ran for more than env.step_timeout_s=0.3"),
    "an exit while awaited": ("async", "raise SystemExit(3)", "raised SystemExit: environments must raise"),
    "a cancellation of its own": ("async", "raise asyncio.CancelledError", "raised CancelledError: environments must"),
    "a time-out of its own": ("async", "raise TimeoutError('no answer')", "TimeoutError: no answer"),
    "a function that is not awaited": ("async", "return asyncio.sleep(0)", "returned a coroutine: define"),
    "a batch with None": ("batched", "None", "returned None: return a number"),
    "a batch with NaN": ("batched", "float('nan')", "returned nan: a reward must be a finite number"),
    "a batch with a text": ("batched", "'good'", "returned the text 'good'"),
    "a batch with a list": ("batched", "[1.0, 1.0]", "returned [1.0, 1.0], 2 values for one answer"),
    "a step with NaN": ("class", "return Step(float('nan'))", "returned reward nan, expected a finite number"),
    "a step with a text as score": ("class", "return Step(1.0, score='1')", "returned score '1', expected a finite"),
    "a step with a huge part": ("class", "return Step(1.0, parts={'a': 1e9})", "part 'a' 1e+09: beyond 1e+06"),
    "a step with an unnamed part": ("class", "return Step(1.0, parts={'': 1.0})", "returned a part named ''"),
    "a step that goes on": ("class", "return Step(1.0, done=False)", ""),
}


def numbered() -> dict[str, dict[str, str]]:
    """For each table, its cases' names under what pytest calls them: a number over all tables, and the name."""
    number, tables = 0, {"FILES": FILES, "RECORDS": RECORDS, "REWARDS": REWARDS, "LATE": LATE}
    named: dict[str, dict[str, str]] = {}
    for table, cases in tables.items():
        named[table] = {f"{number + place:03d} {name}": name for place, name in enumerate(cases, 1)}
        number += len(cases)
    return named


NUMBERED = numbered()
