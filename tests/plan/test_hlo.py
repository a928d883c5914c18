"""Reading a compiled program."""

import jax
import jax.numpy as jnp
import pytest

from jdist.plan.hlo import executed, parse, shape_bytes, trip_count

# As the TPU compiler writes it: comments in long tuples, tiled layouts, no trip counts.
TPU_LOOP = """HloModule jit_program, is_scheduled=true, num_partitions=8

%body (p: (s32[], f32[4])) -> (s32[], f32[4]) {
  %p = (s32[]{:T(128)}, f32[4]{0:T(128)S(1)}) parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%p), index=0
  %x = f32[4]{0:T(128)S(1)} get-tuple-element(%p), index=1
  %r = f32[4]{0:T(128)S(1)} all-reduce(%x), channel_id=1, replica_groups={{0,1,2,3,4,5,6,7}}, to_apply=%add
  ROOT %t = (s32[]{:T(128)}, f32[4]{0:T(128)S(1)}) tuple(%i, %r)
}

%condition (q: (s32[], f32[4])) -> pred[] {
  %q = (s32[]{:T(128)}, f32[4]{0:T(128)S(1)}) parameter(0)
  %n = s32[]{:T(128)} constant(7)
  %j = s32[]{:T(128)} get-tuple-element(%q), index=0
  ROOT %lt = pred[]{:T(512)} compare(%j, %n), direction=LT
}

ENTRY %main (a: f32[4]) -> f32[4] {
  %zero = s32[]{:T(128)} constant(START)
  %copy = s32[]{:T(128)} copy(%zero)
  %a = f32[4]{0:T(128)} parameter(0)
  %tuple = (s32[]{:T(128)}, /*index=1*/f32[4]{0:T(128)S(1)}) tuple(%copy, /*index=1*/%a)
  %while = (s32[]{:T(128)}, /*index=1*/f32[4]{0:T(128)S(1)}) while(%tuple), condition=%condition, body=%body
  ROOT %out = f32[4]{0:T(128)} get-tuple-element(%while), index=1
}
"""


@pytest.mark.parametrize(
    ("shape", "size"),
    [
        ("f32[]", 4),
        ("f32[2,3]{1,0:T(8,128)S(1)}", 24),
        ("(f32[2]{0}, /*index=1*/bf16[3]{0}, pred[5]{0}, u32[])", 8 + 6 + 5 + 4),
        ("s4[3]{0}", 2),
        ("c64[2]", 16),
        ("f8e4m3fn[5]", 5),
        ("f32[<=8,2]", 64),
        ("f32[0]", 0),
        ("token[]", 0),
    ],
)
def test_the_bytes_of_a_shape(shape, size):
    assert shape_bytes(shape) == size


def test_instructions_and_their_operands():
    module = parse(TPU_LOOP.replace("START", "0"))
    assert module.entry == "main"
    assert module.num_devices == 8
    loop = module.computations["main"]["while"]
    assert (loop.opcode, loop.operands) == ("while", ("tuple",))
    assert module.computations["main"]["tuple"].operands == ("copy", "a")
    assert module.roots["condition"].name == "lt"
    assert module.operand_bytes("body", module.computations["body"]["r"]) == 16


@pytest.mark.parametrize(("start", "trips"), [("0", 7), ("3", 4), ("9", 0)])
def test_the_trips_of_a_loop_without_a_written_count(start, trips):
    module = parse(TPU_LOOP.replace("START", start))
    assert trip_count(module, "main", module.computations["main"]["while"]) == trips
    (reduced,) = [item for item in executed(module) if item.instruction.opcode == "all-reduce"]
    assert reduced.certain
    assert reduced.times == trips


def test_a_loop_whose_trips_cannot_be_read_is_marked():
    module = parse(TPU_LOOP.replace("START", "0").replace("constant(7)", "parameter(1)"))
    (reduced,) = [item for item in executed(module) if item.instruction.opcode == "all-reduce"]
    assert (reduced.times, reduced.certain) == (1, False)


def test_nested_loops_of_a_real_program():
    def step(x):
        inner = lambda c, _: (jnp.sin(c @ c), None)  # noqa: E731
        outer = lambda c, _: (jax.lax.scan(inner, c, None, length=3)[0], None)  # noqa: E731
        return jax.lax.scan(outer, x, None, length=5)[0]

    module = parse(jax.jit(step).lower(jnp.ones((64, 64))).compile().as_text())
    products = [item.times for item in executed(module) if item.instruction.opcode in ("dot", "custom-call", "fusion")]
    assert max(products) == 15
