"""The tests run on the newest JAX as on the oldest."""

import xla_flags


def test_flag_that_no_jaxlib_has_is_not_passed_and_ends_no_process():
    asked = {"xla_no_such_flag": "1", "xla_backend_optimization_level": "0"}
    assert xla_flags.known(asked) == ["xla_backend_optimization_level"]
