from jaxrl.training.watch import CollapseSign


def judge(record, state, *, most=400):
    """Flag steps whose mean response is longer than `most` tokens."""
    step = state.get("step", 0) + 1  # of the stage, from 1
    length = record["response_length/mean"]
    if length <= most:
        return {"step": step, "sound": step}, []
    text = f"responses have {length:.0f} tokens, above {most}."
    return {**state, "step": step}, [
        CollapseSign(name="too_long", text=text, since=state.get("sound", 0))
    ]
