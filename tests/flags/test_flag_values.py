"""Flags that a program sets: `FLAGS.mp_policy = ...`, `flagsaver`, defaults; flags with rules."""

import copy
import io

import pytest
from absl import flags
from absl.testing import flagsaver

import jmpx
import jmpx.flags

HALF, MIXED = jmpx.get_policy("c=f16"), jmpx.get_policy("16-mixed")


def define(*arguments, **options):
    values = flags.FlagValues()
    mp = jmpx.flags.define_mp_flags(flag_values=values, **options)
    values(["program", *arguments])
    return mp, values


@pytest.fixture
def mp():
    """Flags of the program itself, which alone `flagsaver` knows: --saved_policy and its kin."""
    before = set(flags.FLAGS)
    mp = jmpx.flags.define_mp_flags("saved", default_policy="bf16-mixed")
    was_parsed = flags.FLAGS.is_parsed()
    flags.FLAGS.mark_as_parsed()
    yield mp
    for name in set(flags.FLAGS) - before:
        delattr(flags.FLAGS, name)
    if not was_parsed:
        flags.FLAGS.unparse_flags()


GIVEN = ["c=f16", " C = fp16 ;", HALF, jmpx.get_policy_map("c=f16")]


@pytest.mark.parametrize("given", GIVEN, ids=str)
def test_a_policy_that_is_set_is_parsed(given):
    mp, values = define()
    values.mp_policy = given
    assert mp.policy == HALF and mp.policy_map == jmpx.PolicyMap(HALF)
    assert values.mp_policy == values["mp_policy"].value == mp.policy_map
    assert mp.loss_scale() == jmpx.DynamicLossScale(2.0**15)
    values.mp_policy = "bf16"
    assert mp.policy == jmpx.get_policy("bf16") and mp.loss_scale() == jmpx.NoOpLossScale()


@pytest.mark.parametrize("given", GIVEN, ids=str)
def test_flagsaver_sets_and_restores(mp, given):
    before = jmpx.get_policy("bf16-mixed")
    with flagsaver.flagsaver(saved_policy=given, saved_scale_value="64"):
        assert mp.policy == HALF
        assert mp.loss_scale() == jmpx.DynamicLossScale(64.0)
        with flagsaver.flagsaver(saved_policy="c=f32; BatchNorm: f16"):
            assert mp.policy_map.rules and mp.loss_scale() == jmpx.DynamicLossScale(64.0)
        assert mp.policy == HALF
    assert mp.policy == before and mp.loss_scale() == jmpx.NoOpLossScale()

    @flagsaver.flagsaver(saved_policy="16-mixed")
    def test():
        return mp.policy

    assert test() == MIXED and mp.policy == before
    with flagsaver.as_parsed(saved_policy="c=f16;"):
        assert mp.policy == HALF and flags.FLAGS["saved_policy"].present
    assert mp.policy == before and not flags.FLAGS["saved_policy"].present
    with pytest.raises(RuntimeError), flagsaver.flagsaver():
        flags.FLAGS.saved_policy = "f16"
        raise RuntimeError
    assert mp.policy == before and flags.FLAGS["saved_policy"].using_default_value


BAD = [
    ("policy", "c=f17", "--saved_policy=c=f17: Unknown dtype 'f17' at position 2 of policy"),
    ("policy", "compute:f16", "--saved_policy=compute:f16: Unexpected ':' at position 7"),
    ("policy", "c=f16;;", "Empty rule at position 6"),
    ("policy", 16, "--saved_policy=16: Expected a policy map string"),
    ("policy", None, "must have a value"),
    ("scale_type", "sometimes", "one of <auto|NoOp|Static|Dynamic>"),
    ("scale_type", None, "must have a value"),
    ("scale_value", "many", "--saved_scale_value=many"),
    ("scale_value", "-1", "not a non-negative number"),
    ("scale_value", None, "must have a value"),
    ("scale_value", "1e39", "Expected 'init' to be a number between 0"),
    ("skip_nonfinite", "perhaps", "--saved_skip_nonfinite=perhaps"),
]


@pytest.mark.parametrize(("name", "given", "message"), BAD)
def test_a_bad_value_that_is_set_is_one_sentence_and_changes_nothing(mp, name, given, message):
    name = f"saved_{name}"
    before = flags.FLAGS.flag_values_dict()
    override = {"saved_scale_value": "2048", name: given}
    with pytest.raises(flags.IllegalFlagValueError) as error:
        flagsaver.flagsaver(**override).__enter__()
    assert message in str(error.value) and "\n" not in str(error.value)
    assert flags.FLAGS.flag_values_dict() == before
    # absl 2.0 keeps what a validator refuses, 2.5 does not.
    with flagsaver.flagsaver(), pytest.raises(flags.IllegalFlagValueError) as error:
        setattr(flags.FLAGS, name, given)
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "given", "expected"),
    [
        ("scale_type", "static", "Static"),
        ("scale_type", "noop", "NoOp"),
        ("scale_value", "256", 256.0),
        ("skip_nonfinite", "false", False),
        ("skip_nonfinite", 1, True),
    ],
)
def test_every_flag_parses_what_is_set(name, given, expected):
    mp, values = define("--mp_policy=f16")
    setattr(values, f"mp_{name}", given)
    assert values[f"mp_{name}"].value == expected
    if name == "scale_type":
        scales = {"Static": jmpx.StaticLossScale(2.0**15), "NoOp": jmpx.NoOpLossScale()}
        assert mp.loss_scale() == scales[expected]
    if name == "skip_nonfinite":
        assert mp.skip_nonfinite is expected


