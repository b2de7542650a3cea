async def reset(extra_info):
    number = extra_info["seed"] % 10
    return f"Guess my number, {number % 2 and 'odd' or 'even'}: ", {**extra_info, "number": number}


async def step(state, action, extra_info):
    done = action.strip() == str(extra_info["number"])
    return {
        "next_state": state + action + " no. ", "reward": float(done), "score": float(done), "done": done,
        "extra_info": extra_info,
    }
