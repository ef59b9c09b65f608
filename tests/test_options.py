import pytest
import torch

from inductor_ext.options import OptionError, Options, split


def compiled(**kwargs):
    return torch.compile(lambda x: x.sin(), backend="gradfuse", **kwargs)(torch.ones(3))


def test_ours_and_inductors_are_split():
    options, theirs = split({"strict": True, "disable": ["score_mods"], "max_autotune": True, "triton.cudagraphs": False})
    assert options == Options(strict=True, disable=frozenset({"score_mods"}))
    assert theirs == {"max_autotune": True, "triton.cudagraphs": False}


def test_deterministic_follows_torch():
    torch.use_deterministic_algorithms(True)
    try:
        assert split(None)[0].deterministic
        assert split({"deterministic": False})[0].deterministic
    finally:
        torch.use_deterministic_algorithms(False)
    assert not split(None)[0].deterministic


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"determinstic": True}, "deterministic"),
        ({"max_autotun": True}, "max_autotune"),
        ({"strict": 1}, "takes a bool, got int"),
        ({"disable": "score_mods"}, "takes a list of names"),
        ({"disable": ["score_mod"]}, "score_mods"),
    ],
)
def test_a_wrong_option_names_the_right_one(options, message):
    with pytest.raises(OptionError, match=message):
        split(options)
    with pytest.raises(Exception, match=message):
        compiled(options=options)


def test_a_wrong_type_of_an_inductor_option_is_inductors_error():
    with pytest.raises(Exception, match="Unexpected type of attr max_autotune"):
        compiled(options={"max_autotune": 3})


@pytest.mark.breadth(2)
@pytest.mark.parametrize("mode", ["default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs"])
def test_every_mode_of_inductor(mode):
    assert torch.equal(compiled(mode=mode), torch.ones(3).sin())


def test_an_unknown_mode_is_inductors_error():
    with pytest.raises(Exception, match="Unrecognized mode=fastest"):
        compiled(mode="fastest")
