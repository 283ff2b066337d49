import re


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    """Return 1 for a right answer, 0.1 for a wrong one, and 0 without an answer."""
    answers = re.findall(r"<answer>(.*?)</answer>", solution_str, re.DOTALL)
    if not answers:
        return 0.0
    return 1.0 if answers[-1].strip() in ground_truth["target"] else 0.1
