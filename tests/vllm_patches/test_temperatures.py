"""Tables of temperatures, as requests come and go."""

import numpy as np

from vllm_patches.temperatures import TemperatureTables


def table(*values: float) -> np.ndarray:
    return np.array(values, dtype=np.float32)


def test_temperatures_by_request_and_position():
    tables = TemperatureTables()
    a, b, c, d = table(0.5, 1.0), table(2.0), table(1.0, 2.0, 3.0, 4.0), table(0.25)
    slots = tables.slots(["a", "plain", "b"], [a, None, b])
    np.testing.assert_array_equal(tables.at(slots, np.array([0, 0, 0])), table(0.5, np.nan, 2.0))
    # The last entry goes on; before the response, in a chunk of the prompt, it is the first.
    np.testing.assert_array_equal(tables.at(slots, np.array([7, 3, -5])), table(1.0, np.nan, 2.0))
    # A longer table comes and b goes; what is held stays.
    slots = tables.slots(["c", "a"], [c, a])
    np.testing.assert_array_equal(tables.at(slots, np.array([3, 3])), table(4.0, 1.0))
    # b comes back, after a preemption, in another place.
    slots = tables.slots(["d", "b", "c", "a"], [d, b, c, a])
    assert len(set(slots.tolist())) == 4
    np.testing.assert_array_equal(tables.at(slots, np.array([1, 1, 1, 0])), table(0.25, 2.0, 2.0, 0.5))
    assert tables.at(slots, np.zeros(4, dtype=np.int64)).dtype == np.float32
