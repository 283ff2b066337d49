import re


def compute_score(data_source, solution_str, ground_truth, extra_info=None, *, partial=0.1):
    """Return 1 for a right answer and `partial` for a wrong one."""
    found = re.findall(r"<answer>(.*?)</answer>", solution_str, re.DOTALL)
    if not found:
        return {"score": 0.0, "answered": False}
    given = found[-1].strip().lower()
    is_right = given in [target.lower() for target in ground_truth["target"]]
    return {"score": 1.0 if is_right else partial, "answered": True, "pred": given}