def test_what_was_set_survives_strings_flag_files_and_copies(tmp_path):
    mp, values = define()
    values.mp_policy = "c=f16,o=f32; BatchNorm?: full; */head/*: c=f32;"
    values.mp_skip_nonfinite = "false"
    path = tmp_path / "flags.txt"
    path.write_text(values.flags_into_string())
    again, _ = define(f"--flagfile={path}")
    assert again.policy_map == mp.policy_map and again.policy_map.rules[0].optional
    assert again.skip_nonfinite is False
    other = copy.deepcopy(values)
    other.mp_policy = "bf16"
    assert other.mp_policy == jmpx.get_policy_map("bf16")
    assert values.mp_policy == mp.policy_map == again.policy_map
    values.unparse_flags()
    values(["program"])
    assert mp.policy == jmpx.get_policy("f32")
    page = io.StringIO()
    other.write_help_in_xml_format(page)
    assert "<current>params=bfloat16,compute=bfloat16,output=bfloat16</current>" in page.getvalue()


def test_defaults_aliases_and_validators_see_the_parsed_value():
    mp, values = define()
    values.set_default("mp_policy", "16-mixed")
    assert mp.policy == MIXED
    flags.DEFINE_alias("precision", "mp_policy", flag_values=values)
    values.precision = "c=f16"
    assert mp.policy == HALF and values.precision == mp.policy_map
    seen = []
    flags.register_validator("mp_policy", lambda v: seen.append(v) or True, flag_values=values)
    values.mp_policy = "bf16; Linear: full"
    assert seen == [jmpx.get_policy_map("bf16; Linear: full")]


def test_single_flags():
    values = flags.FlagValues()
    policy = jmpx.flags.DEFINE_policy("p", "f32", "A policy.", flag_values=values)
    maybe = jmpx.flags.DEFINE_policy_map(
        "m", None, "A map.", flag_values=values, module_name="there", short_name="n"
    )
    needed = jmpx.flags.DEFINE_policy("r", None, "Needed.", flag_values=values, required=True)
    with pytest.raises(flags.IllegalFlagValueError, match="r"):
        values(["program"])
    values(["program", "--r=f16;", "-n=c=f16; Linear: full;"])
    assert needed.value == jmpx.get_policy("f16")
    assert maybe.value == jmpx.get_policy_map("c=f16; Linear: full")
    assert "m" in [flag.name for flag in values.flags_by_module_dict()["there"]]
    values.p, values.m = "c=f16", HALF
    assert policy.value == HALF and maybe.value == jmpx.PolicyMap(HALF)
    values.m = None  # none was asked for
    assert maybe.value is None
    with pytest.raises(TypeError, match="Expected a policy string, .* got <absl"):
        jmpx.get_policy(policy)  # pyright: ignore[reportArgumentType]  # without .value
    for given in ("c=f16; Linear: full", jmpx.get_policy_map("c=f16; Linear: full")):
        with pytest.raises(flags.IllegalFlagValueError, match="a policy has no rules"):
            values.p = given
    with pytest.raises(flags.IllegalFlagValueError, match="--p=c=f16; Linear: full: Unexpected"):
        values(["program", "--p=c=f16; Linear: full", "--r=f16"])
    with pytest.raises(flags.IllegalFlagValueError, match="a policy has no rules"):
        jmpx.flags.DEFINE_policy("q", "f16; Linear: full", "Bad.", flag_values=values)
    assert policy.value == HALF and "q" not in values


def test_one_policy_of_a_flag_with_rules_is_refused():
    text = "c=bf16; BatchNorm: full"
    mp, values = define(f"--mp_policy={text}")
    with pytest.raises(ValueError, match="--mp_policy='params=float32.*BatchNorm.*") as error:
        _ = mp.policy
    message = str(error.value)
    assert "\n" not in message and "read policy_map" in message
    assert mp.policy_map == jmpx.get_policy_map(text)
    assert mp.loss_scale() == jmpx.NoOpLossScale()
    values.mp_policy = "c=bf16;"
    assert mp.policy == mp.policy_map.default
    mp, _ = define(default_policy="c=f16; Linear?: full")
    with pytest.raises(ValueError, match="Linear\\?"):
        _ = mp.policy
    assert mp.loss_scale() == jmpx.DynamicLossScale(2.0**15)
