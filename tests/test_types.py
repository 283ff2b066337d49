from tests.episodes import make_trajectory


def test_token_steps_are_the_sampled_tokens():
    trajectory = make_trajectory(length=5)
    steps = trajectory.token_steps(lambda token: f"<{token}>")
    assert [step.position for step in steps] == [2, 3, 4] == trajectory.generated_positions
    ids = trajectory.full_input_ids
    assert [step.token_id for step in steps] == ids[2:]
    assert [step.token_text for step in steps] == [f"<{token}>" for token in ids[2:]]
    assert [step.log_prob for step in steps] == [-1.0] * 3
