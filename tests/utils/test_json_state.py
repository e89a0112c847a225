import base64
import json
import math
import zlib

import numpy as np
import pytest
import torch

from verl.utils.json_state import from_json, to_json

VALUES = {
    "bytes": torch.tensor([0, 255, 7], dtype=torch.uint8),
    "doubles": torch.tensor([[0.1, -0.0], [math.inf, 1e-308]], dtype=torch.float64),
    "scalar": torch.tensor(5, dtype=torch.int64),
    "none": torch.zeros(0, 3),
    "transposed": torch.arange(6).view(2, 3).T,
}


@pytest.mark.parametrize("name", VALUES)
def test_a_tensor_comes_back_to_the_bit(name: str):
    value = VALUES[name]
    back = from_json(json.loads(json.dumps(to_json({"a": [value, None]}))))["a"][0]
    assert back.dtype == value.dtype and back.shape == value.shape
    assert back.numpy().tobytes() == value.contiguous().numpy().tobytes()


def test_tensors_of_earlier_versions_and_hostile_ones():
    assert from_json({"__tensor__": {"dtype": "int16", "shape": [2], "data": "AQD//w=="}}).tolist() == [1, -1]
    bomb = base64.b64encode(zlib.compress(bytes(1 << 24))).decode()
    with pytest.raises(ValueError, match=r"cannot reshape array of size 3 into shape \(2,\)"):
        from_json({"__tensor__": {"dtype": "int8", "shape": [2], "zlib": bomb}})


def test_other_values_and_what_is_refused():
    state = {"a": (1, 2.5, True, None, "text"), "b": {"c": []}, "d": np.float32(0.5), "e": np.int64(3)}
    back = {"a": [1, 2.5, True, None, "text"], "b": {"c": []}, "d": 0.5, "e": 3}
    assert from_json(json.loads(json.dumps(to_json(state)))) == back
    # What a response made a reward function return may look like a tensor.
    for name in ("__tensor__", "__mapping__"):
        hostile = {"pred": {name: 1}, "deep": {name: {name: {"dtype": "int8"}}}}
        assert from_json(json.loads(json.dumps(to_json(hostile)))) == hostile
    array = np.array([1, 2**32 - 1], dtype=np.uint32)
    assert (from_json(to_json(array)).numpy() == array).all()
    # As JSON, 3 and "3" would be one key.
    with pytest.raises(TypeError, match="^3: a key of a mapping in JSON is text, not int$"):
        to_json({"a": {3: 0.5}})
    with pytest.raises(TypeError, match="object cannot be saved as JSON"):
        to_json({"a": object()})
