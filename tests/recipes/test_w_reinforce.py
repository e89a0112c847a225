"""Advantages of positive and negative samples apart (arXiv 2506.01347)."""

from verl.recipes.w_reinforce import weighted

from .step_inputs import advantage_inputs


def test_right_and_wrong_responses_have_weights_of_their_own():
    inputs = advantage_inputs([1, 0, 0, 1])
    assert weighted(inputs, positive=0.1, negative=1.0).tolist() == [0.1, -1.0, -1.0, 0.1]
    assert weighted(inputs, positive=0.0, negative=1.0).tolist() == [0.0, -1.0, -1.0, 0.0]
    assert weighted(inputs, positive=1.0, negative=0.0).tolist() == [1.0, 0.0, 0.0, 1.0]
